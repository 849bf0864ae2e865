"""Random models of other toolkits, nothing zero, and batches for them."""

import torch
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)


VOCABULARY = 60
SMALL = {"layers": 2, "d_model": 64, "heads": 4, "d_ff": 96}
BASE = {"layers": 6, "d_model": 512, "heads": 8, "d_ff": 2048}


@torch.no_grad()
def stir(model: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """Add noise to all weights and buffers, but not to positions."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if "embed_positions" not in name:
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model.eval()


def _stacks(layers: int, heads: int, d_ff: int) -> dict:
    return {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", d_ff))
    }


def marian_model(
    source_vocab_size: int | None = None,
    size: dict = SMALL,
    noise: float = 0.1,
    vocab_size: int = VOCABULARY,
    **fields,
) -> MarianMTModel:
    """As OPUS-MT's checkpoints are: padding is the last token, starts the target, and is forbidden."""
    pad = vocab_size - 1
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=source_vocab_size or vocab_size,
        decoder_vocab_size=vocab_size,
        share_encoder_decoder_embeddings=source_vocab_size is None,
        d_model=size["d_model"],
        **{**_stacks(size["layers"], size["heads"], size["d_ff"]), "activation_function": "swish", **fields},
        scale_embedding=True,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        max_position_embeddings=64,
    )
    model = stir(MarianMTModel(config), noise)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[pad] = 0
        model.final_logits_bias[0, pad] = 0
    model.generation_config = GenerationConfig(
        num_beams=6,
        max_length=32,
        bad_words_ids=[[pad]],
        renormalize_logits=True,
        pad_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        decoder_start_token_id=pad,
    )
    return model


def fsmt_model(source_vocab_size: int | None = None, tied: bool = True, **fields) -> FSMTForConditionalGeneration:
    """As the models of WMT19 are: matrices are equal, but not tied by the configuration."""
    torch.manual_seed(0)
    config = FSMTConfig(
        src_vocab_size=source_vocab_size or VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        d_model=64,
        **{**_stacks(2, 4, 96), **fields},
        max_position_embeddings=64,
        max_length=32,
    )
    model = stir(FSMTForConditionalGeneration(config))
    stacks = model.model
    with torch.no_grad():
        if tied:
            stacks.decoder.output_projection.weight.copy_(stacks.decoder.embed_tokens.weight)
            if source_vocab_size is None:
                stacks.encoder.embed_tokens.weight.copy_(stacks.decoder.embed_tokens.weight)
    return model


def padded_batch(pad: int, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Sentences of 9, 4 and 14 tokens."""
    lengths = torch.tensor([9, 4, 14])
    ids = torch.randint(
        4, min(vocabulary, pad if pad > 4 else vocabulary), (3, 14), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.arange(14) < lengths[:, None]
    return {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}


def translations(model: PreTrainedModel, batch: dict, **search) -> list[list[int]]:
    """Tokens behind the start token, without padding."""
    outputs = model.generate(**batch, max_new_tokens=10, max_length=None, **search)
    return [[token for token in row if token != model.config.pad_token_id] for row in outputs[:, 1:].tolist()]


@torch.no_grad()
def relative_difference(
    reference: PreTrainedModel, model: PreTrainedModel, batch: dict, without: tuple = (), vocabulary: int = VOCABULARY
) -> float:
    """Greatest difference of the logits on a random target, relative to the greatest logit."""
    target = torch.randint(4, vocabulary - 1, (3, 11), generator=torch.Generator().manual_seed(2))
    target[:, 0] = reference.config.decoder_start_token_id
    inputs = {**batch, "decoder_input_ids": target, "use_cache": False}
    kept = [token for token in range(vocabulary) if token not in without]
    expected, found = (each(**inputs).logits[..., kept] for each in (reference, model))
    assert expected.std() > 0.1
    return float((found - expected).abs().max() / expected.abs().max())
