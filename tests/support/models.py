"""Small models, and batches for them."""

import pytest
import torch
from transformers import GenerationConfig

from hf_vaswani import TABLE_3, VaswaniConfig, VaswaniForConditionalGeneration
from training.paper import GENERATION


PAD, BOS, EOS = 0, 1, 2
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
GENERATES = {**GENERATION, "max_extra_tokens": 5}


def tiny_config(**overrides) -> VaswaniConfig:
    """Small, without dropout, and with d_k and d_v that differ from each other and from d_model / num_heads."""
    fields = {
        "vocab_size": 40,
        "d_model": 16,
        "d_ff": 24,
        "num_heads": 2,
        "d_k": 4,
        "d_v": 6,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
    }
    return VaswaniConfig(**{**fields, **overrides})


def tiny_model(**overrides) -> VaswaniForConditionalGeneration:
    torch.manual_seed(0)
    return VaswaniForConditionalGeneration(tiny_config(**overrides)).eval()


def strong_model(vocab_size: int = 40, **overrides) -> VaswaniForConditionalGeneration:
    """A model whose weights make outputs differ from each other; no weight is zero or one."""
    model = tiny_model(vocab_size=vocab_size, **overrides)
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "position" not in name:
            torch.nn.init.normal_(parameter, std=0.3 if "shared" in name else 0.8)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.2)
    return model


def noisy_model(seed: int = 0, vocab_size: int = 40, **fields):
    model = tiny_model(vocab_size=vocab_size, **fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.4 * torch.randn(weight.shape, generator=generator))
    model.generation_config = GenerationConfig(**SPECIAL)
    return model


def noisy_translator(tokenizer, **generation) -> VaswaniForConditionalGeneration:
    """A random model whose translations are noise, different for each sentence; few end early."""
    model = tiny_model(vocab_size=len(tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)))
    model.generation_config = GenerationConfig(
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        **{**GENERATION, "num_beams": 2, "max_extra_tokens": 10, **generation},
    )
    return model


def new_model(tokenizer, seed: int = 0, **overrides) -> VaswaniForConditionalGeneration:
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer), **overrides)).eval()
    for name, value in GENERATES.items():
        setattr(model.generation_config, name, value)
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 40, shape)


def batch_of(lengths: list[int], vocab_size: int = 40) -> dict[str, torch.Tensor]:
    source = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(source, lengths):
        row[:length] = torch.randint(3, vocab_size, (length,))
    return {"input_ids": source, "attention_mask": (source != PAD).long()}


def sources_of(lengths: list[int], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Random sentences of these lengths, padded on one side, and their mask."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(ids, lengths):
        (row[:length] if side == "right" else row[len(row) - length :]).copy_(random_tokens(length))
    return ids, (ids != PAD).long()


def rows_of_table_3() -> list:
    """Parameters of a test of all rows, of which base and one of most groups are not slow."""
    fast = ("base", "A-h32", "B-dk16", "C-N2", "E-learned")
    return [row if row in fast else pytest.param(row, marks=pytest.mark.slow) for row in TABLE_3]
