import io
import json
import logging
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)

import hf_vaswani
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTranslationPipeline
from support.files import contents, flip_a_bit
from support.hub_client import ALICE, BOB, NOBODY
from support.hub_stranger import SENTENCES, behaviour
from support.models import GENERATES, new_model, tiny_config, tiny_model
from support.paths import SUPPORT
from support.runs import make_trainer
from training.cli import main as command_line
from training.evaluation.metrics import MetricScore
from training.evaluation.report import Report, as_json
from training.publishing.hub import NAMES, WEIGHTS, _is_of


pytestmark = pytest.mark.usefixtures("drawn_once")
CODE = sorted(path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py"))
MODEL_FILES = ["README.md", "checksums.json", "config.json", "generation_config.json", "model.safetensors", *CODE]
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]


def code_of_the_package() -> dict[str, bytes]:
    return {name: (Path(hf_vaswani.__file__).parent / name).read_bytes() for name in CODE}


@pytest.fixture(autouse=True)
def cache(hub, tmp_path, monkeypatch) -> Path:
    """Empty, so that what a test pulls comes from the server."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    hub.requests.clear()
    hub.faults.clear()
    yield folder
    assert hub.failures == []
    assert [fault for fault in hub.faults if fault.times > 0] == [], "a fault did not happen"


@pytest.fixture
def log(monkeypatch):
    """Everything that the libraries can be made to log."""
    monkeypatch.setattr(constants, "HF_DEBUG", True)  # requests are logged as commands
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(name) for name in ("", "huggingface_hub", "transformers", "httpx2", "httpcore2")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    yield written
    for logger, level in zip(loggers, levels):
        logger.removeHandler(handler)
        logger.setLevel(level)


def assert_same(behaved: dict, expected: dict) -> None:
    assert behaved.keys() == expected.keys() and "logits" in expected
    for name, value in expected.items():
        assert torch.equal(behaved[name], value), name


def assert_same_weights(model, other) -> None:
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys() and weights
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name


@pytest.fixture(scope="module")
def published(hub, tokenizer) -> SimpleNamespace:
    """`alice/model`: old weights, tagged v1, and a branch of that name's kind; new weights on main."""
    old, new = new_model(tokenizer, seed=1), new_model(tokenizer, seed=2)
    name = "alice/model"
    old.push_to_hub(name)
    tokenizer.push_to_hub(name)
    first = hub.repositories[name].at("main").id
    api = HfApi()
    api.create_tag(name, tag="v1")
    api.create_branch(name, branch="of/old", revision="v1")
    new.push_to_hub(name)
    assert hub.repositories[name].at("main").id != first
    return SimpleNamespace(name=name, old=old, new=new, first=first)


# Push and pull


