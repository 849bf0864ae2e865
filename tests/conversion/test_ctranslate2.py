"""CTranslate2, an independent implementation in C++, with our weights."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from support.models import rows_of_table_3, strong_model, tiny_model
from training.conversion.ctranslate2 import ACTIVATIONS, QUANTIZATIONS, write


ctranslate2 = pytest.importorskip("ctranslate2")


def load(folder, compute_type: str = "float32"):
    return ctranslate2.Translator(str(folder), compute_type=compute_type, intra_threads=1)


@torch.no_grad()
def largest_difference(model, tokenizer, folder, compute_type: str = "float32") -> float:
    """Largest difference of a log probability, over texts of several lengths in one batch, which is padded."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, len(tokenizer), (length,), generator=generator).tolist() for length in (9, 4, 1, 6)]
    pairs = list(zip(texts, reversed(texts)))
    tokens = [[tokenizer.convert_ids_to_tokens(text) for text in side] for side in zip(*pairs)]
    results = load(folder, compute_type).score_batch(*tokens, max_input_length=0)
    worst = 0.0
    for (source, target), result in zip(pairs, results):
        labels = torch.tensor([*target, 2])
        logits = model(torch.tensor([source]), decoder_input_ids=torch.tensor([[1, *target]])).logits[0]
        expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        worst = max(worst, (torch.tensor(result.log_probs) - expected).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "overrides",
    [
        {},  # d_k, d_v and d_model / num_heads differ
        {"d_k": 6, "d_v": 4},
        {"num_heads": 3, "d_k": 12, "d_v": 5},
        {"attention_bias": True},
        {"position_embedding": "learned", "max_position_embeddings": 12},
        {"tie_word_embeddings": False},
        {"output_bias": True},
        {"layer_norm_eps": 0.1},
        {"encoder_layers": 1, "decoder_layers": 3},
        *({"activation_function": name} for name in ACTIVATIONS),
    ],
    ids=lambda overrides: ",".join(f"{name}={value}" for name, value in overrides.items()) or "tiny",
)
def test_log_probabilities_are_those_of_the_model(overrides, tokenizer, tmp_path):
    model = strong_model(len(tokenizer), **overrides)
    write(model, tokenizer, tmp_path / "model")
    assert largest_difference(model, tokenizer, tmp_path / "model") < 1e-4


def test_constraints_of_the_models_own_search_do_not_disturb_the_comparison(tokenizer, tmp_path):
    model = strong_model(len(tokenizer))
    model.generation_config.no_repeat_ngram_size = 1
    agreement = write(model, tokenizer, tmp_path / "model")
    assert agreement.equal == agreement.sentences > 0
    assert model.generation_config.no_repeat_ngram_size == 1


@pytest.mark.parametrize("row", rows_of_table_3())
def test_every_row_of_table_3_converts(row, tokenizer, tmp_path):
    """In an eighth of its widths, which keeps their proportions."""
    paper = VaswaniConfig.from_table3(row)
    widths = {name: getattr(paper, name) // 8 for name in ("d_model", "d_ff", "d_k", "d_v")}
    config = VaswaniConfig.from_table3(row, vocab_size=len(tokenizer), **widths)
    model = VaswaniForConditionalGeneration(config).eval()
    write(model, tokenizer, tmp_path / "model")
    assert largest_difference(model, tokenizer, tmp_path / "model") < 1e-4


@pytest.mark.parametrize("beams", [1, 4])
def test_translations_are_those_of_transformers_with_its_length_penalty_off(beams, tokenizer, tmp_path):
    model = strong_model(len(tokenizer))
    write(model, tokenizer, tmp_path / "model")
    translator, outputs = load(tmp_path / "model"), set()
    for text in ("three dogs sleep", "a cat sees the two big horses", "The old man gives the child a book."):
        ids = tokenizer(text)["input_ids"]
        [result] = translator.translate_batch(
            [tokenizer.convert_ids_to_tokens(ids)],
            beam_size=beams,
            length_penalty=0,
            max_decoding_length=12,
            min_decoding_length=0,
            patience=3,
        )
        ours = model.generate(torch.tensor([ids]), num_beams=beams, length_penalty=0.0, max_new_tokens=12)[0, 1:]
        ours = [token for token in ours.tolist() if token not in (0, 2)]
        assert tokenizer.convert_tokens_to_ids(result.hypotheses[0]) == ours
        outputs.add(tuple(ours))
    assert len(outputs) == 3


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantising_leaves_the_model_as_it_was(quantization, tokenizer, tmp_path):
    model = strong_model(len(tokenizer), tie_word_embeddings=False, attention_bias=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    write(model, tokenizer, tmp_path / "model", quantization)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("int8", 0.3), ("int8_float32", 0.3), ("int16", 0.03), ("bfloat16", 0.3)]
)
def test_quantised_weights_are_stored_and_compute_nearly_the_same(quantization, tolerance, tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer), d_model=128, d_ff=512, d_k=64, d_v=64)
    write(model, tokenizer, tmp_path / "model", quantization)
    table = 4096 * 128 * (2 if quantization == "bfloat16" else 4)  # of positions, in both stacks the same
    weights = (tmp_path / "model" / "model.bin").stat().st_size - table
    assert weights < (0.35 if "int8" in quantization else 0.55) * 4 * model.num_parameters()
    assert 0 < largest_difference(model, tokenizer, tmp_path / "model", "default") < tolerance


def test_the_folder_has_the_tokenizer_and_describes_the_tokens(tokenizer, tmp_path):
    write(tiny_model(vocab_size=len(tokenizer) + 3), tokenizer, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["decoder_start_token"], config["eos_token"]) == ("<s>", "</s>")
    assert not config["add_source_eos"]  # the tokenizer adds it
    vocabulary = json.loads((tmp_path / "model" / "shared_vocabulary.json").read_text())
    assert vocabulary[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert len(set(vocabulary)) == len(tokenizer) + 3
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("A dog.") == tokenizer("A dog.")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"activation_function": "mish"}, "activation_function: .*'mish'"),
        ({"eos_token_id": [2, 3]}, r"eos_token_id: .*\[2, 3\]"),
        ({"encoder_layers": 0}, "encoder_layers: .* 0"),
        ({"attention_window": 8}, "attention_window: .* 8"),
        ({"eos_token_id": None}, "eos_token_id: .*None"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "decoder_start_token_id: "),
    ],
)
def test_what_does_not_map_is_named(overrides, words, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=words):
        write(tiny_model(vocab_size=len(tokenizer), **overrides), tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_another_type_or_an_8_bit_model_is_refused(tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match=r"quantization: .*int8_float32.*'int4'"):
        write(model, tokenizer, tmp_path / "model", "int4")
    with pytest.raises(ValueError, match="to_int8"):
        write(model.to_int8(), tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_conversion_that_fails_leaves_nothing_and_files_are_not_overwritten(tokenizer, tmp_path, monkeypatch):
    model = tiny_model(vocab_size=len(tokenizer))
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write(model, tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    write(model, tokenizer, tmp_path / "model")  # an empty folder
    (tmp_path / "model" / "model.bin").write_text("mine")
    with pytest.raises(FileExistsError, match="model: expected a new name or an empty folder"):
        write(model, tokenizer, tmp_path / "model")
    assert (tmp_path / "model" / "model.bin").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
