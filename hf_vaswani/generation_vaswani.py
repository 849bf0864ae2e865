"""The paper's beam search (section 6.1) inside transformers' `generate()`, and the fast way through it.

Two fields of the generation configuration select the paper's search. A checkpoint trained with this package has both
in its `generation_config.json`; `generate()` takes both as options.

- `length_penalty_form`: `"gnmt"` divides the log probability of a hypothesis by `((5 + n) / 6) ** length_penalty`,
  where `n` counts its tokens and the end token (Wu et al. 2016, which the paper follows). The search stops as soon as
  no unfinished hypothesis can still win. `"length"`, the default, is transformers' own penalty,
  `n ** length_penalty`, with its own stopping heuristic.
- `max_extra_tokens`: the greatest number of tokens by which a translation may exceed its own source (the paper: 50).
  It applies where neither `max_length` nor `max_new_tokens` is given.

`generate(..., ensemble=[model, ...])` searches with the mean of the probabilities of several models with the same
vocabulary.

Greedy and beam search run in the loops of `decoding_vaswani.py`, which give the results of transformers' own loops,
faster (up to rounding: in half precision two hypotheses of nearly the same score may change places). Everything else
runs in transformers' loops: sampling, scores of every step, streamers, other caches, custom processors, modified
modules, and all with `fast_decoding=False`. Only beam search with GNMT's penalty never does: there the loop of
`decoding_vaswani.py` calls the model's own `forward`.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .decoding_vaswani import (
    BeamSearch,
    DecoderWeights,
    EnsembleDecoder,
    ModelDecoder,
    SentenceProcessor,
    StepDecoder,
    end_tokens,
    greedy_search,
)
from .kernels_vaswani import Int8Linear


LENGTH_PENALTY_FORMS = ("length", "gnmt")
# Number of active `fixed_weights()` blocks of each model, and its packed weights. A model may be copied, so they are
# not kept in it.
PACKED: WeakKeyDictionary[nn.Module, tuple[int, DecoderWeights | None]] = WeakKeyDictionary()
PACKING = threading.Lock()

# Processors that treat each row of the batch by itself, so that sentences may leave it.
ROW_WISE_PROCESSORS = {
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
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
# Model inputs that the fast loops support.
ORDINARY_INPUTS = {"attention_mask", "decoder_input_ids", "encoder_outputs", "input_ids", "logits_to_keep"}
KNOWN_CRITERIA = {MaxLengthCriteria, EosTokenCriteria}
# Fields of the generation configuration that this model adds, and their defaults.
OWN_FIELDS = {"length_penalty_form": "length", "max_extra_tokens": None, "fast_decoding": True}
ROWS = 256  # beams in work at once on a CPU: more multiply no faster
FEW_ROWS = 4  # beams in work that multiply as fast with weights as they are


class SourceLengthLimit(StoppingCriteria):
    """Stopping criterion that ends each sentence at its own greatest length.

    Args:
        limits (`torch.Tensor` of shape `(rows,)`): Greatest number of tokens of each row, without the start token.
    """

    def __init__(self, limits: torch.Tensor):
        self.limits = limits

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        """`input_ids` `(rows * n, 1 + tokens)`: beam search has several candidates for each row, in its order."""
        limits = self.limits.repeat_interleave(len(input_ids) // len(self.limits))
        return input_ids.shape[1] - 1 >= limits


class ScoreRecorder(LogitsProcessor):
    """Logits processor that keeps the scores of every step, `(rows, vocab_size)` each, and changes nothing."""

    def __init__(self):
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps.append(scores.clone())
        return scores


class Search(NamedTuple):
    """Decisions of one call of `generate()` that its decoding loop needs."""

    is_fast: bool  # as far as can be told before the library's preparations
    length_penalty_form: str
    limits: torch.Tensor | None  # (sentences,), greatest number of tokens by `max_extra_tokens`
    ensemble: list[nn.Module]
    synced_gpus: bool | None


class VaswaniGenerationMixin(GenerationMixin):
    """`generate()` with the paper's search, ensembles and fast loops; everything else is transformers'."""

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Pack the decoder's weights once, and reuse them in all calls of `generate()` and in all threads.

        Packing takes as long as several steps, and several threads save memory by sharing.
        Changes of the weights inside the block are not seen.
        """
        with PACKING:
            users, weights = PACKED.get(self, (0, None))
            if weights is None and _is_plain(self):
                weights = DecoderWeights(self, for_many_calls=True)
            PACKED[self] = users + 1, weights
        try:
            yield
        finally:
            with PACKING:
                users, weights = PACKED[self]
                PACKED[self] = users - 1, weights
                if users == 1:
                    del PACKED[self]

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **options,
    ):
        """As transformers' [`~transformers.GenerationMixin.generate`], with four more options.

        Args:
            length_penalty_form, max_extra_tokens, fast_decoding: See the top of this file.
            ensemble (`list` of models, *optional*): Other models whose probabilities count as much as this model's.

        Raises:
            ValueError: An option has an impossible value, or an ensemble is asked for what it cannot do.
            TypeError: A model of the ensemble is of another class.
        """
        if isinstance(options.get("custom_generate"), str):  # code that reads all arguments itself
            return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **options)
        ensemble = options.pop("ensemble", None) or []
        own = {name: options.pop(name) for name in OWN_FIELDS if name in options}
        settings, model_inputs = self._settings(generation_config, own, options)
        self._check_ensemble(ensemble, model_inputs)
        mode = settings.get_generation_mode(options.get("assistant_model"))

        limits = None
        if settings.max_extra_tokens is not None and settings.max_length is None and settings.max_new_tokens is None:
            is_assisted = mode == GenerationMode.ASSISTED_GENERATION and options.get("custom_generate") is None
            limits, most = self._length_limits(inputs, model_inputs, settings, is_assisted)
            generation_config, options = _with_max_new_tokens(most, generation_config, options)
        is_custom = options.get("custom_generate") is not None
        if is_custom and own:
            generation_config = _with_fields(generation_config, own)
        call_library = partial(super().generate, inputs, generation_config, logits_processor, **options)
        if is_custom:
            _refuse(ensemble)
            return call_library(stopping_criteria=stopping_criteria)

        search = Search(
            is_fast=self._may_be_fast(mode, settings, logits_processor, stopping_criteria, model_inputs, ensemble),
            length_penalty_form=settings.length_penalty_form,
            limits=limits,
            ensemble=ensemble,
            synced_gpus=options.get("synced_gpus"),
        )
        is_gnmt = settings.length_penalty_form == "gnmt" and (
            mode == GenerationMode.BEAM_SAMPLE
            or (mode == GenerationMode.BEAM_SEARCH and options.get("streamer") is None)  # which the library refuses
        )
        if search.is_fast or is_gnmt:
            outputs = call_library(
                custom_generate=partial(VaswaniGenerationMixin._decode, search=search),
                **_with_stop_strings(stopping_criteria, settings, options.get("tokenizer")),
                **_copied_encoder_outputs(options),
            )
            if outputs is not None:
                return outputs
        _refuse(ensemble)
        if limits is not None:
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), SourceLengthLimit(limits)])
        return call_library(stopping_criteria=stopping_criteria, **_copied_encoder_outputs(options))

    def _settings(self, generation_config, own: dict, options: dict) -> tuple[GenerationConfig, dict]:
        """Merge the generation configuration of a call, with this model's own fields; also return the model's inputs.

        Options of the call come first, then its `generation_config`, then the model's.
        """
        settings = copy.deepcopy(generation_config) or GenerationConfig()
        settings.update(**self.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        model_inputs = settings.update(**options)
        for name, default in OWN_FIELDS.items():
            setattr(settings, name, own.get(name, vars(settings).get(name, default)))
        if settings.length_penalty_form not in LENGTH_PENALTY_FORMS:
            raise ValueError(
                f"length_penalty_form must be one of {', '.join(LENGTH_PENALTY_FORMS)}, "
                f"got {settings.length_penalty_form!r}."
            )
        if settings.max_extra_tokens is not None and settings.max_extra_tokens < 0:
            raise ValueError(f"max_extra_tokens must not be negative, got {settings.max_extra_tokens}.")
        return settings, {name: value for name, value in model_inputs.items() if value is not None}

    def _check_ensemble(self, ensemble: list[nn.Module], model_inputs: dict) -> None:
        for model in ensemble:
            if not isinstance(model, VaswaniGenerationMixin):
                raise TypeError(f"ensemble: expected Vaswani models, got {type(model).__name__}.")
            for field in ("vocab_size", "source_vocab_size"):
                if (found := getattr(model.config, field)) != (expected := getattr(self.config, field)):
                    raise ValueError(f"ensemble: a model has {field} {found}, this one {expected}.")
        if ensemble and {"encoder_outputs", "inputs_embeds"} & model_inputs.keys():
            raise ValueError("ensemble: every model reads input_ids, but encoder_outputs or inputs_embeds were given.")

    def _length_limits(self, inputs, model_inputs: dict, settings, is_assisted: bool) -> tuple[torch.Tensor, int]:
        """Greatest number of tokens of each sentence by `max_extra_tokens`, without the start token, `(sentences,)`,
        and the `max_new_tokens` of the batch."""
        batch, width = _source_shape(inputs, model_inputs)
        mask, prompt = model_inputs.get("attention_mask"), model_inputs.get("decoder_input_ids")
        source = torch.full((batch,), width, device=self.device) if mask is None else mask.sum(-1)
        limits, most = source + settings.max_extra_tokens, width + settings.max_extra_tokens

        prompt_length = 1
        if prompt is not None:
            start = (
                settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
            )
            has_start = (prompt[:, 0] == torch.as_tensor(start, device=prompt.device)).any().item()
            prompt_length = prompt.shape[1] + (not has_start)  # generate() puts the start token in front
        if self.config.position_embedding == "learned":
            places = self.config.max_position_embeddings
            limits, most = limits.clamp(max=places - 1), min(most, places - prompt_length)
        if is_assisted:
            # Several tokens may be accepted at once; only this keeps them from going past the limit.
            most = max(int(limits.max()) + 1 - prompt_length, 1)
        return limits, most

    def _may_be_fast(self, mode, settings, logits_processor, stopping_criteria, model_inputs, ensemble) -> bool:
        """Check that the fast loops support all options, as far as possible before `generate()` prepares them."""
        mask = model_inputs.get("attention_mask")
        asked = {name for name, value in model_inputs.items() if value is not False}
        return (
            settings.fast_decoding
            and (mode == GenerationMode.BEAM_SEARCH or mode == GenerationMode.GREEDY_SEARCH)
            and not (mode == GenerationMode.GREEDY_SEARCH and settings.return_dict_in_generate)
            and not (settings.output_scores or settings.output_logits or settings.output_attentions)
            and not (settings.output_hidden_states or settings.cache_implementation)
            and settings.use_cache is not False
            and settings.eos_token_id is not None
            and asked <= ORDINARY_INPUTS
            and (mask is None or (mask.dim() == 2 and bool(mask.any(-1).all())))
            and all(_is_row_wise(processor) for processor in logits_processor or ())
            and all(type(criterion) in KNOWN_CRITERIA for criterion in stopping_criteria or ())
            and all(_is_plain(model) for model in (self, *ensemble))
            and not (torch.compiler.is_compiling() or torch.is_autocast_enabled(self.device.type))
        )

    def _decode(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor,
        search: Search,
        **model_kwargs,
    ):
        """Run the decoding loop; `generate()` calls it with the inputs that it has prepared.

        Args:
            input_ids (`torch.LongTensor` of shape `(sentences * beams, prompt)`): Start token and forced prefix.
            inputs_tensor (`torch.Tensor` of shape `(sentences, source)`): Source tokens.
            search (`Search`): Decisions made before the preparations.

        Returns:
            Sequences or an output as `generate()` returns them; `None` where transformers' loop is needed.
        """
        beams = generation_config.num_beams
        prompt = input_ids[::beams]
        limits = torch.full((len(prompt),), generation_config.max_length - 1, device=prompt.device)
        if search.limits is not None:
            limits = torch.minimum(limits, search.limits.to(prompt.device))
        is_fast = (
            search.is_fast
            and all(_is_row_wise(processor) for processor in logits_processor)
            and all(_is_known(criterion, generation_config) for criterion in stopping_criteria)
        )
        if not is_fast:
            _refuse(search.ensemble)
            if search.length_penalty_form != "gnmt" or beams == 1:
                return None
            loop = (logits_processor, stopping_criteria, generation_config, search, model_kwargs)
            return self._beam_search_by_the_model(prompt, limits, *loop)

        is_whole = beams == 1 or prompt.shape[1] > 1 or logits_processor or prompt.device.type != "cpu"
        at_once = None if is_whole else max(1, ROWS // beams)
        decoder = self._step_decoder(search.ensemble, inputs_tensor, model_kwargs, beams, at_once)
        if beams == 1:
            eos, pad = end_tokens(generation_config).to(prompt.device), generation_config.pad_token_id
            return greedy_search(decoder, prompt, limits, eos, logits_processor, int(eos[0] if pad is None else pad))
        beam_search = BeamSearch(generation_config, search.length_penalty_form, logits_processor)
        sequences, scores, beam_indices = beam_search(decoder, prompt, limits)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateBeamEncoderDecoderOutput(
            sequences=sequences, sequences_scores=scores, beam_indices=beam_indices
        )

    def _step_decoder(
        self, ensemble, inputs_tensor, model_kwargs: dict, beams: int, at_once: int | None
    ) -> StepDecoder | EnsembleDecoder:
        """Decoder of a batch, every sentence of which `generate()` has repeated for each of its beams."""
        mask = model_kwargs.get("attention_mask")
        mask = None if mask is None else mask[::beams]
        states = [(self, model_kwargs["encoder_outputs"][0][::beams])]
        states += [(model, model.get_encoder()(inputs_tensor, attention_mask=mask)[0]) for model in ensemble]
        few = self.device.type == "cpu" and len(states[0][1]) * beams <= FEW_ROWS
        decoders = []
        for model, own in states:
            weights = PACKED.get(model, (0, None))[1] or DecoderWeights(model, for_few_rows=few)
            decoders.append(StepDecoder(model, own, mask, weights, at_once))
        return EnsembleDecoder(decoders) if ensemble else decoders[0]

    def _beam_search_by_the_model(
        self, prompt, limits, logits_processor, stopping_criteria, generation_config, search: Search, model_kwargs
    ):
        """Beam search with GNMT's penalty and options that the fast decoder does not support."""
        config, recorder = generation_config, ScoreRecorder()
        asked = {
            "logits": config.output_logits,
            "decoder_attentions": config.output_attentions,
            "cross_attentions": config.output_attentions,
            "decoder_hidden_states": config.output_hidden_states,
        }
        records = [name for name, is_asked in asked.items() if is_asked and config.return_dict_in_generate]
        keeps_scores = bool(config.output_scores and config.return_dict_in_generate)
        if keeps_scores:
            logits_processor = LogitsProcessorList([*logits_processor, recorder])

        def ends(tokens: torch.Tensor) -> torch.Tensor:
            return stopping_criteria(tokens, tuple(recorder.steps) if keeps_scores else None)

        decoder = ModelDecoder(self, model_kwargs, records, _stays_in_step(self, search.synced_gpus))
        beam_search = BeamSearch(config, search.length_penalty_form, logits_processor, ends)
        sequences, scores, beam_indices = beam_search(decoder, prompt, limits)
        decoder.finish()
        if not config.return_dict_in_generate:
            return sequences
        return GenerateBeamEncoderDecoderOutput(
            sequences=sequences,
            sequences_scores=scores if config.output_scores else None,
            scores=tuple(recorder.steps) if keeps_scores else None,
            beam_indices=beam_indices,
            encoder_attentions=model_kwargs["encoder_outputs"].get("attentions") if config.output_attentions else None,
            encoder_hidden_states=(
                model_kwargs["encoder_outputs"].get("hidden_states") if config.output_hidden_states else None
            ),
            past_key_values=model_kwargs.get("past_key_values"),
            **{name: tuple(steps) for name, steps in decoder.records.items()},
        )


def _with_fields(generation_config: GenerationConfig | None, values: dict) -> GenerationConfig:
    """Copy a configuration and set some fields."""
    generation_config = copy.copy(generation_config) or GenerationConfig()
    vars(generation_config).update(values)
    return generation_config


def _with_max_new_tokens(most: int, generation_config, options: dict) -> tuple[GenerationConfig | None, dict]:
    """Set `max_new_tokens` in the caller's configuration or else in the options; transformers warns of both."""
    if generation_config is None:
        return None, {**options, "max_new_tokens": most}
    options = {name: value for name, value in options.items() if name != "max_new_tokens"}
    return _with_fields(generation_config, {"max_new_tokens": most}), options


def _with_stop_strings(stopping_criteria, settings: GenerationConfig, tokenizer) -> dict:
    """Arguments for `generate()`, which does not hand the tokenizer of `stop_strings` on to a custom loop."""
    if settings.stop_strings is None or tokenizer is None:
        return {"stopping_criteria": stopping_criteria}
    strings = StopStringCriteria(tokenizer, settings.stop_strings)
    return {"stopping_criteria": StoppingCriteriaList([*(stopping_criteria or ()), strings]), "stop_strings": None}


def _copied_encoder_outputs(options: dict) -> dict:
    """Copy the caller's encoder outputs, which `generate()` repeats in place for every beam."""
    states = options.get("encoder_outputs")
    return {} if states is None else {"encoder_outputs": copy.copy(states)}


def _source_shape(inputs: torch.Tensor | None, model_inputs: dict) -> tuple[int, int]:
    """Number of sentences of a batch and length of its source."""
    sources = [inputs, model_inputs.get("input_ids"), model_inputs.get("inputs_embeds")]
    if "encoder_outputs" in model_inputs:
        sources.append(model_inputs["encoder_outputs"][0])
    for source in sources:
        if source is not None:
            return source.shape[0], source.shape[1]
    return 1, 1  # generate() starts from one token


def _stays_in_step(model: nn.Module, synced_gpus: bool | None) -> bool:
    """Check that all processes must call the model equally often; by default, those that share its weights."""
    if synced_gpus is not None:
        return synced_gpus
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_alone = not in_group or torch.distributed.get_world_size() == 1
    return not is_alone and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _refuse(ensemble: list[nn.Module]) -> None:
    if ensemble:
        raise ValueError(
            "An ensemble decodes by greedy or beam search, without sampling, streamers, outputs of every step, other "
            "caches, custom processors, or changes to its models."
        )


def _is_row_wise(processor: LogitsProcessor) -> bool:
    """Check that a processor allows sentences to leave the batch."""
    return type(processor) in ROW_WISE_PROCESSORS or isinstance(processor, SentenceProcessor)


def _is_known(criterion: StoppingCriteria, config: GenerationConfig) -> bool:
    """Check that a criterion is the configuration's; a caller's own may differ."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    if type(criterion) is EosTokenCriteria:
        return set(criterion.eos_token_id.tolist()) == set(end_tokens(config).tolist())
    return False


def _is_plain(model: nn.Module) -> bool:
    """Check that all modules are this package's: not quantised, adapted, hooked, sharded, wrapped or subclassed."""
    attention = model.model.decoder.config._attn_implementation
    if model.training or attention not in ("eager", "sdpa"):
        return False
    if attention == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        return False
    if any(callable(getattr(type(model), name, None)) for name in vars(model)):  # a replaced method
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


__all__ = ["VaswaniGenerationMixin"]