def test_what_is_pulled_computes_and_generates_what_was_pushed(published, tokenizer):
    expected = behaviour(published.new, tokenizer)
    assert len(expected["sampled"].unique()) > 10 and len(expected["generated"]) == len(SENTENCES)
    model = AutoModelForSeq2SeqLM.from_pretrained(published.name)
    assert type(model) is VaswaniForConditionalGeneration
    pulled = AutoTokenizer.from_pretrained(published.name)
    for text in (*SENTENCES, "Ünïcode </s> 日本", ""):
        assert pulled(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert pulled.decode(pulled(text)["input_ids"], skip_special_tokens=True) == text
    assert_same(behaviour(model, pulled), expected)
    assert_same_weights(model, published.new)
    assert_same_weights(AutoModel.from_pretrained(published.name), published.new.model)
    assert AutoConfig.from_pretrained(published.name).to_diff_dict() == published.new.config.to_diff_dict()
    for name, value in GENERATES.items():
        assert getattr(model.generation_config, name) == value


def test_the_pipeline_translates_as_the_model_that_was_pushed(published, tokenizer):
    here = pipeline("translation", model=published.new, tokenizer=tokenizer)(SENTENCES)
    assert pipeline("translation", model=published.name)(SENTENCES) == here
    assert [len(translation["translation_text"]) > 0 for translation in here] == [True, True]


def test_a_repository_has_the_weights_as_a_large_file_and_all_the_code(hub, published):
    commit = hub.repositories[published.name].at("main")
    assert sorted(commit.files) == sorted([".gitattributes", *MODEL_FILES, *TOKENIZER_FILES])
    assert [path for path, blob in commit.files.items() if blob.is_large] == ["model.safetensors"]
    files = contents(commit)
    assert {name: files[name] for name in CODE} == code_of_the_package()
    config = json.loads(files["config.json"])
    named = [*config["auto_map"].values(), *(task["impl"] for task in config["custom_pipelines"].values())]
    assert len(named) == 4
    for module, name in (each.split(".") for each in named):  # no "user/repository--" in front, which would bind them
        assert f"\nclass {name}(" in files[f"{module}.py"].decode()
    weights = load_tensors(files["model.safetensors"])
    assert torch.equal(weights["model.shared.weight"], published.new.model.shared.weight)


def test_every_file_is_downloaded_as_it_was_committed(hub, published):
    folder = Path(snapshot_download(published.name))
    downloaded = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert downloaded == contents(hub.repositories[published.name].at("main"))


def test_what_was_pulled_loads_again_without_the_hub(hub, published, tokenizer):
    AutoModelForSeq2SeqLM.from_pretrained(published.name)
    AutoTokenizer.from_pretrained(published.name)
    asked = len(hub.requests)
    assert asked > 0
    model = AutoModelForSeq2SeqLM.from_pretrained(published.name, local_files_only=True)
    pulled = AutoTokenizer.from_pretrained(published.name, local_files_only=True)
    assert len(hub.requests) == asked
    assert_same(behaviour(model, pulled), behaviour(published.new, tokenizer))


@pytest.mark.parametrize("how", ["commit", "short commit", "tag", "branch"])
def test_an_older_revision_gives_the_older_weights(published, tokenizer, how):
    first = published.first
    revision = {"commit": first, "short commit": first[:10], "tag": "v1", "branch": "of/old"}[how]
    old = behaviour(AutoModelForSeq2SeqLM.from_pretrained(published.name, revision=revision), tokenizer)
    assert_same(old, behaviour(published.old, tokenizer))
    assert AutoTokenizer.from_pretrained(published.name, revision=revision).get_vocab() == tokenizer.get_vocab()
    assert not torch.equal(old["logits"], behaviour(published.new, tokenizer)["logits"])
    translator = pipeline("translation", model=published.name, revision=revision)
    assert_same_weights(translator.model, published.old)


def test_a_push_to_a_branch_leaves_main_as_it_was(hub, tokenizer):
    one, two = new_model(tokenizer, seed=3), new_model(tokenizer, seed=4)
    one.push_to_hub("alice/branches")
    before = hub.repositories["alice/branches"].at("main")
    two.push_to_hub("alice/branches", revision="try")
    assert hub.repositories["alice/branches"].at("main") is before
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/branches"), one)
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/branches", revision="try"), two)


def test_a_second_push_of_the_same_makes_no_commit(hub, tokenizer):
    model = new_model(tokenizer, seed=5)
    model.push_to_hub("alice/same")
    before = hub.repositories["alice/same"].history()
    model.push_to_hub("alice/same")
    assert hub.repositories["alice/same"].history() == before and len(before) == 2


def test_a_sharded_model_is_pulled_whole(hub, tokenizer):
    model = new_model(tokenizer, seed=6)
    model.push_to_hub("alice/shards", max_shard_size="20KB")
    files = hub.repositories["alice/shards"].at("main").files
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files
    assert sum(path.endswith(".safetensors") for path in files) > 2
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/shards"), model)


def test_a_file_in_several_parts_is_put_together(hub, tokenizer, monkeypatch):
    monkeypatch.setattr(hub, "multipart_size", 25_000)
    model = new_model(tokenizer, seed=7)
    model.push_to_hub("alice/parts")
    size = len(hub.repositories["alice/parts"].at("main").files["model.safetensors"].content)
    puts = [len(request.body) for request in hub.requests if request.method == "PUT"]
    assert len(puts) > 2 and sum(puts) == size and max(puts) == 25_000
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/parts"), model)


def test_a_configuration_is_pushed_alone_with_its_code(hub, tokenizer):
    config = tiny_config(vocab_size=77, d_v=5)
    config.push_to_hub("alice/config")
    assert AutoConfig.from_pretrained("alice/config").to_diff_dict() == config.to_diff_dict()
    files = contents(hub.repositories["alice/config"].at("main"))
    # The configuration's own code and what it imports; the rest comes with the weights.
    for name in ("configuration_vaswani.py", "pipeline_vaswani.py"):
        assert files[name] == code_of_the_package()[name]


def test_the_stock_trainer_pushes_what_it_trained(hub, tokenizer, pairs, tmp_path):
    start = new_model(tokenizer, seed=8)
    model = new_model(tokenizer, seed=8)
    rows = [tokenizer(source, text_target=target) for source, target in pairs[:8]]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        push_to_hub=True,
        hub_model_id="alice/trained",
        hub_strategy="checkpoint",
        hub_private_repo=True,
    )
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.push_to_hub(language="de", tags=["translation"])
    repository = hub.repositories["alice/trained"]
    assert repository.private
    files = contents(repository.at("main"))
    assert {*MODEL_FILES, *TOKENIZER_FILES, "training_args.bin", "last-checkpoint/optimizer.pt"} <= files.keys()
    assert {name: files[name] for name in CODE} == code_of_the_package()
    assert json.loads(files["last-checkpoint/trainer_state.json"])["global_step"] == 2
    assert files["last-checkpoint/model.safetensors"] == files["model.safetensors"]

    pulled = AutoModelForSeq2SeqLM.from_pretrained("alice/trained")
    assert_same(behaviour(pulled, AutoTokenizer.from_pretrained("alice/trained")), behaviour(model.eval(), tokenizer))
    assert_same_weights(pulled, model)
    assert not torch.equal(pulled.model.shared.weight, start.model.shared.weight)
    assert HfApi().model_info("alice/trained").tags[0] == "translation"


