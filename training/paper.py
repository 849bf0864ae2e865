"""Numbers of the paper that several modules share: results of Table 3, training and beam search."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """Results of a row of Table 3 on newstest2013.

    Attributes:
        perplexity (`float`): Perplexity per token.
        bleu (`float`): BLEU.
        parameters (`int`, *optional*): Millions of parameters; `None` where the paper leaves a blank (as for base).
    """

    perplexity: float
    bleu: float
    parameters: int | None = None


PAPER = {
    "base": PaperRow(4.92, 25.8, 65),
    "A-h1": PaperRow(5.29, 24.9),
    "A-h4": PaperRow(5.00, 25.5),
    "A-h16": PaperRow(4.91, 25.8),
    "A-h32": PaperRow(5.01, 25.4),
    "B-dk16": PaperRow(5.16, 25.1, 58),
    "B-dk32": PaperRow(5.01, 25.4, 60),
    "C-N2": PaperRow(6.11, 23.7, 36),
    "C-N4": PaperRow(5.19, 25.3, 50),
    "C-N8": PaperRow(4.88, 25.5, 80),
    "C-d256": PaperRow(5.75, 24.5, 28),
    "C-d1024": PaperRow(4.66, 26.0, 168),
    "C-ff1024": PaperRow(5.12, 25.4, 53),
    "C-ff4096": PaperRow(4.75, 26.2, 90),
    "D-drop0.0": PaperRow(5.77, 24.6),
    "D-drop0.2": PaperRow(4.95, 25.5),
    "D-ls0.0": PaperRow(4.67, 25.3),
    "D-ls0.2": PaperRow(5.47, 25.7),
    "E-learned": PaperRow(4.92, 25.7),
    "big": PaperRow(4.33, 26.4, 213),
}
UPDATES = {"base": 100_000, "big": 300_000}  # section 5.2
AVERAGED = {"base": 5, "big": 20}  # section 6.1
VOCABULARY = {"de": 37_000, "fr": 32_000}  # section 5.1
FRENCH_BIG = {"dropout": 0.1}  # section 6.1

# Section 6.1.
GENERATION = {"num_beams": 4, "length_penalty_form": "gnmt", "length_penalty": 0.6, "max_extra_tokens": 50}

# The parser of section 6.3. Dropout, learning rate and beam were chosen on section 22 of the Wall Street Journal, and
# only the beam is named; everything else is as in the base model.
PARSER = {"d_model": 1024, "encoder_layers": 4, "decoder_layers": 4}
PARSER_VOCABULARY = {"(WSJ only)": 16_000, "(semi-supervised)": 32_000}
PARSER_GENERATION = {"num_beams": 21, "length_penalty_form": "gnmt", "length_penalty": 0.3, "max_extra_tokens": 300}


def paper_learning_rate(d_model: int, warmup_steps: int) -> float:
    """Peak learning rate of the paper's schedule (section 5.3), reached at step `warmup_steps`.

    >>> round(paper_learning_rate(512, 4000), 6)
    0.000699
    """
    return (d_model * warmup_steps) ** -0.5


def inverse_sqrt_factor(step: int, warmup_steps: int) -> float:
    """Learning rate of the paper's schedule (section 5.3) relative to its peak, at step `step`, counted from 1.

    >>> inverse_sqrt_factor(1, 4000), inverse_sqrt_factor(4000, 4000), inverse_sqrt_factor(16000, 4000)
    (0.00025, 1.0, 0.5)
    """
    return min(step / warmup_steps, (warmup_steps / step) ** 0.5) if warmup_steps else step**-0.5
