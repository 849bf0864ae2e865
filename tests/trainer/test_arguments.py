import os
import re
from importlib import resources

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_vaswani import VaswaniConfig
from support.paths import ROOT
from training.cli import main
from training.trainer.arguments import VaswaniTrainingArguments, parse_arguments
from training.trainer.command_line import expand, load_recipe
from training.trainer.packaged_recipes import packaged_recipes


def parse(*words: str, output_dir: str = "unused"):
    return parse_arguments([*words, "--output_dir", output_dir])


def test_defaults_are_the_papers():
    model, data, training = parse()
    assert (model.model, model.vocab_size) == ("base", 37000)
    assert (data.source_lang, data.target_lang) == ("en", "de")
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.lr_scheduler_type, training.warmup_steps, training.learning_rate) == ("inverse_sqrt", 4000, None)
    assert (training.weight_decay, training.max_grad_norm, training.label_smoothing_factor) == (0.0, 0.0, 0.0)
    assert (training.source_tokens_per_update, training.target_tokens_per_update) == (25000, 25000)
    assert training.max_steps == 100_000


def test_the_command_line_wins_over_the_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: big\nmax_steps: 300\nlearning_rate: 5e-3\nmodel_overrides: {d_ff: 64, dropout: 1e-1}\n")
    model, _, training = parse("--config", str(recipe), "--max_steps", "7")
    assert (model.model, model.model_overrides) == ("big", {"d_ff": 64, "dropout": 0.1})
    assert (training.max_steps, training.learning_rate) == (7, 0.005)
    model, *_ = parse("--config", str(recipe), "--model_overrides", '{"d_ff": 32}', "--model", "C-N2")
    assert (model.model, model.model_overrides) == ("C-N2", {"d_ff": 32})