def test_the_projects_trainer_pushes_what_it_trained(hub, tokenizer, pairs, tmp_path):
    options = {"push_to_hub": True, "hub_model_id": "alice/ours", "hub_strategy": "end"}
    trainer = make_trainer(tmp_path / "run", tokenizer, pairs[:40], max_steps=2, **options)
    trainer.train()
    trainer.push_to_hub()
    files = contents(hub.repositories["alice/ours"].at("main"))
    assert {*MODEL_FILES, *TOKENIZER_FILES, ".gitattributes"} == files.keys()
    pulled = AutoModelForSeq2SeqLM.from_pretrained("alice/ours")
    assert_same(
        behaviour(pulled, AutoTokenizer.from_pretrained("alice/ours")), behaviour(trainer.model.eval(), tokenizer)
    )


def test_a_pipeline_and_a_bare_model_are_pushed_with_their_code(hub, published, tokenizer):
    translator = pipeline("translation", model=published.new, tokenizer=tokenizer)
    translator.push_to_hub("alice/pipeline")
    published.new.model.push_to_hub("alice/bare")
    for name in ("alice/pipeline", "alice/bare"):
        files = contents(hub.repositories[name].at("main"))
        assert {each: files.get(each) for each in CODE} == code_of_the_package()
    assert pipeline("translation", model="alice/pipeline")(SENTENCES) == translator(SENTENCES)
    assert_same_weights(AutoModel.from_pretrained("alice/bare"), published.new.model)


# The code that a repository carries


@pytest.fixture(scope="module")
def stranger(hub, published, tmp_path_factory) -> dict:
    """Report of a process without hf_vaswani, which finds the server by its environment."""
    folder = tmp_path_factory.mktemp("stranger")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": ALICE,
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    script = SUPPORT / "hub_stranger.py"
    done = subprocess.run(
        [sys.executable, "-I", script, published.name, "alice/again", folder / "seen"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ALICE not in done.stdout + done.stderr
    return torch.load(folder / "seen", weights_only=False)


def test_without_the_package_the_carried_code_computes_and_generates_the_same(stranger, published, tokenizer):
    assert stranger["import error"] == "No module named 'hf_vaswani'"
    assert stranger["module"].startswith("transformers_modules.") and "hf_vaswani" not in stranger["module"]
    assert_same(stranger["behaviour"], behaviour(published.new, tokenizer))
    assert stranger["translations"] == pipeline("translation", model=published.new, tokenizer=tokenizer)(SENTENCES)
    for name, weight in published.new.model.state_dict().items():
        assert torch.equal(stranger["encoder"][name], weight), name
    ours = AutoConfig.from_pretrained(published.name).to_dict()
    assert {**stranger["config"], "_name_or_path": None} == {**ours, "_name_or_path": None}


def test_without_the_package_no_code_runs_unless_it_is_trusted(stranger):
    asked = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM", "pipeline")
    assert stranger["refusals"].keys() == {(name, how) for name in asked for how in ("not said", "refused")}
    for message in stranger["refusals"].values():
        assert "alice/model" in message and "trust_remote_code=True" in message
    assert stranger["modules before"] == []  # configuration_vaswani and the others


def test_a_model_of_carried_code_saves_and_pushes_all_of_the_code(hub, stranger):
    code = code_of_the_package()
    again = contents(hub.repositories["alice/again"].at("main"))
    for files in (stranger["saved"], stranger["saved pipeline"], again):
        assert {name: files.get(name) for name in CODE} == code
    first = contents(hub.repositories["alice/model"].at("main"))
    assert again["config.json"] == first["config.json"]
    assert again["model.safetensors"] == first["model.safetensors"]


def test_what_a_model_of_carried_code_pushed_is_pulled_with_and_without_the_package(stranger, published, tokenizer):
    expected = behaviour(published.new, tokenizer)
    assert_same(stranger["behaviour again"], expected)
    assert stranger["translations again"] == stranger["translations"]
    assert "again" in stranger["module again"]
    model = AutoModelForSeq2SeqLM.from_pretrained("alice/again")
    assert_same(behaviour(model, AutoTokenizer.from_pretrained("alice/again")), expected)
    assert pipeline("translation", model="alice/again")(SENTENCES) == stranger["translations"]


def test_with_the_package_its_own_code_is_used_trusted_or_not(hub, published, tokenizer):
    for trusted in (None, False, True):
        translator = pipeline("translation", model=published.name, trust_remote_code=trusted)
        assert type(translator) is VaswaniTranslationPipeline
        assert type(translator.model) is VaswaniForConditionalGeneration
        assert type(translator.model.config) is VaswaniConfig
    assert_same_weights(translator.model, published.new)
    asked = {request.path.split("/")[-1] for request in hub.requests}
    assert "config.json" in asked and not asked & set(CODE)


# Connections that break


def test_an_upload_cut_in_the_middle_is_tried_again(hub, tokenizer, waits):
    model = new_model(tokenizer, seed=11)
    hub.inject("cut request", "PUT", "^/lfs/", times=2)
    model.push_to_hub("alice/retried")
    puts = [request.body is not None for request in hub.requests if request.method == "PUT"]
    assert puts == [False, False, True] and len(waits) == 2
    assert len(hub.repositories["alice/retried"].history()) == 2
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/retried"), model)


@pytest.mark.parametrize(("kind", "seed"), [("cut request", 40), ("lose response", 42)])
def test_an_upload_that_stays_cut_is_an_error_and_commits_nothing(hub, tokenizer, waits, kind, seed):
    name = f"alice/{kind.split()[0]}"
    one, two = new_model(tokenizer, seed), new_model(tokenizer, seed + 1)
    one.push_to_hub(name)
    before = hub.repositories[name].at("main")
    waits.clear()
    hub.inject(kind, "PUT", "^/lfs/", times=6)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'model.safetensors' to the Hub") as error:
        two.push_to_hub(name)
    assert isinstance(error.value.__cause__, httpx2.TransportError) and len(waits) == 5
    assert hub.repositories[name].at("main") is before
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained(name), one)
    two.push_to_hub(name)
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained(name), two)
    assert len(hub.repositories[name].history()) == 3


