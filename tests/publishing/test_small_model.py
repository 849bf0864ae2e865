"""The model in the repository: small, intact, described by its card, and as good as README.md shows."""

import io
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_vaswani
from support.guides import fenced_blocks
from support.paths import ROOT
from training.cli import main


FOLDER = ROOT / "model_cards" / "tatoeba_en_de"


def examples(guide: str) -> list[tuple[str, str]]:
    """Sentences in consoles of a guide that this model translates, with the translations."""
    lines = [block.text.splitlines() for block in fenced_blocks(guide) if "tatoeba_en_de" in block.text]
    return [(command.split('"')[1], output) for command, *outputs in lines if command[0] == "$" for output in outputs]


@pytest.mark.parametrize("guide", ["README.md", "model_cards/tatoeba_en_de/README.md"])
def test_it_answers_what_the_guides_show(guide, monkeypatch, capsys):
    [(source, translation)] = examples(guide)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{source}\n".encode())))
    assert main(["translate", "--model", str(FOLDER)]) == 0
    assert capsys.readouterr().out == f"{translation}\n"


def test_everyday_sentences():
    """Some that cannot be translated word by word."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    assert type(model) is hf_vaswani.VaswaniForConditionalGeneration
    translations = {
        "Where is the station?": "Wo ist der Bahnhof?",
        "Tom has lived in Boston for three years.": "Tom lebt seit drei Jahren in Boston.",
        "She bought a new car yesterday.": "Sie hat gestern ein neues Auto gekauft.",
    }
    inputs = tokenizer(list(translations), return_tensors="pt", padding=True)
    outputs = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    assert outputs == list(translations.values())


def test_it_is_small_and_the_card_describes_these_files():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6e6
    assert not [path for path in files if path.suffix == ".py"]  # the code is the package's
    card = ModelCard.load(FOLDER / "README.md")
    assert card.data.license == "cc-by-2.0" and "tatoeba.org" in card.text
    saved = hf_vaswani.checksums_vaswani.read_checksums(FOLDER)
    assert "model.safetensors" in saved
    for name, expected in saved.items():
        assert hf_vaswani.checksums_vaswani.checksum(FOLDER / name) == expected
        assert expected["sha256"] in card.text, name
