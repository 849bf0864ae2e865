"""The tools that people bring work unmodified: the library's trainer and example, Accelerate, PEFT, quantisation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from torch.nn import functional as F
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8Tensor, Int8WeightOnlyConfig, quantize_
from transformers import (
    AutoModelForSeq2SeqLM,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    QuantoConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TorchAoConfig,
)

from support.models import tiny_model


SOURCE = torch.tensor([[5, 9, 31, 7, 2, 0], [8, 3, 17, 22, 36, 2], [12, 2, 0, 0, 0, 0]])
LABELS = torch.tensor([[14, 6, 31, 2, -100], [9, 21, 4, 9, 2], [30, 11, 2, -100, -100]])
BATCH = {"input_ids": SOURCE, "attention_mask": (SOURCE != 0).long(), "labels": LABELS}
INPUTS = {name: BATCH[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(**BATCH).logits.float()


def close(ours: torch.Tensor, theirs: torch.Tensor, error: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=error, rtol=error)


# Seq2SeqTrainer, as it is


def stock_trainer(folder: Path, tokenizer, pairs, **options) -> Seq2SeqTrainer:
    model = tiny_model(vocab_size=len(tokenizer))
    arguments = {
        "max_steps": 6,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 20,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    encoded = [dict(tokenizer(source, text_target=target)) for source, target in pairs]
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(folder), **arguments),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=encoded[20:],
        eval_dataset=encoded[:20],
        processing_class=tokenizer,
    )


def losses_of(trainer: Seq2SeqTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_stock_trainer_trains_evaluates_predicts_and_saves(tmp_path, tokenizer, pairs):
    trainer = stock_trainer(
        tmp_path,
        tokenizer,
        pairs,
        predict_with_generate=True,
        generation_max_length=12,
        generation_num_beams=2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
    )
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    batch = trainer.data_collator([dict(example) for example in trainer.eval_dataset])
    with torch.no_grad():
        logits = trainer.model(**batch).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)

    predictions = torch.tensor(trainer.predict(trainer.eval_dataset).predictions)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    generated = trainer.model.generate(**inputs, max_length=12, num_beams=2)
    assert torch.equal(predictions[:, : generated.shape[1]], generated)
    assert (predictions[:, generated.shape[1] :] == tokenizer.pad_token_id).all()

    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "final")
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, logits)


def test_the_stock_trainers_label_smoothing_replaces_the_models_own(tmp_path, tokenizer, pairs):
    """The two are one formula, so the same losses follow from either; from both at once, others would."""
    own = losses_of(stock_trainer(tmp_path, tokenizer, pairs))
    smoothed = losses_of(stock_trainer(tmp_path, tokenizer, pairs, label_smoothing_factor=0.1))
    assert smoothed == pytest.approx(own, rel=1e-5)
    other = losses_of(stock_trainer(tmp_path, tokenizer, pairs, label_smoothing_factor=0.3))
    assert other[0] != pytest.approx(own[0], rel=1e-4)


def test_the_stock_trainers_accumulation_equals_a_larger_batch(tmp_path, tokenizer, pairs):
    """Also where the parts have differently many labels."""
    whole = losses_of(stock_trainer(tmp_path, tokenizer, pairs))
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert losses_of(stock_trainer(tmp_path, tokenizer, pairs, **parts)) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_stock_trainers_gradient_checkpointing_changes_no_loss(reentrant, tmp_path, tokenizer, pairs):
    whole = losses_of(stock_trainer(tmp_path, tokenizer, pairs))
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = stock_trainer(tmp_path, tokenizer, pairs, **options)
    assert losses_of(trainer) == pytest.approx(whole, rel=1e-5)
    assert trainer.model.model.decoder.layers[0].gradient_checkpointing


def test_the_stock_trainer_trains_in_bfloat16(tmp_path, tokenizer, pairs):
    whole = losses_of(stock_trainer(tmp_path, tokenizer, pairs))
    trainer = stock_trainer(tmp_path, tokenizer, pairs, bf16=True)
    assert losses_of(trainer) == pytest.approx(whole, rel=0.02)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


# Accelerate


@pytest.mark.parametrize(("precision", "error"), [("no", 1e-6), ("bf16", 0.02)])
def test_a_loop_of_ones_own_under_accelerate_equals_one_without(precision, error):
    def losses(prepare, backward, model):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        examples = [{name: value[i % 3] for name, value in BATCH.items()} for i in range(12)]
        model, optimizer, batches = prepare(model, optimizer, torch.utils.data.DataLoader(examples, batch_size=3))
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**batch).loss
            backward(loss)
            optimizer.step()
            yield loss.item()

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    accelerated = tiny_model().train()
    ours = list(losses(accelerator.prepare, accelerator.backward, accelerated))
    AcceleratorState._reset_state(True)
    plain = list(losses(lambda *objects: objects, torch.Tensor.backward, tiny_model().train()))
    assert ours == pytest.approx(plain, rel=error)
    assert plain[-1] < plain[0]
    assert accelerator.unwrap_model(accelerated).lm_head.weight.dtype == torch.float32


# PEFT


def trained(model) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["fc1", "fc2"], ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"], "all-linear"],
    ids=str,
)
def test_lora_trains_its_adapters_alone_and_merges(targets, tmp_path):
    base = tiny_model()
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    expected = logits_of(base)
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=2, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(base, config)
    losses = trained(model)
    assert losses[-1] < losses[0]
    adapters = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert adapters
    assert adapters == {name for name, _ in model.named_parameters() if "lora_" in name}
    adapted = {name.split("base_model.model.")[1].split(".lora_")[0] for name in adapters}
    if targets == "all-linear":
        linear = {name for name in before if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))}
        assert adapted == {name.removesuffix(".weight") for name in linear}
    else:
        assert {name.split(".")[-1] for name in adapted} == set(targets)

    logits = logits_of(model)
    assert not torch.allclose(logits, expected, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), expected)
    generated = model.generate(**INPUTS, max_new_tokens=6)

    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert torch.equal(logits_of(reloaded), logits)
    merged = reloaded.merge_and_unload()
    assert type(merged) is type(tiny_model())
    close(logits_of(merged), logits)
    assert torch.equal(merged.generate(**INPUTS, max_new_tokens=6), generated)
    for name, weight in base.named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, before[name.replace(".base_layer", "")])


def test_the_stock_trainer_trains_lora(tmp_path, tokenizer, pairs):
    trainer = stock_trainer(tmp_path, tokenizer, pairs)
    config = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=2, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(tiny_model(vocab_size=len(tokenizer)), config)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = Seq2SeqTrainer(model, trainer.args, data_collator=collator, train_dataset=trainer.train_dataset)
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint-6" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "checkpoint-6" / "model.safetensors").exists()


OTHER_ADAPTERS = {
    "IA3": lambda: IA3Config(
        task_type=TaskType.SEQ_2_SEQ_LM, target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]
    ),
    "prompt tuning": lambda: PromptTuningConfig(task_type=TaskType.SEQ_2_SEQ_LM, num_virtual_tokens=3),
    "prefix tuning": lambda: PrefixTuningConfig(task_type=TaskType.SEQ_2_SEQ_LM, num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", OTHER_ADAPTERS)
def test_other_adapters_train_alone_and_reload(kind, tmp_path):
    """Prefix tuning makes keys and values as wide as `d_model / num_heads`, whatever a model says."""
    base = tiny_model(d_k=8, d_v=8)
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    model = get_peft_model(base, OTHER_ADAPTERS[kind]())
    losses = trained(model)
    assert losses[-1] < losses[0]
    left = {name.replace(".base_layer", ""): weight for name, weight in base.named_parameters()}
    for name, weight in before.items():
        assert torch.equal(left[name], weight)
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(tiny_model(d_k=8, d_v=8), tmp_path)
    model.eval()
    with torch.no_grad():
        close(reloaded(**BATCH).loss, model(**BATCH).loss)
    options = {"max_new_tokens": 5, "suppress_tokens": [2]}
    assert torch.equal(reloaded.generate(**INPUTS, **options), model.generate(**INPUTS, **options))


# Quantisation


Q_PROJ = "model.encoder.layers.0.self_attn.q_proj.weight"


INT8 = {
    "torchao weights": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao weights and activations": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "quanto weights": lambda: QuantoConfig(weights="int8"),
}


@pytest.mark.parametrize("kind", INT8)
def test_a_model_in_eight_bits_is_close_to_one_in_full_precision(kind, tmp_path):
    model = tiny_model(d_model=64, d_ff=128, d_k=32, d_v=32)
    model.save_pretrained(tmp_path / "full")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "full", quantization_config=INT8[kind]())
    expected, logits = logits_of(model), logits_of(loaded)
    assert not torch.equal(logits, expected)
    error = (logits - expected).std() / expected.std()
    assert error < 0.05
    assert loaded.generate(**INPUTS, max_new_tokens=5, num_beams=2).shape[0] == 3
    with torch.no_grad():
        close(loaded(**BATCH, skip_logits=True).loss, loaded(**BATCH).loss)
    if kind.startswith("torchao"):  # quanto's models cannot be saved
        loaded.save_pretrained(tmp_path / "quantised")
        reloaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "quantised")
        assert type(reloaded.get_parameter(Q_PROJ)) is type(loaded.get_parameter(Q_PROJ)) is Int8Tensor
        assert torch.equal(logits_of(reloaded), logits)


def test_a_quantised_projection_gives_the_loss_of_its_logits():
    model = tiny_model(d_model=64, d_ff=128, d_k=32, d_v=32, tie_word_embeddings=False)
    plain = model(**BATCH).loss.item()
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model.lm_head.weight) is Int8Tensor
    with torch.no_grad():
        loss = model(**BATCH, skip_logits=True).loss
        close(loss, model(**BATCH).loss)
    assert loss.item() == pytest.approx(plain, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"load_in_8bit": True}, {"load_in_4bit": True}], ids=str)
def test_bitsandbytes_quantises(options, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = tiny_model(d_model=64, d_ff=128, d_k=32, d_v=32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**options), device_map={"": 0}
    )
    batch = {name: value.to("cuda") for name, value in BATCH.items()}
    with torch.no_grad():
        logits, expected = loaded(**batch).logits.float().cpu(), logits_of(model)
    assert (logits - expected).std() / expected.std() < 0.25
    del batch["labels"]
    assert len(loaded.generate(**batch, max_new_tokens=5)) == 3


# The library's example, as it is


def example_script() -> Path:
    source = os.environ.get("TRANSFORMERS_SOURCE")
    if source is None:
        pytest.skip("TRANSFORMERS_SOURCE names no source tree of transformers")
    script = Path(source) / "examples" / "pytorch" / "translation" / "run_translation.py"
    if not script.exists():
        pytest.skip(f"{script} does not exist")
    return script.absolute()


# What `evaluate.load("sacrebleu")` finds in the working directory, so that it need not ask the Hub.
OFFLINE_SACREBLEU = """
import datasets
import evaluate
import sacrebleu


