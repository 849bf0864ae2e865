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
VISIBLE, OTHER = 0.05, "#909090"  # lowest weight that is drawn; colour of pairs that do not count


def mean_weight(weights: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Mean weight of the pairs that count.

    Args:
        weights (`torch.Tensor` of shape `(layers, heads, queries, keys)`): Attention weights.
        counted (`torch.Tensor` of shape `(queries, keys)`): `True` for the pairs of tokens that count.

    Returns:
        `torch.Tensor` of shape `(layers, heads)`: NaN if no pair counts. The same holds for the other measures.
    """
    return weights[..., counted].mean(-1)


def excess_weight(weights: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Largest weight of a query among the pairs that count, a mean over queries with such a pair.

    Of each weight, the mean that its key receives is taken off: a head whose queries all attend to one key scores 0.
    """
    excess = (weights - weights.mean(-2, keepdim=True)).clamp(min=0)
    return (excess * counted).amax(-1)[..., counted.any(-1)].mean(-1)


def received_weight(weights: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Largest weight that a key receives among the pairs that count, a mean over keys with such a pair."""
    return (weights * counted).amax(-2)[..., counted.any(-2)].mean(-1)


# Kind of attention, task of a head, measure of how well it does it, and the pairs that count by the distance `query -
# key` and by both tokens being words rather than special tokens.
TASKS: tuple[tuple[str, str, Callable, Callable], ...] = (
    ("encoder", "previous token", mean_weight, lambda distance, words: distance == 1),
    ("encoder", "next token", mean_weight, lambda distance, words: distance == -1),
    ("encoder", "distant tokens", excess_weight, lambda distance, words: (distance.abs() >= DISTANCE) & words),
    ("decoder", "previous token", mean_weight, lambda distance, words: distance == 1),
    ("decoder", "distant tokens", excess_weight, lambda distance, words: (distance >= DISTANCE) & words),
    ("cross", "alignment", received_weight, lambda distance, words: words),
)


@dataclass(frozen=True)
class Head:
    """A head and what it does.

    Attributes:
        kind (`str`): "encoder", "decoder" or "cross".
        task (`str`): What it does.
        layer, number (`int`): Layer and head, counted from 1.
        score (`float`): The measure of the task, from 0 to 1.
        counted (`torch.Tensor` of shape `(queries, keys)`): `True` for the pairs of tokens that the measure counts.
    """

    kind: str
    task: str
    layer: int
    number: int
    score: float
    counted: torch.Tensor


def shown_tokens(attention: Attention, kind: str) -> tuple[list[str], list[str]]:
    """Query tokens and key tokens in a picture. The queries of a cross-attention are the tokens to predict, as in an
    alignment of words."""
    queries, keys = attention.tokens(kind)
    return (attention.written_tokens if kind == "cross" else queries), keys


def choose_heads(attention: Attention, special_tokens: list[str]) -> list[Head]:
    """Choose the head with the highest measure for each task that the sentence is long enough for."""
    heads = []
    for kind, task, measure, pairs in TASKS:
        queries, keys = shown_tokens(attention, kind)
        is_query_word, is_key_word = (
            torch.tensor([token not in special_tokens for token in tokens]) for tokens in (queries, keys)
        )
        distance = torch.arange(len(queries))[:, None] - torch.arange(len(keys))
        counted = pairs(distance, is_query_word[:, None] & is_key_word)
        scores = measure(attention.weights[kind], counted)
        if scores.max() > 0:  # not of NaN
            layer, head = divmod(scores.argmax().item(), scores.shape[1])
            heads.append(Head(kind, task, layer + 1, head + 1, scores.max().item(), counted))
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
                f"The {name} has {len(tokens)} tokens: a picture shows at most {MAX_TOKENS}. Use a shorter text."
            )
    heads = choose_heads(attention, tokenizer.all_special_tokens)
    return PaperFigure(
        name="heads",
        title="Attention heads",
        section="3.2, Figures 3 to 5",
        caption=f"Source: “{attention.source}”; translation: “{attention.target}”. Lines lead from the tokens that "
        "attend, on the left, to those on the right; their strength is the weight. The decoder's self-attention "
        "starts from the token just read, cross-attention from the token to predict. Each panel shows the head with "
        "the highest measure in this sentence, and in colour the pairs of tokens that count. The measure of the "
        "previous and of the next token is their mean weight; of distant tokens, the largest weight at a distance of "
        f"{DISTANCE} or more, less the mean weight that the token on the right receives; of an alignment, the largest "
        "weight that a source token receives. In the last two, the start and end of a sentence do not count.",
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
        queries, keys = shown_tokens(attention, head.kind)
        weights = attention.weights[head.kind][head.layer - 1, head.number - 1]
        for query, key in (weights >= VISIBLE).nonzero().tolist():
            weight, shade = weights[query, key].item(), color if head.counted[query, key] else OTHER
            axes.plot((0, 1), (query, key), color=shade, alpha=weight, linewidth=3 * weight)
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
