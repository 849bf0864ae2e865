"""`Seq2SeqTrainer` with the paper's token budgets and learning rate schedule, exact perplexity and BLEU."""

import contextlib
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import sacrebleu
import torch
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput, has_length

from ..data.batching import PairCollator, TokenBudgetSampler, TokenBudgetStream
from ..data.brackets import agreement, f1
from ..data.encoding import lengths, share_of_stream
from ..data.trees import parse_tree
from ..inference.parsing import parse
from ..inference.search import Search
from ..inference.translation import translate
from ..inference.tree_search import tree_constraint
from ..paper import inverse_sqrt_factor
from .arguments import VaswaniTrainingArguments
from .averaging import EMA_NAME, MovingAverage, checkpoints_to_average, mean_swapped_in
from .checkpoints import checkpoint_name
from .console import ConsoleLog
from .fsdp import gathered
from .onednn import OneDNNProducts
from .resumable_trainer import ResumableTrainer
from .signals import ignore_signals


STREAM_NAME = "stream.json"  # file of a checkpoint with the position of each device in the stream


class EpochDataLoader(DataLoader):
    """`DataLoader` that forwards the epoch to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


class PaperSchedule(LambdaLR):
    """The paper's learning rate, as a factor of its peak (section 5.3).

    The first update has the rate of step 1. The schedule of transformers would waste it on a rate of 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int):
        super().__init__(optimizer, lambda completed_steps: inverse_sqrt_factor(completed_steps + 1, warmup_steps))


class SaveByMinutes(TrainerCallback):
    """Save a checkpoint at a fixed interval in minutes (section 6.1 of the paper: 10).

    Several devices decide collectively, but only every ten updates, because the exchange synchronises them.
    """

    def __init__(self, minutes: float):
        self.seconds = minutes * 60
        self.last = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1 and state.global_step % 10:
            return
        due = [time.monotonic() - self.last >= self.seconds]
        control.should_save |= broadcast_object_list(due)[0]

    def on_save(self, args, state, control, **kwargs):
        self.last = time.monotonic()


