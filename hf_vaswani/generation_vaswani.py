"""The paper's beam search (section 6.1) inside transformers' `generate()`, and the fast way through it.

Two fields of the generation configuration turn the paper's search on; a checkpoint trained with this package has both
in its `generation_config.json`, and both can be given to `generate()`:

- `length_penalty_form`: `"gnmt"` divides a hypothesis' log probability by `((5 + n) / 6) ** length_penalty`, `n` its
  tokens with the end token (Wu et al. 2016, which the paper follows), and stops as soon as no unfinished hypothesis
  can still win. `"length"`, the default, is transformers' own: `n ** length_penalty`, and its own stopping heuristic.
- `max_extra_tokens`: a translation has at most so many tokens more than its own source (the paper: 50). It applies
  where neither `max_length` nor `max_new_tokens` is given.

`generate(..., ensemble=[model, ...])` searches with the mean of the probabilities of this model and others that have
the same vocabulary.

Greedy and beam search take the loops of `decoding_vaswani.py`, which give what the library's own loops give, faster
(up to rounding: in half precision two hypotheses of nearly the same score may change places).
Whatever those do not know (sampling, scores of every step, streamers, other caches, custom processors, modified
modules, ...) goes the library's way, and so does everything with `fast_decoding=False`.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation import GenerationMixin
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .decoding_vaswani import BeamSearch, DecoderWeights, EnsembleDecoder, StepDecoder, greedy_search
from .int8_vaswani import Int8Linear


LENGTH_PENALTY_FORMS = ("length", "gnmt")
# Models in `fixed_weights()`, how often, and their weights as laid out; not in the models, which may be copied.
FIXED: WeakKeyDictionary[nn.Module, tuple[int, DecoderWeights | None]] = WeakKeyDictionary()
LAYING_OUT = threading.Lock()

# Processors that look at each row of the batch by itself, so that sentences may leave it.
ROW_WISE_PROCESSORS = {
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
}
PLAIN_MODULES = {Int8Linear, nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList}
# What `generate()` prepares for the model on an ordinary call.
ORDINARY_INPUTS = {"attention_mask", "encoder_outputs", "ensemble", "logits_to_keep", "past_key_values", "use_cache"}


def gnmt_length_penalty(length, alpha: float):
    """`((5 + length) / 6) ** alpha`, of a number or a tensor of lengths."""
    return ((5 + length) / 6) ** alpha


class SourceLengthLimit(StoppingCriteria):
    """Ends each sentence at its own greatest length.

    Args:
        limits (`torch.Tensor` of shape `(rows,)`): Tokens that each row may have, without the start token.
    """

    def __init__(self, limits: torch.Tensor):
        self.limits = limits

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        """`input_ids` `(rows, 1 + tokens)`; beam search has several candidates a row, in the order of the rows."""
        limits = self.limits.repeat_interleave(len(input_ids) // len(self.limits))
        return input_ids.shape[1] - 1 >= limits


class GnmtPenalty(float):
    """α, in the place of `length_penalty`, with what the stopping rule has to know.

    Args:
        alpha (`float`): The exponent.
        limits (`torch.Tensor` of shape `(batch,)`): Tokens that each sentence may have.
        wanted (`int`): Hypotheses to return for each sentence.
    """

    limits: torch.Tensor
    wanted: int

    def __new__(cls, alpha: float, limits: torch.Tensor, wanted: int):
        penalty = super().__new__(cls, alpha)
        penalty.limits, penalty.wanted = limits, wanted
        return penalty

    def __deepcopy__(self, memo):
        return self


class VaswaniGenerationMixin(GenerationMixin):
    """`generate()` with `length_penalty_form` and `max_extra_tokens`; everything else is transformers'."""

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Within, the weights stay as they are: `generate()` lays them out for its steps once, for all calls and
        threads, instead of in every call.

        That saves the laying out, which is a good part of the time for a single sentence, and with several threads
        memory. Weights that change within go unseen.
        """
        with LAYING_OUT:
            users, weights = FIXED.get(self, (0, None))
            if weights is None and _is_plain(self):
                weights = DecoderWeights(self)
            FIXED[self] = users + 1, weights
        try:
            yield
        finally:
            with LAYING_OUT:
                users, weights = FIXED[self]
                FIXED[self] = users - 1, weights
                if users == 1:
                    del FIXED[self]

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs):
        defaults = {"length_penalty_form": "length", "max_extra_tokens": None, "fast_decoding": True}
        given = {name: kwargs.pop(name) for name in defaults if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name, default in defaults.items():
            setattr(generation_config, name, given.get(name, getattr(generation_config, name, default)))
        if generation_config.length_penalty_form not in LENGTH_PENALTY_FORMS:
            raise ValueError(
                f"length_penalty_form must be one of {', '.join(LENGTH_PENALTY_FORMS)}, "
                f"got {generation_config.length_penalty_form!r}."
            )
        if generation_config.max_extra_tokens is not None and generation_config.max_extra_tokens < 0:
            raise ValueError(f"max_extra_tokens must not be negative, got {generation_config.max_extra_tokens}.")
        if model_kwargs.get("past_key_values") is not None:
            generation_config.fast_decoding = False
        self._check_ensemble(model_kwargs)
        return generation_config, model_kwargs

    def _check_ensemble(self, model_kwargs: dict) -> None:
        ensemble = model_kwargs.get("ensemble") or ()
        for model in ensemble:
            if not isinstance(model, VaswaniGenerationMixin):
                raise TypeError(f"ensemble: expected Vaswani models, got {type(model).__name__}.")
            if model.config.vocab_size != self.config.vocab_size:
                found, expected = model.config.vocab_size, self.config.vocab_size
                raise ValueError(f"ensemble: a model has a vocabulary of {found}, this one {expected}.")
        if ensemble and {"encoder_outputs", "inputs_embeds"} & model_kwargs.keys():
            raise ValueError("ensemble: every model reads input_ids, but encoder_outputs or inputs_embeds were given.")

    def _validate_model_kwargs(self, model_kwargs: dict) -> None:
        super()._validate_model_kwargs({name: value for name, value in model_kwargs.items() if name != "ensemble"})

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor, model_kwargs, model_input_name, generation_config
    ):
        ensemble = model_kwargs.pop("ensemble", None)
        model_kwargs = super()._prepare_text_encoder_decoder_kwargs_for_generation(
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )
        if ensemble:
            mask = model_kwargs.get("attention_mask")
            model_kwargs["ensemble"] = {
                model: model.get_encoder()(inputs_tensor, attention_mask=mask)[0] for model in ensemble
            }
        return model_kwargs

    def _prepare_generated_length(
        self, generation_config, has_default_max_length, input_ids_length, inputs_tensor, **kwargs
    ):
        extra = generation_config.max_extra_tokens
        if not has_default_max_length or generation_config.max_new_tokens is not None:
            generation_config.max_extra_tokens = extra = None
        if extra is not None:
            generation_config.max_new_tokens = inputs_tensor.shape[1] + extra
            if self.config.position_embedding == "learned":
                room = self.config.max_position_embeddings - input_ids_length
                generation_config.max_new_tokens = min(generation_config.max_new_tokens, room)
        return super()._prepare_generated_length(
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
            **kwargs,
        )

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        limits = _length_limits(input_ids, generation_config, kwargs)
        if not generation_config.return_dict_in_generate and self._is_fast(
            input_ids, logits_processor, stopping_criteria, generation_config, kwargs
        ):
            decoder = self._decoder(kwargs)
            eos, pad = generation_config._eos_token_tensor, int(generation_config._pad_token_tensor)
            return greedy_search(decoder, input_ids, limits, eos, logits_processor, pad)
        _refuse_ensemble(kwargs)
        stopping_criteria.append(SourceLengthLimit(limits))
        return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    def _assisted_decoding(
        self, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **kwargs
    ):
        # `generate()` passes `inputs_tensor` on only where it is a parameter of its own.
        _refuse_ensemble(kwargs)
        limits = _length_limits(input_ids, generation_config, kwargs)
        stopping_criteria.append(SourceLengthLimit(limits))
        # Several tokens may be accepted at once; only `max_length` keeps them from going past the limit.
        generation_config = copy.copy(generation_config)
        generation_config.max_length = 1 + max(limits.max().item(), input_ids.shape[1])
        return super()._assisted_decoding(
            input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=inputs_tensor, **kwargs
        )

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        limits = _length_limits(input_ids, generation_config, kwargs)
        if self._is_fast(input_ids, logits_processor, stopping_criteria, generation_config, kwargs):
            return self._fast_beam_search(input_ids, logits_processor, generation_config, limits, kwargs)
        _refuse_ensemble(kwargs)
        stopping_criteria.append(SourceLengthLimit(limits))
        if generation_config.length_penalty_form == "gnmt":
            generation_config = copy.copy(generation_config)
            generation_config.length_penalty = GnmtPenalty(
                generation_config.length_penalty,
                limits[:: generation_config.num_beams],
                generation_config.num_return_sequences,
            )
        return super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    def _is_fast(self, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs) -> bool:
        """Whether all that is asked for is what `decoding_vaswani.py` does."""
        config = generation_config
        mask = model_kwargs.get("attention_mask")
        given = {name for name, value in model_kwargs.items() if value is not None and value is not False}
        return (
            config.fast_decoding
            and not (config.do_sample or config.output_scores or config.output_logits)
            and not (config.output_attentions or config.output_hidden_states or config.cache_implementation)
            and config.use_cache
            and config._eos_token_tensor is not None
            and config._pad_token_tensor is not None
            and given <= ORDINARY_INPUTS
            and (mask is None or (mask.dim() == 2 and bool(mask.any(-1).all())))
            and all(type(processor) in ROW_WISE_PROCESSORS for processor in logits_processor)
            and all(_is_known_criterion(criterion, config) for criterion in stopping_criteria)
            and not (torch.compiler.is_compiling() or torch.is_autocast_enabled(input_ids.device.type))
            and all(_is_plain(model) for model in (self, *model_kwargs.get("ensemble", {})))
        )

    def _decoder(self, model_kwargs: dict, beams: int = 1) -> StepDecoder | EnsembleDecoder:
        """The decoder of a batch, whose every sentence `generate()` has repeated for each of its beams."""
        mask = model_kwargs.get("attention_mask")
        mask = None if mask is None else mask[::beams]
        states = [(self, model_kwargs["encoder_outputs"][0][::beams]), *model_kwargs.get("ensemble", {}).items()]
        decoders = [StepDecoder(model, own, mask, FIXED.get(model, (0, None))[1]) for model, own in states]
        return EnsembleDecoder(decoders) if "ensemble" in model_kwargs else decoders[0]

    def _fast_beam_search(self, input_ids, logits_processor, generation_config, limits, model_kwargs):
        beams, alpha = generation_config.num_beams, generation_config.length_penalty
        # The library's choice: an id of 0 is taken for none.
        fill = int(generation_config._pad_token_tensor or generation_config._eos_token_tensor[0])

        def penalty(limits: torch.Tensor):
            if generation_config.length_penalty_form == "gnmt":
                return GnmtPenalty(alpha, limits, generation_config.num_return_sequences)
            return alpha

        search = BeamSearch(self, generation_config, logits_processor, fill)
        decoder = self._decoder(model_kwargs, beams)
        sequences, scores, beam_indices = search(decoder, input_ids[::beams], limits[::beams], penalty)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateBeamEncoderDecoderOutput(
            sequences=sequences, sequences_scores=scores, beam_indices=beam_indices
        )

    def _update_finished_beams(self, *, topk_log_probs, cur_len, decoder_prompt_len, length_penalty, **kwargs):
        if isinstance(length_penalty, GnmtPenalty):
            length = cur_len + 1 - decoder_prompt_len
            topk_log_probs = topk_log_probs / gnmt_length_penalty(length, float(length_penalty))
            length_penalty = 0.0  # divided already
        return super()._update_finished_beams(
            topk_log_probs=topk_log_probs,
            cur_len=cur_len,
            decoder_prompt_len=decoder_prompt_len,
            length_penalty=length_penalty,
            **kwargs,
        )

    def _check_early_stop_heuristic(
        self,
        is_early_stop_heuristic_unsatisfied,
        running_beam_scores,
        beam_scores,
        cur_len,
        decoder_prompt_len,
        length_penalty,
        **kwargs,
    ):
        if not isinstance(length_penalty, GnmtPenalty):
            return super()._check_early_stop_heuristic(
                is_early_stop_heuristic_unsatisfied,
                running_beam_scores,
                beam_scores,
                cur_len=cur_len,
                decoder_prompt_len=decoder_prompt_len,
                length_penalty=length_penalty,
                **kwargs,
            )
        # Log probabilities only fall, so an unfinished hypothesis scores best if it adds nothing more to its own and
        # ends where the penalty is greatest: as late as it may, or for a negative α as soon as it can.
        alpha = float(length_penalty)
        soonest = torch.full_like(length_penalty.limits, cur_len + 1 - decoder_prompt_len)
        latest = torch.maximum(length_penalty.limits + 1 - decoder_prompt_len, soonest)
        ending = latest if alpha >= 0 else soonest
        best_possible = running_beam_scores[:, 0] / gnmt_length_penalty(ending, alpha)
        worst_wanted = beam_scores[:, length_penalty.wanted - 1]  # sorted; very low until so many have finished
        return is_early_stop_heuristic_unsatisfied & (best_possible > worst_wanted)[:, None]


def _refuse_ensemble(model_kwargs: dict) -> None:
    if "ensemble" in model_kwargs:
        raise ValueError(
            "An ensemble decodes by greedy or beam search, without sampling, streamers, outputs of every step, other "
            "caches, custom processors, or changes to its models."
        )


def _is_known_criterion(criterion: StoppingCriteria, config: GenerationConfig) -> bool:
    """Whether a criterion says what the configuration says too; one's own may say something else."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    if type(criterion) is EosTokenCriteria:
        return set(criterion.eos_token_id.tolist()) == set(config._eos_token_tensor.tolist())
    return False


