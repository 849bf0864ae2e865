"""Figures of the paper that need no trained model: positions, learning rate, smoothed targets, cost of attention.

Numbers come from the functions that models and trainings use.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from hf_vaswani import VaswaniConfig
from hf_vaswani.kernels_vaswani import SmoothedCrossEntropy, projected_cross_entropy
from hf_vaswani.modeling_vaswani import (
    IGNORED_LABEL,
    VaswaniAttention,
    VaswaniPositionEmbedding,
    eager_attention_forward,
    sinusoids,
)
from hf_vaswani.window_vaswani import attention_in_blocks, restricted

from ..paper import inverse_sqrt_factor, paper_learning_rate
from ..trainer.trainer import PaperSchedule


if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLORS = ("#1f5aa6", "#d9641e", "#2f8f5b", "#8a4fa3", "#6b6b6b")
D_MODEL = VaswaniConfig().d_model
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
WINDOW, KERNEL = 64, 3  # r and k of Table 1


@dataclass(frozen=True)
class PaperFigure:
    """A figure with what it shows.

    Attributes:
        name (`str`): Name of the picture, without an ending.
        title (`str`): One line.
        section (`str`): Sections of the paper, such as "3.5".
        caption (`str`): Plain text.
        code (`tuple[Callable, ...]`): Functions and classes that the figure shows.
        picture (`matplotlib.figure.Figure`): The figure itself.
    """

    name: str
    title: str
    section: str
    caption: str
    code: tuple[Callable, ...]
    picture: "Figure"


def new_figure(width: float, height: float) -> "Figure":
    """Empty figure of this size in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'hf-vaswani[plots]'.") from error
    picture = Figure(figsize=(width, height), layout="constrained")
    picture.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return picture


def finish(axes, columns: int = 1, **labels: str) -> None:
    """Set labels and title, a light grid, and a legend in some columns if there are several lines."""
    axes.set(**labels)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, ncols=columns)


def figures_of_the_paper(lengths: Sequence[int] = LENGTHS) -> list[PaperFigure]:
    """Draw all figures of this module.

    Args:
        lengths (`Sequence[int]`): Lengths of the sentences in which attention is measured.
    """
    return [sinusoids_figure(), dot_products_figure(), schedule_figure(), smoothing_figure(), cost_figure(lengths)]


# Positions


