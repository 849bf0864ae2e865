import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace


# Before anything of Hugging Face is imported: offline, and caches that no other run shares.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-vaswani-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from huggingface_hub import file_download
from huggingface_hub.utils import _http

from hf_vaswani import (
    VaswaniForConditionalGeneration,
    decoding_vaswani,
    generation_vaswani,
)
from support.hub_client import ALICE, BOB, connected
from support.hub_server import Hub
from support.models import tiny_model
from training.data.tokenizer import train_tokenizer
from training.demo_data import generate_pairs, write_demo_data
from training.publishing import model_card
from training.publishing.curves import draw_curves
from training.trainer.checkpoints import STATE_NAME


gc.disable()  # until the tests are imported
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)


def pytest_configure(config):
    if os.environ.get("TRANSFORMERS_SOURCE"):  # test_transformers_suite.py runs tests that carry these
        flash = [f"flash_attn{version}_test" for version in ("", "_3", "_4")]
        for marker in ("accelerate_tests", "generate", "torch_compile_test", "torch_export_test", *flash):
            config.addinivalue_line("markers", f"{marker}: of transformers' own tests")


def pytest_collection_finish():
    """Exempt what is imported by now from garbage collection: every training ends with a full one."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def model() -> VaswaniForConditionalGeneration:
    return tiny_model()


@pytest.fixture(scope="session")
def drawn_once():
    """Cards draw the curves of the same record once: a picture takes as long as all else of a card."""
    pictures: dict[bytes, bytes] = {}

    def draw(run: str, output: str) -> None:
        record = Path(run, STATE_NAME).read_bytes()
        if record not in pictures:
            draw_curves(run, output)
            pictures[record] = Path(output).read_bytes()
        Path(output).write_bytes(pictures[record])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_card, "draw_curves", draw)
        yield


@pytest.fixture(scope="session")
def pairs() -> list[tuple[str, str]]:
    return generate_pairs(300, seed=1)


@pytest.fixture(scope="session")
def tokenizer(pairs):
    return train_tokenizer([text for pair in pairs for text in pair], vocab_size=400, show_progress=False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def layouts(monkeypatch):
    """Models whose weights were laid out, in order."""
    models = []

    class Counted(decoding_vaswani.DecoderWeights):
        def __init__(self, model, **options):
            models.append(model)
            super().__init__(model, **options)

    monkeypatch.setattr(generation_vaswani, "DecoderWeights", Counted)
    monkeypatch.setattr(decoding_vaswani, "DecoderWeights", Counted)
    return models


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = write_demo_data(str(tmp_path_factory.mktemp("data")), train=200, val=10, test=10)
    return {split: [str(path) for path in paths] for split, paths in files.items()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The server, which the client of this process knows."""
    with Hub({ALICE: "alice", BOB: "bob"}) as hub, connected(hub, ALICE, tmp_path_factory.mktemp("cache")):
        yield hub
    assert hub.failures == []


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that the Hub's client wants to wait before it tries again, which it does at once."""
    asked = []
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=asked.append))
    return asked
