"""Reachability of the Hub, found out by one request. The Hub's client itself retries for up to a minute."""

import functools

from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import httpx


def hub_failure() -> str | None:
    """Reason why the Hub does not answer, or answers that it cannot serve; `None` if it works.

    The Hub is asked once per process and endpoint. `HF_HUB_ETAG_TIMEOUT` limits the wait, 10 s by default.
    """
    return _failure_of(constants.ENDPOINT)


@functools.cache
def _failure_of(endpoint: str) -> str | None:
    try:
        status = get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT).status_code
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except httpx.TransportError as error:
        return f"{endpoint} does not answer: {' '.join(str(error).split()) or type(error).__name__}"
    return f"{endpoint} answers with the error {status}" if status >= 500 else None
