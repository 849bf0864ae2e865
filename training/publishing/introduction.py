"""Languages of a model and a sentence for it to translate, for the page of `hf-vaswani demo`."""

import contextlib
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError

from ..inference.checkpoint_files import CONFIG, read_config
from ..inference.demo_page import Introduction
from ..inference.loading import find_checkpoint
from .model_card import metadata
from .records import Run, find_run, first_source


# Sentences for models whose own data are not at hand. The grammar of `hf-vaswani demo-data` has the English one.
EXAMPLES = {
    "en": "The old man gives the child a book.",
    "de": "Der alte Mann gibt dem Kind ein Buch.",
    "fr": "Le vieil homme donne un livre à l'enfant.",
}


def introduce(name: str) -> Introduction:
    """Languages of a checkpoint, from the records of its run or else its model card, and an example.

    The example is the first sentence of the run's evaluation files. Where these were moved or changed, it is one of
    `EXAMPLES`.

    Args:
        name (`str`): Checkpoint folder or Hub repository.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: The configuration, a record or the card is malformed.
    """
    folder = find_checkpoint(name)
    config = read_config(folder / CONFIG)
    run = Run() if config is None else find_run(folder, config)
    if run.record is not None:
        languages = run.values["source_lang"], run.values["target_lang"]
        return Introduction(languages, first_source(run) or _example(languages))
    languages = _card_languages(name, folder)
    return Introduction(languages, _example(languages))


def _example(languages: tuple[str, str] | None) -> str:
    return "" if languages is None else EXAMPLES.get(languages[0], "")


def _card_languages(name: str, folder: Path) -> tuple[str, str] | None:
    """Source and target language in the metadata of the card; `None` without a card, or with other languages."""
    card = folder / "README.md"
    if not Path(name).is_dir():
        with contextlib.suppress(OSError, HFValidationError):  # there is no card, or no connection
            card = Path(hf_hub_download(name, "README.md"))
    if not card.is_file():
        return None
    try:
        languages = metadata(card.read_text(encoding="utf-8")).get("language")
    except ValueError as error:
        raise ValueError(f"{card}: {error}") from error
    if not isinstance(languages, list) or len(languages) != 2:
        return None
    source, target = map(str, languages)
    return source, target
