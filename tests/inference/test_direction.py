"""Pairs in the reverse direction of a model are found, and others are not."""

import logging

import pytest
import torch

from support.models import new_model
from training.cli import main
from training.inference.direction import is_reversed


@pytest.fixture(scope="module")
def writer(tokenizer, pairs):
    """A model that writes German, whatever it reads: the bias of its last normalisation is along the embeddings of
    the tokens that German has and English does not."""
    model = new_model(tokenizer)
    english, german = ({token for text in side for token in tokenizer(text)["input_ids"]} for side in zip(*pairs))
    direction = torch.zeros(model.config.d_model)
    direction[0] = 4.0
    with torch.no_grad():
        model.get_output_embeddings().weight[:, 0] = 0.0
        model.get_output_embeddings().weight[sorted(german - english), 0] = 1.0
        norm = model.model.decoder.layers[-1].feed_forward_residual.norm
        norm.weight.zero_()
        norm.bias.copy_(direction)
    return model


def test_pairs_of_the_models_own_direction_are_not_reversed(writer, tokenizer, pairs):
    assert is_reversed(writer, tokenizer, pairs) is None


def test_reversed_pairs_are_found(writer, tokenizer, pairs):
    forward, backward = is_reversed(writer, tokenizer, [pair[::-1] for pair in pairs])
    assert forward < backward - 1


def test_a_model_that_prefers_neither_side_gives_no_warning(tokenizer, pairs):
    model = new_model(tokenizer)
    assert is_reversed(model, tokenizer, pairs) is None
    assert is_reversed(model, tokenizer, [pair[::-1] for pair in pairs]) is None


def test_few_or_long_pairs_give_no_warning(writer, tokenizer, pairs):
    swapped = [pair[::-1] for pair in pairs]
    assert is_reversed(writer, tokenizer, swapped[:7]) is None
    assert is_reversed(writer, tokenizer, [(" ".join([de] * 40), en) for de, en in swapped]) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_fine_tuning_warns_of_reversed_pairs(writer, tokenizer, data, tmp_path, caplog, swapped):
    writer.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    files = data["train"][::-1] if swapped else data["train"]
    words = ["--init_from", str(tmp_path / "model"), "--max_steps", "1", "--report_to", "none"]
    words += ["--source_tokens_per_update", "500", "--target_tokens_per_update", "500"]
    with caplog.at_level(logging.WARNING):
        assert main(["train", "--train_files", *files, "--output_dir", str(tmp_path / "run"), *words]) == 0
    found = [record.getMessage() for record in caplog.records if "swapped" in record.getMessage()]
    assert len(found) == swapped
    assert all(str(tmp_path / "model") in message for message in found)
