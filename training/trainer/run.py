"""Training run: load the data, learn the vocabulary, build the model, and train."""

import contextlib
import logging
import math
import signal
from pathlib import Path

from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import has_length

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..data.encoding import FilteredStream, filter_by_length, tokenize
from ..data.pairs import load_hub_pairs, load_pairs
from ..data.readers import DataError
from ..data.tokenizer import extend_tokenizer, train_tokenizer
from ..inference.checkpoint_files import check_size
from ..inference.loading import load_tokenizer
from ..paper import GENERATION, paper_learning_rate
from .arguments import DataArguments, ModelArguments, VaswaniTrainingArguments
from .averaging import write_average
from .checkpoints import (
    PARTIAL,
    check_files,
    checkpoint_folders,
    clear_partial,
    complete_checkpoints,
    naming_what_failed,
    put_files_in_place,
    read_state,
)
from .fine_tuning import EarlyStopping, add_adapters, load_model, merge_adapters, starting_checkpoint
from .manifest import check_same_run, make_manifest
from .run_lock import lock_run
from .signals import StopOnSignal
from .trainer import VaswaniTrainer


logger = logging.getLogger(__name__)


OPTIMISER_STATES = (("optimizer*", "scheduler*"), ("global_step*",))  # the second is DeepSpeed's


def checkpoint_to_resume(args: VaswaniTrainingArguments) -> str | None:
    """Checkpoint to resume from; `None` for a new run.

    Raises:
        FileExistsError: The folder has checkpoints, but `resume` is not set.
        FileNotFoundError: `resume` is set, but all checkpoints are incomplete or the last lacks the optimiser state.
        OSError: A file of the last checkpoint is damaged or missing.
        ValueError: The Trainer's state in the checkpoint is malformed.
    """
    with args.main_process_first(desc="looking for checkpoints", local=False):
        if args.resume and args.process_index == 0:
            clear_partial(args.output_dir)
        checkpoints = complete_checkpoints(args.output_dir)
    if checkpoints and not args.resume:
        raise FileExistsError(
            f"{args.output_dir} already has {checkpoints[-1].name}: pass --resume to continue it, "
            "or another --output_dir."
        )
    if args.resume and not checkpoints:
        if checkpoint_folders(args.output_dir):
            raise FileNotFoundError(f"--resume: no complete checkpoint in {args.output_dir}.")
        logger.warning("--resume: %s has no checkpoint yet; the run starts from its beginning.", args.output_dir)
    if not checkpoints:
        return None
    if args.process_index == 0:  # one process suffices
        check_files(checkpoints[-1])
        read_state(checkpoints[-1])  # transformers does not validate the state
    check_optimiser_state(checkpoints[-1], args.deepspeed_plugin is not None)
    return str(checkpoints[-1])


def check_optimiser_state(checkpoint: Path, deepspeed: bool) -> None:
    """Raise FileNotFoundError if the optimiser state is missing or in the wrong format.

    The Trainer would resume without the state. Only a run under DeepSpeed reads DeepSpeed's format.
    """
    has_regular, has_deepspeed = (all(any(checkpoint.glob(name)) for name in names) for names in OPTIMISER_STATES)
    if has_deepspeed if deepspeed else has_regular:
        return
    if has_deepspeed or has_regular:
        raise FileNotFoundError(
            f"--resume: the optimiser state in {checkpoint} was written {'by' if has_deepspeed else 'without'} "
            f"DeepSpeed, but this run is {'without' if has_deepspeed else 'with'} DeepSpeed: launch it like the "
            "earlier run."
        )
    raise FileNotFoundError(f"--resume: {checkpoint} has no optimiser state (save_only_model).")


def load_datasets(data: DataArguments) -> tuple[Dataset | IterableDataset, Dataset | None]:
    """Load training and evaluation pairs as text.

    Raises:
        DataError: The data is unusable, or no training data is given.
    """
    langs = data.source_lang, data.target_lang
    if data.dataset_name:
        train, evaluation = (
            load_hub_pairs(data.dataset_name, data.dataset_config, split, *langs, data.streaming, data.num_proc)
            for split in (data.train_split, data.eval_split)
        )
        return train, Dataset.from_list(list(evaluation)) if data.streaming else evaluation
    if not data.train_files:
        raise DataError("No training data: set train_files or dataset_name.")
    train = load_pairs(data.train_files, *langs, drop_empty=data.drop_empty, streaming=data.streaming)
    evaluation = load_pairs(data.eval_files, *langs, drop_empty=data.drop_empty) if data.eval_files else None
    return train, evaluation