class Sacrebleu(evaluate.Metric):
    def _info(self):
        texts = {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(texts)
        )

    def _compute(self, predictions, references):
        return {"score": sacrebleu.corpus_bleu(predictions, [list(stream) for stream in zip(*references)]).score}
"""


def write_example_files(folder: Path, tokenizer, pairs) -> None:
    """A checkpoint, three files of pairs, and the metric."""
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, part in {"train": pairs[40:], "validation": pairs[:20], "test": pairs[20:40]}.items():
        lines = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in part]
        (folder / f"{split}.json").write_text("\n".join(lines) + "\n")
    (folder / "sacrebleu").mkdir()
    (folder / "sacrebleu" / "sacrebleu.py").write_text(OFFLINE_SACREBLEU)


@pytest.mark.slow
def test_the_stock_translation_example_trains_evaluates_and_predicts(tmp_path, tokenizer, pairs):
    script = example_script()
    write_example_files(tmp_path, tokenizer, pairs)
    options = {
        "model_name_or_path": "./model",
        "trust_remote_code": "True",
        "source_lang": "en",
        "target_lang": "de",
        "train_file": "train.json",
        "validation_file": "validation.json",
        "test_file": "test.json",
        "max_source_length": "64",
        "max_target_length": "32",
        "num_beams": "2",
        "max_steps": "8",
        "per_device_train_batch_size": "8",
        "label_smoothing_factor": "0.1",
        "report_to": "none",
        "output_dir": "run",
    }
    command = [sys.executable, str(script), "--do_train", "--do_eval", "--do_predict", "--predict_with_generate"]
    command += ["--use_cpu", *(word for name, value in options.items() for word in (f"--{name}", value))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert {"train_loss", "eval_loss", "eval_bleu", "predict_bleu"} <= results.keys()
    assert results["eval_samples"] == results["predict_samples"] == 20
    translations = (tmp_path / "run" / "generated_predictions.txt").read_text()
    assert len(translations.split("\n")) == 20
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