class VaswaniTrainer(ResumableTrainer):
    """Trainer with token-budget batches that evaluates perplexity per token and BLEU.

    It takes the arguments of `Seq2SeqTrainer`. The data sets come from `data.tokenize` (`eval_dataset` keeps its text
    columns), `processing_class` is the tokenizer, and the collator is always `PairCollator`. A training set without a
    length is read as a stream in windows of `stream_window` pairs.

    Raises:
        ValueError: Averaging is requested for weights sharded by FSDP or DeepSpeed, or `eval_f1` for a model that is
            not a parser.
    """

    def __init__(
        self,
        model=None,
        args: VaswaniTrainingArguments = None,
        *,
        processing_class,
        stream_window: int = 100_000,
        **kwargs,
    ):
        if args.eval_f1:  # the first evaluation may be hours away
            tree_constraint(Search([model], processing_class, **_search_options(args)))
        collator = PairCollator(processing_class.pad_token_id, processing_class.eos_token_id)
        super().__init__(model, args, data_collator=collator, processing_class=processing_class, **kwargs)
        self._stream_window = stream_window
        self._stream: TokenBudgetStream | None = None
        self._throughput = _Throughput()
        recomputes = self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.activation_checkpointing
        self._uses_onednn = not args.torch_compile and not recomputes and OneDNNProducts.pays(self.model)
        if args.torch_compile:  # batches differ in shape, so a static graph would fit only one of them
            self.accelerator.state.dynamo_plugin.dynamic = True
        self._console = ConsoleLog(label_smoothing=self.model.config.label_smoothing > 0)
        if self.pop_callback(ProgressCallback) or self.pop_callback(PrinterCallback):  # neither in a notebook
            self.add_callback(self._console)
        if args.save_minutes is not None:
            self.add_callback(SaveByMinutes(args.save_minutes))
        self.moving_average = None
        if (args.average == "ema" or args.eval_average) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            name = "average=ema" if args.average == "ema" else "eval_average"
            raise ValueError(f"{name} is not supported with weights sharded by FSDP or DeepSpeed.")
        if args.average == "ema":
            self.moving_average = MovingAverage(self.model, args.ema_decay)
            self.add_callback(self.moving_average)

    # Data

    def _budget(self) -> dict[str, int]:
        args = self.args
        return {
            "source_budget": args.source_tokens_per_update // args.parts_per_update,
            "target_budget": args.target_tokens_per_update // args.parts_per_update,
            "num_replicas": args.world_size,
            "rank": args.process_index,
            "accumulation": args.gradient_accumulation_steps,
            "seed": args.data_seed if args.data_seed is not None else args.seed,
        }

    def token_budget_sampler(self) -> TokenBudgetSampler:
        """Sampler of this device's training batches, for a training set with a length."""
        return TokenBudgetSampler(*lengths(self.train_dataset), **self._budget())

    def get_train_dataloader(self) -> DataLoader:
        """Data loader of this device's training batches. The sampler shards the data, so Accelerate must not."""
        if has_length(self.train_dataset):
            return self._loader(self.train_dataset, self.token_budget_sampler())
        if self.args.dataloader_num_workers:
            raise ValueError(f"dataloader_num_workers must be 0 for a stream, got {self.args.dataloader_num_workers}.")
        pairs, budget = self.train_dataset, self._budget()
        share = share_of_stream(pairs, budget["rank"], budget["num_replicas"])
        if share is not None:  # otherwise each device reads all pairs and trains on its share of them
            pairs, budget = share, {**budget, "num_replicas": 1, "rank": 0}
        self._stream = TokenBudgetStream(pairs, self.data_collator, self._stream_window, **budget)
        return DataLoader(self._stream, batch_size=None)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """Data loader of this device's share of the evaluation set, shortest sentences first."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        source, target = lengths(dataset)
        budget = max(self.args.eval_tokens_per_device, int(source.max()), int(target.max()))
        sampler = TokenBudgetSampler(
            source,
            target,
            budget,
            budget,
            num_replicas=self.args.world_size,
            rank=self.args.process_index,
            shuffle=False,
        )
        return self._loader(dataset, sampler)

    def _loader(self, dataset: Dataset, sampler: TokenBudgetSampler) -> DataLoader:
        workers = self.args.dataloader_num_workers
        return EpochDataLoader(
            dataset.select_columns(["input_ids", "labels"]),
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=ignore_signals,
        )

    # Optimisation

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Use the paper's schedule for `inverse_sqrt`, a new one for each training."""
        replaceable = self.lr_scheduler is None or isinstance(self.lr_scheduler, PaperSchedule)
        if self.args.lr_scheduler_type == "inverse_sqrt" and replaceable:
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = PaperSchedule(self.optimizer if optimizer is None else optimizer, warmup)
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the model's own smoothed loss over all labels of the update, without keeping the logits."""
        inputs = {**inputs, "skip_logits": not return_outputs}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        # Activation checkpointing recomputes the forward pass outside this mode, and fails if the results differ.
        uses_onednn = self._uses_onednn and not getattr(self.model, "is_activation_checkpointing", False)
        with OneDNNProducts() if uses_onednn else contextlib.nullcontext():
            return super().training_step(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Collect the batches of an update, and count their tokens for the log."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._throughput.add(batches)
        return batches, num_items

    def _progress(self) -> dict[str, float]:
        return {
            **super()._progress(),
            "tokens": self._throughput.tokens,
            "padded": self._throughput.padded,
        }

    def _restore_progress(self, progress: dict[str, float]) -> None:
        super()._restore_progress(progress)
        self._throughput.tokens, self._throughput.padded = progress["tokens"], progress["padded"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add this device's target tokens per second, without padding, and its share of padding since the last log.

        The entry at the end of the training has them for the updates after the last log.
        """
        logs.pop("train_samples_per_second", None)  # it assumes a fixed number of pairs per batch
        if "loss" in logs or "train_loss" in logs:
            logs.update(self._throughput.summary())
            self._throughput = _Throughput()
        super().log(logs, start_time)

    # Averages

    def _add_to_checkpoint(self, folder: Path) -> None:
        super()._add_to_checkpoint(folder)
        if self.moving_average is not None and self.args.should_save:
            self.moving_average.save(folder / EMA_NAME, self.processing_class, replace=True)
        if self._stream is not None:
            positions = gather_object([self._stream.position(self.state.global_step)])
            if self.args.should_save:
                (folder / STREAM_NAME).write_text(json.dumps(positions) + "\n", encoding="utf-8")

    def _begin(self) -> None:
        checkpoint = self._resumed_from
        if self.moving_average is not None and checkpoint is not None:
            self.moving_average.load(Path(checkpoint) / EMA_NAME)
        self._throughput.started = time.monotonic()
        super()._begin()
        if self._stream is None or checkpoint is None or self.args.ignore_data_skip:
            return
        positions = json.loads((Path(checkpoint) / STREAM_NAME).read_text(encoding="utf-8"))  # as its checksum says
        # The number of devices may only have changed if all devices read the same stream.
        self._stream.start_at(positions[self.args.process_index if len(positions) == self.args.world_size else 0])

    def train(self, *args, **kwargs) -> TrainOutput:
        try:
            return super().train(*args, **kwargs)
        finally:
            self._console.close()
            if self._stream is not None:
                self._stream.close()

    def _checkpoints_to_keep(self, run: Path) -> set[Path]:
        return super()._checkpoints_to_keep(run) | set(
            checkpoints_to_average(self.args, self.state, self.saved_steps, run)
        )

    def _averaged(self) -> contextlib.AbstractContextManager:
        """Swap the averaged weights into the model for the duration of the context, if `eval_average` is set.

        With `average=last`, they are the average that would be written if the run ended now.
        """
        if not self.args.eval_average:
            return contextlib.nullcontext()
        if self.moving_average is not None:
            return self.moving_average.swapped_in(self.model)
        run, count = Path(self.args.output_dir), self.args.average_count - 1
        earlier = [step for step in self.saved_steps if step < self.state.global_step]
        folders = [run / checkpoint_name(step) for step in earlier[max(len(earlier) - count, 0) :]]
        return mean_swapped_in(self.model, [folder for folder in folders if folder.is_dir()])

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs,
    ) -> dict[str, float]:
        """Evaluate cross-entropy and perplexity per token, and BLEU of translations or F1 of trees by `generate()`.
        Trees are those of `hf-vaswani translate --format tree`.

        The loss is the sum over all target tokens divided by their number, so `exp(eval_loss)` is the perplexity. The
        stock Trainer averages over batches instead. With `eval_average`, the averaged weights are evaluated.

        Args:
            eval_dataset (`datasets.Dataset`, *optional*): Evaluation set that replaces the Trainer's own.
            ignore_keys (`list[str]`, *optional*): Unused; part of the stock Trainer's signature.
            metric_key_prefix (`str`): Prefix of the names of the metrics.
            **gen_kwargs: Options of `generate()`.

        Returns:
            `eval_loss`, `eval_perplexity`, `eval_bleu` or `eval_f1` (if it is set) and `eval_runtime` in seconds.
        """
        self.save_before_evaluation()
        started = time.monotonic()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        was_training = self.model.training
        self.model.eval()
        with self._averaged():
            loss = self._loss_per_token(dataset)
            metrics = {"loss": loss, "perplexity": float(np.exp(loss))}
            if self.args.eval_bleu:
                metrics["bleu"] = self._bleu(dataset, gen_kwargs)
            if self.args.eval_f1:
                metrics["f1"] = bracket_f1(self._outputs(dataset, gen_kwargs), dataset["tree"][:])
        self.model.train(was_training)
        metrics["runtime"] = round(time.monotonic() - started, 2)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._throughput.started += time.monotonic() - started  # exclude the evaluation from the throughput
        return metrics

    @torch.no_grad()
    def _loss_per_token(self, dataset: Dataset) -> float:
        loss = tokens = 0
        for batch in self.get_eval_dataloader(dataset):
            batch = send_to_device(batch, self.args.device)
            loss += self.model(**batch, num_items_in_batch=1, skip_logits=True).loss.item()
            tokens += (batch["labels"] != -100).sum().item()
        losses, counts = zip(*gather_object([(loss, tokens)]))
        return sum(losses) / sum(counts)

    def _bleu(self, dataset: Dataset, gen_kwargs: dict) -> float:
        texts, targets = self._outputs(dataset, gen_kwargs), [dataset["target"][:]]
        return sacrebleu.corpus_bleu(texts, targets, tokenize=self.args.bleu_tokenize, force=True).score

    def _outputs(self, dataset: Dataset, gen_kwargs: dict) -> list[str]:
        """Translate the sources of a data set, or parse them for `eval_f1`, each device a share of them."""
        world, rank = self.args.world_size, self.args.process_index
        gen_kwargs = {**_search_options(self.args), **gen_kwargs}
        budget = self.args.eval_tokens_per_device
        reshard = self.accelerator.is_fsdp2 and self.accelerator.state.fsdp_plugin.reshard_after_forward
        sources = dataset["source"][rank::world]
        decode = partial(parse, file="evaluation set", skip=True) if self.args.eval_f1 else translate
        with gathered(self.model, reshard):  # devices decode different sentences in different numbers of steps
            own_share = decode(self.model, self.processing_class, sources, budget, **gen_kwargs)
        translations = sorted(gather_object([(rank + i * world, text) for i, text in enumerate(own_share)]))
        return [text for _, text in translations]


def _search_options(args: VaswaniTrainingArguments) -> dict[str, int]:
    """Options of `generate()` in evaluation."""
    options = {"num_beams": args.generation_num_beams, "max_length": args.generation_max_length}
    return {name: value for name, value in options.items() if value is not None}


def bracket_f1(trees: list[str], golds: list[str]) -> float:
    """Labelled F1 of trees by `data.brackets`; an empty line is a missing tree, whose gold brackets count."""
    pairs = ((parse_tree(gold), parse_tree(tree) if tree else None) for tree, gold in zip(trees, golds))
    return f1(*(sum(column) for column in zip(*(agreement(*pair) for pair in pairs))))


class _Throughput:
    """Tokens of the updates since the last log, with and without padding."""

    def __init__(self):
        self.started = time.monotonic()
        self.target_tokens = self.tokens = self.padded = 0

    def add(self, batches: list[dict[str, torch.Tensor]]) -> None:
        for batch in batches:
            targets = int((batch["labels"] != -100).sum())
            self.target_tokens += targets
            self.tokens += targets + int(batch["attention_mask"].sum())
            self.padded += batch["labels"].numel() + batch["attention_mask"].numel()

    def summary(self) -> dict[str, float]:
        if not self.padded:
            return {}
        seconds = time.monotonic() - self.started
        return {
            "target_tokens_per_second": round(self.target_tokens / seconds, 1),
            "padding_share": round(1 - self.tokens / self.padded, 4),
        }
