import pytest

from support.models import new_model


@pytest.fixture(autouse=True)
def _quick_cards(drawn_once):
    pass


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """A new model without a run: its folder, the model and the tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = new_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer
