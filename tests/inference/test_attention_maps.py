import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

from support.models import noisy_translator
from training.cli import main
from training.data.tokenizer import train_tokenizer
from training.inference.attention_maps import Attention, attention_maps, attention_page, draw_attention, token_labels
from training.inference.translation import translate


HOSTILE = '</script><script>alert(1)</script> <!-- "it\'s" & &lt; \\u003c \u2028 日 __DATA__ $x$'
KINDS = ("encoder", "decoder", "cross")


@pytest.fixture(scope="module")
def both(tokenizer):
    return noisy_translator(tokenizer), tokenizer


@pytest.fixture(scope="module")
def attention(both, pairs):
    return attention_maps(*both, *pairs[0])


class Page(HTMLParser):
    """The elements of a page, what they load, the text of its JSON, and, where drawn, the table."""

    def __init__(self, page: str):
        super().__init__()
        self.opened, self.loaded, self.json, self.names, self.cells = [], [], "", [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.opened.append((tag, dict(attributes)))
        self.loaded += [value for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag == "td" and "aria-label" in dict(attributes):
            self.cells.append(dict(attributes)["aria-label"])
        if tag == "th" and dict(attributes)["scope"] == "row":
            self.names.append("")

    def handle_data(self, data):
        tag, attributes = self.opened[-1] if self.opened else ("", {})
        if attributes.get("type") == "application/json":
            self.json += data
        in_row = ("scope", "row") in [item for _, opened in self.opened[-2:] for item in opened.items()]
        if in_row and (tag == "th" or attributes.get("class") == "read"):
            self.names[-1] += data


def test_labels_are_readable():
    """A vocabulary of bytes and of one word, so that most tokens are one byte."""
    tokenizer = train_tokenizer(["ab ab ab"], vocab_size=261, show_progress=False)
    assert token_labels(tokenizer, "ab abc  é日\t.") == [
        *("ab", "ab", "·c", "␣", "␣", "é₁", "·é₂", "·日₁", "·日₂", "·日₃", "␣", ".", "</s>")
    ]


def test_text_that_looks_like_a_special_token_is_text(tokenizer):
    labels = token_labels(tokenizer, "a </s>")
    assert "".join(labels[:-1]).replace("·", "").replace("␣", "") == "a</s>"
    assert len(labels) > 4
    assert labels[-1] == "</s>"


@torch.no_grad()
def test_the_maps_are_the_models_own_attention(both, pairs):
    model, tokenizer = both
    for source, target in pairs[:3]:
        inputs, labels = tokenizer(source, return_tensors="pt"), tokenizer(target, return_tensors="pt")["input_ids"]
        model.set_attn_implementation("eager")
        expected = model(**inputs, labels=labels, output_attentions=True)
        model.set_attn_implementation("sdpa")
        found = attention_maps(model, tokenizer, source, target)
        assert model.config._attn_implementation == "sdpa"
        for kind, layers in zip(
            KINDS, (expected.encoder_attentions, expected.decoder_attentions, expected.cross_attentions)
        ):
            rows, columns = found.tokens(kind)
            assert found.weights[kind].shape == (2, 2, len(rows), len(columns))
            torch.testing.assert_close(found.weights[kind], torch.cat(layers))
            torch.testing.assert_close(found.weights[kind].sum(-1), torch.ones(2, 2, len(rows)))
        assert (len(found.source_tokens), len(found.written_tokens)) == (inputs["input_ids"].shape[1], labels.shape[1])
        assert found.read_tokens == ["<s>", *found.written_tokens[:-1]]


def test_without_a_target_it_is_the_models_translation(both, pairs):
    source = pairs[0][0]
    found = attention_maps(*both, source)
    [expected] = translate(*both, [source])
    assert found.target == expected
    assert found.written_tokens == token_labels(both[1], expected)


def test_a_row_of_the_decoder_names_the_token_read_and_the_token_to_predict(both):
    attention = attention_maps(*both, "a dog", "ein Hund")
    written = attention.written_tokens
    assert written[-1] == "</s>"
    for kind in ("decoder", "cross"):
        assert attention.row_labels(kind)[:2] == [f"<s> → {written[0]}", f"{written[0]} → {written[1]}"]
        assert attention.row_labels(kind)[-1] == f"{written[-2]} → </s>"
    assert attention.row_labels("encoder") == attention.source_tokens


def test_a_layer_and_heads_are_selected(attention):
    weights = attention.weights["cross"]
    layer, maps = attention.select("cross", None, "all")
    assert layer == 2
    assert torch.equal(maps, weights[1])
    assert torch.equal(attention.select("cross", 1, 2)[1], weights[0, 1:])
    torch.testing.assert_close(attention.select("cross", 1, "mean")[1][0], (weights[0, 0] + weights[0, 1]) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_holds_the_attention(both, pairs, kind):
    attention = attention_maps(*both, *pairs[1])
    page = Page(attention_page(attention, kind, layer=1, head=2))
    data = json.loads(page.json)
    assert (data["source"], data["target"]) == pairs[1]
    assert data["shown"] == {"kind": kind, "layer": 0, "head": 1}
    part = data["kinds"][kind]
    assert [data["tokens"][part["rows"]], data["tokens"][part["columns"]]] == list(attention.tokens(kind))
    weights = torch.tensor(part["weights"])
    torch.testing.assert_close(weights, attention.weights[kind], atol=5.1e-5, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), atol=5e-5 * weights.shape[3], rtol=0)
    if kind == "decoder":
        assert torch.equal(weights, weights.tril())


def test_the_page_needs_nothing_from_elsewhere(attention):
    page = Page(attention_page(attention))
    assert page.loaded == []
    assert {tag for tag, _ in page.opened} >= {"script", "style", "table", "svg", "form"}
    policy = next(a["content"] for tag, a in page.opened if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_no_text_breaks_out_of_the_page(both, attention):
    plain, hostile = (
        Page(attention_page(a)) for a in (attention, attention_maps(*both, HOSTILE, HOSTILE.replace("日", "<b>")))
    )
    assert [tag for tag, _ in hostile.opened] == [tag for tag, _ in plain.opened]
    data = json.loads(hostile.json)
    assert (data["source"], data["target"]) == (HOSTILE, HOSTILE.replace("日", "<b>"))
    assert data["tokens"]["source"] == token_labels(both[1], HOSTILE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer must be from 1 to 2, got 3"),
        ({"layer": 0}, "layer must be from 1 to 2, got 0"),
        ({"head": 3}, "head must be from 1 to 2, got 3"),
        ({"head": "best"}, "head must be a number"),
        ({"kind": "self"}, "kind must be one of encoder, decoder, cross, got 'self'"),
    ],
)
def test_wrong_choices_are_refused(attention, options, message, tmp_path):
    pytest.importorskip("matplotlib")
    for draw in (lambda **o: attention_page(attention, **o), lambda **o: draw_attention(attention, "x.png", **o)):
        with pytest.raises(ValueError, match=message):
            draw(**options)


def test_wrong_input_is_refused(both, attention, monkeypatch):
    with pytest.raises(ValueError, match="one head at a time"):
        attention_page(attention, head="all")
    with pytest.raises(ValueError, match="The source is empty"):
        attention_maps(*both, "  ")
    monkeypatch.setattr(type(both[1]), "is_fast", False)
    with pytest.raises(ValueError, match="no character offsets"):
        attention_maps(*both, "a")


@pytest.mark.parametrize("head", [1, "mean", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_shows_the_selected_maps_and_tokens(attention, kind, head, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr("training.inference.attention_maps.save_whole", lambda figure, *_, **__: drawn.append(figure))
    draw_attention(attention, "x.png", kind, 1, head)
    _, columns = attention.tokens(kind)
    maps = attention.weights[kind][0]
    expected = {1: maps[:1], "mean": maps.mean(0, keepdim=True), "all": maps}[head]
    shown = [axes for axes in drawn[0].axes if axes.images]
    assert len(shown) == len(expected)
    for axes, weights in zip(shown, expected):
        torch.testing.assert_close(torch.tensor(axes.images[0].get_array().data), weights)
        assert [label.get_text() for label in axes.get_xticklabels()] == columns
        assert [label.get_text() for label in axes.get_yticklabels()] == attention.row_labels(kind)
    titles = [axes.get_title() for axes in shown] + [drawn[0].get_suptitle()]
    assert any("layer 1" in title for title in titles)
    assert ("predict" in drawn[0].get_supylabel()) == (kind != "encoder")
    assert ("source" in drawn[0].get_supxlabel()) == (kind != "decoder")


def test_a_picture_is_a_picture(both, tmp_path):
    """Also of dollars, which matplotlib would take for formulas."""
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "attention.png"
    draw_attention(attention_maps(*both, "a $_ $^ b", "$\\frac$"), str(file))
    pixels = image.imread(file)
    assert min(pixels.shape[:2]) > 150
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::7].tolist()}) > 20


def test_a_text_too_long_is_refused_with_the_size_before_it_is_translated(both, tmp_path, monkeypatch, capsys):
    """Two layers and heads: 3,000 tokens of source and 1 of target are (2 * 3000 ** 2 + 2 * 3001) * 2 numbers."""
    model, tokenizer = both
    source = "a " * 2999
    length = len(tokenizer(source)["input_ids"])
    numbers = 2 * (2 * length**2 + 2 * (length + 1))
    assert numbers > 15_000_000
    for part in both:
        part.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("training.inference.attention_maps.translate", lambda *_: pytest.fail("translated"))
    output = tmp_path / "attention.html"
    capsys.readouterr()
    words = ["attention", "--model", str(tmp_path / "model"), "--source", source, "--output", str(output)]
    assert main(words) == 1
    [message] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-vaswani attention: ")]
    assert f"{length:,} source tokens" in message
    assert f"{numbers * 4 / 1e6:,.0f} MB of memory" in message and f"{numbers * 7 / 1e6:,.0f} MB" in message
    assert "105 MB" in message and not output.exists()
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ValueError, match=rf"source tokens and {length:,} target tokens"):
        attention_maps(model, tokenizer, "a dog " * 2, source)


@pytest.mark.parametrize(("columns", "rows"), [(1000, 1000), (3000, 3)])
def test_a_picture_too_large_is_refused_with_its_size(columns, rows):
    pytest.importorskip("matplotlib")
    weights = {"cross": torch.ones(1, 1, rows, columns)}
    attention = Attention("", "", ["a"] * columns, ["b"] * rows, ["b"] * rows, weights)
    with pytest.raises(ValueError, match=rf"{rows:,} by {columns:,} tokens .* pixels, [\d,]+ MB"):
        draw_attention(attention, "x.png")


def test_attention_that_is_not_a_number_is_an_error(tokenizer):
    model = noisy_translator(tokenizer)
    with torch.no_grad():
        model.get_encoder().layers[0].self_attn.q_proj.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"encoder self-attention has .* not finite"):
        attention_maps(model, tokenizer, "a dog", "ein Hund")


