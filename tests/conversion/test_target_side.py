"""Given translations of a converted MarianMT checkpoint; the oracles are MarianTokenizer and MarianMTModel."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from tokenizers import Tokenizer
from transformers import AutoTokenizer, MarianTokenizer, PreTrainedTokenizerFast

from hf_vaswani import VaswaniForConditionalGeneration
from support.foreign_models import marian_model
from support.marian_files import SETTINGS, arrays_of, write_model
from support.models import new_model
from training.cli import main
from training.data.encoding import tokenize
from training.data.two_sided_tokenizer import TARGET_TOKENIZER, TwoSidedTokenizer, definition
from training.demo_data import generate_pairs
from training.inference.alignment import words_of
from training.inference.attention_maps import attention_maps
from training.inference.corpus import Line, RequestBuilder
from training.inference.direction import is_reversed
from training.inference.loading import load_checkpoint, load_ensemble, load_tokenizer
from training.inference.search import Search
from training.trainer.averaging import average
from training.trainer.checkpoints import complete_checkpoints
from training.trainer.pushing import push_model


pytest.importorskip("sentencepiece", reason="SentencePiece is in the extra dev")
from support.sentencepiece_models import write_json, write_marian


SOURCES, TARGETS = (list(side) for side in zip(*generate_pairs(300)))
SCORED = 8  # pairs
SHUT = -100.0


def write_opus(folder: Path, lacking: bool) -> SimpleNamespace:
    """A MarianMT checkpoint, and what it is converted to. Padding is improbable, as it is forbidden in the result.

    Args:
        lacking: The vocabulary lacks a piece of each language, which are `<unk>` to MarianTokenizer.
    """
    opus, ours = folder / "opus", folder / "ours"
    opus.mkdir()
    write_marian(opus, SOURCES, TARGETS)
    if lacking:
        ids = json.loads((opus / "vocab.json").read_text(encoding="utf-8"))
        tokenizer = MarianTokenizer.from_pretrained(opus)
        used = [
            tokenizer.spm_source.encode(SOURCES[0], out_type=str),
            tokenizer.spm_target.encode(TARGETS[0], out_type=str),
        ]
        rare = {max((piece for piece in pieces if piece in ids), key=len) for pieces in used}
        write_json(
            opus / "vocab.json", {t: i for i, t in enumerate(t for t in sorted(ids, key=ids.get) if t not in rare)}
        )
    tokenizer = MarianTokenizer.from_pretrained(opus)
    model = marian_model(vocab_size=len(tokenizer))
    with torch.no_grad():
        model.final_logits_bias[0, tokenizer.pad_token_id] = SHUT
    model.save_pretrained(opus)
    assert main(["convert", str(opus), str(ours)]) == 0
    return SimpleNamespace(model=model, tokenizer=tokenizer, opus=opus, ours=ours, lacking=lacking)


@pytest.fixture(scope="module", params=[False, True], ids=["all pieces have ids", "a piece of each side lacks one"])
def pair(tmp_path_factory, request):
    return write_opus(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    names = [folder / "pairs.en", folder / "pairs.de"]
    for name, texts in zip(names, (SOURCES, TARGETS)):
        name.write_text("".join(f"{text}\n" for text in texts[:SCORED]), encoding="utf-8")
    return [str(name) for name in names]


@torch.no_grad()
def marian_losses(original: SimpleNamespace) -> list[tuple[float, int]]:
    """Loss of MarianMT for each pair, summed over the tokens, and their number."""
    losses = []
    for source, target in zip(SOURCES[:SCORED], TARGETS):
        inputs = original.tokenizer(source, text_target=target, return_tensors="pt")
        count = inputs["labels"].shape[1]
        losses.append((original.model(**inputs).loss.item() * count, count))
    return losses


def test_labels_are_those_of_marian_tokenizer(pair):
    tokenizer = load_tokenizer(pair.ours)
    expected = pair.tokenizer(text_target=TARGETS)["input_ids"]
    assert pair.tokenizer(TARGETS)["input_ids"] != expected  # the other model would give other labels
    assert pair.lacking == (pair.tokenizer.unk_token_id in expected[0])
    encoded = tokenize(Dataset.from_dict({"source": SOURCES, "target": TARGETS}), tokenizer)
    assert encoded["labels"] == expected
    assert tokenizer(text_target=TARGETS[0])["input_ids"] == expected[0]
    both = tokenizer(SOURCES[:3], text_target=TARGETS[:3], padding=True, return_tensors="pt")
    original = pair.tokenizer(text_target=TARGETS[:3], padding=True, return_tensors="pt")
    assert both["labels"].tolist() == original["input_ids"].tolist()
    assert both["input_ids"].tolist() == tokenizer(SOURCES[:3], padding=True)["input_ids"]
    short = tokenizer(SOURCES[0], text_target=TARGETS[0], truncation=True, max_length=9, max_target_length=4)
    assert (len(short["input_ids"]), len(short["labels"])) == (9, 4)


def test_the_cache_of_encoded_pairs_tells_target_sides_apart(pair):
    tokenizer = load_tokenizer(pair.ours)
    pairs = Dataset.from_dict({"source": SOURCES, "target": TARGETS})
    one_sided = AutoTokenizer.from_pretrained(pair.ours)
    assert tokenize(pairs, tokenizer)["labels"] != tokenize(pairs, one_sided)["labels"]
    assert definition(tokenizer) != definition(one_sided)


def test_score_pairs_gives_the_log_probability_of_marian_mt(pair, files, capsys):
    words = ["score-pairs", "--model", str(pair.ours), "--sources", files[0], "--translations", files[1]]
    assert main(words) == 0
    found = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert found == pytest.approx([-loss for loss, _ in marian_losses(pair)], abs=2e-3)
    assert main([*words, "--tokens"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["tokens"]) for line in lines] == [count for _, count in marian_losses(pair)]
    if not pair.lacking:
        assert "".join(text for text, _ in lines[0]["tokens"][:-1]).strip() == TARGETS[0]


def test_fine_tuning_uses_the_target_side_and_keeps_it(pair, files, tmp_path):
    """With a learning rate of 0, the loss on the evaluation data is MarianMT's. Checkpoints, a resumed run, an average
    and a MarianMT checkpoint keep the file."""
    words = ["train", "--init_from", str(pair.ours), "--train_files", *files, "--eval_files", *files]
    words += ["--output_dir", str(tmp_path / "run"), "--learning_rate", "0", "--eval_steps", "2", "--save_steps", "1"]
    words += ["--tokens_per_device", "2000", "--generation_num_beams", "1", "--generation_max_length", "12"]
    words += ["--disable_tqdm", "true"]
    assert main([*words, "--max_steps", "2"]) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    [loss] = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    losses, counts = zip(*marian_losses(pair))
    assert loss == pytest.approx(sum(losses) / sum(counts), rel=1e-4)

    assert main([*words, "--max_steps", "3", "--resume"]) == 0
    checkpoints = complete_checkpoints(tmp_path / "run")
    average(checkpoints, str(tmp_path / "mean"))
    assert main(["convert", str(checkpoints[-1]), str(tmp_path / "marian"), "--to", "marian"]) == 0
    expected = pair.tokenizer(text_target=TARGETS)["input_ids"]
    for folder in (*checkpoints, tmp_path / "run", tmp_path / "mean", tmp_path / "marian"):
        assert load_tokenizer(folder)(text_target=TARGETS)["input_ids"] == expected, folder
        assert type(AutoTokenizer.from_pretrained(folder)) is PreTrainedTokenizerFast
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert settings["tokenizer_class"] == PreTrainedTokenizerFast.__name__
    assert len(checkpoints) > 1


def test_words_labels_and_prefixes_are_of_the_target_side(pair):
    model, tokenizer = load_checkpoint(str(pair.ours))
    expected = pair.tokenizer(text_target=TARGETS[0])["input_ids"]
    ids, words = words_of(tokenizer, TARGETS[0], is_target=True)
    assert ids == expected
    assert sorted({word for word in words if word is not None}) == list(range(len(TARGETS[0].split())))
    maps = attention_maps(model, tokenizer, SOURCES[0], TARGETS[0])
    assert len(maps.written_tokens) == len(expected)
    pieces = [piece.removeprefix("▁") for piece in pair.tokenizer.spm_target.encode(TARGETS[0], out_type=str)]
    if not pair.lacking:
        assert [label.removeprefix("·") for label in maps.written_tokens[:-1] if label != "␣"] == [
            p for p in pieces if p
        ]
    builder = RequestBuilder(Search([model], tokenizer, max_new_tokens=60), "in", "prefixes", 100, split=False)
    [[request]] = builder.requests([Line(1, SOURCES[0], TARGETS[0])])
    assert request.prefix == expected[:-1]


def test_a_reversed_direction_is_measured_with_the_target_side(pair, monkeypatch):
    """Both directions encode what is read by source.spm, and what is given by target.spm."""
    given = []

    def measured(model, tokenizer, sources, targets):
        given.append((sources, targets))
        return [[0.0]] * len(sources)

    monkeypatch.setattr("training.inference.direction.id_log_probabilities", measured)
    model, tokenizer = load_checkpoint(str(pair.ours))
    is_reversed(model, tokenizer, zip(SOURCES[:10], TARGETS))
    original = pair.tokenizer
    for (_, targets), texts in zip(given, (TARGETS, SOURCES)):
        assert targets == original(text_target=texts[:10])["input_ids"]
    for (sources, _), texts in zip(given, (SOURCES, TARGETS)):
        assert sources == tokenizer(texts[:10])["input_ids"]
    assert len(given) == 2


def test_an_ordinary_checkpoint_has_no_target_side(tokenizer, tmp_path):
    new_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert not (tmp_path / TARGET_TOKENIZER).exists()
    assert definition(loaded) == loaded.backend_tokenizer.to_str()
    assert loaded(text_target=TARGETS)["input_ids"] == tokenizer(TARGETS)["input_ids"]


def test_a_published_checkpoint_has_both_sides(hub, pair):
    name = f"alice/two-sided-{pair.lacking}".lower()
    assert main(["publish", "--checkpoint", str(pair.ours), "--repo", name, "--languages", "en", "de"]) == 0
    assert TARGET_TOKENIZER in hub.repositories[name].at("main").files
    card = Path(HfApi().hf_hub_download(name, "README.md")).read_text(encoding="utf-8")
    assert "two segmentations, one of sources and one of given translations" in card
    _, pulled = load_checkpoint(name)
    assert pulled(text_target=TARGETS)["input_ids"] == pair.tokenizer(text_target=TARGETS)["input_ids"]
    HfApi().create_repo(f"{name}-pushed-by-a-run")
    push_model(pair.ours, f"{name}-pushed-by-a-run", "A commit")
    assert TARGET_TOKENIZER in hub.repositories[f"{name}-pushed-by-a-run"].at("main").files


def test_marians_own_files_with_sentencepiece_models_have_both_sides(pair, tmp_path):
    """As in OPUS-MT's archives: weights, a vocabulary without padding, and two SentencePiece models."""
    folder = tmp_path / "npz"
    folder.mkdir()
    ids = {token: i for token, i in pair.tokenizer.get_vocab().items() if token != "<pad>"}
    write_model(folder, arrays=arrays_of(SETTINGS, target=len(ids)))
    (folder / "vocab.yml").write_text(json.dumps(ids), encoding="utf-8")  # is YAML too
    for name in ("source.spm", "target.spm"):
        shutil.copy(pair.opus / name, folder)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert tokenizer.is_fast
    assert tokenizer(text_target=TARGETS)["input_ids"] == pair.tokenizer(text_target=TARGETS)["input_ids"]


