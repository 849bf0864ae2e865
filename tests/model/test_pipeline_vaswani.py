import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel, pipeline

import hf_vaswani
from hf_vaswani import VaswaniTranslationPipeline
from support.models import tiny_model


SENTENCES = ["three dogs sleep", "", "a", "a cat sees the two big old horses of the farmer"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """A model with weights that make some difference, its tokenizer and a search of its own."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model(vocab_size=len(tokenizer))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2 if "shared" in name else 1.0)
    model.generation_config.update(num_beams=2, max_new_tokens=8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def translate_one(folder, sentence: str, **kwargs) -> list[str]:
    """Translations by `generate()`, called by hand."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    outputs = model.generate(**tokenizer(sentence, return_tensors="pt"), **kwargs)
    return tokenizer.batch_decode(outputs, skip_special_tokens=True)


def test_a_sentence_gives_what_generate_gives(checkpoint):
    translator = pipeline("translation", model=str(checkpoint))
    assert isinstance(translator, VaswaniTranslationPipeline)
    expected = translate_one(checkpoint, SENTENCES[0])
    assert expected[0]
    assert translator(SENTENCES[0]) == [{"translation_text": expected[0]}]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_a_list_keeps_its_order_in_any_batch_size(checkpoint, batch_size):
    translator = pipeline("translation", model=str(checkpoint))
    expected = [translate_one(checkpoint, text)[0] if text else "" for text in SENTENCES]
    assert len(set(expected)) == len(SENTENCES)
    outputs = translator(SENTENCES, batch_size=batch_size, progress=True)
    assert outputs == [{"translation_text": text} for text in expected]


def test_a_list_has_the_weights_laid_out_once(checkpoint, layouts):
    pipeline("translation", model=str(checkpoint))(SENTENCES, batch_size=1)
    assert len(layouts) == 1


def test_other_models_may_have_lists_too(tokenizer):
    """The package's pipeline is for all models of that kind."""
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = MarianConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, **special)
    marian = MarianMTModel(config).eval()
    marian.generation_config.update(bad_words_ids=None, forced_eos_token_id=None, max_length=6)
    translator = pipeline("translation", model=marian, tokenizer=tokenizer)
    assert isinstance(translator, VaswaniTranslationPipeline)
    assert len(translator(["three dogs sleep", "a cat"])) == 2


def test_a_generator_is_read_as_it_is_asked_for(checkpoint):
    read = []

    def source():
        for text in SENTENCES:
            read.append(text)
            yield text

    outputs = iter(pipeline("translation", model=str(checkpoint))(source()))
    first = next(outputs)
    assert first == [{"translation_text": translate_one(checkpoint, SENTENCES[0])[0]}]
    assert len(read) < len(SENTENCES)
    assert len(list(outputs)) == len(SENTENCES) - 1


def test_tokens_and_several_sequences_come_on_demand(checkpoint):
    translator = pipeline("translation", model=str(checkpoint), num_beams=3)
    tokens = translator(SENTENCES[0], return_tensors=True)[0]["translation_token_ids"]
    decoded = translator.tokenizer.decode(tokens, skip_special_tokens=True)
    assert [decoded] == translate_one(checkpoint, SENTENCES[0], num_beams=3)
    several = translator([SENTENCES[0], ""], num_return_sequences=2)
    expected = translate_one(checkpoint, SENTENCES[0], num_beams=3, num_return_sequences=2)
    assert [output["translation_text"] for output in several[0]] == expected
    assert several[1] == [{"translation_text": ""}] * 2


def test_no_sentences_give_no_translations(checkpoint):
    assert pipeline("translation", model=str(checkpoint))([]) == []


def test_long_text_is_cut_only_on_demand(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=5)
    translator = pipeline("translation", model=AutoModelForSeq2SeqLM.from_pretrained(checkpoint), tokenizer=tokenizer)
    text = SENTENCES[3]
    cut = tokenizer(text, truncation=True, return_tensors="pt")
    assert cut["input_ids"].shape == (1, 5)
    expected = tokenizer.decode(translator.model.generate(**cut)[0], skip_special_tokens=True)
    assert translator(text, truncation=True) == [{"translation_text": expected}]
    assert translator(text) == [{"translation_text": translate_one(checkpoint, text)[0]}] != translator("a")


def test_a_pipeline_of_ones_own_is_saved_with_the_model(checkpoint, tmp_path):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    model.config.custom_pipelines = {"mine": {"impl": "mine.Mine", "pt": ["AutoModel"]}}
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    assert set(saved) == {"mine", "translation"}
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert set(loaded.config.custom_pipelines) == {"mine"}  # the other one is registered


def test_what_is_not_text_is_named(checkpoint):
    translator = pipeline("translation", model=str(checkpoint))
    with pytest.raises(TypeError, match=r"inputs\[1\] must be a str, got int"):
        translator(["a", 3])
    with pytest.raises(TypeError, match="must be a str, got int"):
        translator(3)


def test_a_tokenizer_of_another_model_is_refused(checkpoint, tokenizer):
    with pytest.raises(ValueError, match=rf"tokenizer has {len(tokenizer)} tokens, but the model's vocabulary 40"):
        pipeline("translation", model=tiny_model(), tokenizer=tokenizer)
    larger = tiny_model(vocab_size=len(tokenizer) + 200)
    with pytest.raises(ValueError, match=rf"tokenizer has {len(tokenizer)} tokens, but the model's vocabulary"):
        pipeline("translation", model=larger, tokenizer=tokenizer)
    padded = tiny_model(vocab_size=-(-len(tokenizer) // 64) * 64)
    assert len(pipeline("translation", model=padded, tokenizer=tokenizer)(["a"], max_new_tokens=2)) == 1


# Runs where `hf_vaswani` cannot be imported: everything has to come from the checkpoint.
STRANGER = """
import sys, torch


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_vaswani", "training"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Blocker())
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

folder, resaved, sentence = sys.argv[1:]
try:
    AutoModelForSeq2SeqLM.from_pretrained(folder)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("loaded without trust")

results = {}
for name in (folder, resaved):
    assert AutoConfig.from_pretrained(name, trust_remote_code=True).model_type == "vaswani"
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
    body = AutoModel.from_pretrained(name, trust_remote_code=True)
    inputs = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, labels=inputs["input_ids"]).logits
        hidden = body(**inputs, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(inputs["input_ids"]))
        assert torch.equal(model.lm_head(hidden.last_hidden_state), logits)
    translator = pipeline("translation", model=name, trust_remote_code=True)
    results[name] = {
        "logits": logits,
        "generated": model.generate(**inputs),
        "penalised": model.generate(**inputs, length_penalty_form="gnmt", length_penalty=0.6),
        "pipeline": translator(sentence),
    }
    if name == folder:
        translator.save_pretrained(resaved)
torch.save(results[folder], "here.pt")
torch.save(results[resaved], "again.pt")
"""


@pytest.mark.slow  # test_hub.py has a stranger that pulls one
def test_a_checkpoint_is_complete_for_a_stranger(checkpoint, tmp_path):
    script, resaved = tmp_path / "stranger.py", tmp_path / "resaved"
    script.write_text(STRANGER)
    command = [sys.executable, str(script), str(checkpoint), str(resaved), SENTENCES[0]]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(SENTENCES[0], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, labels=inputs["input_ids"]).logits
    for name in ("here.pt", "again.pt"):
        theirs = torch.load(tmp_path / name)
        assert torch.equal(theirs["logits"], logits)
        assert torch.equal(theirs["generated"], model.generate(**inputs))
        gnmt = model.generate(**inputs, length_penalty_form="gnmt", length_penalty=0.6)
        assert torch.equal(theirs["penalised"], gnmt)
        assert theirs["pipeline"] == [{"translation_text": translate_one(checkpoint, SENTENCES[0])[0]}]
    code = {path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py")}
    assert len(code) > 4
    for folder in (checkpoint, resaved):
        assert code == {path.name for path in folder.glob("*.py")}
        assert not [path for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pkl"}]
