"""Attention of a model over a sentence and its translation, as numbers, picture and page."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..files import save_whole
from .translation import translate


TITLES = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}
# The weights of all layers and heads, as numbers of 4 bytes in memory and of up to 7 in a page ("0.1234,").
MOST_NUMBERS, BYTES_IN_MEMORY, BYTES_IN_A_PAGE = 15_000_000, 4, 7
MOST_PIXELS, MOST_PIXELS_OF_A_SIDE, DPI = 100_000_000, 65_000, 150  # of a picture; matplotlib draws 65,535


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model computes attention in the form that returns its weights, for as long as this lasts."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_number(name: str, number: int, highest: int) -> int:
    """`number`, of a layer or a head, which are counted from 1.

    Raises:
        ValueError: There is none of that number.
    """
    if not 1 <= number <= highest:
        raise ValueError(f"{name} must be from 1 to {highest}, got {number}.")
    return number


@dataclass(frozen=True)
class Attention:
    """The attention of a model over a sentence and its translation.

    Attributes:
        source, target (`str`): The texts.
        source_tokens (`list[str]`): What the encoder reads, end token included, as `token_labels` writes it.
        read_tokens (`list[str]`): What the decoder reads: the start token, and the target without its end token.
        written_tokens (`list[str]`): What it is to write after each: the target with its end token.
        weights (`dict[str, torch.Tensor]`): By kind, `(layers, heads, tokens that attend, tokens attended to)`,
            float32: "encoder" from source to source, "decoder" from read to read, "cross" from read to source.
    """

    source: str
    target: str
    source_tokens: list[str]
    read_tokens: list[str]
    written_tokens: list[str]
    weights: dict[str, torch.Tensor]

    def tokens(self, kind: str) -> tuple[list[str], list[str]]:
        """Those that attend, and those attended to."""
        rows = self.source_tokens if kind == "encoder" else self.read_tokens
        return rows, self.read_tokens if kind == "decoder" else self.source_tokens

    def select(self, kind: str, layer: int | None, head: int | str) -> tuple[int, torch.Tensor]:
        """The number of a layer, and the attention of one, all or the mean of its heads.

        Args:
            kind (`str`): "encoder", "decoder" or "cross".
            layer (`int`, *optional*): Counted from 1; the last when not given.
            head (`int` or `str`): Counted from 1; "mean", or "all".

        Returns:
            `tuple[int, torch.Tensor]`: Of shape `(heads, tokens that attend, tokens attended to)`, where `heads` is 1
            unless all are wanted.

        Raises:
            ValueError: There is no such kind, layer or head.
        """
        if kind not in self.weights:
            raise ValueError(f"kind must be one of {', '.join(self.weights)}, got {kind!r}.")
        weights = self.weights[kind]
        layer = check_number("layer", len(weights) if layer is None else layer, len(weights))
        heads = weights[layer - 1]
        if head == "all":
            return layer, heads
        if head == "mean":
            return layer, heads.mean(0, keepdim=True)
        if not isinstance(head, int):
            raise ValueError(f'head must be a number, "mean" or "all", got {head!r}.')
        return layer, heads[check_number("head", head, len(heads)) - 1, None]


def token_labels(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The tokens of a text, in a form to read.

    A token that goes on with the word before it begins with a middle dot; white space is "␣"; a token that is a part
    of a character, some of its bytes, is that character with the number of the part.

    >>> token_labels(tokenizer, "ein Schneemobil  日")
    ['ein', 'Schnee', '·mobil', '␣', '␣', '日₁', '·日₂', '·日₃', '</s>']
    """
    encoding = tokenizer(text, return_offsets_mapping=True)
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]  # behind it, no leading space is taken away
    before = len(tokenizer.decode(anchor))
    labels, part, reached = [], 0, 0
    for token, (start, end), sequence in zip(
        encoding["input_ids"], encoding["offset_mapping"], encoding.sequence_ids()
    ):
        if sequence is None:
            labels.append(tokenizer.convert_ids_to_tokens(token))
            continue
        piece = tokenizer.decode([*anchor, token])[before:]
        goes_on = "" if piece[:1].isspace() or labels[-1:] == ["␣"] else "·"
        if "\ufffd" in piece and "\ufffd" not in text[start:end]:
            part = part + 1 if start < reached else 1
            reached = end
            piece = text[start:end].strip() + "".join(chr(ord("₀") + int(digit)) for digit in str(part))
        labels.append(goes_on + piece.strip() if piece.strip() else "␣")
    return labels