def _is_plain(model: nn.Module) -> bool:
    """Whether all that the library's loop would call is what this package made: not quantised, adapted, hooked, split,
    wrapped, or of a class that was derived from it."""
    attention = model.model.decoder.config._attn_implementation
    if model.training or attention not in ("eager", "sdpa"):
        return False
    if attention == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return False
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if getattr(getattr(model, name), "__func__", None) is not getattr(GenerationMixin, name):
            return False
    own = __name__.removesuffix("generation_vaswani")
    for module in (model, model.model, model.lm_head, *model.model.decoder.modules()):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
        source = type(module).__module__
        is_activation = source in ("torch.nn.modules.activation", "transformers.activations")
        if not (type(module) in PLAIN_MODULES or is_activation or source == own + "modeling_vaswani"):
            return False
        if any(type(parameter) is not nn.Parameter for parameter in module.parameters(recurse=False)):
            return False
    return True


def _length_limits(
    input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict
) -> torch.Tensor:
    """Greatest number of tokens of each row of `input_ids`, without the start token; `(rows,)`."""
    longest = torch.full((len(input_ids),), generation_config.max_length - 1, device=input_ids.device)
    if generation_config.max_extra_tokens is None:
        return longest
    mask, states = model_kwargs.get("attention_mask"), model_kwargs["encoder_outputs"][0]
    source = torch.full_like(longest, states.shape[1]) if mask is None else mask.sum(-1)
    return torch.minimum(longest, source + generation_config.max_extra_tokens)


__all__ = ["VaswaniGenerationMixin", "gnmt_length_penalty"]
