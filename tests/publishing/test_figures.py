"""The paper's figures: numbers against the paper, files, the page, refusals."""

import html
import re
import struct
import sys
from pathlib import Path

import pytest
import torch

from hf_vaswani import modeling_vaswani
from support.models import noisy_translator
from training.cli import main
from training.inference.attention_maps import Attention
from training.publishing import figures
from training.publishing.figure_page import code_of
from training.publishing.figures import learning_rates, position_dot_products, smoothed_target, table_1
from training.publishing.head_figures import choose_heads, excess_weight


NAMES = ["sinusoids", "dot_products", "learning_rate", "label_smoothing", "cost"]


@pytest.fixture
def short(monkeypatch):
    """Attention measured in short sentences only."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures.figures_of_the_paper, "__defaults__", ((16, 32),))


@pytest.fixture
def only_one(monkeypatch):
    """One figure that needs no model."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "figures_of_the_paper", lambda: [figures.schedule_figure()])


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    for part in (noisy_translator(tokenizer, max_extra_tokens=3), tokenizer):
        part.save_pretrained(folder)
    return str(folder)


# Numbers


def test_the_dot_product_of_positions_depends_on_their_distance_alone():
    products = position_dot_products(40, 512)
    for distance in (0, 1, 7, 39):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, torch.full_like(diagonal, diagonal[0].item()), atol=1e-3, rtol=0)
    assert products.diagonal().tolist() == pytest.approx([256] * 40, abs=1e-3)  # 256 times sin² + cos²


def test_dot_products_of_a_narrow_model_are_those_by_hand():
    # The angles of the two pairs of features are the position and a hundredth of it: cos(2) + cos(0.02).
    assert position_dot_products(4, 4)[1, 3].item() == pytest.approx(-0.4161468 + 0.9998000, abs=1e-6)


@pytest.mark.parametrize(
    ("d_model", "warmup_steps", "peak"), [(512, 4000, 6.987712e-4), (1024, 4000, 4.941059e-4), (256, 1600, 1.5625e-3)]
)
def test_the_learning_rate_peaks_at_the_end_of_the_warmup(d_model, warmup_steps, peak):
    steps = [1, warmup_steps - 1, warmup_steps, warmup_steps + 1, 4 * warmup_steps]
    first, before, highest, after, later = learning_rates(d_model, warmup_steps, steps)
    assert highest == pytest.approx(peak, rel=1e-6)
    assert before < highest and after < highest
    assert first == pytest.approx(peak / warmup_steps) and later == pytest.approx(peak / 2)


@pytest.mark.parametrize(("vocab_size", "on_label", "elsewhere"), [(10, 0.91, 0.01), (1000, 0.9001, 0.0001)])
def test_the_smoothed_target_spreads_a_tenth_over_the_whole_vocabulary(vocab_size, on_label, elsewhere):
    target = smoothed_target(vocab_size, label=3, epsilon=0.1)
    expected = [elsewhere] * 3 + [on_label] + [elsewhere] * (vocab_size - 4)
    assert target.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_smoothed_loss_is_lowest_where_its_dot_is():
    picture = figures.smoothing_figure().picture
    dots = [tuple(line.get_xydata()[0]) for line in picture.axes[1].lines if line.get_marker() == "o"]
    assert [place for place, _ in dots] == pytest.approx([0.99, 0.91, 0.82])
    # Entropies of the targets: 0.91 and nine times 0.01; 0.82 and nine times 0.02.
    assert [lowest for _, lowest in dots[1:]] == pytest.approx([0.500288, 0.866895], abs=1e-4)


def test_operations_are_those_of_table_1():
    assert list(table_1(2, 512).values()) == [2_048, 524_288, 1_572_864, 65_536]
    attention, recurrent, *_ = table_1(512, 512).values()
    assert attention == recurrent


def test_attention_is_measured_with_and_without_a_window_on_one_thread(monkeypatch):
    calls, threads = [], torch.get_num_threads()

    def recorded(module, states, mask):
        calls.append((module.config.attention_window, tuple(states.shape), mask is None, torch.get_num_threads()))

    monkeypatch.setattr(figures.VaswaniAttention, "forward", recorded)
    assert all(figures.attention_seconds(512, window) >= 0 for window in (None, 64))
    assert set(calls) == {(None, (1, 512, 512), True, 1), (64, (1, 512, 512), False, 1)}
    assert torch.get_num_threads() == threads


# Heads