def sinusoids_figure(length: int = 128) -> PaperFigure:
    """Position encodings as a heat map, and a few of their features as curves."""
    encodings = sinusoids(torch.arange(length), D_MODEL)
    picture = new_figure(13, 4.2)
    *maps, curves = picture.subplots(1, 3, width_ratios=(1, 1, 1.4))
    for axes, first, title in zip(maps, (0, 1), ("even features: sines", "odd features: cosines")):
        lines = {"extent": (-0.5, length - 0.5, D_MODEL + first - 1, first - 1), "interpolation": "nearest"}
        image = axes.imshow(encodings[:, first::2].T, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", **lines)
        axes.set(title=title, xlabel="position", ylabel="feature")
    picture.colorbar(image, ax=maps, label="value", ticks=(-1, 0, 1))
    shown = encodings[: length // 2]
    for feature, color in zip((40, 80, 120), COLORS):
        curves.plot(shown[:, feature], color=color, label=f"feature {feature}")
    curves.plot(shown[:, 121], color=color, linestyle=":", label="feature 121")
    curves.set_ylim(-1.1, 1.8)
    curves.set_yticks((-1, 0, 1))
    finish(curves, columns=2, title="four features", xlabel="position", ylabel="value")
    return PaperFigure(
        name="sinusoids",
        title="Position encodings",
        section="3.5",
        caption="Each pair of features is the sine and the cosine of the position times a frequency. The frequencies "
        "fall geometrically from 1 to about 1/10000 radians per position: the last features hardly change.",
        code=(sinusoids, VaswaniPositionEmbedding),
        picture=picture,
    )


def position_dot_products(length: int, d_model: int) -> torch.Tensor:
    """Dot products of the encodings of all pairs of the first positions, `(length, length)`."""
    encodings = sinusoids(torch.arange(length), d_model)
    return encodings @ encodings.T


def dot_products_figure(length: int = 128) -> PaperFigure:
    """Dot products of position encodings, and the same against the distance of the positions."""
    products = position_dot_products(length, D_MODEL)
    picture = new_figure(11, 4.2)
    left, right = picture.subplots(1, 2, width_ratios=(1, 1.15))
    image = left.imshow(products, cmap="Blues", interpolation="nearest")
    left.set(title="all pairs of positions", xlabel="position q", ylabel="position p")
    picture.colorbar(image, ax=left, label="dot product PE(p) · PE(q)")
    for position, color, width in zip((length // 2, length // 4, 0), COLORS, (6, 3, 1)):
        distances = torch.arange(length) - position
        right.plot(distances, products[position], color=color, linewidth=width, label=f"p = {position}")
    finish(right, title="against the distance", xlabel="distance q − p, in positions", ylabel="dot product")
    return PaperFigure(
        name="dot_products",
        title="Dot products of position encodings",
        section="3.5",
        caption="The product depends on the distance alone: the curves of three positions lie on one another. It is "
        f"highest at distance 0, where it is d_model / 2 = {D_MODEL // 2}. For any offset k, PE(p + k) is PE(p) "
        "rotated by angles that do not depend on p.",
        code=(sinusoids,),
        picture=picture,
    )


# Learning rate


def learning_rates(d_model: int, warmup_steps: int, steps: Sequence[int]) -> list[float]:
    """Learning rates of a training at these steps, counted from 1, from its scheduler."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=paper_learning_rate(d_model, warmup_steps))
    schedule = PaperSchedule(optimizer, warmup_steps)
    [peak], [factor] = schedule.base_lrs, schedule.lr_lambdas
    return [peak * factor(step - 1) for step in steps]


def schedule_figure(last: int = 20_000) -> PaperFigure:
    """The learning rate for several widths, and for several warm-ups."""
    steps = range(1, last + 1, 20)
    picture = new_figure(11, 4.2)
    panels = (
        ("warmup_steps = 4000", (2, 2, 2), [(width, 4000, f"d_model = {width}") for width in (256, 512, 1024)]),
        ("d_model = 512", (5, 3, 1), [(512, warmup, f"warmup_steps = {warmup}") for warmup in (2000, 4000, 8000)]),
    )
    for axes, (title, widths, curves) in zip(picture.subplots(1, 2, sharey=True), panels):
        for (d_model, warmup, label), color, width in zip(curves, COLORS, widths):
            rates = [1000 * rate for rate in learning_rates(d_model, warmup, steps)]
            axes.plot(steps, rates, color=color, linewidth=width, label=label)
            [peak] = learning_rates(d_model, warmup, [warmup])
            axes.plot(warmup, 1000 * peak, "o", color=color, markersize=4)
            axes.annotate(f"{1000 * peak:.2f}", (warmup, 1000 * peak), (5, 3), textcoords="offset points", color=color)
        axes.set_xticks(range(0, last + 1, 4000))
        finish(axes, title=title, xlabel="step (updates)", ylabel="learning rate, in units of 0.001")
    return PaperFigure(
        name="learning_rate",
        title="Learning rate",
        section="5.3",
        caption="The rate rises linearly for warmup_steps updates and then falls with the inverse square root of the "
        "step, the same for any warmup_steps. Its peak, the dot, is (d_model · warmup_steps)^−0.5: "
        f"{paper_learning_rate(512, 4000):.6f} for the base model, d_model = 512 and warmup_steps = 4000.",
        code=(PaperSchedule, inverse_sqrt_factor, paper_learning_rate),
        picture=picture,
    )


# Label smoothing


def smoothed_loss(logits: torch.Tensor, label: int, epsilon: float) -> torch.Tensor:
    """Label-smoothed loss of the logits `(vocab_size,)` of one position, as trainings compute it."""
    identity = nn.Linear(len(logits), len(logits), bias=False)
    identity.weight.data = torch.eye(len(logits))
    return projected_cross_entropy(logits[None, None], identity, torch.tensor([[label]]), epsilon, IGNORED_LABEL)


def smoothed_target(vocab_size: int, label: int, epsilon: float) -> torch.Tensor:
    """Distribution `(vocab_size,)` that the label-smoothed loss trains towards.

    The gradient of a cross-entropy in the logits is the difference of the model's distribution and this one.
    """
    logits = torch.zeros(vocab_size, requires_grad=True)
    smoothed_loss(logits, label, epsilon).backward()
    return logits.detach().softmax(-1) - logits.grad


def smoothing_figure(vocab_size: int = 10, label: int = 3) -> PaperFigure:
    """Smoothed targets over a small vocabulary, and the loss against the probability of the right token."""
    picture = new_figure(11, 4.2)
    left, right = picture.subplots(1, 2)
    gold = torch.linspace(0.01, 0.99, 99)
    for number, (epsilon, color) in enumerate(zip((0.0, 0.1, 0.2), COLORS)):
        target = smoothed_target(vocab_size, label, epsilon)
        places = [token + 0.27 * (number - 1) for token in range(vocab_size)]
        left.bar(
            places,
            target.tolist(),
            width=0.25,
            color=color,
            label=f"ε = {epsilon:g}: {target[label]:.2f} on the label",
        )
        distributions = ((1 - gold) / (vocab_size - 1))[:, None].repeat(1, vocab_size)
        distributions[:, label] = gold
        losses = torch.stack([smoothed_loss(row.log(), label, epsilon) for row in distributions]).detach()
        right.plot(gold, losses, color=color, label=f"ε = {epsilon:g}")
        right.plot(gold[losses.argmin()], losses.min(), "o", color=color, markersize=5)
    left.set_xticks(range(vocab_size))
    left.set_ylim(0, 1.05)
    right.set_ylim(0, 4)
    finish(left, title=f"target over a vocabulary of {vocab_size}", xlabel="token", ylabel="probability in the target")
    finish(
        right,
        title="loss, the rest shared equally by the other tokens",
        xlabel=f"model's probability of the label, token {label}",
        ylabel="loss, in nats",
    )
    return PaperFigure(
        name="label_smoothing",
        title="Label smoothing",
        section="5.4",
        caption="A share ε of the target is spread evenly over the whole vocabulary, the label included. The paper's "
        "ε is 0.1. The loss is lowest, at the dot, where the model's distribution is the target: a model that is more "
        "certain than that pays for it.",
        code=(projected_cross_entropy, SmoothedCrossEntropy),
        picture=picture,
    )


# Cost of attention


def table_1(length: int, d_model: int) -> dict[str, int]:
    """Operations per layer of Table 1, by type of layer, for a sentence of `length` tokens."""
    return {
        "self-attention, n² · d": length**2 * d_model,
        "recurrent, n · d²": length * d_model**2,
        f"convolutional, k · n · d², k = {KERNEL}": KERNEL * length * d_model**2,
        f"self-attention (restricted), r · n · d, r = {WINDOW}": WINDOW * length * d_model,
    }


@torch.no_grad()
def attention_seconds(length: int, window: int | None = None) -> float:
    """CPU seconds of one self-attention of the base model's encoder, on one thread: the median of several calls.

    Without the projections, and without the mask, which all layers share.

    Args:
        length (`int`): Tokens of the sentence.
        window (`int`, *optional*): Size of the neighbourhood of restricted attention.
    """
    config = VaswaniConfig(attn_implementation="sdpa", attention_window=window)
    attention = VaswaniAttention(config, layer_idx=0).eval()
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, projection, nn.Identity())
    states = torch.randn(1, length, D_MODEL)
    mask = restricted(create_bidirectional_mask, config.encoder_reach)(config, states, None)
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):  # memory and kernels are prepared by the first calls
            attention(states, mask)
        for _ in range(max(3, 1024 // length)):
            start = time.process_time()
            attention(states, mask)
            seconds.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds)


def cost_figure(lengths: Sequence[int]) -> PaperFigure:
    """Time of self-attention against the length, measured, beside the operations of Table 1."""
    full, near = ([1000 * attention_seconds(length, window) for length in lengths] for window in (None, WINDOW))
    per_operation = full[-1] / (lengths[-1] ** 2 * D_MODEL)
    picture = new_figure(8.5, 5)
    axes = picture.subplots()
    counts = [table_1(length, D_MODEL) for length in lengths]
    for name, color, style in zip(counts[0], COLORS, ("-", "--", "-.", ":")):
        axes.plot(lengths, [count[name] * per_operation for count in counts], style, color=color, label=name)
    axes.plot(lengths, full, "o", color=COLORS[0], label="self-attention, measured")
    axes.plot(lengths, near, "s", color=COLORS[3], label="self-attention (restricted), measured")
    axes.axvline(D_MODEL, color=COLORS[-1], linewidth=0.8)
    axes.text(D_MODEL, 0.02, f" n = d = {D_MODEL}", color=COLORS[-1], transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    finish(axes, title=f"one layer, d = {D_MODEL}", xlabel="tokens of the sentence, n", ylabel="CPU time, in ms")
    return PaperFigure(
        name="cost",
        title="Cost of a layer against the length",
        section="4, Table 1",
        caption="Points are measured on this machine just now: one self-attention of the base model without its "
        f"projections, CPU time of one thread in float32. {lengths[-1]:,} tokens take {full[-1]:,.1f} ms, and "
        f"{near[-1]:,.1f} ms in neighbourhoods of {WINDOW}. The lines are Table 1's operations, all at the rate of "
        "the longest full attention. Short sentences cost mostly the calls themselves, and only long ones are divided "
        "into blocks. Self-attention takes fewer operations than a recurrent layer in sentences shorter than d.",
        code=(VaswaniAttention, eager_attention_forward, attention_in_blocks),
        picture=picture,
    )
