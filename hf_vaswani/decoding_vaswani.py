"""What makes `generate()` fast: the decoder, one token a step, with nothing computed or moved twice.

- The encoder's output is projected to keys and values once a sentence, not once a beam; the beams of a sentence are so
  many query rows on one copy.
- The cache is not reordered when beams change places. All beams of a sentence write into the same slots, and a mask
  says which slots are a beam's own past. Slots that no beam sees any more are dropped from time to time.
- Sentences that are finished leave the batch.
- On a CPU, weights are laid out once for all steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn import functional as F

from .int8_vaswani import Int8Linear


class PackedLinear:
    """Linear layers as one, with their outputs one after the other, and weights laid out as the processor likes them.

    On a CPU oneDNN else lays the weights out anew in every call, which for the few rows of a step takes as long as the
    product.

    Args:
        *layers (`nn.Linear` or `Int8Linear`): All of one class, with a bias or all without.
    """

    def __init__(self, *layers: nn.Module):
        self.weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        self.bias = layers[0].bias
        if self.bias is not None and len(layers) > 1:
            self.bias = torch.cat([layer.bias for layer in layers])
        self.is_packed = (
            self.weight.device.type == "cpu"
            and self.weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()
            and torch.backends.mkldnn.enabled
        )
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), None)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(rows, in_features)` to `(rows, out_features)`."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return F.linear(inputs, self.weight, self.bias)


def packed(*layers: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Linear layers as one, with their outputs one after the other, as fast as may be."""
    if len({(type(layer), layer.bias is None) for layer in layers}) > 1:
        parts = [packed(layer) for layer in layers]
        return lambda inputs: torch.cat([part(inputs) for part in parts], dim=-1)
    if isinstance(layers[0], Int8Linear):
        return Int8Linear.joined(layers)
    return PackedLinear(*layers)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, which is computed in 32 bits.

    On a CPU torch takes many times as long for fewer numbers than fit into a register, 16, as for 16.
    """
    wide, length = scores.float(), scores.shape[-1]
    if length < 16 and scores.device.type == "cpu":
        wide = F.pad(wide, (0, 16 - length), value=-torch.inf)
    return wide.softmax(-1)[..., :length].to(scores.dtype)


class LayerWeights:
    """One decoder layer's weights, as a step needs them."""

    def __init__(self, layer: nn.Module):
        attention, cross_attention, feed_forward = layer.self_attn, layer.encoder_attn, layer.feed_forward
        self.qkv = packed(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = packed(attention.o_proj)
        self.cross_query, self.cross_output = packed(cross_attention.q_proj), packed(cross_attention.o_proj)
        self.cross_keys_values = packed(cross_attention.k_proj, cross_attention.v_proj)
        self.inner, self.outer = packed(feed_forward.fc1), packed(feed_forward.fc2)
        self.activation = feed_forward.activation
        self.norms = (layer.self_attn_residual, layer.encoder_attn_residual, layer.feed_forward_residual)


class DecoderWeights:
    """The weights of a model's decoder and of its projection to the vocabulary, as a step needs them."""

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        self.layers = [LayerWeights(layer) for layer in model.model.decoder.layers]
        self.head = packed(model.lm_head)


class StepDecoder:
    """The decoder of a batch of sentences, each with the same number of beams.

    Args:
        model (`VaswaniForConditionalGeneration`): Whose decoder to run.
        encoder_states (`torch.Tensor` of shape `(sentences, source, d_model)`): The encoder's output.
        encoder_mask (`torch.Tensor` of shape `(sentences, source)`, *optional*): 0 on padding.
        weights (`DecoderWeights`, *optional*): Of the model, where they are at hand.
    """

    ROOM = 4  # steps to make room for when the cache is full

    def __init__(
        self,
        model: nn.Module,
        encoder_states: torch.Tensor,
        encoder_mask: torch.Tensor | None,
        weights: DecoderWeights | None = None,
    ):
        config, decoder = model.config, model.model.decoder
        self.heads, self.d_k, self.d_v = config.num_heads, config.d_k, config.d_v
        self.scaling = config.d_k**-0.5
        self.decoder = decoder
        weights = weights or DecoderWeights(model)
        self.layers, self.head = weights.layers, weights.head
        self.sentences = len(encoder_states)
        self.dtype, self.device = encoder_states.dtype, encoder_states.device
        self.hidden_value = torch.finfo(self.dtype).min

        self.source_mask = None  # (sentences, source), added to the scores
        if encoder_mask is not None and not encoder_mask.all():
            self.source_mask = torch.zeros_like(encoder_mask, dtype=self.dtype)
            self.source_mask.masked_fill_(encoder_mask == 0, self.hidden_value)
        self.source_keys, self.source_values = [], []
        for layer in self.layers:
            keys, values = layer.cross_keys_values(encoder_states).split(
                (self.heads * self.d_k, self.heads * self.d_v), dim=-1
            )
            self.source_keys.append(self._heads(keys, self.d_k))
            self.source_values.append(self._heads(values, self.d_v))

        self.length = 0  # steps taken
        self.used = self.room = 0  # slots of the cache in use, and in all
        self.keys: list[torch.Tensor] = [self._slots(0, self.d_k) for _ in self.layers]
        self.values: list[torch.Tensor] = [self._slots(0, self.d_v) for _ in self.layers]
        self.visible = torch.ones(
            self.sentences, 1, 0, dtype=torch.bool, device=self.device
        )  # (sentences, beams, slots)

    def _slots(self, count: int, width: int) -> torch.Tensor:
        return torch.empty(self.sentences * self.heads, count, width, dtype=self.dtype, device=self.device)

    def _heads(self, states: torch.Tensor, width: int) -> torch.Tensor:
        """`(sentences, length, heads * width)` as `(sentences * heads, length, width)`."""
        states = states.unflatten(-1, (self.heads, width)).transpose(1, 2)
        return states.reshape(-1, *states.shape[2:])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, `(sentences * beams, vocab_size)`, in 32 bits; `tokens` as of [`step`]."""
        return self.head(self.step(tokens)).float()

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
        mask = self._mask(self.visible) if beams > 1 else None
        source_mask = None
        if self.source_mask is not None:
            source_mask = self.source_mask[:, None].expand(-1, self.heads, -1).flatten(0, 1)[:, None]

        position = torch.full((1, 1), self.length, device=self.device)
        embedded = self.decoder.embed_tokens(tokens) * self.decoder.embed_scale
        hidden = self.decoder.embed_positions(embedded, position).flatten(0, 1)  # (sentences * beams, d_model)
        for index, layer in enumerate(self.layers):
            hidden = self._layer(index, layer, hidden, new, mask, source_mask)
        self.length += 1
        return hidden

    def _layer(self, index, layer, hidden, new: slice, mask, source_mask) -> torch.Tensor:
        beams = new.stop - new.start
        query, key, value = layer.qkv(hidden).split(
            (self.heads * self.d_k, self.heads * self.d_k, self.heads * self.d_v), dim=-1
        )
        self.keys[index][:, new] = self._heads(key.unflatten(0, (-1, beams)), self.d_k)
        self.values[index][:, new] = self._heads(value.unflatten(0, (-1, beams)), self.d_v)
        attended = self._attend(query, beams, self.keys[index][:, : new.stop], self.values[index][:, : new.stop], mask)
        hidden = layer.norms[0](hidden, layer.output(attended))

        query = layer.cross_query(hidden)
        attended = self._attend(query, beams, self.source_keys[index], self.source_values[index], source_mask)
        hidden = layer.norms[1](hidden, layer.cross_output(attended))
        return layer.norms[2](hidden, layer.outer(layer.activation(layer.inner(hidden))))

    def _attend(self, query, beams: int, keys, values, mask) -> torch.Tensor:
        """Attention (section 3.2.1) of `query` `(sentences * beams, heads * d_k)`, whose last dimension becomes
        `heads * d_v`."""
        query = self._heads(query.unflatten(0, (-1, beams)), self.d_k)
        if mask is None:
            scores = torch.bmm(query, keys.transpose(1, 2)).mul_(self.scaling)
        else:
            scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self.scaling)
        attended = torch.bmm(softmax(scores), values)  # (sentences * heads, beams, d_v)
        return attended.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """What to add to the scores of all heads, `(sentences * heads, beams, slots)`."""
        mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, self.hidden_value)
        return mask[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def reorder(self, parents: torch.Tensor) -> None:
        """Each beam goes on from another one: `parents` `(sentences, beams)`, which may be more beams than before."""
        self.visible = self.visible.gather(1, parents[..., None].expand(-1, -1, self.used))

    def compact(self, kept: torch.Tensor | None, beams: int) -> None:
        """Keep some sentences, all if `None`, and of the cache what their beams see; make room for more steps."""
        visible = self.visible if kept is None else self.visible[kept]
        live = visible.any(1)  # (sentences, slots)
        used = int(live.sum(1).max()) if live.numel() else 0
        slots = live.int().argsort(dim=1, descending=True, stable=True)[:, :used]
        rows = torch.arange(self.sentences, device=self.device) if kept is None else kept
        rows = (rows[:, None] * self.heads + torch.arange(self.heads, device=self.device)).flatten()
        self.visible = visible.gather(2, slots[:, None].expand(-1, visible.shape[1], -1))
        # Whole rows of memory are copied at once, the slots to come among them, whatever they hold.
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
        for cache in (self.source_keys, self.source_values):
            for index, old in enumerate(cache):
                cache[index] = old.index_select(0, rows)
        if self.source_mask is not None:
            self.source_mask = self.source_mask[kept]


class EnsembleDecoder:
    """Decoders of several models, with the same vocabulary and for the same sentences, that step together."""

    def __init__(self, decoders: list[StepDecoder]):
        self.decoders = decoders

    def step(self, tokens: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.step(tokens)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logarithms of the mean of the models' probabilities, `(sentences * beams, vocab_size)`."""
        each = torch.stack([decoder.logits(tokens).log_softmax(-1) for decoder in self.decoders])
        return each.logsumexp(0) - math.log(len(self.decoders))

    def reorder(self, parents: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.reorder(parents)

    def compact(self, kept: torch.Tensor | None, beams: int) -> None:
        for decoder in self.decoders:
            decoder.compact(kept, beams)


def read_prompt(decoder: StepDecoder | EnsembleDecoder, prompt: torch.Tensor) -> None:
    """Steps through all tokens of `prompt` `(sentences, length)` but the last, whose step chooses the next."""
    for place in range(prompt.shape[1] - 1):
        decoder.step(prompt[:, place : place + 1])


@dataclass
class Hypotheses:
    """What a beam search knows of each sentence; the first dimension of every tensor is the sentence.

    A beam's history is its tokens and, for each behind the prompt, the row of the library's batch they came from.
    """

    index: torch.Tensor  # (sentences,), of the sentence in the batch
    limits: torch.Tensor  # (sentences,), greatest number of tokens
    tokens: torch.Tensor  # (sentences, beams, length)
    origins: torch.Tensor  # (sentences, beams, length - prompt)
    scores: torch.Tensor  # (sentences, beams), log probabilities
    finished_tokens: torch.Tensor  # (sentences, beams, length)
    finished_origins: torch.Tensor  # (sentences, beams, length - prompt)
    finished_scores: torch.Tensor  # (sentences, beams), divided by the length penalty
    is_finished: torch.Tensor  # (sentences, beams)
    improvable: torch.Tensor  # (sentences, 1), whether the search of the sentence goes on

    def select(self, kept: torch.Tensor) -> "Hypotheses":
        return Hypotheses(*(getattr(self, field.name)[kept] for field in fields(self)))


NEVER = -1e9  # the library's log probability of what must not be chosen


def start_hypotheses(prompt: torch.Tensor, limits: torch.Tensor, beams: int) -> Hypotheses:
    """Every beam at the prompt `(sentences, length)`; only the first counts, as they are all the same."""
    sentences, device = len(prompt), prompt.device
    scores = torch.full((sentences, beams), NEVER, device=device)
    scores[:, 0] = 0
    tokens = prompt[:, None].expand(-1, beams, -1)
    origins = torch.empty(sentences, beams, 0, dtype=torch.int32, device=device)
    return Hypotheses(
        index=torch.arange(sentences, device=device),
        limits=limits,
        tokens=tokens,
        origins=origins,
        scores=scores,
        finished_tokens=tokens,
        finished_origins=origins,
        finished_scores=torch.full_like(scores, NEVER),
        is_finished=torch.zeros_like(scores, dtype=torch.bool),
        improvable=torch.ones(sentences, 1, dtype=torch.bool, device=device),
    )


class BeamSearch:
    """Beam search by the library's rules, sentence by sentence: the same hypotheses and scores as its own loop.

    Args:
        model (`VaswaniForConditionalGeneration`): Which rates and ends hypotheses, by the methods that the library's
            loop calls too.
        config (`GenerationConfig`): Number of beams, penalty, and when to stop.
        processors (`LogitsProcessorList`): None that tells the rows of a batch apart.
        fill (`int`): What follows the end of a sequence.
    """

    LEAVE = 0.95  # finished sentences leave when no more than this share of the batch goes on

    def __init__(self, model: nn.Module, config, processors, fill: int):
        self.model, self.config, self.processors, self.fill = model, config, processors, fill
        self.beams, self.eos = config.num_beams, config._eos_token_tensor
        self.candidates = max(2, 1 + len(self.eos)) * self.beams
        self.in_beam = torch.arange(self.candidates, device=self.eos.device) < self.beams

    @torch.no_grad()
    def __call__(
        self, decoder: StepDecoder | EnsembleDecoder, prompt: torch.Tensor, limits: torch.Tensor, penalty: Callable
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            decoder (`StepDecoder` or `EnsembleDecoder`): Of the sentences.
            prompt (`torch.Tensor` of shape `(sentences, prompt)`): What all outputs begin with: the start token, and
                what may be forced behind it.
            limits (`torch.Tensor` of shape `(sentences,)`): Tokens that each sentence may have.
            penalty: Makes the `length_penalty` for some sentences from their `limits`.

        Returns:
            Sequences `(sentences * returned, length)`, scores `(sentences * returned,)` and beam indices
            `(sentences * returned, length - prompt)`.
        """
        read_prompt(decoder, prompt)
        self.prompt = prompt.shape[1]
        state, ended = start_hypotheses(prompt, limits, self.beams), []
        while True:
            state, hit_all = self._advance(state, decoder, penalty(state.limits))
            full = state.is_finished.all(-1, keepdim=True) & (self.config.early_stopping is True)
            state.improvable &= ~full & ~hit_all
            going_on = int(state.improvable.sum())
            if not going_on:
                return self._collect([*ended, state])
            if going_on <= self.LEAVE * len(state.index):
                kept = state.improvable[:, 0].nonzero()[:, 0]
                ended.append(state.select((~state.improvable[:, 0]).nonzero()[:, 0]))
                state = state.select(kept)
                decoder.compact(kept, self.beams)

    def _advance(
        self, state: Hypotheses, decoder: StepDecoder | EnsembleDecoder, penalty
    ) -> tuple[Hypotheses, torch.Tensor]:
        """One token more. Also returns which sentences have no candidate that could go on, `(sentences, 1)`."""
        length = state.tokens.shape[-1]
        # At first all beams are the same; one is enough, if it has candidates for all.
        enough = self.model.lm_head.out_features >= self.candidates and not self.processors
        rows = 1 if length == self.prompt and enough else self.beams
        scores = decoder.logits(state.tokens[:, :rows, -1]).log_softmax(-1)
        if self.processors:
            scores = self.processors(state.tokens[:, :rows].flatten(0, 1), scores)
        vocabulary = scores.shape[-1]
        scores = scores.unflatten(0, (-1, rows)).add_(state.scores[:, :rows, None])
        top, index = scores.flatten(1).topk(self.candidates)  # (sentences, candidates)
        parents, token = index // vocabulary, index % vocabulary

        origin = (parents + state.index[:, None] * self.beams)[..., None].int()
        tokens = torch.cat((_gather(state.tokens, parents), token[..., None]), dim=-1)
        origins = torch.cat((_gather(state.origins, parents), origin), dim=-1)
        ends = torch.isin(token, self.eos) | (length >= state.limits)[:, None]

        finished_tokens, state.finished_scores, finished_origins, state.is_finished = (
            self.model._update_finished_beams(
                sequences=F.pad(state.finished_tokens, (0, 1), value=self.fill),
                topk_running_sequences=tokens,
                beam_scores=state.finished_scores,
                topk_log_probs=top,
                beam_indices=F.pad(state.finished_origins, (0, 1), value=-1),
                topk_running_beam_indices=origins,
                is_early_stop_heuristic_unsatisfied=state.improvable,
                is_sent_finished=state.is_finished,
                next_token_hits_stopping_criteria=ends,
                top_num_beam_mask=self.in_beam,
                num_beams=self.beams,
                cur_len=length,
                decoder_prompt_len=self.prompt,
                length_penalty=penalty,
                early_stopping=self.config.early_stopping,
            )
        )
        state.finished_tokens, state.finished_origins = finished_tokens, finished_origins

        state.scores, best = (top + ends * NEVER).topk(self.beams)
        state.tokens, state.origins = _gather(tokens, best), _gather(origins, best)
        decoder.reorder(parents.gather(1, best))
        state.improvable = self.model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=state.improvable,
            running_beam_scores=state.scores,
            beam_scores=state.finished_scores,
            is_sent_finished=state.is_finished,
            cur_len=length + 1,
            max_length=self.config.max_length,
            decoder_prompt_len=self.prompt,
            early_stopping=self.config.early_stopping,
            length_penalty=penalty,
        )
        return state, ends.all(-1, keepdim=True)

    def _collect(self, states: list[Hypotheses]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _gather(histories: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`histories` `(sentences, beams, length)` of the `chosen` beams `(sentences, any)`."""
    return histories.gather(1, chosen[..., None].expand(-1, -1, histories.shape[-1]))


@torch.no_grad()
def greedy_search(
    decoder: StepDecoder | EnsembleDecoder,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    eos: torch.Tensor,
    processors,
    fill: int,
) -> torch.Tensor:
    """The likeliest next token, again and again, as the library's loop does without sampling.

    Args:
        decoder, prompt, limits, processors, fill: As of [`BeamSearch`].
        eos (`torch.Tensor` of shape `(ends,)`): Tokens that end a sentence.

    Returns:
        Sequences `(sentences, length)`.
    """
    read_prompt(decoder, prompt)
    tokens = sequences = prompt
    rows = torch.arange(len(prompt), device=prompt.device)
    while True:
        logits = decoder.logits(tokens[:, -1:])
        if processors:
            logits = processors(tokens, logits)
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


__all__ = ["BeamSearch", "DecoderWeights", "EnsembleDecoder", "StepDecoder", "greedy_search"]
