"""Train a model: `hf-vaswani train --config RECIPE`, or `accelerate launch -m training.train --config RECIPE`."""

import json
import logging
import os
from pathlib import Path

from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, set_seed

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration

from .arguments import DataArguments, ModelArguments, VaswaniTrainingArguments, parse_arguments
from .data import DataError, FilteredStream, filter_by_length, load_hub_pairs, load_pairs, tokenize
from .tokenizer import train_tokenizer
from .trainer import VaswaniTrainer, paper_learning_rate


logger = logging.getLogger(__name__)

# Section 6.1.
GENERATION = {"num_beams": 4, "length_penalty_form": "gnmt", "length_penalty": 0.6, "max_extra_tokens": 50}


def last_checkpoint(output_dir: str) -> str | None:
    """The newest checkpoint in a folder that was written to its end, or `None`.

    The Trainer writes `trainer_state.json` last: a checkpoint in which it is missing or cut off is passed over.
    """
    folders = Path(output_dir).glob("checkpoint-*")
    numbered = [folder for folder in folders if folder.name.removeprefix("checkpoint-").isdigit()]
    for folder in sorted(numbered, key=lambda f: int(f.name.removeprefix("checkpoint-")), reverse=True):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return str(folder)
        except (FileNotFoundError, json.JSONDecodeError):
            logger.warning("%s was not written to its end; it is passed over.", folder)
    return None


def checkpoint_to_resume(args: VaswaniTrainingArguments) -> str | None:
    """The checkpoint to continue from, `None` for a fresh start.

    Raises:
        FileExistsError: The folder has checkpoints, and the run is not told to resume.
        FileNotFoundError: The run is told to resume, and there is nothing to resume from.
    """
    checkpoint = last_checkpoint(args.output_dir)
    if checkpoint and not args.resume:
        raise FileExistsError(
            f"{args.output_dir} already has {os.path.basename(checkpoint)}: pass --resume to continue it, "
            "or another --output_dir."
        )
    if args.resume and not checkpoint:
        raise FileNotFoundError(f"--resume: no complete checkpoint in {args.output_dir}.")
    return checkpoint


def load_datasets(data: DataArguments) -> tuple[Dataset | IterableDataset, Dataset | None]:
    """Training and evaluation pairs, as text.

    Raises:
        DataError: The data cannot be used, or none is named.
    """
    langs = data.source_lang, data.target_lang
    if data.dataset_name:
        name = data.dataset_name, data.dataset_config
        train = load_hub_pairs(*name, data.train_split, *langs, streaming=data.streaming)
        return train, load_hub_pairs(*name, data.eval_split, *langs)
    if not data.train_files:
        raise DataError("No training data: set train_files or dataset_name.")
    train = load_pairs(data.train_files, *langs, drop_empty=data.drop_empty, streaming=data.streaming)
    return train, load_pairs(data.eval_files, *langs) if data.eval_files else None


def get_tokenizer(
    model_args: ModelArguments,
    train: Dataset | IterableDataset,
    checkpoint: str | None,
    args: VaswaniTrainingArguments,
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, or one learned from both sides of the training pairs and saved in `output_dir`."""
    if checkpoint:
        return AutoTokenizer.from_pretrained(checkpoint)
    with args.main_process_first(desc="learning the vocabulary"):
        if args.process_index == 0:
            texts = (text for side in ("source", "target") for batch in train.iter(1000) for text in batch[side])
            tokenizer = train_tokenizer(texts, model_args.vocab_size, show_progress=not args.disable_tqdm)
            tokenizer.save_pretrained(args.output_dir)
        return AutoTokenizer.from_pretrained(args.output_dir)


def build_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> VaswaniForConditionalGeneration:
    """A freshly initialised model for the tokenizer's vocabulary.

    Raises:
        ValueError: The row or an override is not what VaswaniConfig takes.
    """
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
    }
    fields = {"vocab_size": len(tokenizer), **special, **(model_args.model_overrides or {})}
    try:
        config = VaswaniConfig.from_table3(model_args.model, **fields)
    except (TypeError, StrictDataclassError) as error:
        raise ValueError(f"model_overrides {model_args.model_overrides}: {error}") from error
    model = VaswaniForConditionalGeneration._from_config(config, attn_implementation=model_args.attn_implementation)
    model.generation_config = GenerationConfig(**special, **GENERATION)
    return model


def prepare_training_pairs(
    pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> Dataset | FilteredStream:
    """Tokenised pairs within the limits of length; what was dropped is logged."""
    pairs = tokenize(pairs, tokenizer, data.num_proc)
    if isinstance(pairs, IterableDataset):
        return FilteredStream(pairs, data.max_length, data.max_length_ratio)
    pairs, report = filter_by_length(pairs, data.max_length, data.max_length_ratio)
    logger.info("Training data: %s.", report)
    return pairs


def train(model_args: ModelArguments, data: DataArguments, args: VaswaniTrainingArguments) -> VaswaniTrainer:
    """The whole run: data, vocabulary, model, training; leaves the last model in `output_dir`.

    Returns:
        The trainer, after training.
    """
    checkpoint = checkpoint_to_resume(args)
    set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        train_pairs, eval_pairs = load_datasets(data)
    if eval_pairs is None:
        args.eval_strategy, args.metric_for_best_model = "no", None
    seen = train_pairs.take(data.stream_window) if data.streaming else train_pairs
    tokenizer = get_tokenizer(model_args, seen, checkpoint, args)
    with args.main_process_first(desc="tokenising"):
        train_pairs = prepare_training_pairs(train_pairs, tokenizer, data)
        eval_pairs = tokenize(eval_pairs, tokenizer, data.num_proc) if eval_pairs is not None else None

    model = build_model(model_args, tokenizer)
    if args.learning_rate is None:
        args.learning_rate = paper_learning_rate(model.config.d_model, args.get_warmup_steps(args.max_steps))
    trainer = VaswaniTrainer(
        model,
        args,
        train_dataset=train_pairs,
        eval_dataset=eval_pairs,
        processing_class=tokenizer,
        stream_window=data.stream_window,
    )
    logger.info(
        "%s parameters, vocabulary of %d; updates of %d + %d tokens (%d devices x %d batches).",
        f"{model.num_parameters():,}",
        len(tokenizer),
        args.source_tokens_per_update,
        args.target_tokens_per_update,
        args.world_size,
        args.gradient_accumulation_steps,
    )
    if not data.streaming:
        sampler = trainer.token_budget_sampler()
        logger.info("%d updates an epoch, %.1f%% padding.", sampler.num_updates, 100 * sampler.padding_share())
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    return trainer


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani train`."""
    model_args, data, args = parse_arguments(argv)
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if args.process_index == 0 else logging.WARNING,
    )
    train(model_args, data, args)


if __name__ == "__main__":
    main()
