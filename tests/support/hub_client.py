"""The client of this process, told of the server of hub_server.py: what the environment tells it in a new process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from transformers.utils import hub as transformers_hub

from support.hub_server import Hub


ALICE, BOB, NOBODY = "hf_secretOfAlice", "hf_secretOfBob", "hf_secretOfNobody"


@contextlib.contextmanager
def connected(hub: Hub, token: str, cache: Path) -> Iterator[None]:
    """For as long as this lasts, the client asks that server, as the user of that token, and keeps what it gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        patch.setattr(transformers_hub, "_hf_api", None)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("HF_TOKEN", token)
        _http.close_session()
        yield
        _http.close_session()
