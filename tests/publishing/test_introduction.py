import hashlib
import json
import shutil
from pathlib import Path

import pytest

from support.models import tiny_model
from training.inference.demo_page import Introduction
from training.publishing.introduction import introduce


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write_record(folder: Path, source: Path, target: Path) -> None:
    """Record of a run that was evaluated on two files."""
    places = [str(source), str(target)]
    files = {
        f"eval_files[{number}]": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for number, content in enumerate(Path(place).read_bytes() for place in places)
    }
    languages = {"source_lang": "fr", "target_lang": "nl"}
    numbers = {"max_steps": 3, "learning_rate": 0.1, "devices": 1}
    record = {"must_match": {**languages, **files}, "may_change": {**numbers, "places of eval_files": places}}
    (folder / "run.json").write_text(json.dumps(record))


@pytest.fixture
def recorded(model, tmp_path) -> Path:
    (tmp_path / "val.fr").write_text("  \nUn chien dort.\nUn chat.\n", encoding="utf-8")
    (tmp_path / "val.nl").write_text("\nEen hond slaapt.\nEen kat.\n", encoding="utf-8")
    write_record(model, tmp_path / "val.fr", tmp_path / "val.nl")
    return model


def test_without_records_or_card_nothing_is_claimed(model):
    introduction = introduce(str(model))
    assert introduction == Introduction(None, "")
    assert introduction.labels == ("Source, one sentence per line", "Translation")


@pytest.mark.parametrize(
    ("language", "languages", "example"),
    [
        ("[en, de]", ("en", "de"), "The old man gives the child a book."),
        ("[cs, fr]", ("cs", "fr"), ""),
        ("en", None, ""),
        ("[en, de, fr]", None, ""),
    ],
)
def test_the_card_names_the_languages(model, language, languages, example):
    (model / "README.md").write_text(f"---\nlanguage: {language}\n---\n# A model\n")
    assert introduce(str(model)) == Introduction(languages, example)


def test_a_card_that_cannot_be_read_is_named(model):
    (model / "README.md").write_text("---\nlanguage: [en\n---\n")
    with pytest.raises(ValueError, match=r"README\.md: "):
        introduce(str(model))


def test_the_run_names_the_languages_and_has_the_first_sentence(recorded):
    (recorded / "README.md").write_text("---\nlanguage: [cs, pl]\n---\n# A model\n")
    introduction = introduce(str(recorded))
    assert introduction == Introduction(("fr", "nl"), "Un chien dort.")
    assert introduction.labels == ("Source (fr), one sentence per line", "Translation (nl)")


def test_an_average_is_introduced_by_its_checkpoints(recorded, tmp_path):
    average = Path(shutil.copytree(recorded, tmp_path / "elsewhere" / "average"))
    (average / "run.json").unlink()
    assert introduce(str(average)).languages is None
    record = {"method": "mean of the weights", "checkpoints": [str(recorded)]}
    (average / "averaged_from.json").write_text(json.dumps(record))
    assert introduce(str(average)) == Introduction(("fr", "nl"), "Un chien dort.")


def test_where_the_data_changed_the_example_is_one_of_the_language(recorded, tmp_path):
    (tmp_path / "val.fr").write_text("secret\n\n\n", encoding="utf-8")
    assert introduce(str(recorded)) == Introduction(("fr", "nl"), "Le vieil homme donne un livre à l'enfant.")


def test_a_checkpoint_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(OSError, match="missing: no such folder"):
        introduce(str(tmp_path / "missing"))


def test_a_repository_is_introduced_by_its_card(model, hub):
    hub_client = pytest.importorskip("huggingface_hub").HfApi()
    (model / "README.md").write_text("---\nlanguage: [de, en]\n---\n# A model\n")
    hub_client.create_repo("alice/introduced")
    hub_client.upload_folder(repo_id="alice/introduced", folder_path=str(model))
    assert introduce("alice/introduced") == Introduction(("de", "en"), "Der alte Mann gibt dem Kind ein Buch.")
