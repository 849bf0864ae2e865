"""Converted MarianMT checkpoints whose SentencePiece vocabulary is extended, in training and in other commands."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, MarianTokenizer, pipeline

from support.foreign_models import marian_model
from training.cli import main
from training.data.two_sided_tokenizer import TwoSidedTokenizer
from training.demo_data import generate_pairs
from training.inference.loading import load_checkpoint, load_tokenizer


pytest.importorskip("sentencepiece", reason="SentencePiece is in the extra dev")
from support.sentencepiece_models import train, vocabulary, write_json, write_marian


SOURCES, TARGETS = (list(side) for side in zip(*generate_pairs(300)))
NEW_SOURCES = [f"the spectrometer ✓ {text}" for text in SOURCES[:12]]
NEW_TARGETS = [f"das Spektrometer ✓ ß漢 {text}" for text in TARGETS[:12]]
RUN = [
    *("--warmup_steps", "2", "--save_steps", "1", "--eval_strategy", "no", "--extend_vocabulary", "40"),
    *("--source_tokens_per_update", "400", "--target_tokens_per_update", "400", "--tokens_per_device", "400"),
    *("--disable_tqdm", "true"),
]


class Pair(NamedTuple):
    start: Path
    files: list[str]
    run: Path  # three updates


def write_opus(folder: Path, kind: str) -> None:
    """A MarianMT checkpoint with one SentencePiece model, two with a shared vocabulary, or two vocabularies."""
    if kind == "one side":
        write_json(folder / "vocab.json", vocabulary(train(folder / "source.spm", [*SOURCES, *TARGETS], 300)))
        shutil.copy(folder / "source.spm", folder / "target.spm")
    elif kind == "two sides":
        write_marian(folder, SOURCES, TARGETS)
    else:
        sides = {
            name: train(folder / f"{side}.spm", texts, 300)
            for name, side, texts in (("vocab", "source", SOURCES), ("target_vocab", "target", TARGETS))
        }
        longest = max(map(len, sides.values()))
        for name, pieces in sides.items():  # the same size, so that <pad> has the same id
            ids = vocabulary([*pieces, *(f"▁unused{i}" for i in range(longest - len(set(pieces))))])
            write_json(folder / f"{name}.json", ids)
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": kind == "two vocabularies"}
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 512})
    tokenizer = MarianTokenizer.from_pretrained(folder)
    size = tokenizer.pad_token_id + 1
    model = marian_model(size if kind == "two vocabularies" else None, vocab_size=size)
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["one side", "two sides", "two vocabularies"])
def pair(request, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("opus")
    write_opus(folder, request.param)
    assert main(["convert", str(folder), str(folder / "ours")]) == 0
    files = [folder / "new.en", folder / "new.de"]
    for file, lines in zip(files, (NEW_SOURCES, NEW_TARGETS)):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pair = Pair(folder / "ours", [str(file) for file in files], folder / "run")
    assert main(training(pair, pair.run, "--max_steps", "3", "--learning_rate", "0.002")) == 0
    return pair


def training(pair: Pair, run: Path, *more: str) -> list[str]:
    files = ["--train_files", *pair.files]
    return ["train", "--init_from", str(pair.start), *files, "--output_dir", str(run), *RUN, *more]


def sides(tokenizer) -> list:
    """Tokenizers of sources and of given translations, or the only one."""
    target = [tokenizer.target_side] if isinstance(tokenizer, TwoSidedTokenizer) else []
    return [side.backend_tokenizer for side in (tokenizer, *target)]


def sizes(model) -> tuple[int, int]:
    return model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size


def test_new_rows_are_those_of_the_parts_and_all_others_are_the_old_ones(pair, tmp_path):
    """A learning rate of 0 keeps what the run starts from."""
    assert main(training(pair, tmp_path, "--max_steps", "1", "--learning_rate", "0")) == 0
    (old, old_tokenizer), (new, tokenizer) = (load_checkpoint(str(folder)) for folder in (pair.start, tmp_path))
    first, count = old.config.vocab_size, len(tokenizer) - len(old_tokenizer)
    assert 10 < count <= 40
    assert sizes(new) == tuple(size + count for size in sizes(old))
    assert len(tokenizer) == sizes(new)[0]
    assert new.generation_config.to_dict() == old.generation_config.to_dict()
    assert new.config.pad_token_id == old.config.pad_token_id == tokenizer.pad_token_id
    assert {"✓", "漢"} <= set(tokenizer.convert_ids_to_tokens(range(first, first + count)))
    weights, encoder = new.state_dict(), "model.encoder.embed_tokens.weight"
    for name, weight in old.state_dict().items():
        shared = first if weight.shape[:1] == (sizes(old)[0],) and name == encoder else len(weight)
        assert torch.equal(weights[name][:shared], weight[:shared]), name
    moved = sizes(old)[0] - first  # tokens that only sources have
    assert torch.equal(weights[encoder][first + count :], old.state_dict()[encoder][first:])
    assert (moved > 0) == (new.config.source_vocab_size is not None)

    check, unknown = tokenizer.convert_tokens_to_ids("✓"), old_tokenizer.unk_token_id
    assert torch.equal(weights["model.shared.weight"][check], old.model.shared.weight[unknown])
    assert torch.equal(new.lm_head.bias[check], old.lm_head.bias[unknown])
    word = "▁Spektrometer"
    parts = [token.id for token in sides(old_tokenizer)[-1].model.tokenize(word)]
    expected = old.model.shared.weight[parts].mean(0)
    if len(sides(tokenizer)) == 1 or moved:
        found = weights["model.shared.weight"][tokenizer.convert_tokens_to_ids(word)]
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_before_training_old_text_has_the_old_states_and_logits(pair, tmp_path):
    with torch.enable_grad():
        assert main(training(pair, tmp_path, "--max_steps", "1", "--learning_rate", "0")) == 0
    loaded = [load_checkpoint(str(folder)) for folder in (pair.start, tmp_path)]
    compared = 0
    for source, target in zip(SOURCES, TARGETS):
        batches = [tokenizer(source, text_target=target, return_tensors="pt") for _, tokenizer in loaded]
        lengths = [batch["input_ids"].shape for batch in batches]
        if lengths[0] != lengths[1] or batches[0]["labels"].tolist() != batches[1]["labels"].tolist():
            continue  # there is a new piece in it
        inputs = [{"input_ids": batch["input_ids"], "decoder_input_ids": batch["labels"]} for batch in batches]
        states = [model.cpu().model(**kwargs).last_hidden_state for (model, _), kwargs in zip(loaded, inputs)]
        assert torch.equal(*states)
        logits = [model(**kwargs).logits for (model, _), kwargs in zip(loaded, inputs)]
        torch.testing.assert_close(logits[1][..., : logits[0].shape[-1]], logits[0], rtol=1e-6, atol=1e-5)
        compared += 1
    assert compared > 20
    model, tokenizer = loaded[1]
    batch = tokenizer(NEW_SOURCES, text_target=NEW_TARGETS, padding=True, return_tensors="pt")
    assert model(**batch).loss.isfinite()


def test_new_text_is_shorter_comes_back_and_has_no_unknown_token(pair):
    old, new = load_tokenizer(pair.start), load_tokenizer(pair.run)
    source = AutoTokenizer.from_pretrained(pair.run)
    for text in NEW_SOURCES:
        ids = new(text)["input_ids"]
        assert ids == source(text)["input_ids"] and new.unk_token_id not in ids
        assert len(ids) < len(old(text)["input_ids"])
        assert new.decode(ids, skip_special_tokens=True) == text
    size = json.loads((pair.run / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for text in NEW_TARGETS:
        ids = new(text_target=text)["input_ids"]
        assert new.unk_token_id not in ids and max(ids) < size
        assert new.decode(ids, skip_special_tokens=True) == text == source.decode(ids, skip_special_tokens=True)


def test_a_run_with_more_pieces_resumes_to_the_same_weights(pair, tmp_path):
    shutil.copytree(pair.run / "checkpoint-2", tmp_path / "checkpoint-2")
    assert main(training(pair, tmp_path, "--max_steps", "3", "--learning_rate", "0.002", "--resume")) == 0
    expected, found = (AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict() for folder in (pair.run, tmp_path))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_other_commands_take_the_extended_checkpoint(pair, tmp_path, capsys):
    average, source = str(tmp_path / "average"), str(tmp_path / "source.en")
    texts = ["the spectrometer ✓", "the spectrometer"]
    Path(source).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    assert main(["average", "--run", str(pair.run), "--last", "2", "--output", average]) == 0
    output = tmp_path / "out.de"
    assert (
        main(["translate", "--model", average, "--input", source, "--output", str(output), "--engine", "torch"]) == 0
    )
    lines = output.read_text(encoding="utf-8").splitlines()
    assert [row["translation_text"] for row in pipeline("translation", model=average)(texts)] == lines
    capsys.readouterr()
    assert main(["score-pairs", "--model", average, "--sources", pair.files[0], "--translations", pair.files[1]]) == 0
    assert len([float(line) for line in capsys.readouterr().out.splitlines()]) == len(NEW_SOURCES)


def test_the_extended_checkpoint_goes_to_marian_and_ctranslate2(pair, tmp_path):
    """Both conversions compare what they have written with the model."""
    assert main(["convert", str(pair.run), str(tmp_path / "marian"), "--to", "marian"]) == 0
    assert main(["convert", str(tmp_path / "marian"), str(tmp_path / "back")]) == 0
    expected, found = (AutoModelForSeq2SeqLM.from_pretrained(f).state_dict() for f in (pair.run, tmp_path / "back"))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    tokenizers = [load_tokenizer(folder) for folder in (pair.run, tmp_path / "back")]
    for options in ({"text": NEW_SOURCES}, {"text_target": NEW_TARGETS}):
        assert tokenizers[0](**options)["input_ids"] == tokenizers[1](**options)["input_ids"]
    assert MarianMTModel.from_pretrained(tmp_path / "marian").config.pad_token_id == tokenizers[0].pad_token_id
    pytest.importorskip("ctranslate2")
    assert main(["convert", str(pair.run), str(tmp_path / "ct2"), "--to", "ctranslate2"]) == 0


def test_an_extended_checkpoint_is_published(pair, hub):
    name = f"alice/{pair.start.parent.name}"
    assert main(["publish", "--checkpoint", str(pair.run), "--repo", name, "--languages", "en", "de"]) == 0
    _, pulled = load_checkpoint(name)
    expected = load_tokenizer(pair.run)(text_target=NEW_TARGETS)["input_ids"]
    assert pulled(text_target=NEW_TARGETS)["input_ids"] == expected