def test_a_missing_matplotlib_is_named(attention, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-vaswani\[plots\]'"):
        draw_attention(attention, "x.png")


def test_the_command_writes_pages_and_pictures(both, pairs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for part in both:
        part.save_pretrained(tmp_path / "model")
    words = ["attention", "--model", str(tmp_path / "model"), "--source", pairs[0][0], "--target", pairs[0][1]]
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    assert main([*words, "--output", str(page), "--kind", "encoder", "--layer", "1", "--head", "2"]) == 0
    data = json.loads(Page(page.read_text(encoding="utf-8")).json)
    assert (data["target"], data["shown"]) == (pairs[0][1], {"kind": "encoder", "layer": 0, "head": 1})
    assert main([*words, "--output", str(picture), "--head", "all"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.split() == [str(page), str(picture)]
    assert main([*words, "--output", str(tmp_path / "b.html"), "--layer", "7"]) == 1
    assert "layer must be from 1 to 2, got 7" in capsys.readouterr().err
    assert not (tmp_path / "b.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "a.txt"], "must end in .html, .png, .svg, .pdf"),
        (["--output", "a.png", "--head", "0"], "must be at least 1"),
        (["--output", "a.png", "--kind", "self"], "invalid choice"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_loaded(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["attention", "--model", "x", "--source", "y", *options])
    assert message in capsys.readouterr().err


def draw_in_browser(page: str, folder, script: str = "") -> str:
    """The page as it is after its own and another script."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to draw the page with")
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    return subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, encoding="utf-8", timeout=120
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_browser_draws_the_page(both, kind, tmp_path):
    attention = attention_maps(*both, HOSTILE, "ein <b> Hund")
    page = Page(draw_in_browser(attention_page(attention, kind, layer=2, head="mean"), tmp_path))
    rows, columns = attention.tokens(kind)
    assert page.names == attention.row_labels(kind)
    weights = attention.weights[kind][1].mean(0)
    cells = [
        weights[i, j].item() for i in range(len(rows)) for j in range(len(columns)) if kind != "decoder" or j <= i
    ]
    assert len(page.cells) == len(cells)
    for text, weight in zip(page.cells, cells):
        assert float(text.removesuffix(" %")) == pytest.approx(100 * weight, abs=0.51)
    assert sum(tag == "path" for tag, _ in page.opened) > len(rows)
    assert sum("checked" in a or a.get("type") == "radio" for _, a in page.opened) == 3 + 2 + 3


@pytest.mark.slow
def test_a_token_that_is_pointed_at_shows_what_it_attends_to(both, tmp_path):
    """Over the third row of the table, off it, and over the second token of the lines."""
    attention = attention_maps(*both, "a dog", "ein Hund")
    script = """
        const said = [], point = (node, type) => {
            node.dispatchEvent(new MouseEvent(type));
            said.push(document.querySelector("#status").textContent, document.querySelectorAll("tr.chosen").length);
        };
        point(document.querySelectorAll("tbody tr")[2], "mouseenter");
        point(document.querySelectorAll("tbody tr")[2], "mouseleave");
        point(document.querySelectorAll("svg .from")[1], "mouseenter");
        document.title = JSON.stringify(said);
    """
    drawn = draw_in_browser(attention_page(attention, layer=1), tmp_path, script)
    over, one, off, none, other, another = json.loads(html.unescape(re.search("<title>(.*?)</title>", drawn)[1]))
    assert (one, none, another) == (1, 0, 1)
    for row, text in ((2, over), (1, other)):
        first = attention.source_tokens[attention.weights["cross"][0].mean(0)[row].argmax()]
        written = attention.written_tokens[row]
        assert f"to predict “{written}”, the decoder attends to “{first}” " in text
    assert off == "Point at a row to see what it attends to."


@pytest.mark.slow
def test_keys_and_buttons_change_what_the_page_shows(both, tmp_path):
    """Choose head 2, then go down from the first row and keep the second; the status says what it attends to."""
    attention = attention_maps(*both, "a dog", "ein Hund")
    script = """
        document.querySelectorAll("input[name=head]")[2].click();
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        document.querySelector("tbody th").focus();
        press("ArrowDown"); press("Enter"); document.activeElement.blur();
        document.title = document.querySelector("#status").textContent;
    """
    drawn = draw_in_browser(attention_page(attention, layer=1), tmp_path, script)
    weights = attention.weights["cross"][0, 1, 1]
    first = attention.source_tokens[weights.argmax()]
    read, written = attention.read_tokens[1], attention.written_tokens[1]
    said = f"<title>Having read “{read}”, to predict “{written}”, the decoder attends to “{first}” "
    assert said.replace("</s>", "&lt;/s&gt;") in drawn
    assert drawn.count('<tr class="chosen">') == 1
