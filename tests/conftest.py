import atexit
import os
import shutil
import tempfile


# Before anything of Hugging Face is imported: offline, and caches that no other run shares.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-vaswani-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from hf_vaswani import (
    VaswaniConfig,
    VaswaniForConditionalGeneration,
    decoding_vaswani,
    generation_vaswani,
)
from training.data.tokenizer import train_tokenizer
from training.demo_data import generate_pairs


atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)


def pytest_configure(config):
    if os.environ.get("TRANSFORMERS_SOURCE"):  # test_transformers_suite.py runs tests that carry these
        flash = [f"flash_attn{version}_test" for version in ("", "_3", "_4")]
        for marker in ("accelerate_tests", "generate", "torch_compile_test", "torch_export_test", *flash):
            config.addinivalue_line("markers", f"{marker}: of transformers' own tests")


def tiny_config(**overrides) -> VaswaniConfig:
    """Small, without dropout, and with d_k and d_v that differ from each other and from d_model / num_heads."""
    fields = {
        "vocab_size": 40,
        "d_model": 16,
        "d_ff": 24,
        "num_heads": 2,
        "d_k": 4,
        "d_v": 6,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
    }
    return VaswaniConfig(**{**fields, **overrides})


def tiny_model(**overrides) -> VaswaniForConditionalGeneration:
    torch.manual_seed(0)
    return VaswaniForConditionalGeneration(tiny_config(**overrides)).eval()


@pytest.fixture
def model() -> VaswaniForConditionalGeneration:
    return tiny_model()


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
        def __init__(self, model):
            models.append(model)
            super().__init__(model)

    monkeypatch.setattr(generation_vaswani, "DecoderWeights", Counted)
    monkeypatch.setattr(decoding_vaswani, "DecoderWeights", Counted)
    return models