def test_a_commit_cut_in_the_middle_is_an_error_and_commits_nothing(hub, tokenizer):
    one, two = new_model(tokenizer, seed=14), new_model(tokenizer, seed=15, d_ff=20)
    one.push_to_hub("alice/halved")
    before = hub.repositories["alice/halved"].at("main")
    hub.inject("cut request", "POST", "/commit/main$")
    with pytest.raises(httpx2.TransportError):
        two.push_to_hub("alice/halved")
    assert hub.repositories["alice/halved"].at("main") is before
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/halved"), one)
    two.push_to_hub("alice/halved")
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/halved"), two)


def test_a_commit_whose_answer_is_lost_is_whole_and_not_made_twice(hub, tokenizer):
    model = new_model(tokenizer, seed=16)
    hub.inject("lose response", "POST", "/commit/main$")
    with pytest.raises(httpx2.TransportError):
        model.push_to_hub("alice/lost")
    assert sorted(hub.repositories["alice/lost"].at("main").files) == sorted([".gitattributes", *MODEL_FILES])
    model.push_to_hub("alice/lost")
    assert len(hub.repositories["alice/lost"].history()) == 2
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/lost"), model)


def test_a_long_download_cut_in_the_middle_goes_on_where_it_stopped(hub, waits):
    model = tiny_model(vocab_size=200_000)  # the client keeps what it got in pieces of 10 MiB
    model.push_to_hub("alice/long")
    size = len(hub.repositories["alice/long"].at("main").files["model.safetensors"].content)
    kept = constants.DOWNLOAD_CHUNK_SIZE
    assert kept < 0.9 * size
    hub.inject("cut response", "GET", "^/lfs/", after=0.9)
    pulled = AutoModelForSeq2SeqLM.from_pretrained("alice/long")
    ranges = [request.headers.get("range") for request in hub.requests if request.to == "storage"][1:]
    assert ranges == [None, f"bytes={kept}-"] and waits == [1]
    assert_same_weights(pulled, model)


@pytest.mark.parametrize("path", ["^/lfs/", "/config.json$", "/tokenizer.json$"])
def test_a_short_download_cut_in_the_middle_is_made_again(hub, published, tokenizer, waits, path):
    hub.inject("cut response", "GET", path, times=3)
    model = AutoModelForSeq2SeqLM.from_pretrained(published.name)
    pulled = AutoTokenizer.from_pretrained(published.name)
    assert waits == [1, 1, 1]
    assert_same(behaviour(model, pulled), behaviour(published.new, tokenizer))


@pytest.mark.parametrize(
    ("kind", "times", "message"),
    [
        ("cut response", 6, "peer closed connection without sending complete message body"),
        ("reset response", 1, "Connection reset by peer"),
        ("short response", 1, "Consistency check failed"),
    ],
)
def test_half_a_file_is_an_error_and_never_taken_for_the_whole(
    hub, published, tokenizer, cache, waits, kind, times, message
):
    hub.inject(kind, "GET", "^/lfs/", times=times)
    with pytest.raises(OSError) as error:
        AutoModelForSeq2SeqLM.from_pretrained(published.name)
    assert message in "".join(traceback.format_exception(error.value))
    sha256 = hub.repositories[published.name].at("main").files["model.safetensors"].sha256
    assert list(cache.rglob("config.json")) and not list(cache.rglob("model.safetensors"))
    assert not [path for path in cache.rglob("*") if path.name.startswith(sha256) and path.suffix != ".lock"]
    # What a killed process leaves behind is not taken for the file either.
    half = hub.objects[sha256][:1000]
    for name in (f"{sha256}.incomplete", f"{sha256}.0123abcd.incomplete"):
        (cache / "models--alice--model" / "blobs" / name).write_bytes(half)
    model = AutoModelForSeq2SeqLM.from_pretrained(published.name)
    assert_same(behaviour(model, tokenizer), behaviour(published.new, tokenizer))


# Who may do what


def test_a_private_repository_is_pulled_with_the_owners_token_only(hub, tokenizer, monkeypatch):
    model = new_model(tokenizer, seed=21)
    name = "alice/private"
    model.push_to_hub(name, private=True)
    tokenizer.push_to_hub(name)
    assert hub.repositories[name].private
    monkeypatch.delenv("HF_TOKEN")
    for token in (None, False, BOB):
        for pull in (AutoModelForSeq2SeqLM, AutoTokenizer, AutoConfig):
            with pytest.raises(OSError, match=r"alice/private .*\n.*private repository, make sure to pass a token"):
                pull.from_pretrained(name, token=token)
        with pytest.raises(RepositoryNotFoundError, match="Repository Not Found"):
            hf_hub_download(name, "config.json", token=token)
    pulled = AutoModelForSeq2SeqLM.from_pretrained(name, token=ALICE)
    assert_same(behaviour(pulled, AutoTokenizer.from_pretrained(name, token=ALICE)), behaviour(model, tokenizer))
    assert pipeline("translation", model=name, token=ALICE)(SENTENCES[0])[0]["translation_text"]


