import dataclasses
import doctest
import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from support.foreign_models import (
    BASE,
    SMALL,
    VOCABULARY,
    marian_model,
    padded_batch,
    relative_difference,
    stir,
    translations,
)
from support.models import SPECIAL, rows_of_table_3
from training.conversion.marian import SHUT, from_marian, read, restore_training, save, to_marian


PAD = VOCABULARY - 1
KINDS = {
    "relu": {"activation_function": "relu"},
    "swish": {"activation_function": "swish"},
    "two vocabularies": {"source_vocab_size": 75},
    "six layers of 512": {"size": BASE, "noise": 0.02},
}


def batch_for(marian: MarianMTModel) -> dict[str, torch.Tensor]:
    return padded_batch(PAD, marian.config.vocab_size)


@pytest.mark.parametrize("kind", [*list(KINDS)[:3], pytest.param("six layers of 512", marks=pytest.mark.slow)])
def test_logits_and_translations_are_marians(kind, layouts):
    marian = marian_model(**KINDS[kind])
    model, batch = from_marian(marian), batch_for(marian)
    assert relative_difference(marian, model, batch, without=(PAD,)) < 1e-5
    found = set()
    # A random model says one token again and again, unless that is forbidden.
    for search in ({}, {"no_repeat_ngram_size": 1, "renormalize_logits": True}):
        for num_beams in (1, 4, 6):
            expected = translations(marian, batch, num_beams=num_beams, **search)
            assert translations(model, batch, num_beams=num_beams, **search) == expected
            found |= {token for tokens in expected for token in tokens}
    assert len(found) > 10
    assert layouts == [model] * 6  # by the fast loops


def test_the_example_of_from_marian_runs():
    """As written, but for the name of the package, which is `training` in a clone."""
    text = from_marian.__doc__.replace("hf_vaswani_training", "training")
    example = doctest.DocTestParser().get_doctest(text, {}, "from_marian", None, 0)
    assert len(example.examples) == 10
    assert doctest.DocTestRunner().run(example) == (0, 10)


def test_marian_without_its_rule_against_padding_would_differ():
    """The bias of padding replaces a rule of the search: MarianMT's own logit of padding is 0."""
    marian = marian_model()
    model = from_marian(marian)
    assert model.lm_head.bias[PAD] == SHUT
    assert model.generation_config.bad_words_ids is None
    marian.generation_config.bad_words_ids = [[PAD], [7]]
    marian.generation_config.renormalize_logits = True
    assert from_marian(marian).generation_config.bad_words_ids == [[7]]
    marian.generation_config.bad_words_ids = None
    kept = from_marian(marian)
    assert kept.lm_head.bias[PAD] == 0
    assert relative_difference(marian, kept, batch_for(marian)) < 1e-5


def test_search_settings_come_along():
    settings = from_marian(marian_model()).generation_config
    assert (settings.num_beams, settings.length_penalty, settings.max_length) == (6, 1.0, 32)
    assert (settings.length_penalty_form, settings.forced_eos_token_id) == ("length", 0)


@pytest.mark.parametrize("settings", [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.5}, {"min_length": 6}])
def test_settings_that_change_scores_keep_the_renormalisation(settings):
    marian = marian_model()
    for name, value in settings.items():
        setattr(marian.generation_config, name, value)
    model, batch = from_marian(marian), batch_for(marian)
    for num_beams in (1, 4, 6):
        assert translations(model, batch, num_beams=num_beams) == translations(marian, batch, num_beams=num_beams)
    assert not from_marian(marian_model()).generation_config.renormalize_logits  # without them, the fast loops search


