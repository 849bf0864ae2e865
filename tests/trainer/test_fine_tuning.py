import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, TrainerControl, TrainerState

from support.models import tiny_model
from training.cli import main
from training.data.tokenizer import extend_tokenizer, train_tokenizer
from training.demo_data import write_demo_data
from training.trainer.arguments import ModelArguments, VaswaniTrainingArguments
from training.trainer.checkpoints import complete_checkpoints
from training.trainer.fine_tuning import EarlyStopping, extend_embeddings, starting_checkpoint
from training.trainer.trainer import VaswaniTrainer


SMALL = [
    *("--warmup_steps", "2", "--learning_rate", "0.01", "--eval_steps", "2", "--save_steps", "2"),
    *("--source_tokens_per_update", "1000", "--target_tokens_per_update", "1000", "--tokens_per_device", "500"),
    *("--logging_steps", "1", "--generation_num_beams", "1", "--disable_tqdm", "true"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), train=200, val=10, test=10)
    return {split: [str(path) for path in paths] for split, paths in files.items()}


@pytest.fixture(scope="module")
def start(tmp_path_factory, tokenizer):
    """A model whose fields and search are nobody's defaults, in half precision."""
    folder = tmp_path_factory.mktemp("start")
    model = tiny_model(vocab_size=len(tokenizer), dropout=0.2).bfloat16()
    model.generation_config.num_beams = 3
    model.generation_config.length_penalty_form = "gnmt"
    model.generation_config.max_extra_tokens = 7
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words(data, start):
    def words(output, *more: str, init_from: str | Path = start) -> list[str]:
        files = ["--train_files", *data["train"], "--eval_files", *data["val"]]
        return ["train", "--init_from", str(init_from), *files, "--output_dir", str(output), *SMALL, *more]

    return words


def weights_of(folder) -> dict[str, torch.Tensor]:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def history_of(run) -> list[dict]:
    return json.loads((Path(run) / "trainer_state.json").read_text())["log_history"]


def error_of(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def same_weights(one, other) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(other[name], weight), name


# Where it starts


def test_a_run_starts_from_the_models_weights_vocabulary_and_search(words, start, tmp_path):
    """With a learning rate of 0, it ends there too."""
    more = ["--max_steps", "2", "--learning_rate", "0", "--model_overrides", "{dropout: 0.3, label_smoothing: 0}"]
    assert main(words(tmp_path, *more)) == 0
    same_weights(weights_of(start), weights_of(tmp_path))
    old, new = (AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str() for folder in (start, tmp_path))
    assert old == new
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    config = model.config
    assert (config.d_model, config.d_ff, config.d_k, config.encoder_layers) == (16, 24, 4, 2)
    assert (config.dropout, config.label_smoothing, config.attention_dropout) == (0.3, 0, 0)
    search = model.generation_config
    assert (search.num_beams, search.length_penalty_form, search.max_extra_tokens) == (3, "gnmt", 7)
    assert str(start) not in (tmp_path / "config.json").read_text()


def test_the_loss_falls_from_where_the_model_was(words, start, tmp_path, caplog):
    """And a run that does not keep the best weights says so."""
    with caplog.at_level(logging.WARNING):
        assert main(words(tmp_path, "--max_steps", "8")) == 0
    assert "Without load_best_model_at_end, output_dir gets the last weights" in caplog.text
    losses = [entry["eval_loss"] for entry in history_of(tmp_path) if "eval_loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_a_model_of_the_hub_is_found_in_its_cache(words, start, tmp_path):
    cache = Path(os.environ["HF_HOME"], "hub", "models--somebody--model")
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    shutil.copytree(start, cache / "snapshots" / ("0" * 40))
    assert starting_checkpoint("somebody/model") == cache / "snapshots" / ("0" * 40)
    more = ["--max_steps", "1", "--learning_rate", "0", "--lora_rank", "2"]
    assert main(words(tmp_path, *more, init_from="somebody/model")) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model_overrides", "{dropout: 0.3, d_ff: 32}"], "d_ff is 24 in {start}, but the run sets 32"),
        (["--model", "big"], "d_model is 16 in {start}, but the run sets 1024"),
        (["--model", "huge"], "Table 3 has no row 'huge'"),
        (["--model_overrides", "{d_fff: 32}"], "no field 'd_fff'"),
        (["--model_overrides", "{dropout: 3}"], "dropout must be in [0, 1), got 3"),
        (["--model_overrides", "{dropout: much}"], "model_overrides, dropout: "),
        (["--vocab_size", "500"], "vocab_size=500: with init_from, the vocabulary is that of {start}, 400 tokens"),
        (["--init_from", "nowhere/at-all"], "nowhere/at-all: no such folder"),
        (["--init_from", "no where"], "no where: no such folder"),
        (["--init_from", "$NOWHERE/model"], "the environment variable NOWHERE is not set"),
        (["--extend_vocabulary", "0"], "extend_vocabulary must be positive, got 0"),
        (["--lora_rank", "-1"], "lora_rank must be positive, got -1"),
        (["--lora_rank", "2", "--extend_vocabulary", "9"], "adapters alone cannot learn the new tokens' embeddings"),
        (["--lora_rank", "2", "--average", "last"], "average=last with lora_rank"),
        (["--early_stopping_patience", "0"], "early_stopping_patience must be positive, got 0"),
        (["--early_stopping_patience", "3", "--eval_strategy", "no"], "early_stopping_patience=3 needs evaluation"),
    ],
)
def test_what_is_wrong_is_one_line_on_standard_error(words, start, tmp_path, capsys, change, message):
    assert main(words(tmp_path, "--max_steps", "1", *change)) == 1
    error = error_of(capsys)
    assert error.startswith("hf-vaswani train: ")
    assert message.format(start=start) in error


def test_a_model_with_two_vocabularies_is_refused(words, tokenizer, tmp_path, capsys):
    tiny_model(vocab_size=len(tokenizer), source_vocab_size=7).save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    assert main(words(tmp_path / "run", "--max_steps", "1", init_from=tmp_path / "two")) == 1
    assert "source_vocab_size is 7" in error_of(capsys)


def test_what_agrees_with_the_model_may_be_said(words, tmp_path):
    more = ["--vocab_size", "400", "--model", "D-drop0.0", "--model_overrides", "{d_model: 16, num_heads: 2}"]
    assert main(words(tmp_path, *more, "--max_steps", "1")) == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config.dropout == 0


@pytest.mark.parametrize("name", ["extend_vocabulary", "lora_rank"])
def test_what_only_fine_tuning_has_needs_a_model_to_start_from(name):
    with pytest.raises(ValueError, match=f"{name}=5 needs init_from"):
        ModelArguments(**{name: 5})


def test_folders_that_are_no_model_are_refused(start, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not a checkpoint.* no config\.json"):
        starting_checkpoint(str(tmp_path))
    MarianConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: model_type: expected 'vaswani', found 'marian'"):
        starting_checkpoint(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter, not a model"):
        starting_checkpoint(str(tmp_path))


def test_damaged_weights_are_not_started_from(words, start, tmp_path, capsys):
    copy = shutil.copytree(start, tmp_path / "start")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert main(words(tmp_path / "run", "--max_steps", "1", init_from=copy)) == 1
    assert f"{copy}/model.safetensors is damaged" in error_of(capsys)


def test_a_vocabulary_larger_than_the_model_is_refused(words, start, tokenizer, tmp_path, capsys):
    copy = shutil.copytree(start, tmp_path / "start")
    extend_tokenizer(tokenizer, ["Spektrometer"] * 9, [], 1).save_pretrained(copy)
    assert main(words(tmp_path / "run", "--max_steps", "1", init_from=copy)) == 1
    assert f"{copy}: the tokenizer has an id 400, but the model 400 embeddings" in error_of(capsys)
    assert main(words(tmp_path / "run", "--max_steps", "1", "--extend_vocabulary", "9", init_from=copy)) == 1
    assert f"{copy}: the tokenizer has an id 400, but the model 400 embeddings" in error_of(capsys)


# Going on


def test_a_resumed_run_ends_as_if_it_had_not_stopped(words, tmp_path):
    assert main(words(tmp_path / "whole", "--max_steps", "4")) == 0
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert main(words(tmp_path / "resumed", "--max_steps", "4", "--resume")) == 0
    same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))


