"""Training run: load the data, learn the vocabulary, build the model, and train."""

import contextlib
import logging
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import has_length

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from ..data.encoding import FilteredStream, filter_by_length, tokenize
from ..data.pairs import load_hub_pairs, load_pairs
from ..data.readers import DataError
from ..data.tokenizer import check_vocab_size, extend_tokenizer, train_tokenizer, with_symbols
from ..data.treebanks import TreeOptions
from ..files import check_output_folder
from ..inference.checkpoint_files import check_size
from ..inference.direction import is_reversed
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
from .console import hide_library_bars, shows_bars
from .fine_tuning import (
    EarlyStopping,
    add_adapters,
    extend_embeddings,
    load_model,
    merge_adapters,
    starting_checkpoint,
)
from .manifest import check_same_run, make_manifest
from .run_lock import lock_run
from .signals import StopOnSignal
from .trainer import VaswaniTrainer


logger = logging.getLogger(__name__)


LONG = 100_000  # pairs; learning the vocabulary of fewer takes seconds, and shows no progress
MAX_READ = 1000  # pairs, to find enough short ones for `is_reversed`
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
    trees = TreeOptions(data.tree_tags, data.strip_trees)
    weighted = replace(trees, weights=tuple(map(int, data.tree_weights)))
    train = load_pairs(data.train_files, *langs, data.drop_empty, data.streaming, weighted)
    evaluation = load_pairs(data.eval_files, *langs, data.drop_empty, trees=trees) if data.eval_files else None
    return train, evaluation


def existing_tokenizer(
    model_args: ModelArguments, checkpoint: str | None, start: Path | None
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of the checkpoint to resume, of `tokenizer_from`, or of the checkpoint to fine-tune.

    Returns:
        The tokenizer, or `None` if the run has to learn or to extend its own.
    """
    if checkpoint or model_args.tokenizer_from or (start and not model_args.extend_vocabulary):
        return load_tokenizer(checkpoint or model_args.tokenizer_from or start, model_args.trust_remote_code)
    return None


def learn_tokenizer(
    model_args: ModelArguments, train: Dataset | IterableDataset, start: Path | None, args: VaswaniTrainingArguments
) -> PreTrainedTokenizerBase:
    """Learn a tokenizer from both sides of the training pairs, or extend that of `start`; save it to `output_dir`.

    Of trees, only the words are split into tokens; each of their symbols is a token.
    """
    with args.main_process_first(desc="learning the vocabulary", local=False):  # output_dir is shared
        if args.process_index == 0:
            is_trees = "tree" in train.column_names and not start
            sources, targets = texts_of(train, "source"), texts_of(train, "target")
            if start:
                old = load_tokenizer(start, model_args.trust_remote_code)
                tokenizer = extend_tokenizer(old, sources, targets, model_args.extend_vocabulary)
            else:
                logger.info("Learning a vocabulary of %s tokens.", f"{model_args.vocab_size:,}")
                takes_long = not has_length(train) or len(train) >= LONG
                symbols = tree_symbols(train) if is_trees else set()
                size = model_args.vocab_size - len(symbols)
                texts = sources if is_trees else chain(sources, targets)
                tokenizer = train_tokenizer(texts, size, takes_long and shows_bars(args))
                tokenizer = with_symbols(tokenizer, symbols) if symbols else tokenizer
            save_tokenizer(tokenizer, Path(args.output_dir))
        return load_tokenizer(args.output_dir, model_args.trust_remote_code)


def texts_of(pairs: Dataset | IterableDataset, side: str) -> Iterator[str]:
    """Texts of one column of a data set."""
    return (text for batch in pairs.iter(1000) for text in batch[side])


def tree_symbols(pairs: Dataset | IterableDataset) -> set[str]:
    """Symbols of the linearised trees of a data set."""
    return {symbol for batch in pairs.iter(1000) for target in batch["target"] for symbol in target.split(" ")}


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


def new_config(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase | None = None) -> VaswaniConfig:
    """Configuration of a new model, with the tokenizer's vocabulary; before there is one, with `vocab_size`.

    Raises:
        ValueError: Unknown row, invalid override, too small a `vocab_size`, or a model that exceeds the memory.
    """
    vocabulary = {"vocab_size": model_args.vocab_size}
    if tokenizer is None:
        check_vocab_size(model_args.vocab_size)
    else:
        vocabulary = {"vocab_size": len(tokenizer), **special_ids(tokenizer)}
    overrides = model_args.model_overrides or {}
    try:
        config = VaswaniConfig.from_table3(model_args.model, **{**vocabulary, **overrides})
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {overrides}: {' '.join(str(error).split())}") from error
    if config.source_vocab_size is not None and config.source_vocab_size < vocabulary["vocab_size"]:
        raise ValueError(
            f"model_overrides, source_vocab_size: expected at least {vocabulary['vocab_size']}, the tokens of the "
            f"tokenizer, which reads both languages, found {config.source_vocab_size}."
        )
    check_size(config, f"model {model_args.model}, model_overrides {overrides}")
    return config


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tokenizer's special tokens, by their names in the configuration."""
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
    }


