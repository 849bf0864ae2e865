import json
import shutil

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani import VaswaniForConditionalGeneration, VaswaniModel
from support.files import flip_a_bit
from support.hub_client import connected
from support.hub_server import Hub
from support.models import tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def test_a_flipped_bit_in_the_weights_is_noticed(folder):
    weights = folder / "model.safetensors"
    flip_a_bit(weights, -1000)
    load_file(weights)  # safetensors itself sees nothing wrong
    with pytest.raises(OSError, match=r"model\.safetensors is damaged.*SHA-256"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_flipped_bit_in_any_shard_is_noticed(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    flip_a_bit(shards[1], -10)
    with pytest.raises(OSError, match=shards[1].name):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_an_error(folder, kept):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(Exception, match=r"(?i)header|incomplete|invalid|damaged"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_weights_changed_on_purpose_load_without_their_checksums(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "checksums.json").unlink()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    torch.testing.assert_close(loaded.lm_head.weight.detach(), 2 * weights["model.shared.weight"])


def test_saving_again_renews_the_checksums(folder):
    model = tiny_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not loaded.lm_head.weight.any()
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_saving_to_the_hub_pushes_weights_and_checksums_in_one_commit(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("was here before")
    model = tiny_model()
    with Hub({"token": "alice"}) as hub, connected(hub, "token", tmp_path / "cache"):
        model.save_pretrained(
            tmp_path / "mine", push_to_hub=True, repo_id="alice/mine", commit_message="Mine", private=True
        )
        repository = hub.repositories["alice/mine"]
        files = repository.at("main").files
        assert {
            "model.safetensors",
            "checksums.json",
            "config.json",
            "README.md",
            "modeling_vaswani.py",
        } <= files.keys()
        assert "notes.txt" not in files and repository.private
        assert files["checksums.json"].content == (tmp_path / "mine" / "checksums.json").read_bytes()
        loaded = AutoModelForSeq2SeqLM.from_pretrained("alice/mine")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert hub.failures == []


def test_saving_changes_nothing_of_the_models_own_generation_configuration(tmp_path):
    model = tiny_model()
    config = model.generation_config
    model.save_pretrained(tmp_path)
    config.max_extra_tokens = 7
    assert model.generation_config is config
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["max_extra_tokens"] == 7
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config.max_extra_tokens == 7


def test_shards_replace_a_single_file(folder):
    model = tiny_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder, max_shard_size="4KB")
    assert not AutoModelForSeq2SeqLM.from_pretrained(folder).lm_head.weight.any()
    tiny_model().save_pretrained(folder)
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).lm_head.weight.all()


def test_no_pickle_is_read(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="safetensors files only"):
        VaswaniModel.from_pretrained(folder, use_safetensors=False)


def test_an_index_cannot_smuggle_a_pickle_in(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "w.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "w.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"index\.json names w\.bin: .* safetensors files only"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_saving_something_else_beside_it_does_not_bless_damage(folder):
    flip_a_bit(folder / "model.safetensors", -100)
    tiny_model().save_pretrained(folder, variant="fp16")
    assert (folder / "model.fp16.safetensors").is_file()
    with pytest.raises(OSError, match=r"model\.safetensors is damaged"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model.safetensors": {}}'])
def test_broken_checksums_are_named(folder, content):
    (folder / "checksums.json").write_text(content)
    with pytest.raises(OSError, match=r"checksums\.json is damaged"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_weights_that_were_never_saved_here_are_an_error(folder):
    shutil.copy(folder / "model.safetensors", folder / "model.extra.safetensors")
    with pytest.raises(OSError, match=r"model\.extra\.safetensors does not belong to the weights"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("field", "value", "error", "named"),
    [
        ("d_model", "16", StrictDataclassFieldValidationError, "d_model"),
        ("dropout", 1.5, Exception, "dropout must be in"),
        ("activation_function", "reelu", KeyError, "reelu"),
        ("d_ff", 32, RuntimeError, "ignore_mismatched_sizes"),
    ],
)
def test_a_wrong_configuration_is_an_error(folder, field, value, error, named):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(error, match=named):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_a_missing_configuration_is_an_error(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json.*not a valid JSON"):
        VaswaniForConditionalGeneration.from_pretrained(folder)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=folder.name):
        VaswaniForConditionalGeneration.from_pretrained(folder)
