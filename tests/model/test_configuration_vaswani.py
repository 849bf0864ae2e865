import json

import pytest
import torch

from hf_vaswani import TABLE_3, VaswaniConfig, VaswaniForConditionalGeneration


# Exact counts without the V * d_model of the embedding (formula of the paper's architecture), by row of Table 3.
PARAMETERS = {
    "base": 44_101_632,
    "A-h1": 44_101_632,
    "A-h4": 44_101_632,
    "A-h16": 44_101_632,
    "A-h32": 44_101_632,
    "B-dk16": 37_023_744,
    "B-dk32": 39_383_040,
    "C-N2": 14_700_544,
    "C-N4": 29_401_088,
    "C-N8": 58_802_176,
    "C-d256": 17_344_512,
    "C-d1024": 125_927_424,
    "C-ff1024": 31_506_432,
    "C-ff4096": 69_292_032,
    "D-drop0.0": 44_101_632,
    "D-drop0.2": 44_101_632,
    "D-ls0.0": 44_101_632,
    "D-ls0.2": 44_101_632,
    "E-learned": 44_101_632 + 2 * 1024 * 512,  # a table of 1024 positions in each stack
    "big": 176_283_648,
}
# What Table 3 prints, in millions, for the rows where it prints something.
MILLIONS = {
    "base": 65,
    "B-dk16": 58,
    "B-dk32": 60,
    "C-N2": 36,
    "C-N4": 50,
    "C-N8": 80,
    "C-ff1024": 53,
    "C-ff4096": 90,
}


def count_parameters(config: VaswaniConfig) -> int:
    with torch.device("meta"):
        return VaswaniForConditionalGeneration(config).num_parameters()


def test_table_3_has_its_20_rows():
    assert len(TABLE_3) == 20
    assert set(TABLE_3) == set(PARAMETERS)


@pytest.mark.parametrize("row", PARAMETERS)
def test_parameters_of_a_row_of_table_3(row):
    config = VaswaniConfig.from_table3(row, vocab_size=1000)
    assert count_parameters(config) == PARAMETERS[row] + 1000 * config.d_model


@pytest.mark.parametrize("row", sorted(set(MILLIONS) - {"base"}))
def test_difference_from_base_is_the_one_table_3_prints(row):
    counts = [count_parameters(VaswaniConfig.from_table3(name, vocab_size=1000)) for name in (row, "base")]
    difference = (counts[0] - counts[1]) / 1e6
    assert abs(difference - (MILLIONS[row] - MILLIONS["base"])) < 1  # both printed numbers are rounded


def test_base_model_is_the_papers():
    config = VaswaniConfig()
    assert (config.encoder_layers, config.decoder_layers, config.d_model, config.d_ff) == (6, 6, 512, 2048)
    assert (config.num_heads, config.d_k, config.d_v) == (8, 64, 64)
    assert (config.dropout, config.label_smoothing) == (0.1, 0.1)
    assert (config.attention_dropout, config.activation_dropout, config.attention_bias) == (0.0, 0.0, False)
    assert (config.position_embedding, config.activation_function) == ("sinusoidal", "relu")


def test_overrides_replace_the_row():
    config = VaswaniConfig.from_table3("big", vocab_size=32000, dropout=0.1)
    assert (config.vocab_size, config.dropout, config.d_model, config.d_k) == (32000, 0.1, 1024, 64)


def test_an_unknown_row_or_override_is_named():
    with pytest.raises(ValueError, match=r"no row 'C-N3'.*C-N2"):
        VaswaniConfig.from_table3("C-N3")
    with pytest.raises(TypeError, match="no field 'droput'"):
        VaswaniConfig.from_table3("base", droput=0.3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_heads": 7}, "num_heads=7 does not divide d_model=512"),
        ({"num_heads": 7, "d_k": 64}, "d_v is not given"),
        ({"num_heads": 0}, "num_heads"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": 1.0}, "dropout"),
        ({"attention_dropout": 2}, "attention_dropout"),
        ({"activation_dropout": -1}, "activation_dropout"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"position_embedding": "rotary"}, "position_embedding"),
        ({"d_model": 9, "num_heads": 3}, "d_model must be even"),
        ({"d_ff": 0}, "d_ff"),
        ({"d_k": 0}, "d_k"),
        ({"d_v": -1}, "d_v"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"encoder_layers": -1}, "encoder_layers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"embedding_init_std": -1.0}, "embedding_init_std"),
        ({"d_model": "512"}, "d_model"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"d_modle": 512}, "did you mean 'd_model'"),
        ({"num_head": 8}, "did you mean 'num_heads'"),
        ({"droput": 0.1}, "did you mean 'dropout'"),
    ],
)
def test_a_bad_field_is_named(fields, named):
    with pytest.raises(Exception, match=named) as caught:
        VaswaniConfig(**fields)
    assert isinstance(caught.value, ValueError | TypeError) or "Validation" in type(caught.value).__name__


def test_keys_of_other_models_are_no_misspellings():
    """They occur in configuration files and are kept."""
    foreign = {"sep_token_id": 3, "cls_token_id": 4, "mask_token_id": 5, "unk_token_id": 6, "layer_norm_epsilon": 1e-5}
    foreign |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "scale_embedding": True}
    assert VaswaniConfig(**foreign).to_dict().items() >= foreign.items()


def test_heads_need_not_divide_the_width_when_theirs_is_given():
    config = VaswaniConfig(num_heads=7, d_k=16, d_v=32)
    assert (config.num_heads, config.d_k, config.d_v) == (7, 16, 32)


def test_config_survives_saving(tmp_path):
    config = VaswaniConfig.from_table3("B-dk16", vocab_size=77, position_embedding="learned")
    config.save_pretrained(tmp_path)
    assert VaswaniConfig.from_pretrained(tmp_path).to_dict() == {
        **config.to_dict(),
        **{k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k == "auto_map"},
    }


def test_common_names_of_transformers_reach_the_papers_fields():
    config = VaswaniConfig(hidden_size=64, num_attention_heads=4, intermediate_size=128, num_hidden_layers=3)
    assert (config.d_model, config.num_heads, config.d_ff, config.encoder_layers) == (64, 4, 128, 3)