def test_a_push_without_the_right_to_it_is_refused(hub, tokenizer, monkeypatch):
    model = new_model(tokenizer, seed=22)
    model.push_to_hub("alice/hers")
    before = hub.repositories["alice/hers"].at("main")
    other = new_model(tokenizer, seed=23)
    for token, status in ((BOB, 403), (NOBODY, 401)):
        with pytest.raises(HfHubHTTPError) as error:
            other.push_to_hub("alice/hers", token=token)
        assert error.value.response.status_code == status
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HfHubHTTPError) as error:
        other.push_to_hub("alice/hers")
    assert error.value.response.status_code == 401
    assert hub.repositories["alice/hers"].at("main") is before
    assert {name for name in hub.repositories if not name.startswith("alice/")} == set()


def test_the_storage_never_gets_a_token(hub, published, tokenizer):
    new_model(tokenizer, seed=24).push_to_hub("alice/storage")
    AutoModelForSeq2SeqLM.from_pretrained("alice/storage")
    storage = [
        (request.method, request.headers.get("authorization")) for request in hub.requests if request.to == "storage"
    ]
    assert storage == [("PUT", None), ("GET", None)]
    assert ALICE in {request.token for request in hub.requests}


def test_a_token_is_in_no_log_and_in_no_error(hub, published, tokenizer, waits, log, capfd, tmp_path):
    model, api, errors = new_model(tokenizer, seed=25), HfApi(), []

    def fails(kind, action, *arguments, **options):
        with pytest.raises(kind) as error:
            action(*arguments, **options)
        errors.append("".join(traceback.format_exception(error.value)) + repr(error.value))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.push_to_hub("alice/quiet", token=ALICE, private=True)
        model.push_to_hub("alice/quiet")
        AutoModelForSeq2SeqLM.from_pretrained("alice/quiet", token=ALICE)
        AutoModelForSeq2SeqLM.from_pretrained(published.name, revision="v1")
        assert api.whoami(token=ALICE)["name"] == "alice"
        fails(HfHubHTTPError, api.whoami, token=NOBODY)
        other = {"cache_dir": tmp_path / "other"}
        for options in ({"token": BOB, **other}, {"token": NOBODY, **other}, {"token": ALICE, "revision": "none"}):
            fails(OSError, AutoModelForSeq2SeqLM.from_pretrained, "alice/quiet", **options)
        fails(HfHubHTTPError, model.push_to_hub, "alice/quiet", token=BOB)
        fails(HfHubHTTPError, model.push_to_hub, "alice/quiet", token=NOBODY)
        hub.inject("cut request", "PUT", "^/lfs/", times=6)
        fails(RuntimeError, new_model(tokenizer, seed=26).push_to_hub, "alice/quiet", token=ALICE)
        hub.inject("cut request", "POST", "/commit/main$")
        fails(httpx2.TransportError, new_model(tokenizer, seed=27).push_to_hub, "alice/quiet", token=ALICE)
        hub.inject("rate limit", "POST", "/api/repos/create")
        fails(HfHubHTTPError, model.push_to_hub, "alice/quiet", token=ALICE)
    assert len(errors) == 9
    assert {ALICE, BOB, NOBODY} <= {request.token for request in hub.requests}
    for loud in ("/api/repos/create", "curl -X POST", "<TOKEN>", "authenticated: True", "send_request_headers"):
        assert loud in log.getvalue()
    everything = [log.getvalue(), *capfd.readouterr(), *errors, *(str(each.message) for each in warned)]
    for token in (ALICE, BOB, NOBODY):
        assert not [text for text in everything if token in text]


# What the server refuses


def test_what_is_missing_is_told_by_its_name(hub, published):
    for token, status in ((ALICE, 404), (False, 401)):
        with pytest.raises(RepositoryNotFoundError) as error:
            hf_hub_download("alice/absent", "config.json", token=token)
        assert error.value.response.status_code == status
    with pytest.raises(EntryNotFoundError, match=r"absent\.json"):
        hf_hub_download(published.name, "absent.json")
    with pytest.raises(RevisionNotFoundError, match="v9"):
        hf_hub_download(published.name, "config.json", revision="v9")
    with pytest.raises(OSError, match="alice/absent is not a local folder and is not a valid model identifier"):
        AutoModelForSeq2SeqLM.from_pretrained("alice/absent")
    with pytest.raises(OSError, match="v9 is not a valid git identifier"):
        AutoModelForSeq2SeqLM.from_pretrained(published.name, revision="v9")
    HfApi().create_repo("alice/empty")
    with pytest.raises(EntryNotFoundError, match=r"alice/empty/resolve/main/config\.json"):
        hf_hub_download("alice/empty", "config.json")
    with pytest.raises(OSError, match="alice/empty does not appear to have a file named"):
        AutoModelForSeq2SeqLM.from_pretrained("alice/empty", config=tiny_config())


