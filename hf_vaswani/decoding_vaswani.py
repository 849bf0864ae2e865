"""Fast decoders and loops for `generate()`: one token a step, with nothing computed or moved twice.

- Keys and values of the encoder's output are projected once for each sentence. The beams of a sentence are query rows
  over one copy.
- The cache is not reordered when beams change places. All beams of a sentence write into the same slots, and a mask
  marks each beam's own past. Slots that no beam sees any more are dropped from time to time.
- Finished sentences leave the batch. On a CPU, only as many sentences are in work as multiply fastest; the next ones
  of the batch take the places of those that leave.
- On a CPU, weights are packed once for all steps.

The file reads bottom up: weights, decoders, greedy search, beam search.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from .kernels_vaswani import attention_dtype, best_continuations, pack, softmax


class LayerWeights:
    """Packed weights of one decoder layer."""

    def __init__(self, layer: nn.Module, pack: Callable):
        attention, cross_attention, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
        self.qkv = pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = pack(attention.o_proj)
        self.cross_query, self.cross_output = pack(cross_attention.q_proj), pack(cross_attention.o_proj)
        self.cross_keys_values = pack(cross_attention.k_proj, cross_attention.v_proj)
        self.inner, self.outer = pack(feed_forward.fc1), pack(feed_forward.fc2)
        self.activation = feed_forward.activation
        self.norms = (layer.self_attn_residual, layer.encoder_attn_residual, layer.feed_forward_residual)


class DecoderWeights:
    """Packed weights of a model's decoder and output projection.

    Args:
        model (`VaswaniForConditionalGeneration`): Model with the weights.
        for_many_calls (`bool`): Take the time for what pays only if many calls of `generate()` share the weights.
        for_few_rows (`bool`): Do not take the time for what pays only for more rows than a sentence or two have.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, for_many_calls: bool = False, for_few_rows: bool = False):
        pack_layers = partial(pack, for_many_calls=for_many_calls, for_few_rows=for_few_rows)
        self.layers = [LayerWeights(layer, pack_layers) for layer in model.model.decoder.layers]
        self.head = pack_layers(model.lm_head)


