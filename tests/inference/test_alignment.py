import copy
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers
from transformers import MarianConfig, MarianMTModel

import training.inference.alignment
from support.models import noisy_translator, tiny_model
from training.cli import main
from training.data.tokenizer import train_tokenizer
from training.inference.alignment import align, attention_of, best_words, erasure, words_of


WORDS = ["red", "green", "blue", "three", "cat", "dog", "horse", "sun", "Schnürsenkel", "日本", "🙂"]
ROTATED = [(0, 1), (1, 2), (2, 0)]  # links of three words that come in the order 2, 0, 1


@pytest.fixture(scope="module")
def texts(pairs):
    return [source for source, _ in pairs[:12]], [target for _, target in pairs[:12]]


@pytest.fixture(scope="module")
def copying():
    """A model made by hand whose first decoder layer looks for the token that was just read, and its tokenizer, with
    words of one and of several tokens."""
    tokenizer = train_tokenizer(WORDS[:8] * 2, vocab_size=320, show_progress=False)
    model = tiny_model(vocab_size=len(tokenizer), d_model=128, d_k=128, d_v=128, num_heads=1, decoder_layers=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "fc2" in name or "q_proj" in name:
                weight.zero_()  # every sub-layer hands on its input; attention is uniform
        model.model.shared.weight.normal_()
        attention = model.model.decoder.layers[0].encoder_attn
        attention.q_proj.weight.copy_(2 * torch.eye(128))
        attention.k_proj.weight.copy_(2 * torch.eye(128))
    return model, tokenizer


@pytest.fixture(scope="module")
def shuffled():
    """Sources, the same words in another order, with more than one space, and the links between them."""
    rng, sources, translations, gold = random.Random(0), [], [], []
    for length in (1, 2, 3, 5, 7, 11, 7, 3):
        words, order = rng.sample(WORDS, length), rng.sample(range(length), length)
        sources.append("  ".join(words))
        translations.append(" " + "   ".join(words[place] for place in order) + " ")
        gold.append(sorted((place, index) for index, place in enumerate(order)))
    return sources, translations, gold


def test_a_token_is_part_of_the_word_whose_characters_it_stands_for():
    tokenizer = train_tokenizer([""], vocab_size=259, show_progress=False)  # a token a byte
    ids, words = words_of(tokenizer, "a  é日")
    space = tokenizer.convert_tokens_to_ids("Ġ")
    assert [i for i, token in enumerate(ids) if token == space] == [0, 2, 3]
    assert words == [0, 0, None, None, 1, 1, 1, 1, 1, None]


def test_a_token_that_begins_with_a_space_is_part_of_the_word_behind_it(copying):
    _, tokenizer = copying
    assert tokenizer.convert_ids_to_tokens(tokenizer("red cat ")["input_ids"]) == ["Ġred", "Ġcat", "Ġ", "</s>"]
    assert words_of(tokenizer, "red cat ")[1] == [0, 1, None, None]


def test_words_are_those_of_split(tokenizer):
    text = "\tDer König,  日本\u3000sieht\u00a0die 'Äpfel' …\u2003🙂🙂 <s> "
    ids, words = words_of(tokenizer, text)
    for index, word in enumerate(text.split()):
        tokens = [token for token, w in zip(ids, words) if w == index]
        assert tokenizer.decode(tokens).strip() == word
    assert max(w for w in words if w is not None) == len(text.split()) - 1


def test_a_word_is_linked_where_most_of_its_attention_goes():
    """Source: word 0 is two tokens, then white space, word 1, the end. Target: word 0, white space, two of word 1."""
    attention = torch.tensor(
        [
            [0.2, 0.2, 0.1, 0.3, 0.2],  # 0.4 to word 0, though the one best token is in word 1
            [0.0, 0.0, 0.0, 1.0, 0.0],
            [0.5, 0.1, 0.0, 0.4, 0.0],  # together 0.6 + 0.1 to word 0
            [0.0, 0.1, 0.0, 0.6, 0.3],  # and 0.4 + 0.6 to word 1
        ]
    )
    found = best_words(torch.stack([attention, attention[:, [3, 1, 2, 0, 4]]]), [0, 0, None, 1, None], [0, None, 1, 1])
    # The second time 0.5 of the first word to word 0; of the second, 0.5 + 0.7 to word 0, 0.5 to word 1.
    assert found.tolist() == [[0, 1], [0, 0]]


def test_the_end_token_and_white_space_are_no_words():
    assert best_words(torch.tensor([[0.6, 0.1, 0.3]]), [None, 0, None], [0]).tolist() == [0]


def test_of_equals_the_first_is_linked():
    assert best_words(torch.tensor([[0.2, 0.4, 0.4]]), [0, 1, 2], [0]).tolist() == [1]


@pytest.mark.parametrize("batch_tokens", [1, 30, 4096])
def test_words_that_look_for_themselves_are_found(copying, shuffled, batch_tokens):
    sources, translations, gold = shuffled
    assert align(*copying, sources, translations, layer=1, method="shift", batch_tokens=batch_tokens) == gold


def test_naive_takes_the_attention_before_the_word_is_read(copying):
    model, tokenizer = copying
    [links] = align(model, tokenizer, ["red green blue"], ["blue red green"], layer=1, method="naive")
    where = {target: source for source, target in links}
    assert (where[1], where[2]) == (2, 0)  # of the word before


@torch.no_grad()
def test_the_attention_is_the_models_own(tokenizer, texts):
    model = noisy_translator(tokenizer)
    for source, target in zip(*texts):
        inputs, labels = tokenizer(source, return_tensors="pt"), tokenizer(target, return_tensors="pt")["input_ids"]
        model.set_attn_implementation("eager")
        expected = model(**inputs, labels=labels, output_attentions=True).cross_attentions
        model.set_attn_implementation("sdpa")
        for layer in (1, 2):
            for method, rows in (("shift", slice(1, None)), ("naive", slice(0, -1))):
                heads = expected[layer - 1][0]
                for head, weights in (("mean", heads.mean(0)), (1, heads[0]), (2, heads[1])):
                    found = attention_of(model, tokenizer, source, target, layer, head, method)
                    assert found.shape == (labels.shape[1] - 1, inputs["input_ids"].shape[1])
                    torch.testing.assert_close(found, weights[rows])
                    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)))


@pytest.mark.parametrize("method", ["shift", "naive", "attention", "erasure"])
def test_batches_and_padding_change_nothing(tokenizer, texts, method):
    model = noisy_translator(tokenizer)
    layer, head = (2, 1) if method in ("shift", "naive") else (None, None)
    expected = align(model, tokenizer, *texts, layer, head, method, batch_tokens=1)
    for target, links in zip(texts[1], expected):
        assert sorted(word for _, word in links) == list(range(len(target.split())))
    assert len({source for links in expected for source, _ in links}) > 3
    for batch_tokens in (60, 4096):
        assert align(model, tokenizer, *texts, layer, head, method, batch_tokens) == expected
    if layer:
        alone = [align(model, tokenizer, [s], [t], layer, head, method)[0] for s, t in zip(*texts)]
        assert alone == expected


def test_the_models_attention_implementation_comes_back(tokenizer, texts):
    model = noisy_translator(tokenizer)
    align(model, tokenizer, *texts)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="layer"):
        align(model, tokenizer, *texts, layer=3)
    assert model.config._attn_implementation == "sdpa"


def plant(monkeypatch, *layers: list[list[int]]) -> None:
    """Attention by hand, for every pair: of every layer and head, the source token that each position looks at."""
    looks_at = torch.tensor(layers)
    cross = torch.nn.functional.one_hot(
        looks_at, looks_at.shape[-1]
    ).float()  # as many words, and the end, on either side

    def planted(model, tokenizer, ids, maps, budget):
        return ((i, training.inference.alignment._choose(tuple(cross[:, None]), maps)[0]) for i in range(len(ids)))

    monkeypatch.setattr(training.inference.alignment, "_attentions", planted)


def plant_erasure(monkeypatch, words: list[int]) -> None:
    """Source words of the target words of every pair, by erasure."""
    found = torch.tensor(words)
    monkeypatch.setattr(
        training.inference.alignment,
        "erasure_words",
        lambda model, tokenizer, pairs, budget: ((index, found) for index in range(len(pairs))),
    )


@pytest.fixture
def planted(monkeypatch):
    """Attention over three words: head 2 of layer 3 is right for what was read, head 1 of layer 1 for what is to be
    written. The mean of two heads looks at the earlier word of both."""
    constant = [[place] * 4 for place in (0, 1)]
    plant_erasure(monkeypatch, [2, 0, 1])
    plant(monkeypatch, [[2, 0, 1, 1], constant[0]], [constant[1], constant[1]], [constant[0], [0, 2, 0, 1]])
    model = tiny_model(decoder_layers=3)
    return model, train_tokenizer(["a b c"], vocab_size=262, show_progress=False), ["a b c"], ["c a b"]


@pytest.mark.parametrize(
    ("method", "chosen"), [("attention", "naive, layer 1, head 1"), ("shift", "shift, layer 3, head 2")]
)
def test_the_best_map_is_that_which_agrees_with_erasure(planted, caplog, method, chosen):
    caplog.set_level(logging.INFO, "training.inference.alignment")
    assert align(*planted, method=method) == [ROTATED]
    [record] = caplog.records  # and no warning
    assert chosen in record.getMessage()
    assert "100.0%" in record.getMessage() and "1 pairs" in record.getMessage()


def test_two_maps_that_agree_on_the_diagonal_are_not_the_best(monkeypatch):
    """Layer 1 before a word is read and layer 2 after it both follow the order of the words. Layer 3 is right."""
    plant(monkeypatch, [[0, 1, 2, 3, 3]], [[0, 0, 1, 2, 3]], [[1, 2, 0, 3, 3]])
    plant_erasure(monkeypatch, [1, 2, 0, 3])
    tokenizer = train_tokenizer(["a b c d"], vocab_size=263, show_progress=False)
    assert len(tokenizer("a b c d")["input_ids"]) == 5
    model = tiny_model(decoder_layers=3, num_heads=1)
    [links] = align(model, tokenizer, ["a b c d"], ["b c a d"])
    assert links == [(0, 2), (1, 0), (2, 1), (3, 3)]


def test_attention_that_disagrees_with_erasure_is_a_warning(planted, monkeypatch, caplog):
    plant_erasure(monkeypatch, [2, 2, 2])  # one of three words as in the best map
    assert len(align(*planted)[0]) == 3
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "erasure" in warning.getMessage()
    caplog.clear()
    align(*planted, method="naive", layer=1)  # chosen by hand
    assert not caplog.records


def test_a_layer_and_a_head_can_be_chosen(planted):
    assert align(*planted, layer=3, head=2) == align(*planted, layer=1, head=1) == [ROTATED]
    assert align(*planted, layer=2) == [[(1, 0), (1, 1), (1, 2)]]
    assert align(*planted, layer=3) == align(*planted, layer=3, head="mean") == [[(0, 0), (0, 1), (0, 2)]]


def test_maps_are_chosen_by_the_first_pairs(planted, monkeypatch):
    model, tokenizer, sources, translations = planted
    asked = []
    monkeypatch.setattr(
        training.inference.alignment,
        "best_map",
        lambda model, tokenizer, pairs, *_: asked.append(len(pairs)) or (("naive", 1, 1), 1.0),
    )
    assert align(model, tokenizer, ["", *sources * 150], ["a", *translations * 150])[1:] == [ROTATED] * 150
    assert asked == [100]