def test_a_checkpoint_in_the_form_of_opus_mt(tmp_path):
    """A pickle of tensors with positions and every tied matrix, fields of earlier versions, search in two files."""
    marian = marian_model()
    torch.save(marian.state_dict(), tmp_path / "pytorch_model.bin")
    earlier = {"add_bias_logits": False, "add_final_layer_norm": False, "normalize_before": False, "_num_labels": 3}
    earlier |= {"normalize_embedding": False, "static_position_embeddings": True, "classif_dropout": 0.0}
    search = {"bad_words_ids": [[PAD]], "num_beams": 6, "max_length": 32, "bos_token_id": 0}
    fields = {**marian.config.to_dict(), "scale_embedding": True, **earlier, **search}
    for name in ("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings", "dtype"):
        fields.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    search |= {"renormalize_logits": True, "forced_eos_token_id": 0, "pad_token_id": PAD, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps({**search, "decoder_start_token_id": PAD}))
    model = read(tmp_path).model
    assert (model.config.position_embedding, model.lm_head.bias[PAD].item()) == ("sinusoidal", SHUT)
    batch = batch_for(marian)
    assert relative_difference(marian, model, batch, without=(PAD,)) < 1e-5
    assert translations(model, batch) == translations(marian, batch)


def test_a_table_of_positions_is_kept(tmp_path):
    marian = marian_model()
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight.data.normal_()
    save(marian, tmp_path)
    model = read(tmp_path).model
    assert (model.config.position_embedding, model.config.max_position_embeddings) == ("learned", 64)
    assert relative_difference(marian, model, batch_for(marian), without=(PAD,)) < 1e-5


def test_positions_as_marian_trains_them():
    """Marian's frequencies are 10000^(-i / (d/2 - 1)), sines first; its ε is 1e-6."""
    marian = marian_model()
    restore_training(marian)
    model = from_marian(marian)
    table = model.model.decoder.embed_positions.weight
    for position, feature in ((0, 0), (1, 31), (13, 5), (1000, 20)):
        angle = torch.tensor(position * 10000 ** (-feature / 31), dtype=torch.float64)
        assert table[position, feature].item() == pytest.approx(angle.sin().item(), abs=1e-4)
        assert table[position, 32 + feature].item() == pytest.approx(angle.cos().item(), abs=1e-4)
    assert (model.config.layer_norm_eps, model.config.max_position_embeddings) == (1e-6, 1024)
    assert relative_difference(marian, model, batch_for(marian), without=(PAD,)) < 1e-5
    assert relative_difference(marian_model(), model, batch_for(marian), without=(PAD,)) > 1e-3


@pytest.mark.parametrize("kind", list(KINDS)[:3])
def test_from_marian_and_back_no_bit_changes(kind, tmp_path):
    marian = marian_model(**KINDS[kind])
    from_marian(marian).save_pretrained(tmp_path)
    back = to_marian(AutoModelForSeq2SeqLM.from_pretrained(tmp_path))
    weights = back.state_dict()
    assert marian.state_dict().keys() == weights.keys()
    for name, weight in marian.state_dict().items():
        assert torch.equal(weights[name], weight), name
    for name in ("bad_words_ids", "renormalize_logits", "num_beams", "max_length", "forced_eos_token_id"):
        assert getattr(back.generation_config, name) == getattr(marian.generation_config, name), name
    assert not hasattr(back.generation_config, "length_penalty_form")


