import pytest
import torch

from support.foreign_models import fsmt_model, padded_batch, relative_difference, translations
from training.conversion.fsmt import from_fsmt, read


PAD = 1


@pytest.mark.parametrize(
    ("options", "source_vocab_size", "tied"),
    [({}, None, True), ({"source_vocab_size": 75}, 75, True), ({"tied": False}, 60, False)],
)
def test_logits_and_translations_are_fsmts(options, source_vocab_size, tied, tmp_path, layouts):
    fsmt = fsmt_model(**options)
    fsmt.save_pretrained(tmp_path)
    model, batch = read(tmp_path).model, padded_batch(PAD, source_vocab_size or 60)
    assert (model.config.source_vocab_size, model.config.tie_word_embeddings) == (source_vocab_size, tied)
    assert relative_difference(fsmt, model, batch) < 1e-5
    found = set()
    # A random model says one token again and again, unless that is forbidden.
    for search in ({}, {"no_repeat_ngram_size": 1}):
        for num_beams in (1, 4, 5):
            expected = translations(fsmt, batch, num_beams=num_beams, **search)
            assert translations(model, batch, num_beams=num_beams, **search) == expected
            found |= {token for tokens in expected for token in tokens}
    assert len(found) > 15
    assert layouts == [model] * 6  # by the fast loops


def test_positions_start_behind_padding_and_end_where_the_configuration_says():
    model = from_fsmt(fsmt_model())
    assert model.config.max_position_embeddings == 64
    table = model.model.encoder.embed_positions.weight
    assert table[0, 0].item() == pytest.approx(torch.tensor(2.0).sin().item(), abs=1e-6)
    assert table[63, 32 + 31].item() == pytest.approx(torch.tensor(65.0 / 10000).cos().item(), abs=1e-6)


def test_search_settings_come_along():
    settings = from_fsmt(fsmt_model()).generation_config
    assert (settings.num_beams, settings.max_length, settings.forced_eos_token_id) == (5, 32, 2)
    assert (settings.length_penalty, settings.length_penalty_form) == (1.0, "length")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads, decoder_attention_heads: .* found 4 and 2"),
        ({"scale_embedding": False}, "scale_embedding True only, found False"),
        ({"normalize_before": True}, "normalize_before False only, found True"),
    ],
)
def test_what_does_not_map_is_named(fields, message, tmp_path):
    fsmt_model(**fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        read(tmp_path)
