import math
import shutil

import pytest
import sacrebleu
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.nn import functional as F

from hf_vaswani import VaswaniForConditionalGeneration
from support.models import tiny_config, tiny_model
from support.runs import make_trainer
from training.paper import inverse_sqrt_factor, paper_learning_rate
from training.trainer.checkpoints import complete_checkpoints
from training.trainer.trainer import SaveByMinutes, VaswaniTrainer


def paper_rate(step: int, d_model: int, warmup: int) -> float:
    """Equation 3 of the paper, as it stands there."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


@pytest.mark.parametrize("step", [1, 2, 4000, 40_000])
def test_schedule_equals_the_papers_formula(step):
    peak = paper_learning_rate(512, 4000)
    assert peak * inverse_sqrt_factor(step, 4000) == pytest.approx(paper_rate(step, 512, 4000), rel=1e-12)


def test_every_update_uses_the_papers_rate(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path, tokenizer, pairs, learning_rate=paper_learning_rate(16, 4), max_steps=8)
    used = []
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    trainer.train()
    assert used == pytest.approx([paper_rate(step, 16, 4) for step in range(1, 9)])


def test_each_training_has_a_new_schedule_but_a_given_one_is_kept(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path / "own", tokenizer, pairs, max_steps=3)
    for _ in range(2):
        trainer.train()
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        assert rates == pytest.approx([1e-3 * step / 4 for step in (1, 2, 3)])

    trainer = make_trainer(tmp_path / "given", tokenizer, pairs, max_steps=3)
    given = torch.optim.lr_scheduler.LambdaLR(trainer.create_optimizer(), lambda step: 0.5)
    trainer.lr_scheduler = given
    trainer.train()
    assert trainer.lr_scheduler is given
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == [5e-4] * 3


def test_optimiser_is_the_papers_adam(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path, tokenizer, pairs)
    for group in trainer.create_optimizer().param_groups:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0.0)


def test_logged_loss_is_the_smoothed_loss_per_token_of_the_whole_update(tmp_path, tokenizer, pairs):
    """With two batches an update, against the loss of both computed apart with PyTorch's own smoothing."""
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=len(tokenizer)))  # no dropout
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = make_trainer(
        tmp_path, tokenizer, pairs, model, gradient_accumulation_steps=2, max_steps=1, save_strategy="no"
    )
    batches = list(trainer.get_train_dataloader())[:2]
    trainer.train()

    model.load_state_dict(start)
    model.eval()
    loss = tokens = 0
    for batch in batches:
        logits = model(**batch).logits.flatten(0, 1)
        labels = batch["labels"].flatten()
        loss += F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum").item()
        tokens += (labels != -100).sum().item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss / tokens, rel=1e-4)


def test_log_has_rate_and_padding_share(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path, tokenizer, pairs, max_steps=3)
    batches = list(trainer.get_train_dataloader())[:3]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3
    for batch, entry in zip(batches, logs):
        real = (batch["labels"] != -100).sum() + batch["attention_mask"].sum()
        share = 1 - real.item() / (batch["labels"].numel() + batch["attention_mask"].numel())
        assert entry["padding_share"] == pytest.approx(share, abs=1e-4)
        assert entry["target_tokens_per_second"] > 0


def test_updates_after_the_last_log_have_rate_and_padding_share_at_the_end(tmp_path, tokenizer, pairs):
    trainer = make_trainer(tmp_path, tokenizer, pairs, max_steps=3, logging_steps=2)
    batch = list(trainer.get_train_dataloader())[2]
    trainer.train()
    end = trainer.state.log_history[-1]
    real = (batch["labels"] != -100).sum() + batch["attention_mask"].sum()
    share = 1 - real.item() / (batch["labels"].numel() + batch["attention_mask"].numel())
    assert "train_runtime" in end and end["padding_share"] == pytest.approx(share, abs=1e-4)
    assert end["target_tokens_per_second"] > 0

    trainer = make_trainer(tmp_path / "all", tokenizer, pairs, max_steps=2, logging_steps=2)
    trainer.train()
    assert not {"target_tokens_per_second", "padding_share"} & trainer.state.log_history[-1].keys()


