"""Comparison of a converted model with the original one."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani import VaswaniForConditionalGeneration


TOLERANCE = 1e-4  # greatest difference of logits, relative to the greatest logit
NEW_TOKENS = 48  # of the translations to compare
SENTENCES = [
    "Good morning!",
    "The committee met on 14 March 2019 and approved the budget of $3.5 million.",
    "Two small dogs are running across a field of tall grass, and a man in a blue shirt is watching them.",
    "Could you please tell me where the nearest station is?",
    "Der Zug nach München fährt heute wegen Bauarbeiten eine halbe Stunde später ab.",
    "Elle n'a jamais oublié ce qu'il lui avait dit ce jour-là.",
    "El perro duerme.",
    "It was raining, so we stayed at home, read the newspaper and talked about the summer.",
]


class Conversion(NamedTuple):
    """Result of a conversion to a Vaswani model, not checked yet."""

    model: VaswaniForConditionalGeneration
    reference: PreTrainedModel  # the original model, or a faithful copy
    tokenizer_files: dict[str, bytes]  # by name


@dataclass(frozen=True)
class Agreement:
    """Agreement of two models on a few sentences."""

    sentences: int
    logits: float  # greatest difference, relative to the greatest logit
    equal: int  # sentences with the same best translation

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.logits:.1e} of the largest, "
            f"{self.equal} of {self.sentences} translations are equal"
        )

    def check(self, place: object) -> None:
        """Raise ValueError if the models disagree."""
        if not (self.logits <= TOLERANCE and self.equal == self.sentences):
            raise ValueError(f"{place}: the conversion failed its check, so nothing was written: {self}.")


def example_batch(
    model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, torch.Tensor]:
    """Padded `input_ids` and `attention_mask` of a few sentences; without a tokenizer, of random tokens."""
    if tokenizer is not None:
        most = model.config.max_position_embeddings  # the other model's table may end there
        batch = tokenizer(SENTENCES, return_tensors="pt", padding=True, truncation=True, max_length=most)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    config = model.config
    lengths = torch.tensor([3, 17, 24, 11, 16, 13, 5, 20])
    size = config.source_vocab_size or config.vocab_size
    ids = torch.randint(size, (len(lengths), 24), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(24) < lengths[:, None]
    ids[ids == config.pad_token_id] = (config.pad_token_id + 1) % size
    return {"input_ids": ids.masked_fill(~mask, config.pad_token_id), "attention_mask": mask.long()}


def shut_out(reference: PreTrainedModel) -> list[int]:
    """Tokens that `bad_words_ids` forbids one by one; a converted model has other logits for them, see `marian.py`."""
    forbidden = reference.generation_config.bad_words_ids or []
    return [tokens[0] for tokens in forbidden if len(tokens) == 1]


@torch.no_grad()
def compare(
    reference: PreTrainedModel,
    model: VaswaniForConditionalGeneration,
    batch: dict[str, torch.Tensor],
    ignored: Collection[int] = (),
    source_rows: list[int] | None = None,
    **search,
) -> Agreement:
    """Compare the logits and the best translations of two models.

    Args:
        reference (`PreTrainedModel`), model (`VaswaniForConditionalGeneration`): In evaluation mode.
        batch (`dict`): From `example_batch`.
        ignored (`Collection[int]`): Tokens whose logits may differ, as neither model generates them.
        source_rows (`list[int]`, *optional*): The reference's source token for each of the model's, if they differ.
        **search: Options of `generate()` for both; by default each has its own settings.
    """
    most = min(NEW_TOKENS, model.config.max_position_embeddings - 1)
    search = {**search, "max_new_tokens": most, "max_length": None}
    if "length_penalty" in search:
        own = {**search, "length_penalty_form": "length", "max_extra_tokens": None}
    else:
        own = search
    read = batch if source_rows is None else {**batch, "input_ids": torch.tensor(source_rows)[batch["input_ids"]]}
    expected = reference.generate(**read, **search)
    found = model.generate(**batch, **own)
    pad = model.config.pad_token_id
    equal = sum(_without_padding(one, pad) == _without_padding(other, pad) for one, other in zip(expected, found))

    inputs = {"decoder_input_ids": expected, "use_cache": False}
    written = expected[:, 1:] != pad  # behind the start token, which may be padding
    kept = torch.cat((torch.ones_like(written[:, :1]), written), dim=1)
    logits, own_logits = (
        each(**given, **inputs).logits.float()[kept] for each, given in ((reference, read), (model, batch))
    )
    others = [token for token in range(logits.shape[-1]) if token not in ignored] if ignored else slice(None)
    logits, own_logits = logits[:, others], own_logits[:, others]
    difference = (logits - own_logits).abs().max() / logits.abs().max()
    return Agreement(len(expected), float(difference), equal)


def _without_padding(tokens: torch.Tensor, pad: int) -> list[int]:
    return [token for token in tokens.tolist()[1:] if token != pad]
