"""A converted checkpoint in every command, beside the MarianMT model that it comes from; and the way back."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedTokenizerBase,
    pipeline,
)

import hf_vaswani  # noqa: F401
from support.foreign_models import marian_model, padded_batch, relative_difference
from support.models import new_model
from support.sentencepiece_models import write_marian
from training.cli import main
from training.demo_data import write_demo_data


SMALL = [
    *("--warmup_steps", "2", "--learning_rate", "0.005", "--max_steps", "4", "--eval_steps", "2", "--save_steps", "2"),
    *("--source_tokens_per_update", "1000", "--target_tokens_per_update", "1000", "--tokens_per_device", "500"),
    *("--logging_steps", "1", "--disable_tqdm", "true", "--eval_bleu", "false", "--eval_on_start", "true"),
]


class Original(NamedTuple):
    model: MarianMTModel
    tokenizer: MarianTokenizer
    converted: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, list[str]]:
    """200 pairs to train on, 10 to evaluate on, 3 to test on."""
    made = write_demo_data(str(tmp_path_factory.mktemp("data")), train=200, val=10, test=3)
    for path in made["test"][:2]:  # a few words, as the positions of the small models end at 64
        lines = [" ".join(line.split()[:6]) for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {split: [str(path) for path in paths[:2]] for split, paths in made.items()}


@pytest.fixture(scope="module")
def lines(files) -> list[list[str]]:
    return [Path(file).read_text(encoding="utf-8").splitlines() for file in files["test"]]


@pytest.fixture(scope="module")
def originals(files, tmp_path_factory) -> dict[str, Original]:
    """Two models with one pair of SentencePiece models, and their conversions."""
    made, sides = {}, [Path(file).read_text(encoding="utf-8").splitlines() for file in files["train"]]
    for activation in ("relu", "swish"):
        folder = tmp_path_factory.mktemp(activation)
        write_marian(folder, *sides)
        tokenizer = MarianTokenizer.from_pretrained(folder)
        marian = marian_model(vocab_size=len(tokenizer), activation_function=activation)
        marian.generation_config.no_repeat_ngram_size = 1  # random models repeat themselves
        marian.save_pretrained(folder)
        assert main(["convert", str(folder), str(folder / "converted")]) == 0
        made[activation] = Original(MarianMTModel.from_pretrained(folder).eval(), tokenizer, folder / "converted")
    return made


def translated(folders: list[Path], source: str, output: Path, *words: str) -> list[str]:
    models = ["--model", *map(str, folders)]
    assert main(["translate", *models, "--input", source, "--output", str(output), *words]) == 0
    return output.read_text(encoding="utf-8").splitlines()


def by_marian(original: Original, lines: list[str], **search) -> list[str]:
    model, tokenizer = original.model, original.tokenizer
    tokens = [model.generate(**tokenizer(line, return_tensors="pt"), **search)[0] for line in lines]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]


def scored_pairs(folder: Path, files: list[str], capsys, *words: str) -> list[float]:
    capsys.readouterr()
    pairs = ["--sources", files[0], "--translations", files[1]]
    assert main(["score-pairs", "--model", str(folder), *pairs, *words]) == 0
    return [float(line) for line in capsys.readouterr().out.splitlines()]


@torch.no_grad()
def log_probability(model: MarianMTModel, source: torch.Tensor, target: list[int]) -> float:
    """Of a target under MarianMT, which gives padding no probability."""
    decoder = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
    logits = model(input_ids=source, decoder_input_ids=decoder).logits[0]
    logits[:, model.config.pad_token_id] = -torch.inf
    return logits.log_softmax(-1)[range(len(target)), target].sum().item()


# Inference


@pytest.mark.parametrize("activation", [pytest.param("relu", marks=pytest.mark.slow), "swish"])
def test_pipeline_and_translate_give_the_originals_translations(originals, activation, files, lines, tmp_path):
    original, (sources, _) = originals[activation], lines
    best = by_marian(original, sources)  # by its own settings, with a beam of 6
    assert len(set(best)) > 1
    translator = pipeline("translation", model=str(original.converted))
    assert [row["translation_text"] for row in translator(sources)] == best
    folder, file = [original.converted], files["test"][0]
    assert translated(folder, file, tmp_path / "beam", "--engine", "torch") == best
    greedy = by_marian(original, sources, num_beams=1)
    assert translated(folder, file, tmp_path / "greedy", "--num-beams", "1") == greedy


def test_given_translations_have_the_originals_log_probabilities(originals, files, lines, capsys):
    original = originals["swish"]
    expected = [
        log_probability(
            original.model,
            original.tokenizer(source, return_tensors="pt")["input_ids"],
            original.tokenizer(text_target=target)["input_ids"],
        )
        for source, target in zip(*lines)
    ]
    found = scored_pairs(original.converted, files["test"], capsys)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(found) == 3
    of_8_bits = scored_pairs(original.converted, files["test"], capsys, "--dtype", "int8")
    assert of_8_bits == pytest.approx(expected, rel=0.05) and of_8_bits != found


def test_a_translation_with_8_bit_weights_has_a_line_a_sentence(originals, files, tmp_path):
    found = translated([originals["swish"].converted], files["test"][0], tmp_path / "out", "--dtype", "int8")
    assert len(found) == 3 and all(found)


@torch.no_grad()
def test_an_ensemble_is_the_mean_of_the_originals_probabilities(originals, files, lines, tmp_path):
    both = list(originals.values())
    found = translated([each.converted for each in both], files["test"][0], tmp_path / "out", "--num-beams", "1")
    end, pad, tokenizer = both[0].model.config.eos_token_id, both[0].model.config.pad_token_id, both[0].tokenizer
    for line, text in zip(lines[0][:2], found):
        source, tokens = tokenizer(line, return_tensors="pt")["input_ids"], [pad]
        while tokens[-1] != end and len(tokens) < 31:
            inputs = {"input_ids": source, "decoder_input_ids": torch.tensor([tokens])}
            logits = torch.stack([each.model(**inputs).logits[0, -1] for each in both])
            logits[:, pad] = -torch.inf
            mean = logits.softmax(-1).mean(0)
            mean[tokens] = 0  # no token twice
            tokens.append(int(mean.argmax()))
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert found != translated([both[0].converted], files["test"][0], tmp_path / "one", "--num-beams", "1")


def test_words_are_aligned_and_attention_is_shown(originals, files, lines, tmp_path, capsys):
    folder, (sources, targets) = str(originals["swish"].converted), files["test"]
    for method in ("erasure", "shift"):
        layer = [] if method == "erasure" else ["--layer", "1"]
        capsys.readouterr()
        words = ["align", "--model", folder, "--sources", sources, "--translations", targets, "--method", method]
        assert main([*words, *layer]) == 0
        rows = capsys.readouterr().out.splitlines()
        for row, source, target in zip(rows, *lines, strict=True):
            links = [tuple(map(int, link.split("-"))) for link in row.split()]
            assert sorted(word for _, word in links) == list(range(len(target.split())))  # one link for each
            assert all(0 <= of_source < len(source.split()) for of_source, _ in links)
    page = tmp_path / "attention.html"
    assert main(["attention", "--model", folder, "--source", lines[0][0], "--output", str(page)]) == 0
    assert "<html" in page.read_text(encoding="utf-8")


# Fine-tuning, and the way back


def fine_tuned(start: Path, files: dict, output: Path, *words: str) -> Path:
    """A run of four updates, whose loss falls."""
    data = ["--train_files", *files["train"], "--eval_files", *files["val"]]
    run = ["train", "--init_from", str(start), *data, "--output_dir", str(output), *SMALL, *words]
    assert main(run) == 0
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    return output


def check_way_back(ours: Path, marian: Path, tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> None:
    """Convert a checkpoint to MarianMT, and that back: logits, translations and the bits of all weights are equal."""
    assert main(["convert", str(ours), str(marian), "--to", "marian"]) == 0
    model, plain = (
        kind.from_pretrained(path).eval() for kind, path in ((AutoModelForSeq2SeqLM, ours), (MarianMTModel, marian))
    )
    size, pad = model.config.vocab_size, model.config.pad_token_id
    batch = padded_batch(pad, size)
    assert relative_difference(model, plain, batch, without=(pad,), vocabulary=size) < 1e-5
    inputs = AutoTokenizer.from_pretrained(marian)(lines, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    assert tokenizer.batch_decode(plain.generate(**inputs), skip_special_tokens=True) == expected
    assert main(["convert", str(marian), str(marian.with_name("back"))]) == 0
    back = AutoModelForSeq2SeqLM.from_pretrained(marian.with_name("back")).state_dict()
    assert back.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(back[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "adapters"])
def test_a_fine_tuned_model_goes_back_to_marian(originals, kind, files, lines, tmp_path):
    words = ["--lora_rank", "4", "--learning_rate", "0.02"] if kind == "adapters" else []
    start = originals["swish"].converted
    run = fine_tuned(start, files, tmp_path / "run", *words)
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(path).state_dict() for path in (start, run))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert (len(changed) == len(before)) == (kind == "all weights") and changed
    check_way_back(run, tmp_path / "marian", AutoTokenizer.from_pretrained(run), lines[0])


@pytest.mark.slow
def test_an_average_of_fine_tuned_checkpoints_is_published_and_goes_back(originals, files, lines, hub, tmp_path):
    run = fine_tuned(originals["relu"].converted, files, tmp_path / "run")
    average = tmp_path / "average"
    assert main(["average", "--run", str(run), "--last", "2", "--output", str(average)]) == 0
    assert main(["publish", "--checkpoint", str(average), "--repo", "alice/average", "--run", str(run)]) == 0
    pulled = tmp_path / "pulled"
    assert translated(["alice/average"], files["test"][0], pulled) == translated([average], files["test"][0], pulled)
    check_way_back(average, tmp_path / "marian", AutoTokenizer.from_pretrained(average), lines[0])


@pytest.mark.slow
def test_a_byte_level_vocabulary_is_extended_and_goes_back(tokenizer, files, lines, tmp_path):
    """One of SentencePiece: test_extension.py."""
    new_model(tokenizer, d_k=8, d_v=8).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    for source, output in (("ours", "opus"), ("opus", "converted")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / output)]) == 0
    run = fine_tuned(tmp_path / "converted", files, tmp_path / "run", "--extend_vocabulary", "20")
    found = AutoTokenizer.from_pretrained(run)
    assert len(found) > len(tokenizer) + 10
    check_way_back(run, tmp_path / "marian", found, lines[0])
