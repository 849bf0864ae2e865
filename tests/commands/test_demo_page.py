"""The page of `hf-vaswani demo`: what it shows, the page itself where Gradio is installed, and the Space."""

import importlib
import runpy
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from huggingface_hub import SpaceCard

import hf_vaswani
from support.models import noisy_translator
from training.cli import main
from training.inference import demo_page
from training.inference.demo_page import (
    Found,
    Introduction,
    Translator,
    best_translations,
    token_table,
    write_space,
)
from training.inference.search import Translation
from training.inference.translation import translate
from training.publishing import introduction


HOSTILE = '<script>alert("1")</script> {{value}} ${1} </iframe>'


@pytest.fixture(scope="module")
def translator(tokenizer):
    return Translator(noisy_translator(tokenizer, max_extra_tokens=5), tokenizer)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    noisy_translator(tokenizer, max_extra_tokens=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Elements(HTMLParser):
    """The elements of a piece of HTML with their attributes, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.elements, self.text = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


def test_the_best_translations_are_those_of_translate(translator, pairs):
    lines = [pairs[0][0], "", pairs[1][0]]
    found, notice = translator("\n".join(lines), n_best=3, num_beams=4)
    assert notice == ""
    assert [(each.line, each.rank, each.source) for each in found] == [
        (number, rank, lines[number - 1]) for number in (1, 3) for rank in (1, 2, 3)
    ]
    expected = translate(translator.model, translator.tokenizer, lines, num_beams=4)
    assert best_translations(found, 3).split("\n") == expected and expected[1] == "" and expected[0]


def test_scores_are_ranked_and_log_probabilities_are_those_of_forced_decoding(translator, pairs):
    found, _ = translator(pairs[0][0], n_best=4, num_beams=4, length_penalty=0.6)
    scores = [each.translation.score for each in found]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    for each in found:
        line, rank, score, log_probability, text = each.row
        assert (line, rank, text) == (1, each.rank, each.translation.text)
        assert score == pytest.approx(each.translation.score, abs=5e-5)
        tokens = len(each.translation.tokens)
        # Wu et al. 2016, equation 14: the score is the log probability over ((5 + tokens) / 6) ** α.
        assert log_probability == pytest.approx(each.translation.score * ((5 + tokens) / 6) ** 0.6, rel=1e-3)


def test_the_length_penalty_is_that_of_the_page(translator, pairs):
    plain, penalised = (translator(pairs[0][0], num_beams=2, length_penalty=alpha)[0][0] for alpha in (0.0, 1.0))
    assert plain.translation.score == pytest.approx(plain.translation.log_probability, rel=1e-4)
    assert penalised.translation.score > penalised.translation.log_probability + 0.1


def test_the_tokens_stand_above_their_log_probabilities():
    page = Elements(token_table(Translation("a <b>", -1.0, [(" a", -0.25), ("<b>", -0.756), (" ", -2.0)])))
    assert [text for text in page.text if text.strip()] == ["a", "-0.25", "<b>", "-0.76", "␣", "-2.00"]
    assert [tag for tag, _ in page.elements] == ["p", *["ruby", "rt"] * 3]


def test_the_attention_is_a_page_of_its_own_that_text_cannot_leave(translator):
    html = translator.attention(Found(1, 1, HOSTILE, Translation(HOSTILE)))
    [(tag, attributes)] = Elements(html).elements
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts"
    inner = attributes["srcdoc"]
    assert inner.startswith("<!DOCTYPE html>") and "Content-Security-Policy" in inner
    assert inner.count("</script>") == 2  # the data and the page's own


def test_attention_of_an_empty_translation_is_that_of_its_end(translator):
    [(_, attributes)] = Elements(translator.attention(Found(1, 1, "a dog", Translation("")))).elements
    assert '"written":["</s>"]'.replace("<", "\\u003c") in attributes["srcdoc"]


def test_attention_of_a_long_text_is_not_shown(translator, tokenizer):
    html = translator.attention(Found(1, 1, "a dog " * 80, Translation("ein Hund")))
    count = len(tokenizer("a dog " * 80)["input_ids"])
    assert "at most 100 tokens" in html and f" {count}." in html


def test_a_line_beyond_the_positions_is_cut_and_that_is_said(tokenizer):
    torch.manual_seed(0)
    model = noisy_translator(tokenizer, max_new_tokens=4)
    model.config.position_embedding, model.config.max_position_embeddings = "learned", 12
    translator = Translator(model, tokenizer)
    assert translator.limit == 12
    found, notice = translator("The man sleeps. " * 6 + "\nThe man sleeps.")
    assert "more than 12 tokens: 1 lines of the text (1)." in notice
    assert [each.line for each in found] == [1, 2] and found[0].translation.text
    assert "at most 12 tokens" in translator.attention(found[0])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (" \n\n", {}, "There is nothing to translate: the text is empty"),
        ("a\n" * 100, {}, "101 lines, where 100 are allowed"),
        ("a dog", {"n_best": 3, "num_beams": 2}, r"n_best=3 .*num_beams=2"),
    ],
)
def test_what_cannot_be_translated_is_refused(translator, text, options, message):
    with pytest.raises(ValueError, match=message):
        translator(text, **options)


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", "--model", "x"]) == 1
    assert capsys.readouterr().err == "hf-vaswani demo: The page needs Gradio: pip install 'hf-vaswani[demo]'.\n"


# The Space


def test_a_space_has_the_metadata_that_the_hub_reads(tmp_path):
    paths = write_space("user/name", str(tmp_path / "space"), "6.31.0")
    assert sorted(path.name for path in (tmp_path / "space").iterdir()) == ["README.md", "app.py", "requirements.txt"]
    assert {path.parent for path in paths} == {tmp_path / "space"}
    card = SpaceCard.load(tmp_path / "space" / "README.md")
    assert card.data.to_dict() == {
        "title": "Translate with user/name",
        "sdk": "gradio",
        "sdk_version": "6.31.0",
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        "models": ["user/name"],
    }
    assert "https://huggingface.co/user/name" in card.text
    requirements = (tmp_path / "space" / "requirements.txt").read_text()
    assert requirements == f"hf-vaswani[train,demo]=={hf_vaswani.__version__}\n"


def test_a_space_overwrites_nothing(tmp_path):
    (tmp_path / "README.md").write_text("precious")
    with pytest.raises(FileExistsError, match=r"not overwritten: .*README\.md"):
        write_space("user/name", str(tmp_path), "6.31.0")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "message"), [("a b/c", "is not the name of a model on the Hub"), (".", "is a local folder")]
)
def test_a_space_needs_a_model_of_the_hub(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        write_space(name, str(tmp_path / "space"), "6.31.0")
    assert not (tmp_path / "space").exists()


# The page itself


@pytest.fixture(scope="module")
def page(checkpoint):
    """The page, served on this machine; its client."""
    pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    page = demo_page.make_page(str(checkpoint), introduction=Introduction(("en", "de"), "A dog."))
    _, address, _ = page.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, app_kwargs=demo_page.SERVER
    )
    yield client.Client(address, verbose=False)
    page.close()


def test_the_page_translates(page, translator, pairs):
    text = f"{pairs[0][0]}\n\n{pairs[1][0]}"
    translation, table, choice, tokens, attention = page.predict(text, 4, 0.6, 2, api_name="/translate")
    found, _ = translator(text, n_best=2, num_beams=4, length_penalty=0.6)
    assert translation == best_translations(found, 3)
    assert table["headers"] == ["line", "rank", "score", "log probability", "translation"]
    assert [row[:2] for row in table["data"]] == [[1, 1], [1, 2], [3, 1], [3, 2]]
    assert [row[4] for row in table["data"]] == [each.translation.text for each in found]
    assert [value for _, value in choice["choices"]] == [0, 1, 2, 3]
    assert (tokens, attention[:7]) == (token_table(found[0].translation), "<iframe")
    tokens, attention = page.predict(3, api_name="/look_into")
    assert tokens == token_table(found[3].translation)
    assert Elements(attention).elements[0][1]["srcdoc"].count(found[3].source) == 1


def test_the_page_names_the_languages_and_opens_with_the_example(page):
    boxes = [part["props"] for part in page.config["components"] if part["type"] == "textbox"]
    assert [(box["label"], box.get("value")) for box in boxes] == [
        ("Source (en), one sentence per line", "A dog."),
        ("Translation (de)", None),
    ]


def test_the_page_takes_no_files(page, tmp_path):
    """By no address, and none is written; a file by its path neither."""
    import httpx

    (tmp_path / "secret").write_text("private")
    written = Path(tempfile.gettempdir()) / "gradio"
    before = set(written.rglob("*"))
    files = {"files": ("a.txt", b"content")}
    places = (
        "gradio_api/upload",
        "gradio_api/upload/",
        "upload",
        "gradio_api/process_recording",
        "gradio_api/component_server",
    )
    for place in places:
        answer = httpx.post(page.src + place, files=files)
        assert (answer.status_code, "no files" in answer.text) == (403, True), place
    assert httpx.post(page.src + "gradio_api/upload", content=b"content").status_code == 403
    assert httpx.get(f"{page.src}gradio_api/file={tmp_path / 'secret'}").status_code in (403, 404)
    assert set(written.rglob("*")) == before
    assert httpx.get(page.src).status_code == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" ", 4, 0.6, 1), "the text is empty"),
        (("a dog", 2, 0.6, 3), r"n_best=3 .*num_beams=2"),
        (("a dog", 99, 0.6, 1), "greater than maximum value 16"),
        (("a dog", 4, 1000, 1), "greater than maximum value 10"),
    ],
)
def test_the_page_says_what_is_wrong(page, words, message):
    with pytest.raises(Exception, match=message):
        page.predict(*words, api_name="/translate")


def test_the_command_serves_the_page_where_it_is_told_to(checkpoint, monkeypatch, capsys):
    blocks = pytest.importorskip("gradio").Blocks
    served = []
    monkeypatch.setattr(blocks, "launch", lambda self, **options: served.append((self.title, options)))
    assert main(["demo", "--model", str(checkpoint), "--port", "7999"]) == 0
    options = {"server_name": "127.0.0.1", "server_port": 7999, "share": False, "app_kwargs": demo_page.SERVER}
    assert served == [(f"Translate with {checkpoint}", options)]
    assert main(["demo", "--model", str(checkpoint / "none")]) == 1
    assert f"hf-vaswani demo: {checkpoint / 'none'}: no such folder, and" in capsys.readouterr().err


def test_the_app_of_a_space_starts(checkpoint, tmp_path, monkeypatch, capsys):
    gradio = pytest.importorskip("gradio")
    words = ["demo", "--model", "user/name", "--write-space", str(tmp_path / "space")]
    assert main(words) == 0
    assert str(tmp_path / "space" / "app.py") in capsys.readouterr().out.split("\n")
    assert SpaceCard.load(tmp_path / "space" / "README.md").data.sdk_version == gradio.__version__
    # The package as it is installed, with a model that the Hub would have.
    for name in (
        *("training", "training.inference", "training.inference.demo_page"),
        *("training.publishing", "training.publishing.introduction"),
    ):
        monkeypatch.setitem(
            sys.modules, name.replace("training", "hf_vaswani_training"), importlib.import_module(name)
        )
    load = demo_page.load_checkpoint
    monkeypatch.setattr(
        demo_page, "load_checkpoint", lambda name, *args, **kwargs: load(str(checkpoint), *args, **kwargs)
    )
    monkeypatch.setattr(introduction, "find_checkpoint", lambda name: checkpoint)
    served = []
    monkeypatch.setattr(gradio.Blocks, "launch", lambda self, **options: served.append((self.title, options)))
    runpy.run_path(str(tmp_path / "space" / "app.py"), run_name="__main__")
    assert served == [("Translate with user/name", {"app_kwargs": demo_page.SERVER})]