def test_evaluation_gives_the_exact_perplexity(tmp_path, tokenizer, pairs):
    model = tiny_model(vocab_size=len(tokenizer))
    trainer = make_trainer(tmp_path, tokenizer, pairs, model, eval_tokens_per_device=64, generation_num_beams=2)
    metrics = trainer.evaluate(max_new_tokens=10)

    model.eval()
    loss = tokens = 0
    for source, target in pairs[:20]:
        batch = tokenizer(source, text_target=target, return_tensors="pt")
        loss += model(**batch).loss.item() * batch["labels"].shape[1]
        tokens += batch["labels"].shape[1]
    assert metrics["eval_loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)


def test_bleu_is_that_of_the_translations_in_their_order(tmp_path, tokenizer, pairs, monkeypatch):
    """With translations that are nearly right, each for its own source; a random model would give 0."""
    nearly = {source: " ".join(target.split()[:-1]) for source, target in pairs}
    monkeypatch.setattr(
        "training.trainer.trainer.translate", lambda model, tok, sources, *a, **k: [nearly[s] for s in sources]
    )
    metrics = make_trainer(tmp_path, tokenizer, pairs, tiny_model(vocab_size=len(tokenizer))).evaluate()
    expected = sacrebleu.corpus_bleu([nearly[source] for source, _ in pairs[:20]], [[t for _, t in pairs[:20]]]).score
    assert metrics["eval_bleu"] == pytest.approx(expected)
    assert 20 < expected < 95


def test_the_best_checkpoint_is_kept_however_old(tmp_path, tokenizer, pairs, monkeypatch):
    scores = iter([10.0, 30.0, 20.0, 5.0])
    monkeypatch.setattr(VaswaniTrainer, "_bleu", lambda self, dataset, options: next(scores))
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 1, "metric_for_best_model": "eval_bleu"}
    trainer = make_trainer(tmp_path, tokenizer, pairs, max_steps=8, save_total_limit=3, **options)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert trainer.state.best_metric == 30.0
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == [
        "checkpoint-4",
        "checkpoint-7",
        "checkpoint-8",
    ]


def test_a_resumed_run_ends_like_one_that_was_never_stopped(tmp_path, tokenizer, pairs, caplog):
    """In the middle of an epoch, with dropout; weights to the bit."""
    whole = make_trainer(tmp_path / "whole", tokenizer, pairs, gradient_accumulation_steps=2)
    assert whole.token_budget_sampler().num_updates > 6
    whole.train()
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", stopped / "checkpoint-3")
    resumed = make_trainer(stopped, tokenizer, pairs, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(stopped / "checkpoint-3"))
    assert "missing keys" not in caplog.text
    for (name, expected), weight in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(weight, expected), name
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 3]
        for trainer in (whole, resumed)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_training_runs_over_epochs(tmp_path, tokenizer, pairs):
    """Also where the last update of an epoch has fewer batches than the others."""
    trainer = make_trainer(tmp_path, tokenizer, pairs[:60], gradient_accumulation_steps=4, max_steps=9)
    sampler = trainer.token_budget_sampler()
    assert any(not batch for batch in sampler)
    trainer.train()
    assert trainer.state.epoch > 1
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_checkpoints_by_minutes(monkeypatch, tmp_path, tokenizer, pairs):
    clock = [0.0]
    monkeypatch.setattr("training.trainer.trainer.time.monotonic", lambda: clock[0])
    trainer = make_trainer(tmp_path, tokenizer, pairs, save_minutes=1.0, save_strategy="no", max_steps=7)

    class Clock(SaveByMinutes):
        def on_step_begin(self, *args, **kwargs):
            clock[0] += 25.0

    trainer.callback_handler.callbacks.insert(0, Clock(1e9))
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_a_checkpoint_holds_what_others_need(tmp_path, tokenizer, pairs):
    make_trainer(tmp_path, tokenizer, pairs, max_steps=3).train()
    files = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= files
    assert {"configuration_vaswani.py", "modeling_vaswani.py", "optimizer.pt", "trainer_state.json"} <= files


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_with_few_graphs_for_many_shapes(tmp_path, tokenizer, pairs, monkeypatch):
    """By a compiler that runs graphs as they are; its checkpoints are those of any model."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # to be restored: the arguments set it
    torch._dynamo.reset()
    losses = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = tiny_model(vocab_size=len(tokenizer))
        clear_compilation_metrics()
        trainer = make_trainer(tmp_path / str(len(losses)), tokenizer, pairs, model, **compiled)
        batches = list(trainer.get_train_dataloader())[:6]
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len({(batch["input_ids"].shape, batch["labels"].shape) for batch in batches}) == 6
    graphs = [one for one in get_compilation_metrics() if "modeling_vaswani" in (one.co_filename or "")]
    again = [one for one in graphs if one.co_name == "forward" and one.recompile_reason]
    assert graphs
    assert len(again) <= 1  # where source and target had happened to be of one length
    saved = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "1" / "checkpoint-6").state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(saved[name], weight), name