def test_each_task_gets_the_head_that_does_it():
    length, words = 8, [*"abcdefg", "</s>"]
    eye, flat = torch.eye(length), torch.full((length, length), 1 / length)
    previous, following = eye.roll(-1, 1), eye.roll(1, 1)
    far, end = eye.roll(-4, 0), torch.zeros(length, length)
    end[:, -2] = 1  # all attend to one word, most of them from afar
    weights = {
        "encoder": torch.stack([torch.stack([flat, previous, end]), torch.stack([far, flat, following])]),
        "decoder": torch.stack([torch.stack([flat, previous, flat]), torch.stack([flat, flat, far])]).tril(),
        "cross": torch.stack([torch.stack([flat, end, flat]), torch.stack([flat, eye, flat])]),
    }
    heads = choose_heads(Attention("", "", words, ["<s>", *words[:-1]], words, weights), ["<s>", "</s>"])
    assert [(head.kind, head.task, head.layer, head.number) for head in heads] == [
        ("encoder", "previous token", 1, 2),
        ("encoder", "next token", 2, 3),
        ("encoder", "distant tokens", 2, 1),
        ("decoder", "previous token", 1, 2),
        ("decoder", "distant tokens", 2, 3),
        ("cross", "alignment", 2, 2),
    ]
    assert heads[0].score == heads[1].score == heads[5].score == 1


def test_a_token_that_all_others_attend_to_is_not_distant():
    distance = torch.arange(8)[:, None] - torch.arange(8)
    sink, far = torch.zeros(2, 1, 8, 8)
    sink[..., 6] = 1
    far[0] = torch.eye(8).roll(-4, 0)  # 1 on a token four away, which receives 1/8 on average
    assert excess_weight(torch.stack((sink, far)), distance.abs() >= 4).tolist() == [[0], [0.875]]


def test_tasks_that_a_short_sentence_has_no_room_for_are_left_out():
    weights = {
        "encoder": torch.ones(1, 1, 2, 2) / 2,
        "decoder": torch.ones(1, 1, 1, 1),
        "cross": torch.ones(1, 1, 1, 2),
    }
    heads = choose_heads(Attention("", "", ["a", "</s>"], ["<s>"], ["</s>"], weights), ["<s>", "</s>"])
    assert [(head.kind, head.task) for head in heads] == [
        ("encoder", "previous token"),
        ("encoder", "next token"),
    ]


# The command


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG file in pixels."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_figures_and_a_page_that_names_their_code(short, checkpoint, tmp_path, capsys):
    output = tmp_path / "new" / "figures"
    words = ["figures", "--model", checkpoint, "--text", "a dog <b> & $x$", "--output", str(output)]
    assert main(words) == 0
    names = [*NAMES, "heads"]
    files = [output / "index.html", *(output / f"{name}.png" for name in names)]
    assert capsys.readouterr().out.splitlines() == list(map(str, files))
    assert sorted(output.iterdir()) == sorted(files)
    assert all(800 < width < 2000 and 400 < height < 3000 for width, height in map(size_of, files[1:]))

    page = files[0].read_text(encoding="utf-8")
    assert re.findall('<section id="(.*?)">', page) == names
    assert re.findall(r"Section (\d[\d.]*)", page) == ["3.5", "3.5", "5.3", "5.4", "4", "3.2"]
    assert page.count("data:image/png;base64,") == len(names) and "http" not in page.split("<section")[0]
    assert "“a dog &lt;b&gt; &amp; $x$”" in page and "<b>" not in page
    code = html.unescape("".join(re.findall("<summary>(.*?)</summary>", page)))
    assert "hf_vaswani.modeling_vaswani.sinusoids (hf_vaswani/modeling_vaswani.py, lines" in code
    assert ".PaperSchedule (training/trainer/trainer.py, lines" in code


def test_line_numbers_are_those_of_the_file():
    code = code_of(modeling_vaswani.sinusoids)
    lines = Path(modeling_vaswani.__file__).read_text(encoding="utf-8").splitlines()
    assert lines[code.first - 1].startswith("def sinusoids(") and lines[code.last - 1].startswith(
        "    return torch.stack("
    )
    assert code.lines == lines[code.first - 1 : code.last]


def test_without_a_model_the_heads_are_left_out(only_one, tmp_path):
    (tmp_path / "empty").mkdir()
    assert main(["figures", "--output", str(tmp_path / "empty")]) == 0
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"index.html", "learning_rate.png"}


def test_a_folder_with_files_is_refused_before_anything_is_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "figures_of_the_paper", None)
    (tmp_path / "mine").write_text("mine")
    for output, fact in ((tmp_path, "empty folder"), (tmp_path / "mine", "not a folder")):
        assert main(["figures", "--output", str(output)]) == 1
        assert fact in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_error_leaves_no_folder(only_one, checkpoint, tmp_path, capsys):
    for text, fact in (("", "empty"), ("dog " * 200, "at most 100")):
        assert main(["figures", "--model", checkpoint, "--text", text, "--output", str(tmp_path / "out")]) == 1
        assert fact in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_text_needs_a_model(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["figures", "--text", "a dog", "--output", str(tmp_path / "out")])
    assert exit.value.code == 2 and "--model" in capsys.readouterr().err


def test_without_matplotlib_the_message_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["figures", "--output", str(tmp_path / "out")]) == 1
    assert "hf-vaswani[plots]" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
