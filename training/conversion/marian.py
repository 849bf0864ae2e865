"""MarianMT of transformers, such as the OPUS-MT models, to a Vaswani model and back.

Both compute the same function: layer normalisation behind each sub-layer, one scaled embedding, a tied projection. Two
things differ. MarianMT has all sines before all cosines, so the features change places. And MarianMT never generates
padding, by `bad_words_ids`; here the bias of the output projection says so.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.generation_vaswani import OWN_FIELDS

from ..files import folder_written_whole
from ..inference.loading import load_model
from .agreement import Agreement, Conversion, compare, example_batch, shut_out
from .fields import check_equal, check_fields, check_unrestricted, search_fields
from .positions import position_table
from .tokenizer_files import tokenizer_files
from .weights import ATTENTION_BIASES, halved, interleaved, load_exactly, our_name, reordered, their_name


CONFIG = "config.json"
SHUT = -100.0  # logit bias of a token that is never generated; an infinite one would make the smoothed loss infinite
TRAINED_EPS = 1e-6  # of Marian's layer normalisation; transformers has 1e-5
TRAINED_POSITIONS = 1024  # rows of the table with Marian's own positions
LONGEST = 512  # tokens of a translation, as in OPUS-MT's checkpoints

# Fields that transformers reads, or that earlier versions of it read, and their only possible values.
FIXED = {
    **{"scale_embedding": True, "tie_word_embeddings": True, "encoder_layerdrop": 0, "decoder_layerdrop": 0},
    **{"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
}
SAME_IN_BOTH_STACKS = ("attention_heads", "ffn_dim")
SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "activation_function"),
    *("dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)
# Search settings that leave the scores of tokens as they are, so that renormalisation changes nothing.
PLAIN_SEARCH = {
    *("num_beams", "max_length", "max_new_tokens", "length_penalty", "early_stopping", "use_cache"),
    *("num_return_sequences", "output_scores", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    *("bad_words_ids", "renormalize_logits"),
}
# The search in which a written model is compared: the nearest to the paper's that MarianMT has.
COMPARED_SEARCH = {"num_beams": 4, "length_penalty": 1.0}


def read(folder: Path, as_trained: bool = False) -> Conversion:
    """Convert a MarianMT checkpoint.

    Args:
        folder (`Path`): The checkpoint.
        as_trained (`bool`): Compute as Marian itself does, see `restore_training`, not as transformers does.

    Raises:
        ValueError: The model has no equal here, or a file is malformed. The message names file and field.
        OSError: A file is missing or damaged.
    """
    marian = load_model(folder, dtype=torch.float32).eval()
    return Conversion(*convert(marian, folder / CONFIG, as_trained), tokenizer_files(folder, "MarianTokenizer"))


def convert(
    marian: MarianMTModel, place: Path, as_trained: bool = False
) -> tuple[VaswaniForConditionalGeneration, MarianMTModel]:
    """Convert a model, and return it with the one that it must agree with.

    Args:
        marian (`MarianMTModel`): Model to convert, in float32.
        place (`Path`): Origin of its configuration, for messages.
        as_trained (`bool`): See `read`.
    """
    if as_trained:
        restore_training(marian)
    return from_marian(marian, place), marian


@torch.no_grad()
def restore_training(marian: MarianMTModel) -> None:
    """Give a MarianMT model, in place, the positions and the ε of layer normalisation with which Marian trained it.

    Marian's frequencies fall from 1 to 1/10000 exactly; those of the paper and of transformers stop one step earlier.
    """
    half = marian.config.d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float64) * (-torch.tensor(10000.0).log() / (half - 1)))
    angles = torch.arange(TRAINED_POSITIONS)[:, None] * frequencies
    table = torch.cat((angles.sin(), angles.cos()), dim=-1).float()
    for stack in (marian.model.encoder, marian.model.decoder):
        stack.embed_positions.weight = nn.Parameter(table.clone(), requires_grad=False)
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = TRAINED_EPS


@torch.no_grad()
def from_marian(marian: MarianMTModel, place: str | Path = "MarianMTModel") -> VaswaniForConditionalGeneration:
    """Vaswani model that computes what a MarianMT model does.

    Both have the same logits `(batch, target length, vocab_size)`, up to rounding, for the same `input_ids` and
    `attention_mask` `(batch, source length)` and `decoder_input_ids` `(batch, target length)`, and `generate()` gives
    the same translations. Where MarianMT forbids padding, the logit of padding is about -100 here.

    Positions that are not transformers' own are kept as a learned table, and biases that are all zero are left out.

    Args:
        marian (`MarianMTModel`): Model to convert. It does not change.
        place (`str` or `Path`): Origin of its configuration, for messages.

    Returns:
        A model with its own copy of the weights, on the CPU, in float32 and evaluation mode. Its `generation_config`
        has the search settings of `marian`.

    Raises:
        ValueError: The configuration has no equal here, such as `scale_embedding=False`, or another number of heads in
            each stack. The message names the field.

    Example:
        >>> import torch
        >>> from transformers import MarianConfig, MarianMTModel
        >>> from hf_vaswani_training.conversion.marian import from_marian
        >>> sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 30, "pad_token_id": 29}
        >>> heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 29}
        >>> marian = MarianMTModel(MarianConfig(**sizes, **heads, scale_embedding=True)).eval()
        >>> model = from_marian(marian)
        >>> inputs = {"input_ids": torch.tensor([[5, 6, 0]]), "decoder_input_ids": torch.tensor([[29, 7]])}
        >>> list(model(**inputs).logits.shape)
        [1, 2, 30]
        >>> torch.allclose(model(**inputs).logits, marian(**inputs).logits, atol=1e-5)
        True
    """
    check_fields(place, marian.config.to_dict(), FIXED)
    check_equal(place, marian.config.to_dict(), SAME_IN_BOTH_STACKS)
    config, stacks = marian.config, {"encoder": marian.model.encoder, "decoder": marian.model.decoder}
    search, is_padding_shut = _search(marian.generation_config)
    weights = _weights(marian)
    if has_table := not all(_has_sinusoids(stack.embed_positions) for stack in stacks.values()):
        weights |= {f"model.{name}.embed_positions.weight": s.embed_positions.weight for name, s in stacks.items()}
    else:
        weights = reordered(weights, interleaved(config.d_model))
    output_bias = marian.final_logits_bias[0].clone()
    if is_padding_shut:
        output_bias[config.pad_token_id] = SHUT
    weights["lm_head.bias"] = output_bias

    optional = {"attention_bias": ATTENTION_BIASES, "output_bias": ("lm_head.bias",)}
    for field, ends in optional.items():
        biases = [name for name in weights if name.endswith(ends)]
        optional[field] = any(bool(weights[name].any()) for name in biases)
        weights = {name: weight for name, weight in weights.items() if optional[field] or name not in biases}
    is_shared = config.share_encoder_decoder_embeddings
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(
            vocab_size=config.vocab_size if is_shared else config.decoder_vocab_size,
            source_vocab_size=None if is_shared else config.vocab_size,
            d_ff=config.encoder_ffn_dim,
            num_heads=config.encoder_attention_heads,
            position_embedding="learned" if has_table else "sinusoidal",
            max_position_embeddings=len(stacks["decoder"].embed_positions.weight),
            layer_norm_eps=stacks["decoder"].layers[0].final_layer_norm.eps,
            **optional,
            **{name: getattr(config, name) for name in SAME_FIELDS},
        )
    )
    load_exactly(model, weights)
    model.generation_config = search
    return model.eval()


def _weights(marian: MarianMTModel) -> dict[str, torch.Tensor]:
    """Layers and embeddings under our names."""
    encoder, decoder = marian.model.encoder, marian.model.decoder
    weights = {
        f"model.{stack}.{our_name(f'layers.{name}')}": weight
        for stack, module in (("encoder", encoder), ("decoder", decoder))
        for name, weight in module.layers.state_dict().items()
    }
    weights["model.shared.weight"] = decoder.embed_tokens.weight
    if not marian.config.share_encoder_decoder_embeddings:
        weights["model.encoder.embed_tokens.weight"] = encoder.embed_tokens.weight
    return weights


def _has_sinusoids(positions: nn.Module) -> bool:
    return torch.allclose(positions.weight, positions.create_weight().to(positions.weight), rtol=0, atol=1e-5)


def _search(settings: GenerationConfig) -> tuple[GenerationConfig, bool]:
    """The same search for a Vaswani model, and whether its output bias has to shut padding out.

    Where padding is forbidden and the other tokens share its probability, a very low bias does the same in fewer
    steps. Other forbidden tokens stay in the settings, and so does renormalisation where others change scores.
    """
    fields = search_fields(settings)
    forbidden = fields.get("bad_words_ids") or []
    is_shut = [settings.pad_token_id] in forbidden and bool(settings.renormalize_logits)
    if is_shut:
        rest = [tokens for tokens in forbidden if tokens != [settings.pad_token_id]]
        fields |= {"bad_words_ids": rest or None, "renormalize_logits": bool(rest or fields.keys() - PLAIN_SEARCH)}
    return GenerationConfig(**{"length_penalty": 1.0, "length_penalty_form": "length", **fields}), is_shut


def write(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Agreement:
    """Write a model as a MarianMT checkpoint atomically, with its tokenizer, and compare what was written.

    MarianMT has neither the paper's length penalty nor its limit by the length of the source. Its search gets the same
    beams and exponent, on the length itself, and at most 512 tokens.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to convert, in float32.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        folder (`str` or `Path`): Folder to write: a new or an empty one.

    Raises:
        ValueError: MarianMT cannot represent the model. The message names the field.
        FileExistsError: There is something in `folder`.
        OSError: Writing failed.
    """
    marian = to_marian(model)
    with folder_written_whole(Path(folder)) as partial:
        save(marian, partial)
        tokenizer.save_pretrained(partial)
        written = MarianMTModel.from_pretrained(partial).eval()
        agreement = compare(written, model, example_batch(model, tokenizer), shut_out(written), **COMPARED_SEARCH)
        agreement.check(folder)
    return agreement


def save(marian: MarianMTModel, folder: Path) -> None:
    """Save a MarianMT model, learned positions included, which its own `save_pretrained` leaves out."""
    marian.save_pretrained(folder)
    stacks = {"encoder": marian.model.encoder, "decoder": marian.model.decoder}
    tables = {
        f"model.{name}.embed_positions.weight": stack.embed_positions.weight.detach().clone()
        for name, stack in stacks.items()
        if not _has_sinusoids(stack.embed_positions)
    }
    if tables:
        file = folder / "model.safetensors"
        save_file({**load_file(file), **tables}, file, metadata={"format": "pt"})


@torch.no_grad()
def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """MarianMT model that computes what a Vaswani model does, apart from the ε of layer normalisation, 1e-5 there.

    Heads narrower than `d_model / num_heads` are padded with zeros, and their queries scaled accordingly.

    Raises:
        ValueError: MarianMT cannot represent the model. The message names the field.
    """
    config, width = model.config, _head_width(model.config)
    is_shut = config.output_bias and model.lm_head.bias[config.pad_token_id] <= SHUT
    marian = MarianMTModel(_marian_config(config))
    weights = {name: weight for name, weight in model.named_parameters() if "embed_positions" not in name}
    output_bias = weights.pop("lm_head.bias", torch.zeros(config.vocab_size)).clone()
    if is_shut:
        output_bias[config.pad_token_id] = 0
    if config.position_embedding == "sinusoidal":
        weights = reordered(weights, halved(config.d_model))
    shared = weights.pop("model.shared.weight")
    named = {their_name(name): _wide_heads(name, weight, config, width) for name, weight in weights.items()}
    named["model.shared.weight" if config.source_vocab_size is None else "model.decoder.embed_tokens.weight"] = shared
    for stack in ("encoder", "decoder"):
        positions = marian.get_submodule(f"model.{stack}.embed_positions").weight
        if config.position_embedding == "learned":
            positions = position_table(model.get_submodule(f"model.{stack}"), len(positions))
        named[f"model.{stack}.embed_positions.weight"] = positions
    if not config.attention_bias:
        proj = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "out_proj.bias")
        named |= {name: torch.zeros_like(w) for name, w in marian.named_parameters() if name.endswith(proj)}
    load_exactly(marian, {**named, "final_logits_bias": output_bias[None]})
    marian.generation_config = _marian_search(model.generation_config, config, bool(is_shut))
    return marian.eval()


def _head_width(config: VaswaniConfig) -> int:
    """Width of MarianMT's heads, `d_model / num_heads`.

    Raises:
        ValueError: MarianMT cannot represent the model.
    """
    check_unrestricted("MarianMT", config)
    if not config.tie_word_embeddings:
        raise ValueError("MarianMT: tie_word_embeddings: expected True, found False.")
    if config.d_model % config.num_heads:
        raise ValueError(
            f"MarianMT: num_heads: expected a divisor of d_model, {config.d_model}, found {config.num_heads}."
        )
    width = config.d_model // config.num_heads
    for name in ("d_k", "d_v"):
        if getattr(config, name) > width:
            raise ValueError(f"MarianMT: {name}: expected at most {width}, found {getattr(config, name)}.")
    return width


def _wide_heads(name: str, weight: torch.Tensor, config: VaswaniConfig, width: int) -> torch.Tensor:
    """Pad the heads of an attention's weight or bias with zeros to `width` features.

    Scores are divided by `√width` in MarianMT, and by `√d_k` here, so queries are multiplied by `√(width / d_k)`.
    """
    if name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
        d_k = config.d_k
        weight = F.pad(weight.unflatten(0, (-1, d_k)).movedim(1, -1), (0, width - d_k)).movedim(-1, 1).flatten(0, 1)
        return weight * (width / d_k) ** 0.5 if "q_proj" in name and d_k != width else weight
    d_v = config.d_v
    if name.endswith(("v_proj.weight", "v_proj.bias")):
        return F.pad(weight.unflatten(0, (-1, d_v)).movedim(1, -1), (0, width - d_v)).movedim(-1, 1).flatten(0, 1)
    if name.endswith("o_proj.weight"):
        return F.pad(weight.unflatten(1, (-1, d_v)), (0, width - d_v)).flatten(1)
    return weight


def _marian_config(config: VaswaniConfig) -> MarianConfig:
    return MarianConfig(
        vocab_size=config.source_vocab_size or config.vocab_size,
        decoder_vocab_size=config.vocab_size,
        share_encoder_decoder_embeddings=config.source_vocab_size is None,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        scale_embedding=True,
        max_position_embeddings=config.max_position_embeddings,
        forced_eos_token_id=None,
        **{name: getattr(config, name) for name in SAME_FIELDS},
    )


def _marian_search(settings: GenerationConfig, config: VaswaniConfig, is_shut: bool) -> GenerationConfig:
    """The nearest search that MarianMT has."""
    fields = search_fields(settings)
    for name in OWN_FIELDS:
        fields.pop(name, None)
    if is_shut:
        forbidden = [*(fields.get("bad_words_ids") or []), [config.pad_token_id]]
        fields |= {"bad_words_ids": forbidden, "renormalize_logits": True}
    if not fields.keys() & {"max_length", "max_new_tokens"}:
        fields["max_length"] = min(LONGEST, config.max_position_embeddings)
    return GenerationConfig(**fields)