class StepDecoder:
    """Decoder of a batch of sentences with the same number of beams, one position a step.

    Args:
        model (`VaswaniForConditionalGeneration`): Model with the decoder to run.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): The encoder's output.
        encoder_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 0 on padding.
        weights (`DecoderWeights`, *optional*): Packed weights of the model; packed here when not given.
        at_once (`int`, *optional*): Greatest number of sentences in work, the first ones; by default all of them.
    """

    ROOM = 4  # steps to make room for when the cache is full
    keeps_batch = False  # finished sentences can leave

    def __init__(
        self,
        model: nn.Module,
        encoder_states: torch.Tensor,
        encoder_mask: torch.Tensor | None,
        weights: DecoderWeights | None = None,
        at_once: int | None = None,
    ):
        config, decoder = model.config, model.model.decoder
        self.heads, self.d_k, self.d_v = config.num_heads, config.d_k, config.d_v
        self.scaling = config.d_k**-0.5
        self.decoder = decoder
        weights = weights or DecoderWeights(model)
        self.layers, self.head = weights.layers, weights.head
        self.sentences = min(len(encoder_states), at_once or len(encoder_states))  # in work
        self.vocab_size, self.device = config.vocab_size, encoder_states.device
        self.dtype = attention_dtype(encoder_states)
        self.hidden_value = torch.finfo(self.dtype).min

        mask = None  # (all sentences, source), added to the scores
        if encoder_mask is not None and not encoder_mask.all():
            mask = torch.zeros_like(encoder_mask, dtype=self.dtype)
            mask.masked_fill_(encoder_mask == 0, self.hidden_value)
        self.source_mask = None if mask is None else mask[: self.sentences].clone()
        self.source = self._project(encoder_states[: self.sentences])
        self.waiting_states = encoder_states[self.sentences :]
        self.waiting_mask = None if mask is None else mask[self.sentences :]

        self.positions = torch.zeros(self.sentences, 1, dtype=torch.long, device=self.device)  # of the next token
        self.used = self.room = 0  # slots of the cache in use, and in all
        self.keys: list[torch.Tensor] = [self._slots(0, self.d_k) for _ in self.layers]
        self.values: list[torch.Tensor] = [self._slots(0, self.d_v) for _ in self.layers]
        self.visible = torch.ones(
            self.sentences, 1, 0, dtype=torch.bool, device=self.device
        )  # (sentences, beams, slots)
        self.reach = config.decoder_reach  # of restricted self-attention (section 4)
        self.places = torch.empty(self.sentences, 0, dtype=torch.long, device=self.device)  # positions of the slots

    @property
    def waiting(self) -> int:
        """Number of sentences that have not begun."""
        return len(self.waiting_states)

    def _project(self, encoder_states: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys `(sentences * heads, d_k, source)` and values `(sentences * heads, source, d_v)` for every layer."""
        projected = []
        for layer in self.layers:
            keys, values = (
                layer.cross_keys_values(encoder_states)
                .to(self.dtype)
                .split((self.heads * self.d_k, self.heads * self.d_v), dim=-1)
            )
            projected.append((self._heads(keys, self.d_k).transpose(1, 2).contiguous(), self._heads(values, self.d_v)))
        return projected

    def _slots(self, count: int, width: int) -> torch.Tensor:
        return torch.empty(self.sentences * self.heads, count, width, dtype=self.dtype, device=self.device)

    def _heads(self, states: torch.Tensor, width: int) -> torch.Tensor:
        """`(sentences, length, heads * width)` as `(sentences * heads, length, width)`."""
        states = states.unflatten(-1, (self.heads, width)).transpose(1, 2)
        return states.reshape(-1, *states.shape[2:])

    def read(self, prompt: torch.Tensor) -> None:
        """Steps through all tokens of `prompt` `(sentences, length)` but the last, whose step predicts the next."""
        for place in range(prompt.shape[1] - 1):
            self.step(prompt[:, place : place + 1])

    def logits(self, histories: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, `(sentences * beams, vocab_size)`.

        Args:
            histories (`torch.Tensor` of shape `(sentences, beams, length)`): Tokens of every beam; all but the last
                have been read already.
        """
        return self.head(self.step(histories[..., -1]))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states of the next position.

        Args:
            tokens (`torch.Tensor` of shape `(sentences, beams)`): The last token of every beam.

        Returns:
            `torch.Tensor` of shape `(sentences * beams, d_model)`.
        """
        beams = tokens.shape[1]
        if self.used + beams > self.room:
            self.compact(None, beams)
        new = slice(self.used, self.used + beams)
        self.used = new.stop
        own = torch.eye(beams, dtype=torch.bool, device=self.device).expand(self.sentences, -1, -1)
        self.visible = torch.cat((self.visible.expand(-1, beams, -1), own), dim=-1)
        if self.reach is not None:  # no later step sees what is out of reach now: `compact` drops it
            self.places = torch.cat((self.places, self.positions.expand(-1, beams)), dim=1)
            self.visible = self.visible & (self.places >= self.positions - self.reach)[:, None]
        mask = self._mask(self.visible) if beams > 1 or self.reach is not None else None
        source_mask = None
        if self.source_mask is not None:
            source_mask = self.source_mask[:, None].expand(-1, self.heads, -1).flatten(0, 1)[:, None]

        embedded = self.decoder.embed_tokens(tokens) * self.decoder.embed_scale
        hidden = self.decoder.embed_positions(embedded, self.positions).flatten(0, 1)  # (sentences * beams, d_model)
        for index, layer in enumerate(self.layers):
            hidden = self._layer(index, layer, hidden, new, mask, source_mask)
        self.positions += 1
        return hidden

    def _layer(self, index, layer, hidden, new: slice, mask, source_mask) -> torch.Tensor:
        beams = new.stop - new.start
        query, key, value = (
            layer.qkv(hidden)
            .to(self.dtype)
            .split((self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v), dim=-1)
        )
        self.keys[index][:, new] = self._heads(key.unflatten(0, (-1, beams)), self.d_k)
        self.values[index][:, new] = self._heads(value.unflatten(0, (-1, beams)), self.d_v)
        keys, values = self.keys[index][:, : new.stop], self.values[index][:, : new.stop]
        attended = self._attend(query, beams, keys.transpose(1, 2), values, mask)
        hidden = layer.norms[0](hidden, layer.output(attended.to(hidden.dtype)))

        query = layer.cross_query(hidden).to(self.dtype)
        keys, values = self.source[index]
        attended = self._attend(query, beams, keys, values, source_mask)
        hidden = layer.norms[1](hidden, layer.cross_output(attended.to(hidden.dtype)))
        return layer.norms[2](hidden, layer.outer(layer.activation(layer.inner(hidden))))

    def _attend(self, query, beams: int, keys, values, mask) -> torch.Tensor:
        """Attention (section 3.2.1) of `query` `(sentences * beams, heads * d_k)`, whose last dimension becomes
        `heads * d_v`, to `keys` `(sentences * heads, d_k, slots)` and `values` `(sentences * heads, slots, d_v)`."""
        query = self._heads(query.unflatten(0, (-1, beams)), self.d_k)
        if mask is None:
            scores = torch.bmm(query, keys).mul_(self.scaling)
        else:
            scores = torch.baddbmm(mask, query, keys, alpha=self.scaling)
        attended = torch.bmm(softmax(scores), values)  # (sentences * heads, beams, d_v)
        return attended.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """Mask to add to the scores of all heads, `(sentences * heads, beams, slots)`."""
        mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, self.hidden_value)
        return mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def reorder(self, parents: torch.Tensor) -> None:
        """Continue each beam from another one, `parents` `(sentences, beams)`; there may be more beams than before."""
        self.visible = self.visible.gather(1, parents[..., None].expand(-1, -1, self.used))

    def rest(self, ended: torch.Tensor) -> None:
        """Let the sentences that have `ended`, `(sentences,)`, wait at the first position to leave, as a learned table
        of positions may have none behind their last token."""
        self.positions.masked_fill_(ended[:, None], 0)

    def replace(self, ended: torch.Tensor) -> None:
        """Put the next waiting sentences in the places of those that have `ended`, `(count,)`."""
        count = len(ended)
        rows = self._rows(ended)
        for old, new in zip(self.source, self._project(self.waiting_states[:count])):
            for states, new_states in zip(old, new):
                states.index_copy_(0, rows, new_states)
        self.waiting_states = self.waiting_states[count:]
        if self.source_mask is not None:
            self.source_mask[ended] = self.waiting_mask[:count]
            self.waiting_mask = self.waiting_mask[count:]
        self.visible[ended] = False
        self.positions[ended] = 0

    def _rows(self, sentences: torch.Tensor) -> torch.Tensor:
        """Rows of all heads of some sentences."""
        return (sentences[:, None] * self.heads + torch.arange(self.heads, device=self.device)).flatten()

    def compact(self, kept: torch.Tensor | None, beams: int) -> None:
        """Keep some sentences, all if `None`, with the slots that their beams see; make room for more steps."""
        visible = self.visible if kept is None else self.visible[kept]
        live = visible.any(1)  # (sentences, slots)
        used = int(live.sum(1).max()) if live.numel() else 0
        slots = live.int().argsort(dim=1, descending=True, stable=True)[:, :used]
        rows = self._rows(torch.arange(self.sentences, device=self.device) if kept is None else kept)
        self.visible = visible.gather(2, slots[:, None].expand(-1, visible.shape[1], -1))
        if self.reach is not None:
            self.places = (self.places if kept is None else self.places[kept]).gather(1, slots)
        # Whole rows of memory are copied at once; the free slots among them may hold anything.
        taken = F.pad(slots, (0, self.ROOM * beams)).repeat_interleave(self.heads, 0) + rows[:, None] * self.room
        self.sentences, self.used, self.room = len(visible), used, taken.shape[1]
        for cache in (self.keys, self.values):
            for index, old in enumerate(cache):
                if old.shape[1]:
                    cache[index] = old.flatten(0, 1).index_select(0, taken.flatten()).unflatten(0, taken.shape)
                else:
                    cache[index] = self._slots(self.room, old.shape[-1])
        if kept is None:
            return
        self.source = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in self.source]
        self.positions = self.positions[kept]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[kept]


class EnsembleDecoder:
    """Decoders of several models with the same vocabulary, for the same sentences, that step together."""

    keeps_batch = False

    def __init__(self, decoders: list[StepDecoder]):
        self.decoders, self.vocab_size = decoders, decoders[0].vocab_size

    @property
    def waiting(self) -> int:
        return self.decoders[0].waiting

    def read(self, prompt: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.read(prompt)

    def logits(self, histories: torch.Tensor) -> torch.Tensor:
        """Logarithms of the mean of the models' probabilities, `(sentences * beams, vocab_size)`."""
        each = torch.stack([decoder.logits(histories).float().log_softmax(-1) for decoder in self.decoders])
        return each.logsumexp(0) - math.log(len(self.decoders))

    def reorder(self, parents: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.reorder(parents)

    def rest(self, ended: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.rest(ended)

    def replace(self, ended: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.replace(ended)

    def compact(self, kept: torch.Tensor | None, beams: int) -> None:
        for decoder in self.decoders:
            decoder.compact(kept, beams)


class ModelDecoder:
    """Decoder by the model's own `forward` and cache: slower than [`StepDecoder`], and open to every option of
    `generate()`.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to call at every step.
        model_kwargs (`dict`): Arguments that `generate()` prepared for the model, one row for each beam.
        records (`Sequence[str]`): Fields of the model's outputs to keep, of every step.
        synced (`bool`): Call the model equally often in all processes, as sharded weights need.
    """

    keeps_batch = True  # every row stays, in its place, to the end
    waiting = 0

    def __init__(self, model: nn.Module, model_kwargs: dict, records: Sequence[str] = (), synced: bool = False):
        self.model, self.model_kwargs, self.synced = model, model_kwargs, synced
        self.records: dict[str, list] = {name: [] for name in records}
        self.inputs: dict | None = None  # of the last call

    def read(self, prompt: torch.Tensor) -> None:
        """Leave the prompt to the first call of the model, which reads it whole."""

    def logits(self, histories: torch.Tensor) -> torch.Tensor:
        """As [`StepDecoder.logits`]."""
        if self.synced:
            self._is_anyone_unfinished(True)
        tokens = histories.flatten(0, 1)
        self.inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=self._unread(tokens.shape[1]),
            is_first_iteration=self.inputs is None,
            **self.model_kwargs,
        )
        outputs = self.model(**self.inputs, return_dict=True)
        if outputs.past_key_values is not None:
            self.model_kwargs["past_key_values"] = outputs.past_key_values
        if (mask := self.model_kwargs.get("decoder_attention_mask")) is not None:
            self.model_kwargs["decoder_attention_mask"] = F.pad(mask, (0, 1), value=1)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=tokens.device)
        for name, steps in self.records.items():
            steps.append(logits.clone() if name == "logits" else outputs[name])
        return logits

    def _unread(self, length: int) -> int | None:
        """Number of last tokens to read; `None` means all that are given."""
        if self.inputs is not None:
            return 1 if self.model_kwargs["use_cache"] else None
        cache, mask = self.model_kwargs.get("past_key_values"), self.model_kwargs.get("decoder_attention_mask")
        if cache is None or mask is None or mask.shape[1] != length:
            return None
        return length - cache.get_seq_length()

    def reorder(self, parents: torch.Tensor) -> None:
        """As [`StepDecoder.reorder`], with as many beams as before."""
        cache = self.model_kwargs.get("past_key_values")
        if cache is not None:
            first = torch.arange(len(parents), device=parents.device) * parents.shape[1]
            cache.reorder_cache((first[:, None] + parents).flatten())

    def finish(self) -> None:
        """Call the model on until every process has finished, if they must stay in step."""
        while self.synced and self._is_anyone_unfinished(False):
            self.model(**self.inputs, return_dict=True)

    def _is_anyone_unfinished(self, unfinished: bool) -> bool:
        flag = torch.tensor(float(unfinished), device=self.model.device)
        torch.distributed.all_reduce(flag)
        return flag.item() > 0


Decoder = StepDecoder | EnsembleDecoder | ModelDecoder


class SentenceProcessor(LogitsProcessor):
    """Logits processor that needs to know the sentence of each row, because sentences leave the batch.

    Args:
        sentences (`int`): Number of sentences of the whole batch.
    """

    def __init__(self, sentences: int):
        self.sentences = sentences

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Process the rows of all sentences, as transformers' loops ask for."""
        return self.process(input_ids, scores, torch.arange(self.sentences, device=scores.device))

    def process(self, input_ids: torch.LongTensor, scores: torch.Tensor, sentences: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.Tensor` of shape `(rows, length)`): Tokens of equally many rows for each sentence.
            scores (`torch.Tensor` of shape `(rows, vocab_size)`): Scores of the next token.
            sentences (`torch.Tensor` of shape `(remaining,)`): Positions in the whole batch, in the order of the rows.
        """
        raise NotImplementedError


def _processed(processors: LogitsProcessorList, tokens, scores, sentences: torch.Tensor) -> torch.Tensor:
    """Apply processors to the rows of `sentences`; see [`SentenceProcessor.process`]."""
    for processor in processors:
        if isinstance(processor, SentenceProcessor):
            scores = processor.process(tokens, scores, sentences)
        else:
            scores = processor(tokens, scores)
    return scores


@torch.no_grad()
def greedy_search(
    decoder: StepDecoder | EnsembleDecoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    eos: torch.Tensor,
    processors: LogitsProcessorList,
    fill: int,
) -> torch.Tensor:
    """Choose the likeliest next token, again and again, as transformers' loop does without sampling.

    Args:
        decoder (`StepDecoder` or `EnsembleDecoder`): Decoder of the sentences.
        prompt (`torch.Tensor` of shape `(sentences, prompt)`): Start token and forced prefix of the outputs.
        limits (`torch.Tensor` of shape `(sentences,)`): Greatest number of tokens of each sentence.
        eos (`torch.Tensor` of shape `(ends,)`): Tokens that end a sentence.
        processors (`LogitsProcessorList`): Processors that treat every row of a batch alike, or know its sentence.
        fill (`int`): Padding behind the end of a sequence.

    Returns:
        Sequences `(sentences, length)`.
    """
    decoder.read(prompt)
    tokens = sequences = prompt
    rows = torch.arange(len(prompt), device=prompt.device)
    while True:
        logits = decoder.logits(tokens[:, None])
        if processors:
            logits = _processed(processors, tokens, logits.float(), sentences=rows)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=-1)
        sequences = F.pad(sequences, (0, 1), value=fill)
        sequences[rows, -1] = tokens[:, -1]
        goes_on = ~torch.isin(tokens[:, -1], eos) & (tokens.shape[1] - 1 < limits)
        kept = goes_on.nonzero()[:, 0]
        if not len(kept):
            return sequences
        if len(kept) < len(rows):
            rows, tokens, limits = rows[kept], tokens[kept], limits[kept]
            decoder.compact(kept, beams=1)


def gnmt_length_penalty(length, alpha: float):
    """`((5 + length) / 6) ** alpha` (Wu et al. 2016), of a number or a tensor of lengths."""
    return ((5 + length) / 6) ** alpha


NEVER = -1e9  # log probability of a hypothesis that must not be chosen, as in transformers


@dataclass
class Hypotheses:
    """Running and finished hypotheses of a beam search; the first dimension of every tensor is the sentence.

    A history consists of tokens and, for each token behind the prompt, the row of the batch that it came from. A step
    adds a column to all histories. Those of a sentence that began later have meaningless columns before their own.
    """

    index: torch.Tensor  # (sentences,), position of the sentence in the batch
    limits: torch.Tensor  # (sentences,), greatest number of tokens
    starts: torch.Tensor  # (sentences,), column of the first token
    tokens: torch.Tensor  # (sentences, beams, length)
    origins: torch.Tensor  # (sentences, beams, length - prompt)
    scores: torch.Tensor  # (sentences, beams), log probabilities
    finished_tokens: torch.Tensor  # (sentences, beams, length)
    finished_origins: torch.Tensor  # (sentences, beams, length - prompt)
    finished_scores: torch.Tensor  # (sentences, beams), divided by the length penalty, best first
    is_finished: torch.Tensor  # (sentences, beams)
    improvable: torch.Tensor  # (sentences, 1), whether the search of the sentence goes on

    @classmethod
    def at_prompt(
        cls, prompt: torch.Tensor, limits: torch.Tensor, index: torch.Tensor, beams: int, start: int = 0
    ) -> "Hypotheses":
        """Put every beam at the prompt `(sentences, length)`; only the first counts, as all are the same."""
        sentences, device = len(prompt), prompt.device
        scores = torch.full((sentences, beams), NEVER, device=device)
        scores[:, 0] = 0
        tokens = F.pad(prompt, (start, 0))[:, None].expand(-1, beams, -1)
        origins = torch.zeros(sentences, beams, start, dtype=torch.int32, device=device)
        return cls(
            index=index,
            limits=limits,
            starts=torch.full_like(limits, start),
            tokens=tokens,
            origins=origins,
            scores=scores,
            finished_tokens=tokens,
            finished_origins=origins,
            finished_scores=torch.full_like(scores, NEVER),
            is_finished=torch.zeros_like(scores, dtype=torch.bool),
            improvable=torch.ones(sentences, 1, dtype=torch.bool, device=device),
        )

    def lengths(self, prompt: int) -> torch.Tensor:
        """Number of tokens behind the prompt of so many tokens, `(sentences, 1)`."""
        return (self.tokens.shape[-1] - prompt - self.starts)[:, None]

    def select(self, kept: torch.Tensor) -> "Hypotheses":
        return Hypotheses(*(getattr(self, field.name)[kept] for field in fields(self)))

    def replace(self, ended: torch.Tensor, new: "Hypotheses") -> None:
        for field in fields(self):
            getattr(self, field.name)[ended] = getattr(new, field.name)

    def from_start(self, fill: int) -> "Hypotheses":
        """The same finished hypotheses, with every history from the first column on and `fill` behind it."""
        moved = {"starts": torch.zeros_like(self.starts)}
        for name, behind in (("finished_tokens", fill), ("finished_origins", -1)):
            histories = getattr(self, name)
            columns = self.starts[:, None, None] + torch.arange(histories.shape[-1], device=histories.device)
            columns = columns.expand(-1, histories.shape[1], -1)
            inside = columns < histories.shape[-1]
            moved[name] = torch.where(inside, histories.gather(2, columns.clamp(max=histories.shape[-1] - 1)), behind)
        return replace(self, **moved)

    def without_first(self, columns: int) -> "Hypotheses":
        """Drop the first columns of all histories."""
        names = ("tokens", "origins", "finished_tokens", "finished_origins")
        shorter = {name: getattr(self, name)[..., columns:] for name in names}
        return replace(self, starts=self.starts - columns, **shorter)


class Candidates(NamedTuple):
    """Continuations of a sentence's beams by one token, best first."""

    scores: torch.Tensor  # (sentences, candidates), log probabilities
    parents: torch.Tensor  # (sentences, candidates), beams that they continue
    tokens: torch.Tensor  # (sentences, candidates, length)
    origins: torch.Tensor  # (sentences, candidates, length - prompt)
    ends: torch.Tensor  # (sentences, candidates), whether the hypothesis ends here


class BeamSearch:
    """Beam search by transformers' rules, sentence by sentence: the same hypotheses and scores as its own loop.

    Args:
        config (`GenerationConfig`): Number of beams, exponent `length_penalty`, `early_stopping`, end and padding
            tokens.
        length_penalty_form (`str`): `"gnmt"` or `"length"`, see `generation_vaswani.py`.
        processors (`LogitsProcessorList`): Processors of the log probabilities; ones that tell the rows of a batch
            apart need a decoder that keeps its batch.
        criteria (`Callable`, *optional*): Maps tokens `(rows, length)` to the rows that end, instead of the end
            tokens; needs a decoder that keeps its batch.
    """

    LEAVE = 0.95  # finished sentences leave when no more than this share of the batch goes on
    REPLACE = 0.9  # waiting ones take their places when no more than this share goes on

    def __init__(
        self,
        config: GenerationConfig,
        length_penalty_form: str,
        processors: LogitsProcessorList,
        criteria: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.config, self.processors, self.criteria = config, processors, criteria
        self.is_gnmt, self.alpha = length_penalty_form == "gnmt", config.length_penalty
        self.beams = config.num_beams
        self.eos = end_tokens(config)
        self.candidates = max(2, 1 + len(self.eos)) * self.beams
        # As in transformers, a padding id of 0 counts as none.
        self.fill = int(config.pad_token_id or self.eos[0]) if len(self.eos) else -1

    @torch.no_grad()
    def __call__(
        self, decoder: Decoder, prompt: torch.Tensor, limits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            decoder (`StepDecoder`, `EnsembleDecoder` or `ModelDecoder`): Decoder of the sentences.
            prompt (`torch.Tensor` of shape `(sentences, prompt)`): Start token and forced prefix of the outputs.
            limits (`torch.Tensor` of shape `(sentences,)`): Greatest number of tokens of each sentence.

        Returns:
            Sequences `(sentences * returned, length)`, scores `(sentences * returned,)` and beam indices
            `(sentences * returned, length - prompt)`.
        """
        decoder.read(prompt)
        self.prompt, self.eos = prompt.shape[1], self.eos.to(prompt.device)
        index = torch.arange(len(prompt) - decoder.waiting, device=prompt.device)
        state, ended = Hypotheses.at_prompt(prompt[index], limits[index], index, self.beams), []
        while True:
            candidates = self._candidates(state, *self._best(state, decoder))
            self._collect_finished(state, candidates)
            self._continue(state, candidates, decoder)
            state.improvable = state.improvable & self._can_improve(state)

            full = state.is_finished.all(-1, keepdim=True) & (self.config.early_stopping is True)
            stuck = candidates.ends.all(-1, keepdim=True)
            if decoder.keeps_batch:
                if not state.improvable.any() or full.all() or stuck.all():
                    return self._outputs([state])
                continue
            state.improvable &= ~full & ~stuck
            going_on = int(state.improvable.sum())
            if not going_on and not decoder.waiting:
                return self._outputs([*ended, state.from_start(self.fill)])
            if going_on <= (self.REPLACE if decoder.waiting else self.LEAVE) * len(state.index):
                finished = (~state.improvable[:, 0]).nonzero()[:, 0]
                ended.append(state.select(finished).from_start(self.fill))
                state = self._replaced(state, finished, decoder, prompt, limits)
            elif going_on < len(state.index):
                decoder.rest(~state.improvable[:, 0])

    def _replaced(self, state: Hypotheses, finished, decoder: Decoder, prompt, limits) -> Hypotheses:
        """Put waiting sentences in the places of finished ones; where none wait, those left over leave."""
        index = torch.arange(len(prompt) - decoder.waiting, len(prompt), device=prompt.device)[: len(finished)]
        if len(index):
            start = state.tokens.shape[-1] - self.prompt
            new = Hypotheses.at_prompt(prompt[index], limits[index], index, self.beams, start)
            state.replace(finished[: len(index)], new)
            decoder.replace(finished[: len(index)])
            state = state.without_first(min(int(state.starts.min()), start - 1))
        if len(index) < len(finished):
            kept = state.improvable[:, 0].nonzero()[:, 0]
            state = state.select(kept)
            decoder.compact(kept, self.beams)
        return state

    def _best(self, state: Hypotheses, decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the best continuations by one token, enough for all beams to go on when some of them end.

        Returns:
            Log probabilities, beams that are continued and tokens, each `(sentences, candidates)`.
        """
        if not self.processors and not decoder.keeps_batch:
            # At the prompt all beams are the same: one is computed, if it has enough continuations.
            is_first = state.tokens.shape[-1] == self.prompt
            beams = 1 if is_first and decoder.vocab_size >= self.candidates else self.beams
            logits = decoder.logits(state.tokens[:, :beams])
            return best_continuations(logits, state.scores[:, :beams], self.candidates)
        scores = decoder.logits(state.tokens).float().log_softmax(-1)
        scores = _processed(self.processors, state.tokens.flatten(0, 1), scores, sentences=state.index)
        scores = (scores.unflatten(0, (-1, self.beams)) + state.scores[..., None]).flatten(1)
        if self.config.do_sample:
            places = scores.softmax(-1).multinomial(self.candidates)
            top = scores.gather(1, places)
        else:
            top, places = scores.topk(self.candidates)
        vocabulary = scores.shape[1] // self.beams
        return top, places // vocabulary, places % vocabulary

    def _candidates(self, state: Hypotheses, top, parents, token) -> Candidates:
        """Continuations from what `_best` chose."""
        origin = parents + state.index[:, None] * self.beams
        tokens = torch.cat((_gather(state.tokens, parents), token[..., None]), dim=-1)
        origins = torch.cat((_gather(state.origins, parents), origin[..., None].int()), dim=-1)
        return Candidates(top, parents, tokens, origins, self._ends(state, tokens))

    def _ends(self, state: Hypotheses, tokens: torch.Tensor) -> torch.Tensor:
        if self.criteria is None:
            ends = torch.isin(tokens[..., -1], self.eos)
        else:
            ends = self.criteria(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
        return ends | (tokens.shape[-1] - 1 - state.starts >= state.limits)[:, None]

    def _collect_finished(self, state: Hypotheses, candidates: Candidates) -> None:
        """Merge the candidates that end here into the best finished hypotheses.

        Only the best `num_beams` candidates may finish; the others are there to go on. A sentence takes no more when
        it cannot improve, or when it is full and `early_stopping` is `True`.
        """
        in_beam = torch.arange(self.candidates, device=candidates.ends.device) < self.beams
        finishes = candidates.ends & in_beam
        full = state.is_finished.all(-1, keepdim=True) & (self.config.early_stopping is True)
        scores = candidates.scores / self._penalty(state.lengths(self.prompt) + 1)
        for excluded in (full, ~state.improvable, ~finishes):
            scores = scores + excluded * NEVER

        scores, best = torch.cat((state.finished_scores, scores), dim=1).topk(self.beams)
        tokens = F.pad(state.finished_tokens, (0, 1), value=self.fill)
        origins = F.pad(state.finished_origins, (0, 1), value=-1)
        state.finished_tokens = _gather(torch.cat((tokens, candidates.tokens), dim=1), best)
        state.finished_origins = _gather(torch.cat((origins, candidates.origins), dim=1), best)
        state.finished_scores = scores
        state.is_finished = torch.cat((state.is_finished, finishes), dim=1).gather(1, best)

    def _continue(self, state: Hypotheses, candidates: Candidates, decoder: Decoder) -> None:
        """Make the best candidates that do not end here the new beams."""
        state.scores, best = (candidates.scores + candidates.ends * NEVER).topk(self.beams)
        state.tokens, state.origins = _gather(candidates.tokens, best), _gather(candidates.origins, best)
        decoder.reorder(candidates.parents.gather(1, best))

    def _penalty(self, length: torch.Tensor) -> torch.Tensor:
        """Divisor of the log probability of a hypothesis of so many tokens behind the prompt."""
        return gnmt_length_penalty(length, self.alpha) if self.is_gnmt else length**self.alpha

    def _can_improve(self, state: Hypotheses) -> torch.Tensor:
        """Find the sentences of which an unfinished hypothesis can still win, `(sentences, 1)`.

        The answer of the form `"gnmt"` is exact. Log probabilities only fall: a hypothesis scores best if it loses
        nothing more and ends where the penalty is greatest. That is as late as possible, or as soon as possible for a
        negative exponent. It has to beat the last of the hypotheses to return. The form `"length"` follows
        transformers' heuristic, which depends on `early_stopping`.
        """
        length = state.lengths(self.prompt)
        best, finished = state.scores[:, :1], state.finished_scores
        if self.is_gnmt:
            soonest = length + 1
            latest = torch.maximum(state.limits[:, None] + 1 - self.prompt, soonest)
            ending = latest if self.alpha >= 0 else soonest
            wanted = self.config.num_return_sequences
            return best / self._penalty(ending) > finished[:, wanted - 1 : wanted]
        if self.config.early_stopping == "never" and self.alpha > 0:
            length = torch.full_like(length, self.config.max_length - self.prompt)
        worst = torch.where(state.is_finished, finished.min(dim=1, keepdim=True).values, NEVER)
        return (best / self._penalty(length) > worst).any(-1, keepdim=True)

    def _outputs(self, states: list[Hypotheses]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best finished hypotheses, in the order of the batch, padded to one length."""
        wanted = self.config.num_return_sequences
        length = max(state.finished_tokens.shape[-1] for state in states)
        order = torch.cat([state.index for state in states]).argsort()
        results = []
        for name, fill in (("finished_tokens", self.fill), ("finished_origins", -1)):
            parts = [getattr(state, name)[:, :wanted] for state in states]
            longest = length - (self.prompt if name == "finished_origins" else 0)
            parts = [F.pad(part, (0, longest - part.shape[-1]), value=fill) for part in parts]
            results.append(torch.cat(parts)[order].flatten(0, 1))
        scores = torch.cat([state.finished_scores[:, :wanted] for state in states])[order].flatten()
        written = int((results[1] >= 0).sum(-1).max())
        return results[0][:, : self.prompt + written], scores, results[1][:, :written]


def end_tokens(config: GenerationConfig) -> torch.Tensor:
    """Tokens that end a sentence, `(ends,)`; empty if there are none."""
    ids = [] if config.eos_token_id is None else config.eos_token_id
    return torch.as_tensor(ids, dtype=torch.long).reshape(-1)


def _gather(histories: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`histories` `(sentences, beams, length)` of the `chosen` beams `(sentences, any)`."""
    return histories.gather(1, chosen[..., None].expand(-1, -1, histories.shape[-1]))


__all__ = [
    "BeamSearch",
    "DecoderWeights",
    "EnsembleDecoder",
    "ModelDecoder",
    "SentenceProcessor",
    "StepDecoder",
    "gnmt_length_penalty",
    "greedy_search",
]