class TableModel:
    """A model whose logits are the sums of a table's rows, of the source tokens that the decoder sees."""

    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor):
        self.table = table

    def get_encoder(self):
        return lambda input_ids, attention_mask: SimpleNamespace(last_hidden_state=self.table[input_ids])

    def prepare_decoder_input_ids_from_labels(self, labels):
        return labels

    def __call__(self, encoder_outputs, attention_mask, decoder_input_ids, use_cache):
        logits = (encoder_outputs.last_hidden_state * attention_mask[..., None]).sum(1, keepdim=True)
        return SimpleNamespace(logits=logits.expand(-1, decoder_input_ids.shape[1], -1))


@pytest.mark.parametrize("budget", [1, 8, 4096])
def test_a_word_is_linked_to_the_word_without_which_it_is_least_likely(copying, budget):
    """Logits of the tokens 0, 1 and 2: token 3 speaks for 0, tokens 4 and 5 for 1, token 6, outside words, for 2."""
    table = torch.zeros(7, 3)
    table[3, 0], table[4, 1], table[5, 1], table[6, 2] = 2.0, 1.0, 1.0, 1.5
    source, target = ([3, 4, 6, 5], [0, 1, None, 1]), ([1, 0, 2], [0, 1, None])
    shorter = ([5], [0]), ([1], [0])
    found = dict(erasure(TableModel(table), copying[1], [shorter, (source, target)], budget))
    assert found[0].shape == (1, 1)
    falls = found[1]
    # With all: logits 2, 2, 1.5. Without word 0: 0, 2, 1.5. Without word 1, which is two tokens: 2, 0, 1.5.
    everything, without = torch.tensor([2.0, 2.0, 1.5]), [torch.tensor([0, 2.0, 1.5]), torch.tensor([2.0, 0, 1.5])]
    expected = [everything.log_softmax(-1) - logits.log_softmax(-1) for logits in without]
    torch.testing.assert_close(falls, torch.stack(expected, dim=1)[[1, 0, 2]])
    assert best_words(falls, [0, 1], target[1]).tolist() == [1, 0]


@torch.no_grad()
def test_erasure_is_the_cross_attention_without_the_word(tokenizer, texts):
    """The same as cutting the states of the word's tokens out of the encoder's output."""
    model = noisy_translator(tokenizer)
    for source_text, target_text in list(zip(*texts))[:3]:
        source, target = words_of(tokenizer, source_text), words_of(tokenizer, target_text)
        labels = torch.tensor([target[0]])
        states = model.get_encoder()(input_ids=torch.tensor([source[0]])).last_hidden_state

        def log_probabilities(kept, states=states, labels=labels):
            logits = model(encoder_outputs=(states[:, kept],), labels=labels).logits
            return logits.log_softmax(-1)[0].gather(-1, labels[0, :, None])[:, 0]

        everything = log_probabilities(list(range(len(source[0]))))
        [(_, falls)] = erasure(model, tokenizer, [(source, target)], 4096)
        assert falls.shape == (len(target[0]), len(source_text.split()))
        for word, fall in enumerate(falls.T):
            kept = [index for index, other in enumerate(source[1]) if other != word]
            torch.testing.assert_close(fall, everything - log_probabilities(kept), atol=1e-4, rtol=1e-4)


def test_a_pair_with_no_words_on_a_side_has_no_links(copying):
    for options in ({"layer": 1}, {}, {"method": "erasure"}):
        found = align(*copying, ["", "red", " ", "red"], ["", "", "red", "red"], **options)
        assert found == [[], [], [], [(0, 0)]]
        assert align(*copying, [""], ["red"], **options) == [[]]
        assert align(*copying, [], [], **options) == []