def test_what_is_there_already_is_a_conflict(hub, published):
    api = HfApi()
    for create in (
        lambda **more: api.create_repo(published.name, **more),
        lambda **more: api.create_branch(published.name, branch="of/old", **more),
        lambda **more: api.create_tag(published.name, tag="v1", **more),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            create()
        assert error.value.response.status_code == 409
        create(exist_ok=True)
    assert hub.repositories[published.name].tags["v1"] == published.first


def test_a_commit_on_a_state_that_has_passed_is_refused(hub, tokenizer):
    api = HfApi()
    api.create_repo("alice/turns")
    first = hub.repositories["alice/turns"].at("main").id
    add = {"repo_id": "alice/turns", "path_in_repo": "a.txt", "parent_commit": first}
    api.upload_file(path_or_fileobj=b"one", **add)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
        api.upload_file(path_or_fileobj=b"two", **add)
    assert Path(hf_hub_download("alice/turns", "a.txt")).read_bytes() == b"one"


def test_a_client_that_asks_too_often_waits_as_long_as_it_is_told(hub, published, tokenizer, waits):
    model = new_model(tokenizer, seed=31)
    hub.inject("rate limit", "POST", "/preupload/", retry_after=7)
    model.push_to_hub("alice/patient")
    assert len(waits) == 1 and waits[0] >= 7
    for method, path, seconds in (("GET", "^/lfs/", 20), ("HEAD", "/config.json$", 30)):
        hub.inject("rate limit", method, path, retry_after=seconds, times=2)
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/patient"), model)
    assert sorted(wait // 10 for wait in waits[1:]) == [2, 2, 3]


def test_a_client_that_is_never_let_in_says_so(hub, tokenizer, waits):
    hub.inject("rate limit", "POST", "/api/repos/create")
    with pytest.raises(HfHubHTTPError, match="429 Too Many Requests"):
        new_model(tokenizer).push_to_hub("alice/limited")
    assert "alice/limited" not in hub.repositories
    model = new_model(tokenizer, seed=32)
    hub.inject("rate limit", "POST", "/preupload/", times=6)
    with pytest.raises(HfHubHTTPError, match="429 Too Many Requests"):
        model.push_to_hub("alice/limited")
    assert len(hub.repositories["alice/limited"].history()) == 1
    model.push_to_hub("alice/limited")
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/limited"), model)


def test_the_server_refuses_content_that_is_not_what_it_is_called(hub):
    """The assertions above rely on it."""
    api = HfApi()
    api.create_repo("alice/checked")
    batch = f"{hub.url}/alice/checked.git/info/lfs/objects/batch"
    headers = {"Authorization": f"Bearer {ALICE}"}
    wanted = {"operation": "upload", "transfers": ["basic"], "objects": [{"oid": "0" * 64, "size": 4}]}
    with httpx2.Client() as client:
        action = client.post(batch, json=wanted, headers=headers).json()["objects"][0]["actions"]["upload"]
        assert client.put(action["href"], content=b"else").status_code == 400
        assert client.put(action["href"].split("?")[0], content=b"else").status_code == 403
        assert client.post(batch, json=wanted).status_code == 401
    assert "0" * 64 not in hub.objects


# hf-vaswani publish


@pytest.fixture
def checkpoint(tokenizer, tmp_path) -> Path:
    """A folder as a run leaves it, with things beside the model that are nobody's business."""
    folder = tmp_path / "checkpoint"
    new_model(tokenizer, seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("optimizer.pt", "training_args.bin", "notes.txt"):
        (folder / name).write_text("private")
    return folder


def test_a_published_checkpoint_is_pulled_as_it_was(hub, checkpoint, capsys):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/published", "--languages", "en", "de"]
    assert command_line(words) == 0
    commit = hub.repositories["alice/published"].at("main")
    assert capsys.readouterr().out.strip().endswith(commit.id)
    assert sorted(commit.files) == sorted([".gitattributes", *MODEL_FILES, *TOKENIZER_FILES])
    card = huggingface_hub.ModelCard.load("alice/published")
    assert (card.data.language, card.data.pipeline_tag) == (["en", "de"], "translation")
    pulled = AutoModelForSeq2SeqLM.from_pretrained("alice/published")
    local = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    torch.testing.assert_close(pulled.state_dict(), local.state_dict(), rtol=0, atol=0)

    assert command_line(words) == 0  # again: nothing new, no commit
    assert hub.repositories["alice/published"].at("main").id == commit.id


def test_nothing_of_an_earlier_model_stays_in_force(hub, checkpoint, tokenizer):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/replaced"]
    assert command_line(words) == 0
    model = new_model(tokenizer, seed=9)
    model.save_pretrained(checkpoint, max_shard_size="8KB")
    (checkpoint / "old").mkdir()
    (checkpoint / "old" / "model.safetensors").write_bytes(b"of nobody's business")
    assert command_line(words) == 0
    files = hub.repositories["alice/replaced"].at("main").files
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files
    assert not [name for name in files if "/" in name]
    assert_same_weights(AutoModelForSeq2SeqLM.from_pretrained("alice/replaced"), model)


def remove_a_tensor(folder: Path) -> None:
    tensors = load_tensors((folder / "model.safetensors").read_bytes())
    tensors.pop("model.decoder.layers.0.feed_forward.fc1.weight")
    (folder / "model.safetensors").write_bytes(save_tensors(tensors, {"format": "pt"}))


def test_a_card_written_by_hand_survives_publishing(hub, checkpoint):
    HfApi().create_repo("alice/by-hand")
    written = b"---\nlicense: mit\n---\n\n# Mine\n"
    HfApi().upload_file(path_or_fileobj=written, path_in_repo="README.md", repo_id="alice/by-hand")
    assert command_line(["publish", "--checkpoint", str(checkpoint), "--repo", "alice/by-hand"]) == 0
    assert hub.repositories["alice/by-hand"].at("main").files["README.md"].content == written


def test_publishing_to_a_branch_leaves_main_alone(hub, checkpoint):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/branched", "--revision", "next"]
    assert command_line([*words, "--private"]) == 0
    repository = hub.repositories["alice/branched"]
    assert repository.private
    assert "model.safetensors" in repository.at("next").files
    assert "model.safetensors" not in repository.at("main").files


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda folder: (folder / "modeling_vaswani.py").unlink(), "has no modeling_vaswani.py"),
        (lambda folder: (folder / "kernels_vaswani.py").unlink(), "has no kernels_vaswani.py"),
        (lambda folder: (folder / "generation_config.json").unlink(), "has no generation_config.json"),
        (remove_a_tensor, "the weights do not fit the model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: flip_a_bit(folder / "model.safetensors", -100), "model.safetensors is damaged"),
    ],
)
def test_a_broken_checkpoint_is_not_published(hub, checkpoint, broken, message, capsys):
    broken(checkpoint)
    assert command_line(["publish", "--checkpoint", str(checkpoint), "--repo", "alice/broken"]) == 1
    assert message in capsys.readouterr().err
    assert "alice/broken" not in hub.repositories


@pytest.mark.parametrize("name", ["generation_config.json", "README.md", "trainer_state.json", "model-a.safetensors"])
def test_a_link_to_a_file_elsewhere_is_not_published(hub, checkpoint, tmp_path, name, capsys):
    (tmp_path / "private").write_bytes((checkpoint / name).read_bytes() if (checkpoint / name).exists() else b"{}")
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(tmp_path / "private")
    assert command_line(["publish", "--checkpoint", str(checkpoint), "--repo", "alice/linked"]) == 1
    message = capsys.readouterr().err
    assert f"{checkpoint / name} is a link to {tmp_path / 'private'}" in message and message.count("\n") == 1
    assert "alice/linked" not in hub.repositories


def test_what_is_published_is_chosen_by_its_name_alone(hub, checkpoint, tmp_path):
    """No pickle, and nothing with an odd name, link or not; links within the checkpoint are files."""
    (checkpoint / "elsewhere.pt").symlink_to(tmp_path)
    odd = [b"model \n.safetensors", b"model\xff.safetensors", b"model.safetensors ", "modelé.safetensors".encode()]
    assert not [name for name in odd if _is_of(os.fsdecode(name), WEIGHTS, NAMES)]  # they do not even load
    odd = [b"config.json\n", b"tokenizer\xff.json", b" model.safetensors", b"a`b.py", b"-rf"]
    for name in [*odd, b"pytorch_model.bin", b"scheduler.pt", b"rng_state.pth", b"Model.safetensors"]:
        (checkpoint / os.fsdecode(name)).write_bytes(b"private")
    (checkpoint / "tokenizer.json").rename(checkpoint / "mine.json")
    (checkpoint / "tokenizer.json").symlink_to("mine.json")
    assert command_line(["publish", "--checkpoint", str(checkpoint), "--repo", "alice/odd"]) == 0
    files = hub.repositories["alice/odd"].at("main").files
    assert sorted(files) == sorted([".gitattributes", *MODEL_FILES, *TOKENIZER_FILES])
    assert files["tokenizer.json"].content == (checkpoint / "mine.json").read_bytes()


def test_a_checkpoint_in_the_hubs_own_cache_can_be_published(hub, published):
    """There, files are links to others."""
    folder = Path(huggingface_hub.snapshot_download(published.name))
    assert (folder / "model.safetensors").is_symlink()
    assert command_line(["publish", "--checkpoint", str(folder), "--repo", "alice/again"]) == 0
    assert "model.safetensors" in hub.repositories["alice/again"].at("main").files


def test_publishing_where_one_may_not_is_an_error(hub, checkpoint, capsys, monkeypatch):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "bob/model"]
    assert command_line(words) == 1
    assert "403" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", NOBODY)
    assert command_line(words) == 1
    error = capsys.readouterr().err
    assert "401" in error
    assert NOBODY not in error
    assert "bob/model" not in hub.repositories