def test_a_changed_start_is_noticed_and_a_moved_one_may_be(words, start, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(words(run, "--max_steps", "2")) == 0
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(start, moved)
    assert main(words(run, "--max_steps", "3", "--resume", init_from=moved)) == 0

    shutil.copytree(start, other)
    model = AutoModelForSeq2SeqLM.from_pretrained(start)
    with torch.no_grad():
        model.model.shared.weight[3] += 1
    model.save_pretrained(other)
    assert main(words(run, "--max_steps", "4", "--resume", init_from=other)) == 1
    error = error_of(capsys)
    assert "this is not the run that wrote" in error
    assert "init_from ({'model.safetensors': {'size': " in error

    for option in ("--lora_rank", "--extend_vocabulary"):
        assert main(words(run, "--max_steps", "4", "--resume", option, "4")) == 1
        assert f"{option[2:]} (None, now 4)" in error_of(capsys)
    from_scratch = words(run, "--max_steps", "4", "--resume")
    assert main([from_scratch[0], *from_scratch[3:]]) == 1
    assert "}}, now None)" in error_of(capsys)


# The vocabulary


def test_rows_of_new_tokens_are_the_means_of_their_parts():
    texts = ["ab abc"] * 3
    old = train_tokenizer(texts, vocab_size=260, show_progress=False)
    extended = extend_tokenizer(old, texts, [], 2)
    for tied in (True, False):
        model = tiny_model(vocab_size=260, tie_word_embeddings=tied, output_bias=True)
        torch.nn.init.normal_(model.lm_head.bias)
        bias = model.lm_head.bias.detach().clone()
        before = [model.get_input_embeddings().weight.clone(), model.get_output_embeddings().weight.clone()]
        extend_embeddings(model, old, extended)
        after = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        assert (after[0] is after[1]) == tied
        assert model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight is after[0]
        assert model.config.vocab_size == model.lm_head.out_features == 262
        # The old one's 259 is "ab". " ab" is the new token 260; " abc" is 261, of this and "c".
        space, ab, c = old.convert_tokens_to_ids(["Ġ", "ab", "c"])
        assert (ab, extended.convert_ids_to_tokens([260, 261])) == (259, ["Ġab", "Ġabc"])
        for one, other in zip([*before, bias], [*after, model.lm_head.bias]):
            assert torch.equal(other[:260], one)
            torch.testing.assert_close(other[260], (one[space] + one[ab]) / 2)
            torch.testing.assert_close(other[261], (one[space] + one[ab] + one[c]) / 3)


def test_a_run_extends_the_vocabulary_and_resumes(words, start, tmp_path):
    extend = ["--extend_vocabulary", "12", "--max_steps", "4"]
    assert main(words(tmp_path / "whole", *extend)) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert model.config.vocab_size == len(tokenizer) == 412
    assert model.lm_head.weight is model.model.shared.weight
    assert model.generation_config.max_extra_tokens == 7
    old = AutoTokenizer.from_pretrained(start)
    assert old.get_vocab().items() <= tokenizer.get_vocab().items()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert main(words(tmp_path / "resumed", *extend, "--resume")) == 0
    same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))


def test_new_rows_before_training_are_the_means(words, start, tmp_path, data):
    assert main(words(tmp_path, "--extend_vocabulary", "3", "--max_steps", "1", "--learning_rate", "0")) == 0
    before, after = (weights_of(folder)["model.shared.weight"] for folder in (start, tmp_path))
    assert torch.equal(after[:400], before)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"][-3:]
    left, right = AutoTokenizer.from_pretrained(start).convert_tokens_to_ids(merges[0])
    torch.testing.assert_close(after[400], (before[left] + before[right]) / 2)


