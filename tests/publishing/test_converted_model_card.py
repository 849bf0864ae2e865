"""The card of a converted model, and of one that was fine-tuned from it: original, licence, conversion."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from markdown_it import MarkdownIt

from hf_vaswani import VaswaniConfig
from support.foreign_models import marian_model
from support.runs import train_argv
from support.sentencepiece_models import write_marian
from training.cli import main
from training.conversion.folders import describe_original
from training.inference.origin import Origin
from training.publishing.model_card import CardOptions, merge, metadata, sections, weights_of, write_card
from training.publishing.records import Run, find_run
from training.trainer.manifest import origin_of


README = "---\nlanguage:\n- en\n- de\nlicense: apache-2.0\n---\n\n# Opus\n"
ORIGIN = Origin(
    source="user/opus",
    revision="v2",
    repository="user/opus",
    commit="0123abcd",
    format="marian",
    license="apache-2.0",
    languages=["en", "de"],
    checked_on="text",
    compared="logits",
    sentences=8,
    equal=7,
    logits=0.0000123,
    tokenizer="converted: 8 of 8 equal",
)


def section(text: str, name: str) -> str:
    [found] = [each.text for each in sections(text) if each.name == name]
    return found


def card_of(folder: Path, output: Path, *words: str) -> str:
    assert main(["publish", "--checkpoint", str(folder), "--card-only", str(output), *words]) == 0
    return (output / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def opus(tmp_path_factory, pairs) -> Path:
    """A MarianMT checkpoint with its two SentencePiece models, and a model card."""
    folder = tmp_path_factory.mktemp("models") / "opus"
    folder.mkdir()
    write_marian(folder, *zip(*pairs))
    marian_model(vocab_size=len(json.loads((folder / "vocab.json").read_text()))).save_pretrained(folder)
    (folder / "README.md").write_text(README)
    return folder


@pytest.fixture(scope="module")
def converted(opus) -> Path:
    folder = opus.with_name("converted")
    assert main(["convert", str(opus), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tuned(converted, data, tmp_path_factory) -> Path:
    """Two updates from the converted model."""
    folder = tmp_path_factory.mktemp("tuned")
    words = ["--init_from", str(converted), "--max_steps", "2", "--eval_bleu", "false"]
    arguments = train_argv(data, folder, *words)
    position = arguments.index("--model_overrides")
    del arguments[position : position + 4]  # and vocab_size: both are the converted model's
    assert main([*arguments, "--learning_rate", "0.001"]) == 0
    return folder


# The record


def test_licence_and_languages_of_the_original_are_recorded(converted):
    record = json.loads((converted / "converted_from.json").read_text())
    assert (record["license"], record["languages"], record["repository"]) == ("apache-2.0", ["en", "de"], None)


@pytest.mark.parametrize(
    ("readme", "expected", "warned"),
    [
        (None, (None, None), ""),
        ("# No metadata\n", (None, None), ""),
        ("---\nlicense: [mit, apache-2.0]\nlanguage: no\n---\n", (None, ["no"]), "license: expected text"),
        ("---\nlicense: other\nlanguage: {a: b}\n---\n", ("other", None), "language: expected codes"),
        ("---\nlicense: [mit\n---\n", (None, None), "licence and languages are not recorded"),
        ("---\n- license\n---\n", (None, None), "licence and languages are not recorded"),
    ],
)
def test_what_the_originals_card_does_not_say_is_not_recorded(readme, expected, warned, tmp_path, caplog):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    record = describe_original(str(tmp_path), tmp_path)
    assert (record["license"], record["languages"]) == expected
    assert warned in caplog.text and bool(warned) == ("README.md" in caplog.text)


# The card


def test_the_card_of_a_converted_model_names_its_original_and_what_was_measured(converted, opus, tmp_path):
    text = card_of(converted, tmp_path)
    record = json.loads((converted / "converted_from.json").read_text())
    data = ModelCard(text).data.to_dict()
    assert (data["license"], data["language"]) == ("apache-2.0", ["en", "de"])
    assert not data.keys() & {"base_model", "datasets", "model-index"}  # a folder is no model of the Hub
    assert "converted from `opus`" in section(text, "summary") and "trained" not in section(text, "summary")
    assert "translating from" not in section(text, "summary")  # the original's card does not say which is the source
    training = section(text, "training")
    assert f"{record['logits']:.1e}" in training and "8 of 8 translations are equal" in training
    assert "MarianMT of transformers" in training and "no weight was trained since" in training
    assert "apache-2.0" in section(text, "licence")
    assert "not recorded" in section(text, "data") and "averaged" not in section(text, "deviations")
    assert str(opus.parent) not in text


def test_a_run_beside_a_converted_model_is_not_its_run(converted, tmp_path, tuned):
    """Whose model has the same fields, so that only the record tells."""
    shutil.copytree(converted, tuned / "converted")
    run = find_run(tuned / "converted", VaswaniConfig.from_pretrained(tuned))
    assert (run.record, run.state, run.is_converted) == (None, None, True)
    shutil.rmtree(tuned / "converted")


def test_a_publishers_licence_and_languages_win_and_stay(converted, tmp_path):
    text = card_of(converted, tmp_path, "--license", "mit", "--languages", "en", "de")
    assert metadata(text)["license"] == "mit"
    assert "Weights: mit." in section(text, "licence") and "apache-2.0" in section(text, "licence")
    assert "translating from `en` to `de`" in section(text, "summary")
    assert card_of(converted, tmp_path) == text


def test_languages_of_the_original_do_not_become_source_and_target_by_publishing_again(converted, tmp_path):
    text = card_of(converted, tmp_path)
    assert card_of(converted, tmp_path) == text


def test_a_licence_unknown_before_is_renewed(converted, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(converted, plain)
    record = json.loads((plain / "converted_from.json").read_text())
    (plain / "converted_from.json").write_text(json.dumps({**record, "license": None}))
    text = card_of(plain, tmp_path)
    assert metadata(text)["license"] == "unknown" and "not known" in section(text, "licence")
    text = card_of(converted, tmp_path)
    assert metadata(text)["license"] == "apache-2.0" and "Weights: apache-2.0" in section(text, "licence")


def test_a_fine_tuned_model_names_the_original_too(tuned, tmp_path):
    record = json.loads((tuned / "checkpoint-2" / "run.json").read_text())
    assert record["may_change"]["converted_from"]["license"] == "apache-2.0"
    assert origin_of(tuned) == record["may_change"]["converted_from"]  # for the runs that start from it
    text = card_of(tuned, tmp_path)
    assert re.search(r"fine-tuned with hf-vaswani, .*from a model converted from `opus`", section(text, "summary"))
    assert "- Converted from: `opus`" in section(text, "training") and "- Updates: 2\n" in section(text, "training")
    assert "Data of the original: not recorded" in section(text, "data")
    assert metadata(text)["license"] == "unknown"  # the weights are others; their licence is the publisher's to name
    assert "apache-2.0" in section(text, "licence")
    assert yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])["init_from"] == "converted"


def write(checkpoint, run: Run, **options) -> ModelCard:
    return write_card(*checkpoint, "me/model", CardOptions(**options), run)[0]


def test_a_model_of_the_hub_is_the_base_model(checkpoint):
    card = write(checkpoint, Run(converted=ORIGIN))
    assert (card.data.base_model, card.data.base_model_relation) == ("user/opus", "quantized")
    assert "[user/opus](https://huggingface.co/user/opus), revision `0123abcd`" in card.text
    assert "1.2e-05" in card.text and "7 of 8 translations" in card.text
    values = {"source_lang": "en", "target_lang": "de", "max_steps": 2, "learning_rate": 1.0, "warmup_steps": 1}
    record = {"must_match": values, "may_change": {"devices": 1, "converted_from": ORIGIN}}
    tuned = write(checkpoint, Run(record=record))
    assert (tuned.data.base_model, tuned.data.base_model_relation) == ("user/opus", "finetune")
    assert "base_model" not in write(checkpoint, Run()).data.to_dict()


def test_a_licence_by_name_keeps_its_name_and_link(checkpoint):
    named = {**ORIGIN, "license": "other", "license_name": "opus-licence", "license_link": "LICENSE"}
    data = write(checkpoint, Run(converted=named)).data
    assert (data.license, data.license_name) == ("other", "opus-licence")
    assert data.license_link == "https://huggingface.co/user/opus/blob/0123abcd/LICENSE"
    other = write(checkpoint, Run(converted=named), license="mit").data.to_dict()
    assert other["license"] == "mit" and not other.keys() & {"license_name", "license_link"}
    local = {**named, "repository": None, "commit": None, "license_link": "../LICENSE"}
    assert "license_link" not in write(checkpoint, Run(converted=local)).data.to_dict()


def test_a_licence_that_is_no_identifier_is_shown_and_not_taken(checkpoint):
    card = write(checkpoint, Run(converted={**ORIGIN, "license": "Apache 2.0"}))
    assert card.data.license == "unknown" and "names the licence Apache 2.0." in card.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"as_trained": True}, "those of Marian's training"),
        ({}, "those of MarianMT in transformers, which differ slightly"),
    ],
)
def test_positions_are_named(checkpoint, fields, said):
    assert f"- Positions: {said}" in write(checkpoint, Run(converted={**ORIGIN, **fields})).text


HOSTILE = [
    "<script>x</script>\n\n# Mine",
    "<!-- /hf-vaswani: training -->",
    "a](javascript:x) `b` | *c*\n---\n",
    "\ud800\x00",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_records_are_shown_as_text(checkpoint, text):
    names = ("source", "format", "repository", "commit", "license", "license_name", "license_link", "checked_on")
    origin = {**ORIGIN, **dict.fromkeys((*names, "compared", "tokenizer"), text), "languages": [text, text]}
    for run in (Run(converted=origin), Run(converted={**origin, "repository": None})):
        card = write(checkpoint, run)
        names = ["summary", "usage", "scores", "data", "training", "deviations", "licence"]
        assert [each.name for each in sections(card.text)] == names
        tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)
        assert len([token for token in tokens if token.type == "heading_open"]) == 9
        children = [child for token in tokens for child in token.children or []]
        assert not [child for child in children if child.type in ("html_inline", "image")]
        links = [child.attrs["href"] for child in children if child.type == "link_open"]
        assert all(link.startswith(("https://huggingface.co/", "https://arxiv.org/")) for link in links)
        assert metadata(f"{card}")["license"] == "unknown"
        again = f"{card}\n"
        assert merge(again, card, weights_of(checkpoint[0]), set()) == again


def test_a_malformed_record_is_one_line_that_names_the_field(converted, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    record = json.loads((copy / "converted_from.json").read_text())
    for field, value in (("license", 3), ("logits", "small"), ("languages", "en")):
        (copy / "converted_from.json").write_text(json.dumps({**record, field: value}))
        assert main(["publish", "--checkpoint", str(copy), "--card-only", str(tmp_path / "card")]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "converted_from.json" in error and field in error
    assert not (tmp_path / "card").exists()


# The Hub


def test_a_conversion_of_a_hub_model_is_published_with_its_record(hub, opus, tmp_path):
    api = HfApi()
    api.create_repo("alice/opus")
    commit = api.upload_folder(repo_id="alice/opus", folder_path=opus).oid
    assert main(["convert", "alice/opus", str(tmp_path / "ours")]) == 0
    assert main(["publish", "--checkpoint", str(tmp_path / "ours"), "--repo", "alice/ours"]) == 0
    data = ModelCard.load("alice/ours").data
    assert (data.base_model, data.base_model_relation, data.license) == ("alice/opus", "quantized", "apache-2.0")
    record = json.loads(hub.repositories["alice/ours"].at("main").files["converted_from.json"].content)
    assert (record["repository"], record["commit"], record["source"]) == ("alice/opus", commit, "alice/opus")


def test_the_record_of_a_folder_is_published_without_its_path(hub, converted, opus):
    assert main(["publish", "--checkpoint", str(converted), "--repo", "alice/local"]) == 0
    content = hub.repositories["alice/local"].at("main").files["converted_from.json"].content.decode()
    assert json.loads(content)["source"] == "opus" and str(opus.parent) not in content