@pytest.mark.parametrize("name", ["--train_files", "--train-files", "--train_file", "--train-file"])
def test_one_file_of_pairs_is_a_file_too(tmp_path, name):
    (tmp_path / "mine.tsv").write_text("a\tb\n")
    _, data, _ = parse(name, str(tmp_path / "mine.tsv"), "--eval-file", str(tmp_path / "mine.tsv"))
    assert data.train_files == data.eval_files == [str(tmp_path / "mine.tsv")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stesp: 3", "mine.yaml: unknown field 'max_stesp'. Did you mean 'max_steps'"),
        ("- a\n- b", r"mine.yaml: expected 'field: value' lines, found list"),
        ("a: [", r"mine.yaml: not valid YAML"),
        ("max_steps: 1e5", r"mine.yaml: argument --max_steps: invalid int value: '1e5'"),
        ("bf16: maybe", r"mine.yaml: argument --bf16: .*maybe"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(tmp_path, text, message):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse("--config", str(recipe))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: [1]\n", "max_steps: expected one value, found a list of 1"),
        ("max_steps: {a: 1}\n", "max_steps: expected a value, found a mapping"),
        ("train_files: [[a], b]\n", "train_files: expected a list of names, found ['a']"),
        ("train_files: [--resume, b]\n", "train_files: expected a list of names, found '--resume'"),
        ("max_steps: 2001-01-01\n", "--max_steps: invalid int value: '2001-01-01'"),
        ("max_steps: 1" + "0" * 400 + "\n", "max_steps must be below 2**63"),
        ("learning_rate: 1e400\n", "learning_rate must be a finite number, got inf"),
        ("max_length_ratio: .nan\n", "--max_length_ratio: invalid float value: '.nan'"),
        ("seed: -1\n", "seed must be at least 0 and below 2**32, got -1"),
        ('output_dir: "a\\0b"\n', "output_dir holds a null byte"),
        ("lr_scheduler_kwargs: '{'\n", "lr_scheduler_kwargs: expected a mapping, as JSON"),
        ("model_overrides: {d_model: [1]}\n", "model_overrides, d_model: expected one value, found ['1']"),
        ("model_overrides: {dropout: 2001-99-99}\n", "model_overrides, dropout: month must be in 1..12"),
        ("model_overrides: '['\n", "model_overrides '[': not valid YAML"),
        ("model_overrides: 3\n", "model_overrides '3': expected 'field: value' lines, found str"),
        ("a: &x [1]\nb: *x\n", "not valid YAML: aliases are not allowed"),
        ("a: " + "[" * 3000, "not valid YAML"),
        ("", "expected 'field: value' lines, found"),
        ("\0", "not valid YAML"),
        (b"\xff\xfe", "byte 0xff at position 0 is not UTF-8"),
        (b"a" * (2**20 + 1), "1,048,577 bytes; a recipe has at most 1,048,576"),
    ],
)
def test_a_recipe_of_wrong_types_is_one_line_that_names_file_and_field(tmp_path, capsys, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["train", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(path) in error
    assert error.count("\n") == 1 and len(error) < 1000


def test_a_recipe_may_hold_a_mapping_where_a_field_takes_one(tmp_path):
    (tmp_path / "recipe.yaml").write_text("lr_scheduler_kwargs: {power: 2.0}\nreport_to: [tensorboard]\n")
    for _ in range(2):  # the parser changes the types of fields when it is made
        args = parse("--config", str(tmp_path / "recipe.yaml"), "--lr_scheduler_type", "polynomial")
        assert args[2].lr_scheduler_kwargs == {"power": 2.0}
        assert args[2].report_to == ["tensorboard"]


def test_a_recipe_that_is_no_file_is_said_to_be_so(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, message in (("", "is a folder, not a file"), ("pipe.yaml", "expected a regular file")):
        assert main(["train", "--config", str(tmp_path / name)]) == 1
        assert f"{tmp_path / name}: {message}" in capsys.readouterr().err


def test_a_field_says_what_its_value_means(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("target_lang: no\ntrain_files: a.tsv\neval_files:\nbf16: yes\nmetric_for_best_model: null\n")
    _, data, training = parse("--config", str(recipe))
    assert (data.target_lang, data.train_files, data.eval_files) == ("no", ["a.tsv"], [])
    assert (training.bf16, training.metric_for_best_model) == (True, None)


def test_epochs_can_be_asked_for_instead_of_steps():
    assert parse("--num_train_epochs", "3")[2].max_steps == -1
    assert parse("--num_train_epochs", "3", "--max_steps", "7")[2].max_steps == 7


def test_without_bleu_the_loss_says_which_checkpoint_is_best():
    training = parse("--eval_bleu", "false")[2]
    assert (training.metric_for_best_model, training.greater_is_better) == ("eval_loss", False)
    assert (parse()[2].metric_for_best_model, parse()[2].greater_is_better) == ("eval_bleu", True)


@pytest.mark.parametrize(("metric", "more"), [("eval_perplexity", False), ("perplexity", False), ("bleu", True)])
def test_less_perplexity_is_better_and_more_bleu(metric, more):
    assert parse("--metric_for_best_model", metric)[2].greater_is_better is more
    assert parse("--metric_for_best_model", metric, "--greater_is_better", "true")[2].greater_is_better is True


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file.*demo, .*wmt14_en_de_base"):
        load_recipe("nowhere")


@pytest.mark.parametrize(("tokens_per_device", "parts"), [(25000, 1), (12500, 2), (3125, 8), (4096, 7), (30000, 1)])
def test_accumulation_follows_from_the_devices(tokens_per_device, parts):
    *_, training = parse("--tokens_per_device", str(tokens_per_device))
    assert (training.world_size, training.gradient_accumulation_steps, training.parts_per_update) == (1, parts, parts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label_smoothing_factor", "0.1"], "Set label_smoothing in the model"),
        (["--tokens_per_device", "0"], "tokens_per_device must be positive, got 0"),
        (["--source_tokens_per_update", "-5"], "source_tokens_per_update must be positive, got -5"),
        (["--per_device_train_batch_size", "64"], "per_device_train_batch_size=64 has no effect"),
        (["--auto_find_batch_size", "true"], "auto_find_batch_size=True has no effect"),
        (["--dataloader_drop_last", "true"], "dataloader_drop_last=True has no effect"),
        (["--resume_from_checkpoint", "runs/a/checkpoint-9"], "resume_from_checkpoint=.* has no effect: --resume"),
        (["--metric_for_best_model", "rouge"], "metric_for_best_model=rouge: expected one of eval_loss, eval_perp"),
        (["--tokens_per_device", "5000", "--gradient_accumulation_steps", "2"], "makes it 5: give one of them"),
        (["--eval_steps", "300", "--save_steps", "200"], "eval_steps=300.* must be a multiple of save_steps=200"),
        (["--learning_rate", "-1"], "learning_rate must not be negative, got -1.0"),
        (["--eval_strategy", "often"], "often"),
        (["--warmup_steps", "0"], "without a warm-up, the peak learning_rate must be given"),
        (
            ["--model_overrides", "d_model=128"],
            "model_overrides 'd_model=128': expected 'field: value' lines, found str",
        ),
        (["--model_overrides", "{d_model: [}"], "model_overrides .*not valid YAML"),
        (["--tokenizer_from", "a", "--init_from", "b"], "tokenizer_from and init_from: the model .* has a vocabulary"),
        (["--max_stesp", "3"], "unknown option --max_stesp"),
        (["--max_steps", "many"], "argument --max_steps: invalid"),
    ],
)
def test_a_bad_argument_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words)


@pytest.mark.parametrize("value", ["0", "-1", "-3"])
@pytest.mark.parametrize(
    "name",
    [
        *("max_steps", "num_train_epochs", "save_minutes", "num_proc", "max_length", "max_length_ratio"),
        *("stream_window", "early_stopping_patience", "average_count", "tokens_per_device", "eval_tokens_per_device"),
    ],
)
def test_what_must_be_positive_is_named(name, value):
    if (name, value) == ("max_steps", "-1"):
        assert parse("--max_steps", "-1", "--num_train_epochs", "2")[2].max_steps == -1  # transformers' "by epochs"
        return
    with pytest.raises(ValueError, match=rf"^{name} must be positive, got {value}(\.0)?\.$"):
        parse(f"--{name}", value)


@pytest.mark.parametrize(
    ("word", "close"), [("--trian_files", "--train_files"), ("--train_fils=a.tsv", "--train_files"), ("--zzz", None)]
)
def test_an_unknown_argument_comes_with_what_it_is_close_to(word, close):
    with pytest.raises(ValueError, match="unknown option") as error:
        parse(word)
    name = word.partition("=")[0]  # the value may be a secret
    assert str(error.value) == f"unknown option {name}." + (f" Did you mean '{close}'?" if close else "")


@pytest.mark.parametrize("stage", ["2", "3"])
def test_weights_divided_by_deepspeed_are_refused(monkeypatch, stage):
    """As far as can be seen without DeepSpeed: with the plugin that `accelerate launch` would have made."""
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    plugin = DeepSpeedPlugin()
    monkeypatch.setattr(
        VaswaniTrainingArguments, "deepspeed_plugin", property(lambda self: plugin, lambda *args: None), raising=False
    )
    if stage == "2":
        assert parse()[2].deepspeed_plugin is plugin
        return
    with pytest.raises(ValueError, match=r"DeepSpeed, zero_stage 3: .* Use zero_stage 2, or FSDP2"):
        parse()


def test_paths_hold_environment_variables(monkeypatch):
    monkeypatch.setenv("CORPUS", "/data/corpus")
    _, data, _ = parse("--train_files", "$CORPUS/a.en", "${CORPUS}/a.de")
    assert data.train_files == ["/data/corpus/a.en", "/data/corpus/a.de"]
    with pytest.raises(ValueError, match="the environment variable NOT_SET_HERE is not set"):
        expand("$NOT_SET_HERE/a.en")


def test_the_guides_recipe_is_valid(tmp_path):
    guide = (ROOT / "training" / "README.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "mine.yaml").write_text(recipe, encoding="utf-8")
    model, data, training = parse_arguments(["--config", str(tmp_path / "mine.yaml")])
    assert (model.vocab_size, data.train_files, training.parts_per_update) == (16000, ["train.en", "train.de"], 8)


RECIPES = {"ablation_multi30k", "demo", "finetune", "multi30k_en_de", "multi30k_en_fr", "tatoeba_en_de"}
PARSING = {"parsing_craft", "parsing_craft_short", "parsing_wsj", "parsing_wsj_semi"}
WMT14 = {"wmt14_en_de_base", "wmt14_en_de_big", "wmt14_en_fr_base", "wmt14_en_fr_big"}


def test_the_recipes_are_all_there():
    assert set(packaged_recipes()) == RECIPES | PARSING | WMT14


@pytest.mark.parametrize("name", sorted(RECIPES | PARSING | WMT14))
def test_a_recipe_makes_a_valid_run(name, monkeypatch):
    for variable in ("MULTI30K", "CRAFT", "WSJ", "TATOEBA"):
        monkeypatch.setenv(variable, "/data")
    model, data, training = parse("--config", name)
    config = VaswaniConfig.from_table3(model.model, **(model.model_overrides or {}), vocab_size=model.vocab_size)
    assert config.d_model == config.num_heads * config.d_k
    target = "trees" if name in PARSING else "fr" if "_fr" in name else "de"
    assert (data.source_lang, data.target_lang) == ("en", target)
    assert data.max_length <= training.source_tokens_per_update // training.parts_per_update


@pytest.mark.parametrize(("name", "vocabulary"), [("parsing_wsj", 16000), ("parsing_wsj_semi", 32000)])
def test_recipes_of_parsing_are_the_papers(name, vocabulary, monkeypatch):
    """Section 6.3; everything else as in the base model."""
    monkeypatch.setenv("WSJ", "/data")
    model, data, training = parse("--config", name)
    config = VaswaniConfig.from_table3(model.model, **model.model_overrides)
    assert (config.encoder_layers, config.decoder_layers, config.d_model) == (4, 4, 1024)
    assert (config.d_ff, config.num_heads, model.vocab_size) == (2048, 8, vocabulary)
    assert (training.num_beams, training.length_penalty, training.max_extra_tokens) == (21, 0.3, 300)
    assert (training.warmup_steps, training.learning_rate) == (4000, None)
    assert (data.tree_weights == ["10", "1"]) == (name == "parsing_wsj_semi")
    assert data.strip_trees and training.best_metric == "eval_f1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_beams", "0"], "num_beams must be positive, got 0"),
        (["--length_penalty=-1"], "length_penalty must not be negative, got -1"),
        (["--max_extra_tokens=-1"], "max_extra_tokens must not be negative, got -1"),
        (["--tree_weights", "1", "0"], "tree_weights: expected whole numbers above 0, found 1, 0"),
        (["--tree_weights", "1.5"], "tree_weights: expected whole numbers above 0, found 1.5"),
        (["--tree_tags", "none"], "tree_tags"),
        (["--metric_for_best_model", "eval_f1"], "metric_for_best_model=eval_f1 needs eval_f1"),
    ],
)
def test_fields_of_parsing_and_search_are_checked(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(*words)


def test_f1_takes_the_place_of_bleu():
    training = parse("--eval_f1")[2]
    assert (training.eval_bleu, training.best_metric, training.greater_is_better) == (False, "eval_f1", True)
    assert (parse()[2].eval_bleu, parse()[2].eval_f1) == (True, False)


# Rows of the paper: Table 3 for the model, sections 5.1 to 5.4 and 6.1 for the rest.
@pytest.mark.parametrize(
    ("name", "d_model", "dropout", "vocabulary", "steps", "checkpoints"),
    [
        ("wmt14_en_de_base", 512, 0.1, 37000, 100_000, 5),
        ("wmt14_en_de_big", 1024, 0.3, 37000, 300_000, 20),
        ("wmt14_en_fr_base", 512, 0.1, 32000, 100_000, 5),
        ("wmt14_en_fr_big", 1024, 0.1, 32000, 300_000, 20),
    ],
)
def test_wmt14_recipes_are_the_papers(name, d_model, dropout, vocabulary, steps, checkpoints):
    model, data, training = parse("--config", name)
    config = VaswaniConfig.from_table3(model.model, **(model.model_overrides or {}))
    assert (config.d_model, config.dropout, config.label_smoothing) == (d_model, dropout, 0.1)
    assert (model.vocab_size, training.max_steps, training.warmup_steps) == (vocabulary, steps, 4000)
    assert (training.source_tokens_per_update, training.target_tokens_per_update) == (25000, 25000)
    assert (data.dataset_name, training.learning_rate, training.save_minutes) == ("wmt/wmt14", None, 10)
    assert training.save_total_limit >= checkpoints


def test_the_recipe_of_fine_tuning_is_gentler_than_training_and_stops_early():
    model, data, training = parse("--config", "finetune", "--init-from", "user/name", "--train-files", "mine.tsv")
    assert (model.init_from, model.model_overrides, data.train_files) == ("user/name", {"dropout": 0.3}, ["mine.tsv"])
    assert training.learning_rate < (512 * 4000) ** -0.5  # of the paper's base model
    assert training.warmup_steps < 4000
    assert (training.early_stopping_patience, training.load_best_model_at_end) == (5, True)
    assert (training.metric_for_best_model, training.eval_steps) == ("eval_bleu", training.save_steps)


def test_the_model_to_start_from_may_be_named_by_a_variable(monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    assert parse("--init_from", "$MODELS/mine")[0].init_from == "/models/mine"
    assert parse("--tokenizer_from", "$MODELS/mine")[0].tokenizer_from == "/models/mine"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_wmt14_updates_hold_25000_tokens_on_any_number_of_devices(devices, monkeypatch):
    _, _, training = parse("--config", "wmt14_en_de_base")
    monkeypatch.setattr(type(training), "world_size", property(lambda self: devices))
    training.gradient_accumulation_steps = 1
    training.set_accumulation()
    assert training.parts_per_update * (25000 // training.parts_per_update) == 25000
    assert training.parts_per_update == 8  # the same batches, however many devices share them


ACCELERATE = {  # name: kind, processes, machines
    "cpu": ("NO", 1, 1),
    "one_gpu": ("NO", 1, 1),
    "eight_gpus": ("MULTI_GPU", 8, 1),
    "two_machines": ("MULTI_GPU", 16, 2),
    "fsdp2": ("FSDP", 8, 1),
    "zero2": ("DEEPSPEED", 8, 1),
}


def test_the_accelerate_configurations_are_all_there():
    files = {path.name for path in packaged_accelerate_folder().iterdir()}
    assert files == {f"{name}.yaml" for name in ACCELERATE}


@pytest.mark.parametrize("name", sorted(ACCELERATE))
def test_an_accelerate_configuration_loads_and_says_how_to_launch_it(name):
    path = packaged_accelerate_folder() / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes, config.num_machines) == ACCELERATE[name]
    assert config.use_cpu == (name == "cpu")
    assert config.mixed_precision == "no"
    comment = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"accelerate launch --config_file training/recipes/accelerate/{name}.yaml" in comment
    (recipe,) = re.findall(r"-m training.train --config (\w+)", comment)
    assert recipe in packaged_recipes()


def launch_arguments(name: str):
    """Environment that `accelerate launch` derives from a configuration."""
    file = str(packaged_accelerate_folder() / f"{name}.yaml")
    words = ["--config_file", file, "--main_process_port", "0", "-m", "training.train", "--config", "demo"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args, defaults


def set_environment(monkeypatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_two_machines_are_launched_as_two_of_eight_processes():
    args, _ = launch_arguments("two_machines")
    prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 0)
    assert args.rdzv_endpoint.startswith("10.0.0.1:")


def test_the_fsdp_configuration_makes_whole_checkpoints(monkeypatch):
    set_environment(monkeypatch, prepare_multi_gpu_env(launch_arguments("fsdp2")[0]))
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy


def test_the_deepspeed_configuration_leaves_precision_and_accumulation_to_the_recipe(monkeypatch):
    """As far as can be seen without DeepSpeed: what it would be given."""
    args, defaults = launch_arguments("zero2")
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as `accelerate launch` does
    _, _, training = parse("--bf16", "true")
    set_environment(monkeypatch, prepare_deepspeed_cmd_env(args)[1])
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(training.mixed_precision)
    config = plugin.deepspeed_config
    assert config["zero_optimization"]["stage"] == 2
    assert [config["zero_optimization"][f"offload_{what}"]["device"] for what in ("optimizer", "param")] == [
        "none"
    ] * 2
    assert config["bf16"]["enabled"]
    for name in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"):
        assert config[name] == "auto"  # what the Trainer fills in


def packaged_accelerate_folder():
    return resources.files("training") / "recipes" / "accelerate"