def row_of_table_3(row: str) -> VaswaniForConditionalGeneration:
    """A random model of the row, eight times as narrow."""
    narrow = {name: getattr(VaswaniConfig.from_table3(row), name) // 8 for name in ("d_model", "d_ff", "d_k", "d_v")}
    torch.manual_seed(0)
    config = VaswaniConfig.from_table3(row, vocab_size=VOCABULARY, max_position_embeddings=64, **narrow)
    model = stir(VaswaniForConditionalGeneration(config))
    model.generation_config = GenerationConfig(**SPECIAL)
    return model


@pytest.mark.parametrize("row", rows_of_table_3())
def test_every_row_of_table_3_becomes_a_marian_model(row, tmp_path):
    model = row_of_table_3(row)
    save(to_marian(model), tmp_path)
    marian = MarianMTModel.from_pretrained(tmp_path).eval()
    batch = padded_batch(SPECIAL["pad_token_id"])
    assert relative_difference(model, marian, batch) < 2e-5  # ε is 1e-5 there
    for module in marian.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = model.config.layer_norm_eps
    assert relative_difference(model, marian, batch) < 5e-6
    if row not in ("B-dk16", "B-dk32"):  # whose heads are padded
        back = from_marian(marian)
        assert back.state_dict().keys() == model.state_dict().keys()
        for name, weight in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], weight), name


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True, "output_bias": True, "activation_function": "swish"},
        {"source_vocab_size": 75, "output_bias": True},
    ],
)
def test_from_ours_and_back_no_bit_changes(fields):
    config = VaswaniConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        d_ff=96,
        num_heads=4,
        encoder_layers=2,
        decoder_layers=2,
        layer_norm_eps=1e-5,
        **fields,
    )
    model = stir(VaswaniForConditionalGeneration(config))
    model.generation_config = GenerationConfig(**SPECIAL)
    marian = to_marian(model)
    batch = padded_batch(SPECIAL["pad_token_id"], config.source_vocab_size or VOCABULARY)
    assert relative_difference(model, marian, batch) < 1e-5
    for num_beams in (1, 4):
        expected = translations(model, batch, num_beams=num_beams)
        assert translations(marian, batch, num_beams=num_beams) == expected
    back = from_marian(marian)
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    kept = {field.name for field in dataclasses.fields(config)} - {"label_smoothing", "max_position_embeddings"}
    for name in VaswaniConfig.__annotations__.keys() & kept:
        assert getattr(back.config, name) == getattr(config, name), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected True, found False"),
        ({"num_heads": 3, "d_k": 4, "d_v": 4}, "num_heads: expected a divisor of d_model, 64, found 3"),
        ({"d_k": 32}, "d_k: expected at most 16, found 32"),
        ({"d_v": 17}, "d_v: expected at most 16, found 17"),
        ({"attention_window": 8}, "attention_window: expected none, .*found 8"),
    ],
)
def test_what_marian_cannot_represent_is_named(fields, message):
    config = VaswaniConfig(
        vocab_size=9, d_ff=8, encoder_layers=1, decoder_layers=1, **{"d_model": 64, "num_heads": 4, **fields}
    )
    with pytest.raises(ValueError, match=f"MarianMT: {message}"):
        to_marian(VaswaniForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads, decoder_attention_heads: .* found 4 and 2"),
        ({"encoder_ffn_dim": 32}, "encoder_ffn_dim, decoder_ffn_dim: .* found 32 and 96"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings True only, found False"),
        ({"normalize_before": True}, "normalize_before False only, found True"),
        ({"decoder_layerdrop": 0.1}, "decoder_layerdrop 0 only, found 0.1"),
    ],
)
def test_what_does_not_map_is_named(fields, message, tmp_path):
    marian_model(**fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        read(tmp_path)


def test_stacks_of_unequal_depth_map():
    marian = marian_model(decoder_layers=1)
    model = from_marian(marian)
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 1)
    assert relative_difference(marian, model, batch_for(marian), without=(PAD,)) < 1e-5


def test_embeddings_that_are_not_scaled_are_named(tmp_path):
    marian = marian_model()
    marian.config.scale_embedding = False
    marian.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scale_embedding True only, found False"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"MarianMTModel: scale_embedding: .* True only, found False"):
        from_marian(marian)


def test_a_converted_model_can_be_trained(tmp_path):
    """The bias that shuts padding out keeps the smoothed loss finite, and every weight learns."""
    marian = marian_model(size=SMALL)
    model = from_marian(marian).train()
    batch = batch_for(marian)
    loss = model(**batch, labels=torch.randint(1, PAD, (3, 8)), skip_logits=True).loss
    loss.backward()
    assert loss < 20
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