def get_tokenizer(
    model_args: ModelArguments,
    train: Dataset | IterableDataset,
    checkpoint: str | None,
    start: Path | None,
    args: VaswaniTrainingArguments,
) -> PreTrainedTokenizerBase:
    """Load, learn or extend the run's tokenizer.

    The tokenizer is loaded from the checkpoint to resume, from `tokenizer_from`, or from the checkpoint to fine-tune.
    Otherwise it is learned from both sides of the training pairs, or extended on them (`extend_vocabulary`), and saved
    to `output_dir`.
    """
    trust = model_args.trust_remote_code
    if checkpoint or model_args.tokenizer_from or (start and not model_args.extend_vocabulary):
        return load_tokenizer(checkpoint or model_args.tokenizer_from or start, trust)
    with args.main_process_first(desc="learning the vocabulary", local=False):  # output_dir is shared
        if args.process_index == 0:
            texts = (text for side in ("source", "target") for batch in train.iter(1000) for text in batch[side])
            if start:
                tokenizer = extend_tokenizer(load_tokenizer(start, trust), texts, model_args.extend_vocabulary)
            else:
                tokenizer = train_tokenizer(texts, model_args.vocab_size, show_progress=not args.disable_tqdm)
            save_tokenizer(tokenizer, Path(args.output_dir))
        return load_tokenizer(args.output_dir, trust)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, run: Path) -> None:
    """Write the tokenizer's files atomically to the run's folder.

    Raises:
        OSError: Writing failed.
    """
    partial = run / PARTIAL / "tokenizer"
    partial.mkdir(parents=True, exist_ok=True)
    with naming_what_failed(run, "the tokenizer could not be written", lambda: clear_partial(run)):
        tokenizer.save_pretrained(partial)
        put_files_in_place(partial, run)
    clear_partial(run)


def build_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> VaswaniForConditionalGeneration:
    """Initialise a new model for the tokenizer's vocabulary.

    Raises:
        ValueError: Unknown row, or invalid override.
    """
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
    }
    overrides = model_args.model_overrides or {}
    try:
        config = VaswaniConfig.from_table3(model_args.model, **{"vocab_size": len(tokenizer), **special, **overrides})
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {overrides}: {' '.join(str(error).split())}") from error
    if config.source_vocab_size is not None and config.source_vocab_size < len(tokenizer):
        raise ValueError(
            f"model_overrides, source_vocab_size: expected at least {len(tokenizer)}, the tokens of the tokenizer, "
            f"which reads both languages, found {config.source_vocab_size}."
        )
    check_size(config, f"model {model_args.model}, model_overrides {overrides}")
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=model_args.attn_implementation)
    model.generation_config = GenerationConfig(**special, **GENERATION)
    return model


def prepare_pairs(
    train_pairs: Dataset | IterableDataset,
    eval_pairs: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
) -> tuple[Dataset | FilteredStream, Dataset | None]:
    """Tokenise the pairs, and filter training pairs by length and evaluation pairs by emptiness; log dropped pairs."""
    limits = {"max_length": data.max_length, "max_ratio": data.max_length_ratio or math.inf}
    train_pairs = tokenize(train_pairs, tokenizer, data.num_proc)
    if isinstance(train_pairs, IterableDataset):
        train_pairs = FilteredStream(train_pairs, **limits)
    else:
        train_pairs, report = filter_by_length(train_pairs, **limits)
        logger.info("Training data: %s.", report)
    if eval_pairs is not None:
        eval_pairs, report = filter_by_length(tokenize(eval_pairs, tokenizer, data.num_proc))
        logger.info("Evaluation data: %s.", report)
    return train_pairs, eval_pairs


def check_evaluation(args: VaswaniTrainingArguments, eval_pairs: Dataset | None) -> None:
    """Disable evaluation if there is no evaluation data.

    Raises:
        ValueError: The run's arguments require evaluation.
    """
    if eval_pairs is None:
        if args.average == "best":
            raise ValueError("average=best: there is no evaluation data to select the best checkpoints.")
        args.eval_strategy, args.metric_for_best_model = "no", None
    if args.early_stopping_patience and (args.eval_strategy == "no" or args.metric_for_best_model is None):
        raise ValueError(
            f"early_stopping_patience={args.early_stopping_patience} needs evaluation while training "
            "(eval_files, eval_strategy), and metric_for_best_model."
        )


def check_stream(data: DataArguments, args: VaswaniTrainingArguments) -> None:
    """Raise ValueError for settings that would fail only after a stream has been read for a while."""
    if args.max_steps < 1:
        raise ValueError("num_train_epochs: the length of a stream is unknown; set max_steps instead.")
    tokens = min(args.source_tokens_per_update, args.target_tokens_per_update) // args.parts_per_update
    if data.max_length > tokens:
        raise ValueError(
            f"max_length is {data.max_length}, but a batch has only {tokens} tokens per side: lower max_length, or "
            "raise the tokens per update or per device."
        )


def check_positions(config: VaswaniConfig, max_length: int) -> None:
    """Raise ValueError if pairs may be longer than the table of learned positions."""
    if config.position_embedding == "learned" and max_length > config.max_position_embeddings:
        raise ValueError(
            f"max_length is {max_length}, but the model has only {config.max_position_embeddings} learned positions "
            "(max_position_embeddings)."
        )