def scores(folder: Path, score: float) -> str:
    """A file as `hf-vaswani score --json` writes it."""
    (folder / "newstest2014.json").write_text(
        as_json(Report("out", 3, 0, [MetricScore("sacreBLEU", score, "tok:13a")]))
    )
    return str(folder / "newstest2014.json")


def test_one_commit_has_the_card_and_the_log_without_paths(hub, checkpoint, tmp_path):
    log = {"global_step": 3, "epoch": 1.0, "log_history": [{"step": 3, "loss": 2.5}], "total_flos": 0.0}
    state = json.dumps({**log, "max_steps": 3, "best_model_checkpoint": str(tmp_path / "checkpoint-3")})
    (checkpoint / "trainer_state.json").write_text(state)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/logged", "--license", "mit"]
    assert command_line([*words, "--scores", scores(tmp_path, 27.3)]) == 0
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    repository = hub.repositories["alice/logged"]
    files = contents(repository.at("main"))
    assert len(repository.history()) == 2  # the repository's own first commit, and one
    assert {"README.md", "trainer_state.json", "curves.png", "model.safetensors", *CODE} <= files.keys()
    pushed = json.loads(files["trainer_state.json"])
    assert pushed["log_history"] == log["log_history"] and pushed["best_model_checkpoint"] == "checkpoint-3"
    card = huggingface_hub.ModelCard.load("alice/logged")
    assert (card.data.license, card.data.eval_results[0].metric_value) == ("mit", 27.3)
    assert 'pipeline("translation", model="alice/logged", trust_remote_code=True)' in card.text

    assert command_line([*words, "--scores", scores(tmp_path, 27.3)]) == 0
    assert len(repository.history()) == 2
    (checkpoint / "trainer_state.json").unlink()
    assert command_line(words) == 0
    assert "trainer_state.json" not in repository.at("main").files  # it was another run's


