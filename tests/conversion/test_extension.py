"""Converted MarianMT checkpoints whose SentencePiece vocabulary is extended, in training and in other commands."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from support.foreign_models import marian_model
from training.cli import main
from training.data.tokenizer import extend_tokenizer
from training.demo_data import generate_pairs
from training.inference.loading import load_checkpoint, load_tokenizer
from training.trainer.fine_tuning import extend_embeddings


pytest.importorskip("sentencepiece", reason="SentencePiece is in the extra dev")
from support.sentencepiece_models import train, vocabulary, write_json, write_marian


SOURCES, TARGETS = (list(side) for side in zip(*generate_pairs(300)))
NEW_SOURCES = [f"the spectrometer ✓ {text}" for text in SOURCES[:12]]
NEW_TARGETS = [f"das Spektrometer ✓ ß漢 {text}" for text in TARGETS[:12]]
RUN = [
    *("--warmup_steps", "2", "--save_steps", "1", "--eval_strategy", "no", "--extend_vocabulary", "40"),
    *("--source_tokens_per_update", "400", "--target_tokens_per_update", "400", "--tokens_per_device", "400"),
    *("--max_steps", "3", "--learning_rate", "0.002", "--disable_tqdm", "true"),
]


KINDS = ["one side", "two sides", "two vocabularies"]
in_memory = pytest.mark.parametrize("start", KINDS, indirect=True)
in_commands = pytest.mark.parametrize(
    "start", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]), KINDS[2]], indirect=True
)


class Extended(NamedTuple):
    """Models and tokenizers before and after, without training."""

    old: PreTrainedModel
    old_tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


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


@pytest.fixture(scope="module")
def start(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("opus")
    write_opus(folder, request.param)
    assert main(["convert", str(folder), str(folder / "ours")]) == 0
    return folder / "ours"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    paths = [tmp_path_factory.mktemp("files") / name for name in ("new.en", "new.de")]
    for path, lines in zip(paths, (NEW_SOURCES, NEW_TARGETS)):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def run(start, files, tmp_path_factory) -> Path:
    """Three updates."""
    folder = tmp_path_factory.mktemp("run")
    assert main(training(start, files, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def extended(start) -> Extended:
    (old, old_tokenizer), (model, _) = (load_checkpoint(str(start), device=torch.device("cpu")) for _ in range(2))
    tokenizer = extend_tokenizer(old_tokenizer, NEW_SOURCES, NEW_TARGETS, 40)
    extend_embeddings(model, old_tokenizer, tokenizer)
    return Extended(old, old_tokenizer, model, tokenizer)


def training(start: Path, files: list[str], folder: Path, *more: str) -> list[str]:
    return ["train", "--init_from", str(start), "--train_files", *files, "--output_dir", str(folder), *RUN, *more]


def sizes(model: PreTrainedModel) -> tuple[int, int]:
    return model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size


# In memory, before training


@in_memory
def test_old_rows_stay_and_new_ones_are_means_of_their_parts(extended):
    old, old_tokenizer, new, tokenizer = extended
    first, count = old.config.vocab_size, len(tokenizer) - len(old_tokenizer)
    assert 10 < count <= 40
    assert sizes(new) == tuple(size + count for size in sizes(old))
    assert (len(tokenizer), new.lm_head.out_features) == sizes(new)
    assert new.generation_config.to_dict() == old.generation_config.to_dict()
    assert new.config.pad_token_id == old.config.pad_token_id == tokenizer.pad_token_id
    assert {"✓", "漢"} <= set(tokenizer.convert_ids_to_tokens(range(first, first + count)))
    before, after, encoder = old.state_dict(), new.state_dict(), "model.encoder.embed_tokens.weight"
    for name, weight in before.items():
        same = first if name == encoder else len(weight)
        assert torch.equal(after[name][:same], weight[:same]), name
    has_own = new.config.source_vocab_size is not None
    assert (sizes(old)[0] > first) == has_own
    assert torch.equal(after[encoder][first + count :], before[encoder][first:])  # of sources only

    check, unknown = tokenizer.convert_tokens_to_ids("✓"), old_tokenizer.unk_token_id
    for name in ("model.shared.weight", encoder, "lm_head.bias"):
        assert torch.equal(after[name][check], before[name][unknown]), name
    word = tokenizer.convert_tokens_to_ids("▁Spektrometer")
    read, written = (old_tokenizer(**{side: "Spektrometer"})["input_ids"][:-1] for side in ("text", "text_target"))
    of_written = written if has_own else min(written, read, key=len)
    torch.testing.assert_close(after["model.shared.weight"][word], before["model.shared.weight"][of_written].mean(0))
    torch.testing.assert_close(after["lm_head.bias"][word], before["lm_head.bias"][of_written].mean(0))
    of_read = read if has_own else of_written
    torch.testing.assert_close(after[encoder][word], before[encoder][of_read].mean(0))


@in_memory
@torch.no_grad()
def test_old_text_has_the_old_states_and_logits(extended):
    old, old_tokenizer, new, tokenizer = extended
    compared = 0
    for source, target in zip(SOURCES, TARGETS):
        before, after = (t(source, text_target=target, return_tensors="pt") for t in (old_tokenizer, tokenizer))
        if before["input_ids"].shape != after["input_ids"].shape or before["labels"].shape != after["labels"].shape:
            continue  # there is a new piece in it
        assert torch.equal(before["labels"], after["labels"])
        inputs = [{"input_ids": batch["input_ids"], "decoder_input_ids": batch["labels"]} for batch in (before, after)]
        states = [model.model(**kwargs).last_hidden_state for model, kwargs in zip((old, new), inputs)]
        assert torch.equal(*states)
        logits = [model(**kwargs).logits for model, kwargs in zip((old, new), inputs)]
        torch.testing.assert_close(logits[1][..., : old.config.vocab_size], logits[0], rtol=1e-6, atol=1e-6)
        compared += 1
    assert compared > 10
    batch = tokenizer(NEW_SOURCES, text_target=NEW_TARGETS, padding=True, return_tensors="pt")
    assert new(**batch).loss.isfinite()


# In commands


@in_commands
def test_new_text_is_shorter_comes_back_and_has_no_unknown_token(start, run):
    old, new = load_tokenizer(start), load_tokenizer(run)
    source = AutoTokenizer.from_pretrained(run)
    for text in NEW_SOURCES:
        ids = new(text)["input_ids"]
        assert ids == source(text)["input_ids"] and new.unk_token_id not in ids
        assert len(ids) < len(old(text)["input_ids"])
        assert new.decode(ids, skip_special_tokens=True) == text
    size = json.loads((run / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for text in NEW_TARGETS:
        ids = new(text_target=text)["input_ids"]
        assert new.unk_token_id not in ids and max(ids) < size
        assert new.decode(ids, skip_special_tokens=True) == text == source.decode(ids, skip_special_tokens=True)


@in_commands
def test_a_run_with_more_pieces_resumes_to_the_same_weights(start, files, run, tmp_path):
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    assert main(training(start, files, tmp_path, "--resume")) == 0
    expected, found = (AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict() for folder in (run, tmp_path))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@in_commands
def test_other_commands_take_the_extended_checkpoint(run, files, tmp_path, capsys):
    average, source = str(tmp_path / "average"), str(tmp_path / "source.en")
    texts = ["the spectrometer ✓", "the spectrometer"]
    Path(source).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    assert main(["average", "--run", str(run), "--last", "2", "--output", average]) == 0
    output = tmp_path / "out.de"
    assert (
        main(["translate", "--model", average, "--input", source, "--output", str(output), "--engine", "torch"]) == 0
    )
    lines = output.read_text(encoding="utf-8").splitlines()
    assert [row["translation_text"] for row in pipeline("translation", model=average)(texts)] == lines
    capsys.readouterr()
    assert main(["score-pairs", "--model", average, "--sources", files[0], "--translations", files[1]]) == 0
    assert len([float(line) for line in capsys.readouterr().out.splitlines()]) == len(NEW_SOURCES)


@in_commands
def test_the_extended_checkpoint_goes_to_marian_and_ctranslate2(run, tmp_path):
    """Both conversions compare what they have written with the model."""
    assert main(["convert", str(run), str(tmp_path / "marian"), "--to", "marian"]) == 0
    assert main(["convert", str(tmp_path / "marian"), str(tmp_path / "back")]) == 0
    expected, found = (AutoModelForSeq2SeqLM.from_pretrained(f).state_dict() for f in (run, tmp_path / "back"))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    tokenizers = [load_tokenizer(folder) for folder in (run, tmp_path / "back")]
    for options in ({"text": NEW_SOURCES}, {"text_target": NEW_TARGETS}):
        assert tokenizers[0](**options)["input_ids"] == tokenizers[1](**options)["input_ids"]
    assert MarianMTModel.from_pretrained(tmp_path / "marian").config.pad_token_id == tokenizers[0].pad_token_id
    pytest.importorskip("ctranslate2")
    assert main(["convert", str(run), str(tmp_path / "ct2"), "--to", "ctranslate2"]) == 0


@in_commands
def test_an_extended_checkpoint_is_published(run, hub):
    name = f"alice/{run.name}"
    assert main(["publish", "--checkpoint", str(run), "--repo", name, "--languages", "en", "de"]) == 0
    _, pulled = load_checkpoint(name)
    expected = load_tokenizer(run)(text_target=NEW_TARGETS)["input_ids"]
    assert pulled(text_target=NEW_TARGETS)["input_ids"] == expected