def make_trainer(
    model_args: ModelArguments, data: DataArguments, args: VaswaniTrainingArguments, checkpoint: str | None
) -> VaswaniTrainer:
    """Prepare data, vocabulary and model, and create their trainer.

    Args:
        model_args, data, args: Arguments of the run; a missing `learning_rate` is set to the paper's.
        checkpoint (`str`, *optional*): Checkpoint to resume from.

    Raises:
        ValueError: The arguments conflict, or another run wrote the checkpoint.
    """
    with args.main_process_first(desc="finding the model to start from"):
        start = starting_checkpoint(model_args.init_from) if model_args.init_from else None
    with args.main_process_first(desc="reading the data"):
        train_pairs, eval_pairs = load_datasets(data)
    check_evaluation(args, eval_pairs)
    vocabulary_pairs = train_pairs.take(data.stream_window) if data.streaming else train_pairs
    tokenizer = get_tokenizer(model_args, vocabulary_pairs, checkpoint, start, args)
    with args.main_process_first(desc="tokenising"):
        train_pairs, eval_pairs = prepare_pairs(train_pairs, eval_pairs, tokenizer, data)

    model = load_model(model_args, start, tokenizer) if start else build_model(model_args, tokenizer)
    check_positions(model.config, data.max_length)
    if args.learning_rate is None:
        args.learning_rate = paper_learning_rate(model.config.d_model, args.get_warmup_steps(args.max_steps))
    record = None
    if args.process_index == 0:  # one process suffices; it reads all files again
        record = make_manifest(model_args, data, args, model.config, tokenizer, train_pairs, start)
        if checkpoint:
            check_same_run(record, checkpoint)
    return VaswaniTrainer(
        add_adapters(model, model_args.lora_rank, args) if model_args.lora_rank else model,
        args,
        train_dataset=train_pairs,
        eval_dataset=eval_pairs,
        processing_class=tokenizer,
        callbacks=[EarlyStopping(args.early_stopping_patience)] if args.early_stopping_patience else [],
        stream_window=data.stream_window,
        manifest=record,
    )


def log_size(trainer: VaswaniTrainer) -> None:
    """Log the sizes of the model, its vocabulary, an update and an epoch."""
    args = trainer.args
    trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    logger.info(
        "%s parameters, %s of them trained, vocabulary of %d; updates of %d + %d tokens (%d devices x %d batches).",
        f"{trainer.model.num_parameters():,}",
        f"{trained:,}",
        len(trainer.processing_class),
        args.source_tokens_per_update,
        args.target_tokens_per_update,
        args.world_size,
        args.gradient_accumulation_steps,
    )
    if has_length(trainer.train_dataset):
        sampler = trainer.token_budget_sampler()
        logger.info("%d updates an epoch, %.1f%% padding.", sampler.num_updates, 100 * sampler.padding_share())


def train(model_args: ModelArguments, data: DataArguments, args: VaswaniTrainingArguments) -> VaswaniTrainer:
    """Run a training from data to final model.

    The last model, or the best (`load_best_model_at_end`), is written to `output_dir`, with adapters merged into its
    weights.

    Returns:
        The trainer, after training.

    Raises:
        RunInUseError: Another process has locked the folder.
        SystemExit: A signal stopped the training after a checkpoint. The exit status is 128 plus the signal's number.
    """
    if data.streaming:
        check_stream(data, args)
    if args.resume and not Path(args.output_dir).is_dir():
        raise FileNotFoundError(f"--resume: no complete checkpoint in {args.output_dir}: no such folder.")
    with lock_run(Path(args.output_dir)) if args.process_index == 0 else contextlib.nullcontext():
        return _train(model_args, data, args)


def _train(model_args: ModelArguments, data: DataArguments, args: VaswaniTrainingArguments) -> VaswaniTrainer:
    checkpoint = checkpoint_to_resume(args)
    set_seed(args.seed)
    trainer = make_trainer(model_args, data, args, checkpoint)
    log_size(trainer)
    evaluated = args.eval_strategy != "no" and not args.eval_average
    if model_args.init_from and evaluated and not args.load_best_model_at_end and args.process_index == 0:
        logger.warning(
            "Without load_best_model_at_end, output_dir gets the last weights, which are rarely the best for small "
            "data. --config finetune keeps the best weights, stops early, and has a schedule for small data."
        )
    with StopOnSignal() as stop:
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.state
    if stop.stopped_by and state.global_step < state.max_steps:
        name = signal.Signals(stop.stopped_by).name
        if args.process_index == 0:
            logger.warning(
                "%s: stopped after update %d, with a checkpoint. --resume continues.", name, state.global_step
            )
        raise SystemExit(128 + stop.stopped_by)
    if model_args.lora_rank:
        merge_adapters(trainer, model_args.init_from)
    trainer.save_run()
    if args.average is not None and args.process_index == 0:
        logger.info("Averaged weights: %s.", write_average(trainer))
    if state.best_model_checkpoint:
        scored = f", of the average ({args.average}) at that step" if args.eval_average else ""
        name = args.metric_for_best_model
        logger.info("Best: %s (%s %.4g%s).", state.best_model_checkpoint, name, state.best_metric, scored)
    return trainer