def test_a_word_that_the_tokenizer_drops_has_no_link(copying):
    model, tokenizer = copying
    tokenizer = copy.deepcopy(tokenizer)
    steps = [normalizers.Replace("*", ""), tokenizer.backend_tokenizer.normalizer]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    assert align(model, tokenizer, ["red cat"], ["cat * red"], layer=1, method="shift") == [[(0, 2), (1, 0)]]
    assert align(model, tokenizer, ["red cat", "*"], ["*", "cat"], layer=1) == [[], []]
    [links] = align(model, tokenizer, ["* red * cat"], ["cat * red"], method="erasure")
    assert [target for _, target in links] == [0, 2]
    assert {source for source, _ in links} <= {1, 3}


@torch.no_grad()
def test_a_model_of_another_architecture_is_aligned_too(tokenizer, texts):
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
    config = MarianConfig(vocab_size=len(tokenizer), d_model=16, init_std=0.5, **sizes, **heads, **ends)
    links = align(MarianMTModel(config).eval(), tokenizer, *texts)
    assert [len(pair) for pair in links] == [len(target.split()) for target in texts[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 4}, "layer must be from 1 to 3, got 4"),
        ({"layer": 0}, "layer must be from 1 to 3, got 0"),
        ({"layer": 1, "head": 2}, "head must be from 1 to 1, got 2"),
        ({"layer": 1, "head": "all"}, "head must be a number or"),
        ({"head": 1}, "head 1 also needs a layer"),
        ({"method": "both"}, "method must be one of attention, shift, naive, erasure, got 'both'"),
        ({"method": "erasure", "layer": 1}, "layer 1"),
    ],
)
def test_wrong_options_are_refused(copying, options, message):
    with pytest.raises(ValueError, match=message):
        align(*copying, ["red"], ["red"], **options)


def test_wrong_input_is_refused(copying, monkeypatch):
    model, tokenizer = copying
    with pytest.raises(ValueError, match="got 2 and 1"):
        align(model, tokenizer, ["red", "cat"], ["red"])
    with pytest.raises(ValueError, match="method must be one of shift, naive, got 'erasure'"):
        attention_of(model, tokenizer, "red", "red", 1, method="erasure")
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="no character offsets"):
        align(model, tokenizer, ["red"], ["red"])


def test_the_command_prints_a_line_a_pair(copying, shuffled, tmp_path, capsys):
    for part in copying:
        part.save_pretrained(tmp_path / "model")
    sources, translations, gold = shuffled
    (tmp_path / "en").write_text("\n".join([*sources, ""]) + "\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join([*translations, "cat"]) + "\n", encoding="utf-8")
    words = ["align", "--model", str(tmp_path / "model"), "--sources", str(tmp_path / "en")]
    words += ["--translations", str(tmp_path / "de")]
    assert main([*words, "--method", "shift", "--layer", "1", "--head", "1", "--batch-tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(" ".join(f"{s}-{t}" for s, t in links) for links in gold), ""]
    assert main(words) == 0
    assert "in 8 pairs" in capsys.readouterr().err
    (tmp_path / "gold").write_text("\n".join("0-0" for _ in sources) + "\n\n")
    by_attention = [*words, "--method", "shift", "--layer", "1"]
    assert main([*by_attention, "--references", str(tmp_path / "gold")]) == 0
    number, found = sum(map(len, gold)), sum((0, 0) in links for links in gold)
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"precision {found / number:.3f}, recall {found / 8:.3f}" in printed
    assert f"{1 - 2 * found / (number + 8):.3f}" in printed
    (tmp_path / "gold").write_text("0-9\n" * 9)
    assert main([*by_attention, "--references", str(tmp_path / "gold")]) == 1
    assert f"{tmp_path / 'gold'}:1:" in capsys.readouterr().err
    assert main([*words, "--layer", "4"]) == 1
    assert "layer must be from 1 to 3, got 4" in capsys.readouterr().err
    (tmp_path / "de").write_text("rot\n")
    assert main(words) == 1
    assert f"{tmp_path / 'en'} has 9" in capsys.readouterr().err