# Adapters


def test_adapters_alone_are_trained_and_merged_at_the_end(words, start, tmp_path):
    assert main(words(tmp_path, "--lora_rank", "2", "--max_steps", "4")) == 0
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    assert not list(tmp_path.glob("adapter_*"))
    before, after = weights_of(start), weights_of(tmp_path)
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    linear = {name for name in before if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))}
    assert changed == linear
    assert len(linear) == 2 * 6 + 2 * 10

    base = AutoModelForSeq2SeqLM.from_pretrained(start, dtype=torch.float32)
    same_weights(PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict(), after)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert model.generation_config.max_extra_tokens == 7
    assert json.loads((tmp_path / "checksums.json").read_text()).keys() == {
        *("model.safetensors", "config.json", "generation_config.json")
    }


def test_adapters_resume_exactly(words, tmp_path):
    more = ["--lora_rank", "2", "--max_steps", "4"]
    assert main(words(tmp_path / "whole", *more)) == 0
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    assert main(words(tmp_path / "resumed", *more, "--resume")) == 0
    same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))
    losses = [
        [entry["loss"] for entry in history_of(tmp_path / run) if "loss" in entry] for run in ("whole", "resumed")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert main(words(tmp_path / "resumed", *more[:2], "--max_steps", "6", "--resume")) == 0  # over what was merged


def test_without_peft_the_message_says_what_to_install(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(words(tmp_path, "--lora_rank", "2", "--max_steps", "1")) == 1
    assert "lora_rank needs PEFT: pip install 'hf-vaswani[lora]'" in error_of(capsys)


# Early stopping


def scored(monkeypatch, scores: dict[int, float]) -> None:
    """Each evaluation has the BLEU that is given for its update."""
    monkeypatch.setattr(VaswaniTrainer, "_bleu", lambda self, *args: scores[self.state.global_step])


STOPPING = ["--max_steps", "40", "--load_best_model_at_end", "true", "--save_total_limit", "1"]


def test_a_run_stops_when_bleu_no_longer_rises_and_leaves_the_best(words, tmp_path, monkeypatch, caplog, capsys):
    """The warm-up ends after update 2; what is worse within it does not count, nor what is equal."""
    scored(monkeypatch, {2: 1, 4: 5, 6: 4, 8: 9, 10: 9, 12: 8})
    with caplog.at_level("INFO"):
        assert main(words(tmp_path, *STOPPING, "--early_stopping_patience", "2")) == 0
    assert "Stopped after update 12: no improvement of eval_bleu in 2 evaluations" in caplog.text
    out = capsys.readouterr().out
    assert f"{tmp_path}: trained 12 updates, best BLEU 9.00 at update 8. It has these best weights." in out
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-12"]
    same_weights(weights_of(tmp_path / "checkpoint-8"), weights_of(tmp_path))


def test_early_stopping_goes_on_counting_in_a_resumed_run(words, tmp_path, monkeypatch):
    scored(monkeypatch, {2: 1, 4: 9, 6: 4, 8: 3, 10: 2, 12: 1})
    patience = [*STOPPING, "--save_total_limit", "9", "--early_stopping_patience"]
    assert main(words(tmp_path / "whole", *patience, "3")) == 0
    assert history_of(tmp_path / "whole")[-1]["step"] == 10
    for step in (4, 6, 8):
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "resumed" / f"checkpoint-{step}")
    assert main(words(tmp_path / "resumed", *patience, "3", "--resume")) == 0
    assert history_of(tmp_path / "resumed")[-1]["step"] == 10
    same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))

    monkeypatch.setattr(VaswaniTrainer, "training_step", lambda *args: pytest.fail("it trains"))
    assert main(words(tmp_path / "resumed", *patience, "3", "--resume")) == 0
    same_weights(weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed"))
    monkeypatch.undo()
    scored(monkeypatch, {12: 1})
    assert main(words(tmp_path / "resumed", *patience, "4", "--resume")) == 0
    assert history_of(tmp_path / "resumed")[-1]["step"] == 12


def test_early_stopping_needs_evaluation_data(words, data, tmp_path, capsys):
    command = words(tmp_path, "--early_stopping_patience", "3")
    first = command.index("--eval_files")
    assert main([*command[:first], *command[first + 3 :]]) == 1
    assert "early_stopping_patience=3 needs evaluation while training" in error_of(capsys)


def test_the_best_adapters_are_merged(words, start, tmp_path, monkeypatch):
    scored(monkeypatch, {2: 1, 4: 9, 6: 4})
    assert main(words(tmp_path, *STOPPING, "--early_stopping_patience", "1", "--lora_rank", "2")) == 0
    base = AutoModelForSeq2SeqLM.from_pretrained(start, dtype=torch.float32)
    best = PeftModel.from_pretrained(base, tmp_path / "checkpoint-4").merge_and_unload()
    same_weights(best.state_dict(), weights_of(tmp_path))


def test_evaluations_of_the_warm_up_do_not_count(tmp_path):
    args = VaswaniTrainingArguments(output_dir=str(tmp_path), warmup_steps=100, early_stopping_patience=2)
    stopping, state = EarlyStopping(2), TrainerState(max_steps=1000, best_metric=9.0)
    counts = []
    for step in (50, 100, 150, 200):
        state.global_step, control = step, TrainerControl()
        stopping.on_evaluate(args, state, control, {"eval_bleu": 5.0})
        counts.append((stopping.early_stopping_patience_counter, control.should_training_stop))
    assert counts == [(0, False), (0, False), (1, False), (2, True)]


def test_a_run_that_had_no_patience_can_be_given_one(words, tmp_path, monkeypatch):
    scored(monkeypatch, {2: 9, 4: 4, 6: 3})
    assert main(words(tmp_path, "--max_steps", "2")) == 0
    assert main(words(tmp_path, "--max_steps", "40", "--resume", "--early_stopping_patience", "2")) == 0
    assert history_of(tmp_path)[-1]["step"] == 6


# Real data


TINY = {"d_model": 128, "d_ff": 256, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3}


@pytest.mark.slow
def test_fine_tuning_on_multi30k_beats_the_model_it_starts_from_and_starting_from_nothing(tmp_path):
    """BLEU on val, raw text, greedy; a general model of Tatoeba's short sentences, then 150 updates of captions."""
    general, captions = os.environ.get("TATOEBA"), os.environ.get("MULTI30K")
    if not general or not captions:
        pytest.skip("TATOEBA and MULTI30K do not name the folders of Tatoeba En-De and Multi30k")
    common = ["--eval_files", f"{captions}/val.en.gz", f"{captions}/val.de.gz", "--tokens_per_device", "2048"]
    common += ["--source_tokens_per_update", "4096", "--target_tokens_per_update", "4096", "--bf16", "true"]
    common += ["--attn_implementation", "eager", "--generation_num_beams", "1", "--disable_tqdm", "true"]
    new = ["--vocab_size", "6000", "--learning_rate", "0.004", "--model_overrides"]
    few = ["--max_steps", "150", "--warmup_steps", "50", "--eval_steps", "150", "--save_steps", "150"]

    def bleu(run: str, data: str, *more: str) -> float:
        files = ["--train_files", f"{data}/train.en.gz", f"{data}/train.de.gz"]
        assert main(["train", *files, *common, "--output_dir", str(tmp_path / run), *more]) == 0
        return [entry["eval_bleu"] for entry in history_of(tmp_path / run) if "eval_bleu" in entry][-1]

    many = ["--max_steps", "900", "--warmup_steps", "300", "--eval_steps", "900", "--save_steps", "900"]
    untuned = bleu("general", general, *many, *new, json.dumps(TINY))
    scratch = bleu("scratch", captions, *few, *new, json.dumps({**TINY, "dropout": 0.3}))
    start = ["--config", "finetune", "--init_from", str(tmp_path / "general"), "--learning_rate", "0.002"]
    tuned = bleu("tuned", captions, *few, *start)
    assert tuned > max(untuned, scratch) + 1
