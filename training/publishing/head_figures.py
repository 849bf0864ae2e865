"""Attention heads that do something visible (Figures 3 to 5 of the paper), found by measures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani.modeling_vaswani import VaswaniAttention, eager_attention_forward

from ..inference.attention_maps import Attention, attention_maps
from ..inference.choices import TITLES
from .figures import COLORS, PaperFigure, new_figure


DISTANCE = 4  # tokens between a query and a key that count as distant
MAX_TOKENS = 100  # in a picture
VISIBLE = 0.05  # lowest weight that is drawn


def neighbours(weights: torch.Tensor, offset: int) -> torch.Tensor:
    """Mean weight on the token at an offset from the query.

    Args:
        weights (`torch.Tensor` of shape `(layers, heads, queries, keys)`): Attention weights.
        offset (`int`): -1 for the previous token.

    Returns:
        `torch.Tensor` of shape `(layers, heads)`: NaN if there is no such pair of tokens.
    """
    return weights.diagonal(offset, -2, -1).mean(-1)


def distant(weights: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
    """Largest weight on a token at least `DISTANCE` away, a mean over the queries. Special tokens do not count.

    Of each weight, the mean that its key receives is taken off: a head in which all queries attend to one key scores 0.

    Args:
        weights (`torch.Tensor` of shape `(layers, heads, length, length)`): Weights of a self-attention.
        is_word (`torch.Tensor` of shape `(length,)`): `False` for special tokens.

    Returns:
        `torch.Tensor` of shape `(layers, heads)`.
    """
    positions = torch.arange(len(is_word))
    counts = ((positions[:, None] - positions).abs() >= DISTANCE) & is_word & is_word[:, None]
    excess = (weights - weights.mean(-2, keepdim=True)).clamp(min=0)
    return (excess * counts).amax(-1)[..., is_word].mean(-1)


def coverage(weights: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
    """Largest weight that a key receives from any query, a mean over the keys. Special tokens do not count.

    Args:
        weights (`torch.Tensor` of shape `(layers, heads, queries, keys)`): Weights of a cross-attention.
        is_word (`torch.Tensor` of shape `(keys,)`): `False` for special tokens.

    Returns:
        `torch.Tensor` of shape `(layers, heads)`.
    """
    return weights.amax(-2)[..., is_word].mean(-1)


# Kind of attention, task of a head, and measure of how well it does it.
TASKS: tuple[tuple[str, str, Callable], ...] = (
    ("encoder", "previous token", lambda weights, is_word: neighbours(weights, -1)),
    ("encoder", "next token", lambda weights, is_word: neighbours(weights, 1)),
    ("encoder", "distant tokens", distant),
    ("decoder", "previous token", lambda weights, is_word: neighbours(weights, -1)),
    ("decoder", "distant tokens", distant),
    ("cross", "alignment", coverage),
)


@dataclass(frozen=True)
class Head:
    """A head and what it does.

    Attributes:
        kind (`str`): "encoder", "decoder" or "cross".
        task (`str`): What it does.
        layer, number (`int`): Layer and head, counted from 1.
        score (`float`): The measure of the task, from 0 to 1.
    """

    kind: str
    task: str
    layer: int
    number: int
    score: float


def choose_heads(attention: Attention, special_tokens: list[str]) -> list[Head]:
    """Choose the head with the highest measure for each task that the sentence is long enough for."""
    heads = []
    for kind, task, measure in TASKS:
        keys = attention.tokens(kind)[1]
        is_word = torch.tensor([token not in special_tokens for token in keys])
        scores = measure(attention.weights[kind], is_word)
        if scores.max() > 0:  # not of NaN
            layer, head = divmod(scores.argmax().item(), scores.shape[1])
            heads.append(Head(kind, task, layer + 1, head + 1, scores.max().item()))
    return heads


def heads_figure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> PaperFigure:
    """Draw the best head for each task, in a sentence and the model's translation of it.

    Args:
        model, tokenizer: A checkpoint.
        text (`str`): Source sentence.

    Raises:
        ValueError: The sentence or its translation has more than `MAX_TOKENS` tokens; or see `attention_maps`.
    """
    attention = attention_maps(model, tokenizer, text)
    for name, tokens in (("text", attention.source_tokens), ("translation", attention.read_tokens)):
        if len(tokens) > MAX_TOKENS:
            raise ValueError(
                f"The {name} has {len(tokens)} tokens, and a picture of heads at most {MAX_TOKENS}: use a shorter text."
            )
    heads = choose_heads(attention, tokenizer.all_special_tokens)
    return PaperFigure(
        name="heads",
        title="Attention heads",
        section="3.2, Figures 3 to 5",
        caption=f"Source: “{attention.source}” Translation: “{attention.target}” Lines lead from the tokens on the "
        "left, which attend, to those on the right; their strength is the weight. In the decoder, the left token is "
        "the one just read. Each panel shows the head with the highest measure in this sentence: for the previous and "
        f"the next token, its mean weight; for distant tokens, the largest weight at a distance of {DISTANCE} or "
        "more, less the mean weight that its token receives, a mean over the tokens on the left; for an alignment, "
        "the largest weight that a source token receives, a mean over the source tokens. The start and end of a "
        "sentence do not count in the last two.",
        code=(eager_attention_forward, VaswaniAttention),
        picture=draw_heads(attention, heads),
    )


def draw_heads(attention: Attention, heads: list[Head], across: int = 3):
    """Draw each head as lines between two columns of tokens."""
    down = -(-len(heads) // across)
    longest = max(len(tokens) for tokens in (attention.source_tokens, attention.read_tokens))
    picture = new_figure(4.0 * across, (0.24 * longest + 0.8) * down)
    grid = picture.subplots(down, across, squeeze=False).flat
    for axes, head in zip(grid, heads):
        color = COLORS[list(TITLES).index(head.kind)]
        queries, keys = attention.tokens(head.kind)
        for query, row in enumerate(attention.weights[head.kind][head.layer - 1, head.number - 1].tolist()):
            for key, weight in enumerate(row):
                if weight >= VISIBLE:
                    axes.plot((0, 1), (query, key), color=color, alpha=weight, linewidth=3 * weight)
        for place, side, tokens in ((-0.04, "right", queries), (1.04, "left", keys)):
            for position, token in enumerate(tokens):
                axes.text(place, position, token, ha=side, va="center", fontsize=9, parse_math=False)
        axes.set(xlim=(-1, 2), ylim=(longest - 0.5, -0.7))
        axes.set_axis_off()
        title = f"{head.task}: {head.score:.2f}\n{TITLES[head.kind]}, layer {head.layer}, head {head.number}"
        axes.set_title(title, fontsize=10, color=color)
    for axes in grid:
        axes.set_axis_off()
    return picture
