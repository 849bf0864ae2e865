import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from ctranslate2 import Translator
from ctranslate2.converters import MarianConverter
from ctranslate2.converters.marian import load_vocab

from support.foreign_models import relative_difference
from support.marian_files import SETTINGS, TOKENS, arrays_of, write_folder, write_model
from training.conversion.npz import read


@pytest.mark.parametrize("activation", ["swish", "relu"])
@pytest.mark.parametrize("source", [None, [*TOKENS, "more", "words"], TOKENS[:20]])
def test_ctranslate2_says_the_same(activation, source, tmp_path):
    folder = tmp_path / "marian"
    folder.mkdir()
    files = write_folder(folder, source, **{"transformer-ffn-activation": activation})
    converter = MarianConverter(str(folder / "model.npz"), list(map(str, files)))
    translator = Translator(converter.convert(str(tmp_path / "ct2")))
    model = read(folder).model
    pad = max(len(source or TOKENS), len(TOKENS))
    assert model.config.pad_token_id == model.config.decoder_start_token_id == pad
    assert model.config.layer_norm_eps == 1e-5

    sources = source or TOKENS
    ids = [[3, 7, 12, 5, 19, 0], [8, 8, 2, 0], [17, 4, 6, 9, 11, 13, 16, 10, 2, 0]]
    tokens = [[sources[token] for token in row[:-1]] for row in ids]  # it adds the end itself
    batch = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), batch_first=True, padding_value=pad)
    inputs = {"input_ids": batch, "attention_mask": (batch != pad).long()}
    search = {"num_beams": 4, "length_penalty": 1.0, "max_length": None, "max_new_tokens": 9}
    # A random model says one token again and again, unless that is forbidden.
    search |= {"forced_eos_token_id": None, "no_repeat_ngram_size": 1, "renormalize_logits": True}
    outputs = model.generate(**inputs, **search)
    expected = translator.translate_batch(
        tokens, beam_size=4, max_decoding_length=9, min_decoding_length=0, no_repeat_ngram_size=1, return_scores=True
    )
    found = [[TOKENS[token] for token in row if token not in (pad, 0)] for row in outputs[:, 1:].tolist()]
    assert [result.hypotheses[0] for result in expected] == found
    assert len({token for row in found for token in row}) > 4

    targets = [[TOKENS[(7 * row + column) % len(TOKENS)] for column in range(2, 9)] for row in range(3)]
    scores = translator.score_batch(tokens, targets)
    labels = torch.tensor([[*(TOKENS.index(token) for token in row), 0] for row in targets])
    logits = model(**inputs, labels=labels).logits
    ours = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(ours, torch.tensor([score.log_probs for score in scores]), rtol=1e-5, atol=1e-5)
    assert logits[..., len(TOKENS) :].max() < -90  # padding, and ids that the target lacks


def test_the_reference_of_the_conversion_is_the_same_model(tmp_path):
    write_folder(tmp_path)
    conversion = read(tmp_path)
    ids = torch.randint(0, len(TOKENS), (3, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pad, size = len(TOKENS), len(TOKENS) + 1
    assert relative_difference(conversion.reference, conversion.model, batch, (pad,), size) < 1e-5


def test_vocabulary_and_search_come_along(tmp_path):
    (path, _) = write_folder(tmp_path)
    conversion = read(tmp_path)
    ids = json.loads(conversion.tokenizer_files["vocab.json"])
    assert list(ids) == [*load_vocab(str(path)), "<pad>"]
    assert list(ids.values()) == list(range(len(TOKENS) + 1))
    settings = conversion.model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_form) == (4, 0.5, "length")
    assert conversion.model.config.eos_token_id == 0


def test_positions_as_trained_are_a_table(tmp_path):
    write_folder(tmp_path)
    config = read(tmp_path, as_trained=True).model.config
    assert (config.position_embedding, config.layer_norm_eps) == ("learned", 1e-6)


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run(tmp_path):
    write_folder(tmp_path)
    arrays = {**arrays_of(SETTINGS), "Wemb": np.array([Bomb(tmp_path / "ran")], dtype=object)}
    write_model(tmp_path, arrays=arrays)
    with pytest.raises(ValueError, match=r"model\.npz: .*allow_pickle"):
        read(tmp_path)
    (tmp_path / "model.npz").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"model\.npz"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(share, tmp_path):
    write_folder(tmp_path)
    content = (tmp_path / "model.npz").read_bytes()
    (tmp_path / "model.npz").write_bytes(content[: int(share * len(content))])
    with pytest.raises((ValueError, OSError), match=r"model\.npz"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "s2s"}, "type 'transformer' only, found 's2s'"),
        (
            {"transformer-preprocess": "n", "transformer-postprocess": "da"},
            "transformer-preprocess '' only, found 'n'",
        ),
        ({"transformer-decoder-autoreg": "rnn"}, "autoreg 'self-attention' only, found 'rnn'"),
        ({"transformer-ffn-activation": "glu"}, "transformer-ffn-activation: expected one of .* found 'glu'"),
        ({"transformer-tied-layers": [1, 1, 1]}, "transformer-tied-layers"),
    ],
)
def test_settings_that_do_not_map_are_named(settings, message, tmp_path):
    write_folder(tmp_path, **settings)
    with pytest.raises(ValueError, match=rf"model\.npz: special:model\.yml: .*{message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_ff_logit_out_W": np.zeros((32, 5), np.float32)}, "decoder_ff_logit_out_W"),  # untied
        ({"decoder_l1_rnn_W": np.zeros((2, 2), np.float32)}, "decoder_l1_rnn_W"),
        ({"encoder_l2_self_Wq": None}, "encoder_l2_self_Wq: expected an array"),
        (
            {"encoder_l2_self_Wq": np.zeros((32, 32), np.int8)},
            "encoder_l2_self_Wq: expected float32 or float16, found int8",
        ),
        (
            {"encoder_l2_self_Wq": np.zeros((32, 31), np.float32)},
            r"q_proj\.weight: expected shape \[32, 32\], found \[31, 32\]",
        ),
        ({"Wemb": np.zeros((9, 32), np.float32)}, f"expected embeddings of {len(TOKENS)} tokens"),
        ({"special:model.yml": None}, "special:model.yml: expected the settings"),
    ],
)
def test_arrays_that_do_not_map_are_named(change, message, tmp_path):
    write_folder(tmp_path)
    arrays = {**dict(np.load(tmp_path / "model.npz")), **change}
    np.savez(tmp_path / "model.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=rf"model\.npz: .*{message}"):
        read(tmp_path)


def test_vocabularies_that_do_not_fit_are_named(tmp_path):
    (path, _) = write_folder(tmp_path)
    path.write_text(path.read_text() + "again: 0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"target\.yml: expected the ids 0 to"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(OSError, match=r"target\.yml"):
        read(tmp_path)
    (tmp_path / "decoder.yml").unlink()
    with pytest.raises(ValueError, match=r"vocabularies, found 0"):
        read(tmp_path)
