"""Manifest of a run: written into its checkpoints, and compared on `--resume`."""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, TypedDict

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig
from hf_vaswani.checksums_vaswani import checksum, weight_files

from ..data.encoding import FilteredStream, lengths, share_of_stream
from ..hardware import hardware
from ..json_records import check_fields, read_record
from .arguments import DataArguments, ModelArguments, VaswaniTrainingArguments
from .resumable_trainer import MANIFEST_NAME


logger = logging.getLogger(__name__)


# Training arguments that affect training by floating-point rounding at most. All others must match.
HARMLESS = {
    *("output_dir", "disable_tqdm", "report_to", "run_name", "project", "debug", "skip_memory_metrics"),
    *("per_device_eval_batch_size", "prediction_loss_only", "predict_with_generate", "batch_eval_metrics"),
    *("average", "average_count", "early_stopping_patience"),
    *("num_beams", "length_penalty", "max_extra_tokens"),
    *("load_best_model_at_end", "greater_is_better", "bleu_tokenize", "use_cache"),
    *("do_train", "do_eval", "do_predict", "use_cpu", "tf32", "full_determinism"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "torch_empty_cache_steps"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "accelerator_config", "parallelism_config"),
    *("fsdp", "fsdp_config", "deepspeed", "bf16_full_eval", "fp16_full_eval", "tokens_per_device"),
    *("gradient_accumulation_steps", "restore_callback_states_from_checkpoint"),
}
HARMLESS_PREFIXES = (
    *("logging_", "log_", "eval_", "save_", "hub_", "push_", "ddp_", "dataloader_", "generation_", "include_"),
    *("torch_compile", "trackio_"),
)
# Irrelevant arguments, and arguments recorded under other names.
UNRECORDED = {
    *("resume", "resume_from_checkpoint", "local_rank", "label_names", "remove_unused_columns"),
    *("ema_decay", "metric_for_best_model"),
}


class Manifest(TypedDict):
    """Parts of `run.json`: fields that a resumed run must match, and fields that may change."""

    must_match: dict[str, Any]
    may_change: dict[str, Any]


SCORING = {"bleu_tokenize", "eval_average", "num_beams", "length_penalty", "max_extra_tokens"}
SCHEDULES_WITHOUT_END = {"inverse_sqrt", "constant", "constant_with_warmup"}


def make_manifest(
    model_args: ModelArguments,
    data: DataArguments,
    args: VaswaniTrainingArguments,
    config: VaswaniConfig,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset | FilteredStream,
    start: Path | None = None,
) -> dict[str, dict]:
    """Manifest of a run: model, data and optimisation (`must_match`), and settings that may change (`may_change`).

    Args:
        model_args, data, args: Arguments of the run, with `learning_rate` set.
        config (`VaswaniConfig`): Configuration of the model.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the run.
        pairs (`datasets.Dataset` or `FilteredStream`): Tokenised and filtered training pairs.
        start (`Path`, *optional*): Folder of the checkpoint `init_from`.
    """
    model = {f"model.{name}": value for name, value in model_fields(config).items()}
    vocabulary = {"vocab_size": model_args.vocab_size, "tokenizer": _digest(tokenizer.backend_tokenizer.to_str())}
    harmless = _harmless(args)
    values = {name: value for name, value in args.to_dict().items() if name not in UNRECORDED}
    if args.metric_for_best_model is not None:  # a changed metric is not comparable with the best score so far
        harmless -= {name for name in harmless if name in SCORING or name.startswith("generation_")}
    may_change = {name: value for name, value in values.items() if name in harmless}
    may_change |= {"attn_implementation": model_args.attn_implementation, "devices": args.world_size}
    files = {"train_files": data.train_files, "eval_files": data.eval_files}
    may_change |= {name: [Path(file).name for file in paths] for name, paths in files.items()}
    may_change |= {"places of eval_files": [os.path.abspath(file) for file in data.eval_files]}
    may_change |= {"name of init_from": model_args.init_from}
    may_change |= {"hardware": hardware(args.device)}
    must_match = model | vocabulary | _start(model_args, start) | _data(data, pairs, args.world_size)
    must_match |= {name: value for name, value in values.items() if name not in harmless}
    # Batches depend on their number per update, not on the device that computes them.
    must_match |= {"batches of an update": args.parts_per_update}
    must_match |= {"ema_decay": args.ema_decay if args.average == "ema" else None}
    if args.metric_for_best_model is None:
        may_change |= _evaluation(data)
    else:  # scores on other data are not comparable with the best score so far
        must_match |= {"metric_for_best_model": args.metric_for_best_model} | _evaluation(data)
    return json.loads(json.dumps({"must_match": must_match, "may_change": may_change}, default=str))


def model_fields(config: VaswaniConfig) -> dict:
    """Fields that `VaswaniConfig` itself declares, with their values."""
    values = config.to_dict()
    return {
        f.name: values[f.name] for f in dataclasses.fields(VaswaniConfig) if f.name in VaswaniConfig.__annotations__
    }


def _start(model_args: ModelArguments, start: Path | None) -> dict:
    """Checksums of the initial weights of a fine-tuning run, and its additions to the model."""
    weights = None if start is None else {name: checksum(path) for name, path in weight_files(start).items()}
    return {"init_from": weights} | {name: getattr(model_args, name) for name in ("extend_vocabulary", "lora_rank")}


def _evaluation(data: DataArguments) -> dict:
    """Checksums or split of the evaluation data."""
    values = {f"eval_files[{i}]": checksum(Path(file)) for i, file in enumerate(data.eval_files)}
    return values | ({"eval_split": data.eval_split} if data.dataset_name else {})


def _data(data: DataArguments, pairs: Dataset | FilteredStream, devices: int) -> dict:
    """Fingerprint of the training data, independent of the files' names and folders."""
    names = ["source_lang", "target_lang", "drop_empty", "max_length", "max_length_ratio", "streaming"]
    names += ["tree_tags", "strip_trees", "tree_weights"]
    names += ["dataset_name", "dataset_config", "train_split"] if data.dataset_name else []
    names += ["stream_window"] if data.streaming else []
    values = {name: getattr(data, name) for name in names}
    values |= {"number of train_files": len(data.train_files)}
    values |= {f"train_files[{i}]": checksum(Path(file)) for i, file in enumerate(data.train_files)}
    if data.streaming:  # devices that read different files form different batches
        separate_files = share_of_stream(pairs, 0, devices) is not None
        return values | {"devices that read files of their own": devices if separate_files else 1}
    source, target = lengths(pairs)
    values |= {"pairs": len(pairs), "lengths of the pairs": _digest(source.tobytes() + target.tobytes())}
    # Files have checksums; a data set on the Hub is identified by its tokens.
    return values | ({"tokens of the pairs": _tokens(pairs)} if data.dataset_name else {})


def _harmless(args: VaswaniTrainingArguments) -> set[str]:
    names = {name for name in args.to_dict() if name in HARMLESS or name.startswith(HARMLESS_PREFIXES)}
    if args.lr_scheduler_type in SCHEDULES_WITHOUT_END and not 0 < args.warmup_steps < 1:
        names |= {"max_steps", "num_train_epochs"}
    return names


def _tokens(pairs: Dataset) -> str:
    """SHA-256 of all tokens, filtered pairs included, independent of the chunks in memory."""
    digest = hashlib.sha256()
    for name in ("input_ids", "labels"):
        for chunk in pairs.data.column(name).chunks:
            digest.update(chunk.flatten().to_numpy())
    return digest.hexdigest()


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def read_manifest(path: Path, schema: type[Any] = Manifest) -> dict[str, dict]:
    """Read `run.json`, including the format of earlier versions, which named its two parts "same" and "noted".

    Args:
        path (`Path`): File to read.
        schema (`type`): `TypedDict` with the required parts.

    Raises:
        ValueError: The file is malformed; the message names file and field.
    """
    manifest = read_record(path)
    for name, earlier in (("must_match", "same"), ("may_change", "noted")):
        if earlier in manifest and name not in manifest:
            manifest[name] = manifest.pop(earlier)
    check_fields(manifest, schema, str(path))
    return manifest


def check_same_run(record: dict[str, dict], checkpoint: str) -> None:
    """Compare a run to resume with the manifest in its checkpoint, and log changes that are allowed.

    Raises:
        ValueError: A field that must match differs; the message names each field with both values.
    """
    path = Path(checkpoint) / MANIFEST_NAME
    if path.is_file():
        earlier = read_manifest(path)
    else:
        logger.warning("%s has no %s: only the model is compared.", checkpoint, MANIFEST_NAME)
        fields = model_fields(VaswaniConfig.from_pretrained(checkpoint))
        earlier = {
            "must_match": json.loads(json.dumps({f"model.{k}": v for k, v in fields.items()})),
            "may_change": {},
        }
    if changed := changes(earlier["must_match"], record["must_match"]):
        raise ValueError(f"--resume: this is not the run that wrote {checkpoint}: {', '.join(changed)}.")
    if changed := changes(earlier["may_change"], record["may_change"]):
        logger.info("Allowed changes since %s: %s.", Path(checkpoint).name, ", ".join(changed))


def changes(earlier: dict, now: dict) -> list[str]:
    """Changes as `field (earlier value, now value)`, for fields in both mappings."""
    return [
        f"{name} ({earlier[name]}, now {now[name]})" for name in earlier if name in now and earlier[name] != now[name]
    ]