# Mistakes


def test_an_extended_vocabulary_writes_what_it_lacked(pair, files, tmp_path):
    words = ["train", "--init_from", str(pair.ours), "--train_files", *files, "--output_dir", str(tmp_path / "run")]
    assert main([*words, "--extend_vocabulary", "1", "--max_steps", "1", "--eval_strategy", "no"]) == 0
    old, (model, new) = load_tokenizer(pair.ours), load_checkpoint(str(tmp_path / "run"))
    assert new.target_vocab_size == old.target_vocab_size + 1 == model.config.vocab_size == len(new.target_side)
    assert (old.unk_token_id in old(text_target=TARGETS[0])["input_ids"]) == pair.lacking
    assert new.unk_token_id not in new(text_target=TARGETS[0])["input_ids"]


def test_target_sides_that_do_not_fit_are_named(pair, tmp_path, capsys):
    VaswaniForConditionalGeneration.from_pretrained(pair.ours).save_pretrained(tmp_path)
    source = load_tokenizer(pair.ours)
    source.save_pretrained(tmp_path)
    path = tmp_path / TARGET_TOKENIZER
    whole = path.read_text(encoding="utf-8")
    settings = (tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")

    def error(kind: type[Exception] = ValueError) -> str:
        with pytest.raises(kind, match="target_") as caught:
            load_checkpoint(str(tmp_path))
        assert str(tmp_path) in str(caught.value)
        return str(caught.value)

    path.write_text(whole[:1000], encoding="utf-8")
    assert "expected JSON" in error()
    content = json.loads(whole)
    content["model"]["vocab"].insert(0, ["first", -9.0])
    content["added_tokens"], content["post_processor"] = [], None
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "expected the id 0, found 1" in error()
    path.unlink()
    assert "target_vocab_size: expected target_tokenizer.json beside it" in error(OSError)
    path.write_text(whole, encoding="utf-8")
    size, most = source.target_vocab_size, len(json.loads(whole)["model"]["vocab"])
    for wrong, message in ((most + 1, f"a number up to {most}"), ("all", "found 'all'")):
        (tmp_path / "tokenizer_config.json").write_text(settings.replace(f": {size},", f": {json.dumps(wrong)},"))
        assert "target_vocab_size: expected a number" in error()
        assert message in error()
    if pair.lacking:
        (tmp_path / "tokenizer_config.json").write_text(settings.replace(f": {size},", f": {most},"))
        assert f"expected at most the model's {size} tokens, found {most}" in error()


def test_models_of_an_ensemble_share_the_target_side(pair, tmp_path):
    VaswaniForConditionalGeneration.from_pretrained(pair.ours).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(pair.ours)
    other = TwoSidedTokenizer(
        tokenizer, Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), tokenizer.target_vocab_size
    )
    other.save_pretrained(tmp_path)
    load_ensemble([str(pair.ours), str(pair.ours)])
    with pytest.raises(ValueError, match="different tokenizers"):
        load_ensemble([str(pair.ours), str(tmp_path)])