def check_size(config: PreTrainedConfig, source: int, target: int) -> None:
    """Whether the attention over a sentence and its translation can be held and shown, before it is computed.

    Args:
        config (`PreTrainedConfig`): Of the model.
        source, target (`int`): Tokens of the two.

    Raises:
        ValueError: It has more than `MOST_NUMBERS` numbers; the message says how large it would be.
    """
    encoder, decoder = config.encoder_layers * source**2, config.decoder_layers * target * (target + source)
    numbers = (encoder + decoder) * config.num_heads
    if numbers <= MOST_NUMBERS:
        return
    memory, page, most = (
        f"{count * size / 1e6:,.0f} MB"
        for count, size in (
            (numbers, BYTES_IN_MEMORY),
            (numbers, BYTES_IN_A_PAGE),
            (MOST_NUMBERS, BYTES_IN_A_PAGE),
        )
    )
    raise ValueError(
        f"The attention between {source:,} tokens of source and {target:,} of target, in {config.num_heads} heads of "
        f"{config.encoder_layers} + {config.decoder_layers} layers, takes {memory} of memory and a page of up to "
        f"{page}; a page may have {most}. Look at a shorter text."
    )


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str | None = None
) -> Attention:
    """What every token of a sentence and its translation attends to.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint, a fast one.
        source (`str`): Raw text.
        target (`str`, *optional*): Its translation; the model's own when not given.

    Raises:
        ValueError: `source` is empty, the texts are too long (see `check_size`), the tokenizer does not tell which
            characters a token stands for, or the attention is not finite.
    """
    if not source.strip():
        raise ValueError("The source is empty.")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not tell which characters a token stands for.")
    inputs = tokenizer(source, return_tensors="pt").to(model.device)
    check_size(model.config, inputs["input_ids"].shape[1], 1)  # before a long text is translated
    if target is None:
        [target] = translate(model, tokenizer, [source])
    labels = tokenizer(target, return_tensors="pt")["input_ids"].to(model.device)
    check_size(model.config, inputs["input_ids"].shape[1], labels.shape[1])
    read = model.prepare_decoder_input_ids_from_labels(labels)
    with eager_attention(model):
        outputs = model(**inputs, decoder_input_ids=read, use_cache=False, output_attentions=True)
    by_kind = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    weights = {kind: torch.cat(layers).float().cpu() for kind, layers in zip(TITLES, by_kind)}
    if broken := [kind for kind, numbers in weights.items() if not numbers.isfinite().all()]:
        raise ValueError(f"The {TITLES[broken[0]]} has numbers that are not finite: the weights are broken.")
    written = token_labels(tokenizer, target)
    return Attention(
        source=source,
        target=target,
        source_tokens=token_labels(tokenizer, source),
        read_tokens=[tokenizer.convert_ids_to_tokens(read[0, 0].item()), *written[:-1]],
        written_tokens=written,
        weights=weights,
    )


def draw_attention(
    attention: Attention, output: str, kind: str = "cross", layer: int | None = None, head: int | str = "mean"
) -> None:
    """Write a picture of one layer: a heat map of one head or of the mean, or a grid of all heads.

    Args:
        attention (`Attention`): From `attention_maps`.
        output (`str`): Picture to write; the ending chooses the format.
        kind, layer, head: As for `Attention.select`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no such kind, layer or head, or the picture would be too large.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'hf-vaswani[plots]'.") from error

    layer, maps = attention.select(kind, layer, head)
    rows, columns = attention.tokens(kind)
    which = {"mean": ", mean of the heads", "all": ""}.get(head, f", head {head}")
    title = f"{TITLES[kind]}, layer {layer}{which}"
    across = math.ceil(math.sqrt(len(maps)))
    down = math.ceil(len(maps) / across)
    # In inches: a cell, a letter, and room for a title or the scale.
    width, height = (
        0.24 * len(tokens) + 0.07 * max(map(len, labels)) for tokens, labels in ((columns, rows), (rows, columns))
    )
    size = width * across + 1, (height + 0.3) * down + 0.3
    across_pixels, down_pixels = (round(inches * DPI) for inches in size)
    if across_pixels * down_pixels > MOST_PIXELS or max(across_pixels, down_pixels) > MOST_PIXELS_OF_A_SIDE:
        raise ValueError(
            f"A picture of {len(rows):,} by {len(columns):,} tokens has {across_pixels:,} x {down_pixels:,} pixels, "
            f"{across_pixels * down_pixels * 4 / 1e6:,.0f} MB; it may have {MOST_PIXELS * 4 / 1e6:,.0f} MB, and "
            f"{MOST_PIXELS_OF_A_SIDE:,} pixels on a side. Look at a shorter text, at one head, or at a page (.html)."
        )
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for number, (axes, weights) in enumerate(zip(grid, maps), start=1):
        image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=maps.max().item())
        # "$" is a dollar, not the start of a formula.
        axes.set_xticks(range(len(columns)), columns, parse_math=False, rotation=90)
        axes.set_yticks(range(len(rows)), rows, parse_math=False)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
        axes.set_title(f"head {number}" if head == "all" else title, fontsize=9)
    if head == "all":
        figure.suptitle(title, fontsize=10)
    for axes in grid[len(maps) :]:
        axes.set_visible(False)
    scale = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30)
    scale.ax.tick_params(labelsize=8)
    scale.outline.set_visible(False)
    save_whole(figure, Path(output), dpi=DPI)


def attention_page(
    attention: Attention, kind: str = "cross", layer: int | None = None, head: int | str = "mean"
) -> str:
    """A page for the browser, HTML that needs nothing from elsewhere, to look through all kinds, layers and heads.

    Args:
        attention (`Attention`): From `attention_maps`.
        kind, layer, head: What the page shows first, as for `Attention.select`; one head, or the mean.

    Raises:
        ValueError: There is no such kind, layer or head, or all heads are asked for.
    """
    if head == "all":
        raise ValueError('A page shows one head at a time: head must be a number or "mean", got "all".')
    layer, _ = attention.select(kind, layer, head)
    sides = {"encoder": ("source", "source"), "decoder": ("read", "read"), "cross": ("read", "source")}
    data = {
        "source": attention.source,
        "target": attention.target,
        "tokens": {
            "source": attention.source_tokens,
            "read": attention.read_tokens,
            "written": attention.written_tokens,
        },
        "kinds": {
            name: {
                "title": TITLES[name],
                "rows": sides[name][0],
                "columns": sides[name][1],
                "causal": name == "decoder",
                "weights": (weights.double() * 1e4).round().div(1e4).tolist(),
            }
            for name, weights in attention.weights.items()
        },
        "shown": {"kind": kind, "layer": layer - 1, "head": None if head == "mean" else head - 1},
    }
    # Without "<", no text can end the script element or open a comment in it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = (resources.files(__package__) / "attention.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text, 1)