def build_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> VaswaniForConditionalGeneration:
    """Initialise a new model for the tokenizer's vocabulary.

    Raises:
        ValueError: Unknown row, invalid override, or a model that exceeds the memory.
    """
    config = new_config(model_args, tokenizer)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=model_args.attn_implementation)
    model.generation_config = GenerationConfig(**special_ids(tokenizer), **GENERATION)
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


def check_evaluation(data: DataArguments, args: VaswaniTrainingArguments) -> None:
    """Disable evaluation if there is no evaluation data.

    Raises:
        ValueError: The run's arguments require evaluation.
    """
    if not (data.dataset_name or data.eval_files):
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


def starting_model(
    model_args: ModelArguments,
    args: VaswaniTrainingArguments,
    start: Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> VaswaniForConditionalGeneration | None:
    """Load the model to fine-tune, with its adapters, or initialise a new one for an existing tokenizer.

    Returns:
        The model, or `None` for a new model whose vocabulary has yet to be learned.
    """
    if start is None:
        return build_model(model_args, tokenizer) if tokenizer is not None else None
    model = load_model(model_args, start)
    return add_adapters(model, model_args.lora_rank, args) if model_args.lora_rank else model


def warn_of_reversed_pairs(
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset | IterableDataset,
    start: Path,
) -> None:
    """Log a warning if the model to fine-tune translates from the pairs' targets to their sources."""
    rows = ((pair["source"], pair["target"]) for pair in pairs.take(MAX_READ))
    if (means := is_reversed(model, tokenizer, rows)) is not None:
        logger.warning(
            "The training data looks swapped: %s gives the targets %.1f per token, and the sources %.1f (mean log "
            "probability, given the other side). Fine-tuning would reverse the model's direction.",
            *(start, *means),
        )


def make_trainer(
    model_args: ModelArguments, data: DataArguments, args: VaswaniTrainingArguments, checkpoint: str | None
) -> VaswaniTrainer:
    """Prepare data, vocabulary and model, and create their trainer. The model is checked before any data is read.

    Args:
        model_args, data, args: Arguments of the run; a missing `learning_rate` is set to the paper's.
        checkpoint (`str`, *optional*): Checkpoint to resume from.

    Raises:
        ValueError: The arguments conflict, or another run wrote the checkpoint.
    """
    with args.main_process_first(desc="finding the model to start from"):
        start = starting_checkpoint(model_args.init_from) if model_args.init_from else None
    check_evaluation(data, args)
    tokenizer = existing_tokenizer(model_args, checkpoint, start)
    model = starting_model(model_args, args, start, tokenizer)
    check_positions(new_config(model_args) if model is None else model.config, data.max_length)

    with args.main_process_first(desc="reading the data"):
        texts, eval_texts = load_datasets(data)
    if args.eval_f1 and (eval_texts is None or "tree" not in eval_texts.column_names):
        raise ValueError(
            f"eval_f1: expected .trees files as eval_files, found {', '.join(data.eval_files) or 'none'}."
        )
    if tokenizer is None:
        sample = texts.take(data.stream_window) if data.streaming else texts
        tokenizer = learn_tokenizer(model_args, sample, start, args)
    with args.main_process_first(desc="tokenising"):
        train_pairs, eval_pairs = prepare_pairs(texts, eval_texts, tokenizer, data)

    if model is None:
        model = build_model(model_args, tokenizer)
    if model_args.extend_vocabulary:
        extend_embeddings(model, load_tokenizer(start, model_args.trust_remote_code), tokenizer)
    if start and not checkpoint and args.process_index == 0:
        warn_of_reversed_pairs(model, tokenizer, texts, start)
    search = {name: getattr(args, name) for name in ("num_beams", "length_penalty", "max_extra_tokens")}
    model.generation_config.update(**{name: value for name, value in search.items() if value is not None})
    if args.learning_rate is None:
        args.learning_rate = paper_learning_rate(model.config.d_model, args.get_warmup_steps(args.max_steps))
    record = None
    if args.process_index == 0:  # one process suffices; it reads all files again
        record = make_manifest(model_args, data, args, model.config, tokenizer, train_pairs, start)
        if checkpoint:
            check_same_run(record, checkpoint)
    return VaswaniTrainer(
        model,
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
    args, model = trainer.args, trainer.model
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    parameters = f"{model.num_parameters():,} parameters"
    if trained < model.num_parameters():
        parameters += f", {trained:,} of them trained"
    logger.info("Model: %s; vocabulary of %s tokens.", parameters, f"{len(trainer.processing_class):,}")
    logger.info(
        "Update: up to %s source and %s target tokens, in %s on %s.",
        f"{args.source_tokens_per_update:,}",
        f"{args.target_tokens_per_update:,}",
        _count(args.gradient_accumulation_steps, "batch", "batches"),
        _count(args.world_size, "device", "devices"),
    )
    if has_length(trainer.train_dataset):
        sampler = trainer.token_budget_sampler()
        padding = sampler.padding_share()
        logger.info("Epoch: %s, %.1f%% padding.", _count(sampler.num_updates, "update", "updates"), 100 * padding)


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


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
    hide_library_bars(args)
    if data.streaming:
        check_stream(data, args)
    check_output_folder(args.output_dir, "output_dir")
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
    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    with logging_redirect_tqdm(loggers), StopOnSignal() as stop:  # messages appear above the bar
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
    return trainer
