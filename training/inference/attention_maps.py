"""Attention weights over a sentence and its translation, as tensors, as a picture, and as an HTML page."""

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
from .choices import TITLES
from .translation import translate


# Titles of the rows and of the columns.
AXES = {
    "encoder": ("source token", "source token, attended to"),
    "decoder": ("token just read → token to predict", "token read so far, attended to"),
    "cross": ("token just read → token to predict", "source token, attended to"),
}
# Limit of the weights of all layers and heads. A weight takes 4 bytes in memory and up to 7 in a page ("0.1234,").
MAX_WEIGHTS, BYTES_IN_MEMORY, BYTES_IN_PAGE = 15_000_000, 4, 7
MAX_PIXELS, MAX_SIDE, DPI = 100_000_000, 65_000, 150  # size of a picture; matplotlib's own limit per side is 65,535


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model computes attention eagerly, the implementation that returns the weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check_number(name: str, number: int, highest: int) -> int:
    """Return the number of a layer or head, counted from 1, if it is valid.

    Raises:
        ValueError: The number is below 1 or above `highest`.
    """
    if not 1 <= number <= highest:
        raise ValueError(f"{name} must be from 1 to {highest}, got {number}.")
    return number


@dataclass(frozen=True)
class Attention:
    """Attention weights of a model over a sentence and its translation.

    Attributes:
        source, target (`str`): Raw texts.
        source_tokens (`list[str]`): Encoder input, end token included, in the form of `token_labels`.
        read_tokens (`list[str]`): Decoder input: the start token, then the target without its end token.
        written_tokens (`list[str]`): Decoder output for each of these: the target with its end token.
        weights (`dict[str, torch.Tensor]`): Weights by kind, float32 of shape `(layers, heads, queries, keys)`:
            "encoder" from source to source, "decoder" from read to read tokens, "cross" from read tokens to source.
    """

    source: str
    target: str
    source_tokens: list[str]
    read_tokens: list[str]
    written_tokens: list[str]
    weights: dict[str, torch.Tensor]

    def tokens(self, kind: str) -> tuple[list[str], list[str]]:
        """Query tokens and key tokens of a kind of attention."""
        rows = self.source_tokens if kind == "encoder" else self.read_tokens
        return rows, self.read_tokens if kind == "decoder" else self.source_tokens

    def row_labels(self, kind: str) -> list[str]:
        """Labels of the query tokens. In the decoder, "read → next": the token just read, and the one to predict."""
        if kind == "encoder":
            return self.source_tokens
        return [f"{read} → {written}" for read, written in zip(self.read_tokens, self.written_tokens)]

    def select(self, kind: str, layer: int | None, head: int | str) -> tuple[int, torch.Tensor]:
        """Select a layer, and one head, all heads, or the mean of the heads.

        Args:
            kind (`str`): "encoder", "decoder" or "cross".
            layer (`int`, *optional*): Layer, counted from 1; defaults to the last one.
            head (`int` or `str`): Head, counted from 1, or "mean" or "all".

        Returns:
            `tuple[int, torch.Tensor]`: Number of the layer, and its weights of shape `(heads, queries, keys)`, where
            `heads` is 1 unless `head` is "all".

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


def token_labels(tokenizer: PreTrainedTokenizerBase, text: str, is_target: bool = False) -> list[str]:
    """Readable labels of the tokens of a text.

    A token that continues a word begins with a middle dot. White space is "␣". A token that holds only some of the
    bytes of a character is labelled with that character and the number of the part.

    >>> token_labels(tokenizer, "ein Schneemobil  日")
    ['ein', 'Schnee', '·mobil', '␣', '␣', '日₁', '·日₂', '·日₃', '</s>']
    """
    encoding = tokenizer(**{"text_target" if is_target else "text": text}, return_offsets_mapping=True)
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]  # a token after it keeps its leading space
    before = len(tokenizer.decode(anchor))
    labels, part, reached = [], 0, 0
    for token, (start, end), sequence in zip(
        encoding["input_ids"], encoding["offset_mapping"], encoding.sequence_ids()
    ):
        if sequence is None:
            labels.append(tokenizer.convert_ids_to_tokens(token))
            continue
        piece = tokenizer.decode([*anchor, token])[before:]
        continuation = "" if piece[:1].isspace() or labels[-1:] == ["␣"] else "·"
        if "\ufffd" in piece and "\ufffd" not in text[start:end]:
            part = part + 1 if start < reached else 1
            reached = end
            piece = text[start:end].strip() + "".join(chr(ord("₀") + int(digit)) for digit in str(part))
        labels.append(continuation + piece.strip() if piece.strip() else "␣")
    return labels


def check_size(config: PreTrainedConfig, source: int, target: int) -> None:
    """Check that the attention over a sentence and its translation is small enough to store and to show.

    Args:
        config (`PreTrainedConfig`): Configuration of the model.
        source, target (`int`): Numbers of tokens.

    Raises:
        ValueError: There would be more than `MAX_WEIGHTS` weights. The message gives their size.
    """
    encoder, decoder = config.encoder_layers * source**2, config.decoder_layers * target * (target + source)
    num_weights = (encoder + decoder) * config.num_heads
    if num_weights <= MAX_WEIGHTS:
        return
    memory, page, max_page = (
        f"{count * size / 1e6:,.0f} MB"
        for count, size in (
            (num_weights, BYTES_IN_MEMORY),
            (num_weights, BYTES_IN_PAGE),
            (MAX_WEIGHTS, BYTES_IN_PAGE),
        )
    )
    raise ValueError(
        f"The attention over {source:,} source tokens and {target:,} target tokens, with {config.num_heads} heads in "
        f"{config.encoder_layers} + {config.decoder_layers} layers, takes {memory} of memory and a page of up to "
        f"{page}. The limit for a page is {max_page}: use a shorter text."
    )


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, target: str | None = None
) -> Attention:
    """Compute the attention weights over a sentence and its translation.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Fast tokenizer of the same checkpoint.
        source (`str`): Raw text.
        target (`str`, *optional*): Translation of the source; defaults to the model's own.

    Raises:
        ValueError: `source` is empty, the texts are too long (see `check_size`), the tokenizer has no character
            offsets, or the attention is not finite.
    """
    if not source.strip():
        raise ValueError("The source is empty.")
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no character offsets: expected a fast tokenizer.")
    inputs = tokenizer(source, return_tensors="pt").to(model.device)
    check_size(model.config, inputs["input_ids"].shape[1], 1)  # before a long text is translated
    if target is None:
        [target] = translate(model, tokenizer, [source])
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    check_size(model.config, inputs["input_ids"].shape[1], labels.shape[1])
    read = model.prepare_decoder_input_ids_from_labels(labels)
    with eager_attention(model):
        outputs = model(**inputs, decoder_input_ids=read, use_cache=False, output_attentions=True)
    by_kind = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    weights = {kind: torch.cat(layers).float().cpu() for kind, layers in zip(TITLES, by_kind)}
    if broken := [kind for kind, numbers in weights.items() if not numbers.isfinite().all()]:
        raise ValueError(
            f"The {TITLES[broken[0]]} has values that are not finite: the weights of the model are broken."
        )
    written = token_labels(tokenizer, target, is_target=True)
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
    """Draw one layer as a heat map of one head or of the mean of the heads, or as a grid of all heads.

    Args:
        attention (`Attention`): Output of `attention_maps`.
        output (`str`): Picture to write. The suffix selects the format.
        kind, layer, head: See `Attention.select`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no such kind, layer or head, or the picture would be too large.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'hf-vaswani[plots]'.") from error

    layer, maps = attention.select(kind, layer, head)
    rows, (_, columns) = attention.row_labels(kind), attention.tokens(kind)
    head_title = {"mean": ", mean of the heads", "all": ""}.get(head, f", head {head}")
    title = f"{TITLES[kind]}, layer {layer}{head_title}"
    across = math.ceil(math.sqrt(len(maps)))
    down = math.ceil(len(maps) / across)
    # Size in inches: 0.24 per cell, 0.07 per letter of the longest label, and room for titles and the colour bar.
    width, height = (
        0.24 * len(tokens) + 0.07 * max(map(len, labels)) for tokens, labels in ((columns, rows), (rows, columns))
    )
    size = width * across + 1.3, (height + 0.3) * down + 0.6
    across_pixels, down_pixels = (round(inches * DPI) for inches in size)
    if across_pixels * down_pixels > MAX_PIXELS or max(across_pixels, down_pixels) > MAX_SIDE:
        raise ValueError(
            f"A picture of {len(rows):,} by {len(columns):,} tokens has {across_pixels:,} x {down_pixels:,} pixels, "
            f"{across_pixels * down_pixels * 4 / 1e6:,.0f} MB. The limits are {MAX_PIXELS * 4 / 1e6:,.0f} MB and "
            f"{MAX_SIDE:,} pixels per side: use a shorter text, a single head, or a page (.html)."
        )
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for number, (axes, weights) in enumerate(zip(grid, maps), start=1):
        image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=maps.max().item())
        # Without parsing, "$" is a dollar sign rather than the start of a formula.
        axes.set_xticks(range(len(columns)), columns, parse_math=False, rotation=90)
        axes.set_yticks(range(len(rows)), rows, parse_math=False)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
        axes.set_title(f"head {number}" if head == "all" else title, fontsize=9)
    if head == "all":
        figure.suptitle(title, fontsize=10)
    row_title, column_title = AXES[kind]
    figure.supylabel(row_title, fontsize=9)
    figure.supxlabel(column_title, fontsize=9)
    for axes in grid[len(maps) :]:
        axes.set_visible(False)
    scale = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30)
    scale.ax.tick_params(labelsize=8)
    scale.set_label("weight; a row sums to 1", fontsize=8)
    scale.outline.set_visible(False)
    save_whole(figure, Path(output), dpi=DPI)


def attention_page(
    attention: Attention, kind: str = "cross", layer: int | None = None, head: int | str = "mean"
) -> str:
    """Render a self-contained HTML page with all kinds, layers and heads.

    Args:
        attention (`Attention`): Output of `attention_maps`.
        kind, layer, head: Initial selection, see `Attention.select`. `head` must not be "all".

    Raises:
        ValueError: There is no such kind, layer or head, or `head` is "all".
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
                "axes": AXES[name],
                "causal": name == "decoder",
                "weights": (weights.double() * 1e4).round().div(1e4).tolist(),
            }
            for name, weights in attention.weights.items()
        },
        "shown": {"kind": kind, "layer": layer - 1, "head": None if head == "mean" else head - 1},
    }
    # Escape "<", so that no text can end the script element or open a comment in it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = (resources.files(__package__) / "attention.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", text, 1)