def test_the_log_for_tensorboard_goes_up_and_comes_down_with_its_run(hub, checkpoint, tmp_path):
    state = {"global_step": 3, "epoch": 1.0, "log_history": [{"step": 3, "loss": 2.5}], "total_flos": 0.0}
    run = tmp_path / "run"
    (run / "runs" / "secret-host").mkdir(parents=True)
    for folder in (run, checkpoint):
        (folder / "trainer_state.json").write_text(json.dumps({**state, "max_steps": 3}))
    with SummaryWriter(str(run / "runs" / "secret-host")) as writer:
        writer.add_scalar("train/loss", 2.5, 3)
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/tensorboard"]
    repository = None
    for _ in range(2):  # the second time there is nothing new
        assert command_line([*words, "--run", str(run)]) == 0
        repository = hub.repositories["alice/tensorboard"]
        assert len(repository.history()) == 2
    files = contents(repository.at("main"))
    assert [name for name in files if "/" in name] == ["runs/events.out.tfevents.0"]
    assert b"train/loss" in files["runs/events.out.tfevents.0"]
    HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="runs/mine.0", repo_id="alice/tensorboard")
    assert command_line(words) == 0  # a checkpoint alone, as far as anybody knows
    assert [name for name in contents(repository.at("main")) if "/" in name] == ["runs/mine.0"]


def test_a_card_edited_on_the_hub_gets_the_new_score_and_keeps_the_edit(hub, checkpoint, tmp_path):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/edited", "--scores"]
    assert command_line([*words, scores(tmp_path, 20.0)]) == 0
    text = contents(hub.repositories["alice/edited"].at("main"))["README.md"].decode()
    edited = text.replace("## Scores", "Ask Alice.\n\n## Scores").replace("license: unknown", "license: mit")
    HfApi().upload_file(path_or_fileobj=edited.encode(), path_in_repo="README.md", repo_id="alice/edited")
    assert command_line([*words, scores(tmp_path, 30.0)]) == 0
    renewed = contents(hub.repositories["alice/edited"].at("main"))["README.md"].decode()
    assert "Ask Alice.\n\n## Scores" in renewed and "| sacreBLEU | 30.00 |" in renewed and "20.0" not in renewed
    assert huggingface_hub.ModelCard(renewed).data.license == "mit" and "Weights: mit." in renewed


def test_two_cards_that_differ_are_an_error_until_one_is_chosen(hub, checkpoint, capsys):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/two-cards"]
    assert command_line(words) == 0
    repository = hub.repositories["alice/two-cards"]
    before = repository.at("main")
    text = contents(before)["README.md"].decode()
    (checkpoint / "README.md").write_text(text)
    assert command_line(words) == 0  # the same words in both
    (checkpoint / "README.md").write_text(text.replace("## Scores", "Mine.\n\n## Scores"))
    assert command_line(words) == 1
    assert "--keep folder or --keep repository" in capsys.readouterr().err
    assert command_line([*words, "--keep", "repository"]) == 0
    assert repository.at("main") is before
    assert command_line([*words, "--keep", "folder"]) == 0
    assert "Mine.\n\n## Scores" in contents(repository.at("main"))["README.md"].decode()


def test_a_branch_begins_with_the_card_of_the_main_one(hub, checkpoint):
    words = ["publish", "--checkpoint", str(checkpoint), "--repo", "alice/carded"]
    assert command_line(words) == 0
    text = contents(hub.repositories["alice/carded"].at("main"))["README.md"].decode().replace("# carded", "# Mine")
    HfApi().upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id="alice/carded")
    assert command_line([*words, "--revision", "next"]) == 0
    assert "# Mine" in contents(hub.repositories["alice/carded"].at("next"))["README.md"].decode()
