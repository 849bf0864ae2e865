import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from support.models import batch_of, strong_model, tiny_config, tiny_model
from training.benchmarks import decoding, latency, limits
from training.benchmarks.enlarge import grow, grow_tokenizer
from training.benchmarks.peers import to_marian


LEARNED = {"position_embedding": "learned", "max_position_embeddings": 64}
ONE_TYPE = ["ours-float32", "marian-float32", "engine-float32", "ctranslate2-float32", "ctranslate2-bfloat16"]


@pytest.mark.parametrize(
    "overrides",
    [{}, LEARNED, {"attention_bias": True}],
)
@torch.no_grad()
def test_marian_with_our_weights_is_the_same_function(overrides):
    model = strong_model(40, d_k=8, d_v=8, **overrides)
    marian = to_marian(model)
    inputs = {**batch_of([7, 4]), "decoder_input_ids": torch.randint(3, 40, (2, 5))}
    torch.testing.assert_close(marian(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_marian_never_generates_padding_where_a_converted_model_does_not():
    model = strong_model(40, d_k=8, d_v=8, output_bias=True)
    assert to_marian(model).generation_config.bad_words_ids is None
    with torch.no_grad():
        model.lm_head.bias[model.config.pad_token_id] = -100  # as `convert` writes it
    settings = to_marian(model).generation_config
    assert settings.bad_words_ids == [[model.config.pad_token_id]]
    assert settings.renormalize_logits is True


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "output_bias": True, **LEARNED}])
@torch.no_grad()
def test_a_grown_model_is_the_same_function(overrides):
    model = strong_model(40, d_k=8, d_v=8, **overrides)
    large = grow(model)
    base = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "d_k": 64, "encoder_layers": 6, "decoder_layers": 6}
    assert {name: getattr(large.config, name) for name in base} == base
    assert large.config.vocab_size == 40
    inputs = {**batch_of([7, 4]), "decoder_input_ids": torch.randint(3, 40, (2, 5))}
    expected = model.double()(**inputs).logits  # in 64 bits: such weights magnify what is rounded
    torch.testing.assert_close(large.double()(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_grown_to_the_shape_of_opus_mt_is_the_same_function_on_old_tokens():
    model = strong_model(40, d_k=8, d_v=8)
    large = grow(model, "opus-mt", vocab_size=300)
    shape = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 6}
    shape |= {"activation_function": "swish", "attention_bias": True, "output_bias": True, "vocab_size": 300}
    assert {name: getattr(large.config, name) for name in shape} == shape
    inputs = {**batch_of([7, 4]), "decoder_input_ids": torch.randint(3, 40, (2, 5))}
    expected, logits = model.double()(**inputs).logits, large.double()(**inputs).logits
    # swish(s x) / s differs from max(0, x) by 0.28 / s; the largest logit is about 20.
    torch.testing.assert_close(logits[..., :40], expected, rtol=1e-3, atol=1e-2)
    assert logits[..., 40:].max() < expected.min() - 20


def test_a_grown_vocabulary_splits_texts_as_before(tokenizer):
    grown = grow_tokenizer(tokenizer, len(tokenizer) + 50)
    assert len(grown) == len(tokenizer) + 50
    text = "three dogs sleep <unused 420> ♥"
    assert grown(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert grown.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "small, options, message",
    [
        ({"num_heads": 3}, {}, "num_heads: a model with 3 cannot grow to 8"),
        ({"encoder_layers": 7}, {}, "encoder_layers: a model with 7 cannot grow to 6"),
        ({}, {"vocab_size": 39}, "vocab_size: a model with 40 cannot grow to 39"),
        ({"activation_function": "gelu"}, {"shape": "opus-mt"}, "activation_function: .* gelu cannot grow to swish"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings: "),
    ],
)
def test_a_model_that_cannot_grow_is_refused(small, options, message):
    with pytest.raises(ValueError, match=message):
        grow(tiny_model(**small), **options)


def test_a_sample_has_runs_of_similar_length():
    lengths = [len(sentence) for sentence in decoding.sample([[0] * n for n in range(320, 0, -1)], 64)]
    assert lengths == [*range(65, 97), *range(225, 257)]  # the third and the eighth of ten runs
    assert len(decoding.sample([[0]] * 5, 128)) == 5


class FixedRates:
    """A system whose batch sizes take as many milliseconds as their names say. It counts calls."""

    def __init__(self, groups: list[list[str]], clock: list[float]):
        self.calls: list[str] = []

        def search(name):
            def translate(sentences):
                self.calls.append(name)
                clock[0] += float(name)

            return translate

        self.batched = [{name: search(name) for name in group} for group in groups]


def test_batch_sizes_are_tried_until_the_rate_falls(monkeypatch):
    clock = [0.0]
    system = FixedRates([["5", "3", "4", "1"], ["6", "7", "2"]], clock)
    monkeypatch.setattr(decoding, "load", lambda *args: system)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(decoding.torch, "set_num_threads", lambda count: None)
    assert decoding.choose("ours-float32", None, 1, [[1]]) == "3"
    assert system.calls == ["5", "5", "3", "3", "4", "4", "6", "6", "7", "7"]  # once to warm up, and once measured


def test_rates_are_medians_with_their_range():
    figures = decoding.rates([2.0, 4.0, 5.0], sentences=100, tokens=1000)
    assert figures == {"sentences_per_second": 25.0, "range": [20.0, 50.0], "tokens_per_second": 250}


def test_ratios_compare_the_same_types():
    rates = {"ours-float32": 30, "ours-int8": 60, "marian-float32": 10, "marian-bfloat16": 12}
    rates |= {"engine-float32": 44, "ctranslate2-float32": 40, "ctranslate2-int8": 80}
    assert decoding.ratios({name: {"sentences_per_second": rate} for name, rate in rates.items()}) == {
        "ratio_vs_marian": {"float32": 3.0},
        "ratio_vs_ctranslate2": {"float32": 0.75, "int8": 0.75},
        "engine_vs_ctranslate2": {"float32": 1.1},
        "best_vs_marian_float32": 6.0,
        "best_vs_best_ctranslate2": 0.75,
    }
    assert decoding.ratios({"ours-int8": {"sentences_per_second": 1}}) == {
        "ratio_vs_marian": {},
        "ratio_vs_ctranslate2": {},
        "engine_vs_ctranslate2": {},
    }


def test_latencies_are_percentiles_of_sentences_and_medians_of_turns():
    seconds = [i / 1000 for i in range(1, 102)]  # 1 to 101 ms: the median is 51, the 95th percentile 96
    turns = [(seconds, 202), ([2 * s for s in seconds], 202), ([4 * s for s in seconds], 202)]
    # A turn takes 5.151 s, or 2 and 4 times that, and 202 steps of 51 MB at 2 GB/s take the same 5.151 s.
    assert latency.summary(turns, step_bytes=51_000_000, rate=2e9) == {
        "p50": 102.0,
        "p95": 192.0,
        "p50_range": [51.0, 204.0],
        "share_of_memory_limit": 0.5,
    }


def test_packed_weights_have_rows_of_their_own_and_are_compared_with_marian():
    rows = latency.latency_rows(["ours-int8", "marian-float32"])
    assert rows == ["ours-int8", "ours-int8 fixed_weights", "marian-float32"]
    ours, marian = ({"greedy": {"p50": x}, "beam4": {"p50": y}} for x, y in ((10, 20), (30, 50)))
    figures = {"ours-float32": marian, "ours-float32 fixed_weights": ours, "marian-float32": marian}
    assert latency.latency_ratios(figures) == {"float32": {"greedy": 3.0, "beam4": 2.5}}


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_a_step_reads_the_weights_of_the_decoder_but_not_the_projections_of_the_source(dtype, size):
    model = tiny_model()
    names = {n: w.numel() for n, w in model.model.decoder.named_parameters() if w.dim() == 2 and "embed" not in n}
    read = sum(
        count for name, count in names.items() if "encoder_attn.k_" not in name and "encoder_attn.v_" not in name
    )
    expected = size * (read + model.model.shared.weight.numel())
    assert limits.decoder_bytes(model.config, dtype) == expected
    assert limits.decoder_bytes(tiny_config(vocab_size=41), dtype) == expected + size * 16


def test_products_with_weights_are_counted_by_shape():
    def event(key, count, *shapes):
        return SimpleNamespace(key=key, count=count, input_shapes=list(shapes))

    events = [
        event("aten::mm", 2, [6, 4], [4, 8]),
        event("aten::addmm", 3, [8], [6, 4], [4, 8], [], []),
        event("mkldnn::_linear_pointwise", 5, [2, 3, 4], [8, 4], [], [], [], []),
        event("aten::_int_mm", 7, [1, 4], [4, 8]),
        event("aten::bmm", 11, [2, 3, 4], [2, 4, 3]),
        event("aten::add", 13, [6, 4], [6, 4]),
    ]
    assert limits.linear_products(events) == Counter({(6, 4, 8): 10, (1, 4, 8): 7})


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_profiler_sees_every_product_with_weights(dtype):
    expected = Counter({(17, 32, 64): 2, (17, 64, 32): 2})
    for make in limits.products_of(dtype):
        layers = [make(inner, outer) for (_, inner, outer), count in expected.items() for _ in range(count)]
        inputs = [torch.ones(17, inner, dtype=getattr(torch, dtype)) for inner in (32, 32, 64, 64)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            for layer, rows in zip(layers, inputs):
                layer(rows)
        assert limits.linear_products(profile.key_averages(group_by_input_shape=True)) == expected
    assert limits.seconds_of(expected, dtype, step_bytes=10**5) > 0


def checkpoint(tokenizer, folder, **overrides):
    """A checkpoint with noise for weights, and two sentence pairs beside it, as arguments of the benchmark."""
    model = strong_model(len(tokenizer), d_k=8, d_v=8, output_bias=True, **overrides)
    with torch.no_grad():
        model.lm_head.bias[model.config.eos_token_id] = 8  # ends sentences soon
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "source").write_text("three dogs sleep\na cat sees the horse\n")
    (folder / "target").write_text("drei Hunde schlafen\neine Katze sieht das Pferd\n")
    files = {"--model": "model", "--sources": "source", "--references": "target"}
    return [word for option, name in files.items() for word in (option, str(folder / name))]


def check_figures(output: str, systems: set[str]) -> dict:
    figures = json.loads(output.strip().splitlines()[-1])
    assert set(figures["results"]) | set(figures["skipped"]) == systems
    rates = {system: result["sentences_per_second"] for system, result in figures["results"].items()}
    ours, marian = rates["ours-float32"], rates["marian-float32"]
    assert figures["ratio_vs_marian"] == {"float32": round(ours / marian, 2)}
    assert all(result["peak_memory_mb"] > 0 and result["tokens"] >= 2 for result in figures["results"].values())
    assert set(figures["latency_ms"]) == set(latency.latency_rows(list(figures["results"])))
    for searches in figures["latency_ms"].values():
        assert set(searches) == {"greedy", "beam4"}
        assert all(0 < each["p50"] <= each["p95"] for each in searches.values())
    assert all(share > 0 for share in figures["share_of_matrix_product_limit"].values())
    assert figures["memory_gb_per_second"] > 0
    return figures


def test_the_benchmark_ends_with_its_figures(tokenizer, tmp_path, capfd, monkeypatch):
    """In this process: starting others takes longer than all else."""
    for module in (decoding, latency, limits):
        monkeypatch.setattr(module.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(decoding, "in_process", lambda function, *args: function(*args))
    monkeypatch.setattr(limits, "READ", 2**22)
    options = [*checkpoint(tokenizer, tmp_path), "--quick", "--single-sentences", "1", "--threads", "1"]
    decoding.main([*options, "--systems", "ours-int8", "ours-float32", "marian-float32"])
    out = capfd.readouterr().out
    figures = check_figures(out, {"ours-int8", "ours-float32", "marian-float32"})
    assert set(figures["share_of_matrix_product_limit"]) == {"int8", "float32"}
    first = next(line for line in out.splitlines() if "sentences/s" in line)
    assert "ours-int8: " in first
    assert "ours-float32" not in out[: out.index(first)]  # which has not begun


@pytest.mark.slow
def test_the_benchmark_in_processes_of_its_own(tokenizer, tmp_path, capfd):
    pytest.importorskip("ctranslate2")
    vocabulary = str(len(tokenizer) + 10)
    options = [*checkpoint(tokenizer, tmp_path), "--repeats", "2", "--single-sentences", "1", "--threads", "1"]
    decoding.main([*options, "--shape", "opus-mt", "--vocab-size", vocabulary, "--systems", *ONE_TYPE])
    out = capfd.readouterr().out
    figures = check_figures(out, set(ONE_TYPE))
    assert set(figures["skipped"]) <= {"ctranslate2-bfloat16"}  # few processors have it
    assert set(figures["engine_vs_ctranslate2"]) == set(figures["ratio_vs_ctranslate2"]) == {"float32"}
    turns = [line.split("] ")[1].split(":")[0] for line in out.splitlines() if " sentences/s (turn " in line]
    assert turns == [*figures["results"]] * 2  # A B C A B C
    # CTranslate2's own client never ends at the first token.
    tokens = {figures["results"][f"{name}-float32"]["tokens"] for name in ("ours", "marian", "engine")}
    assert len(tokens) == 1


@pytest.mark.parametrize(
    "source, target, overrides, message",
    [
        ("one\ntwo\n", "eins\n", {}, "found 1 and 2"),
        ("", "", {}, "found 0 and 0"),
        (
            "one\n" + "dogs " * 30 + "\n",
            "eins\nzwei\n",
            LEARNED,
            "line 2: .* 64 positions",
        ),
    ],
)
def test_unsuitable_files_are_refused(tokenizer, tmp_path, source, target, overrides, message):
    options = checkpoint(tokenizer, tmp_path, **overrides)
    (tmp_path / "source").write_text(source)
    (tmp_path / "target").write_text(target)
    with pytest.raises(ValueError, match=message):
        decoding.main(options)


def test_foreign_models_and_missing_files_are_refused(tokenizer, tmp_path, capfd):
    options = checkpoint(tokenizer, tmp_path)
    with pytest.raises(SystemExit):
        decoding.main([*options, "--sources", str(tmp_path / "none")])
    assert "none: no such file" in capfd.readouterr().err
    to_marian(strong_model(len(tokenizer), d_k=8, d_v=8)).save_pretrained(tmp_path / "foreign")
    tokenizer.save_pretrained(tmp_path / "foreign")
    with pytest.raises(ValueError, match="expected a Vaswani model, found MarianMTModel"):
        decoding.main([*options, "--model", str(tmp_path / "foreign")])
