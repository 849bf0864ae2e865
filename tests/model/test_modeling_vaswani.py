import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, DynamicCache, MarianConfig, MarianModel
from transformers.modeling_outputs import BaseModelOutput

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel, modeling_vaswani
from hf_vaswani.modeling_vaswani import eager_attention_forward, sinusoids
from support.models import random_tokens, sources_of, tiny_model


PAD, BOS, EOS = 0, 1, 2


# Positions (section 3.5)


@pytest.mark.parametrize(("position", "feature"), [(0, 0), (0, 1), (1, 0), (3, 5), (17, 6), (50, 15), (999, 9)])
def test_sinusoids_follow_the_formula(position, feature):
    angle = position / 10000 ** ((feature - feature % 2) / 16)
    expected = math.cos(angle) if feature % 2 else math.sin(angle)
    assert sinusoids(torch.tensor([position]), 16)[0, feature].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("offset", [1, 7, 100])
def test_a_shift_of_positions_is_a_fixed_rotation(offset):
    positions = torch.arange(200)
    encoded = sinusoids(positions, 32).unflatten(-1, (16, 2))  # (positions, pairs, sine and cosine)
    shifted = sinusoids(positions + offset, 32).unflatten(-1, (16, 2))
    angles = [offset / 10000 ** (2 * i / 32) for i in range(16)]
    rotation = torch.tensor([[[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]] for a in angles])
    torch.testing.assert_close(torch.einsum("ixy,piy->pix", rotation, encoded), shifted, atol=1e-4, rtol=0)


def test_sinusoids_reach_past_max_position_embeddings():
    model = tiny_model(max_position_embeddings=8)
    with torch.no_grad():
        logits = model(input_ids=random_tokens(1, 50), decoder_input_ids=random_tokens(1, 50)).logits
    assert torch.isfinite(logits).all()


def test_learned_positions_have_a_table_in_each_stack_and_a_limit():
    model = tiny_model(position_embedding="learned", max_position_embeddings=8)
    tables = [module.embed_positions.weight for module in (model.model.encoder, model.model.decoder)]
    assert [tuple(table.shape) for table in tables] == [(8, 16), (8, 16)]
    assert not torch.equal(*tables)
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings is 8"):
        model(input_ids=random_tokens(1, 9), decoder_input_ids=random_tokens(1, 2))
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings is 8"):
        model.generate(random_tokens(1, 4), max_new_tokens=20, suppress_tokens=[EOS])
    assert model.generate(random_tokens(1, 4), max_extra_tokens=50, suppress_tokens=[EOS]).shape[1] == 8


# Attention (section 3.2): worked examples, by hand


def attend(scores: list, d_k: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose products QKᵀ are `scores` `(heads, 3, 3)`, since the keys are unit vectors."""
    query = torch.tensor(scores, dtype=torch.float32)[None]
    key = torch.eye(3).expand_as(query)
    return eager_attention_forward(nn.Module(), query, key, values, None, scaling=d_k**-0.5)


def test_worked_example_of_one_head():
    values = torch.tensor([[2.0, 1, 0, 1], [1, 2, 1, 0], [3, 1, 2, 1]])[None, None]
    outputs, weights = attend([[[-1, 0, 3], [2, -1, 0], [4, 1, -3]]], 4, values)
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([0.10, 0.16, 0.74]), atol=5e-3, rtol=0)
    torch.testing.assert_close(outputs[0, 0, 0], torch.tensor([2.58, 1.16, 1.64, 0.84]), atol=2e-2, rtol=0)


def test_worked_example_of_two_heads():
    scores = [[[2, 0, 1], [0, 1, 1], [2, 1, 2]], [[0, 1, 0], [1, 0, 0], [0, 0, 0]]]
    expected = [
        [[0.58, 0.14, 0.28], [0.20, 0.40, 0.40], [0.40, 0.20, 0.40]],
        [[0.25, 0.50, 0.25], [0.50, 0.25, 0.25], [0.33, 0.33, 0.33]],
    ]
    _, weights = attend(scores, 2, torch.zeros(1, 2, 3, 2))
    torch.testing.assert_close(weights[0], torch.tensor(expected), atol=6e-3, rtol=0)


# Independent implementations


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.out_proj.weight.copy_(ours.o_proj.weight)
    if ours.q_proj.bias is not None:
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
        theirs.out_proj.bias.copy_(ours.o_proj.bias)


def copy_layer(ours: nn.Module, theirs: nn.Module, residuals: list[str]) -> None:
    copy_attention(ours.self_attn, theirs.self_attn)
    if hasattr(theirs, "multihead_attn"):
        copy_attention(ours.encoder_attn, theirs.multihead_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    for number, residual in enumerate(residuals, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(getattr(ours, residual).norm.state_dict())


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Also biases and normalisations, which start as 0 and 1."""
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn_like(weight))


@pytest.mark.parametrize("attention_bias", [False, True])
@torch.no_grad()
def test_logits_equal_torch_nn_transformer(attention_bias):
    model = tiny_model(d_k=8, d_v=8, attention_bias=attention_bias, layer_norm_eps=1e-5)
    randomize(model)
    arguments = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**arguments), 2, enable_nested_tensor=False).eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**arguments), 2).eval()
    for ours, theirs in zip(model.model.encoder.layers, encoder.layers):
        copy_layer(ours, theirs, ["self_attn_residual", "feed_forward_residual"])
    for ours, theirs in zip(model.model.decoder.layers, decoder.layers):
        copy_layer(ours, theirs, ["self_attn_residual", "encoder_attn_residual", "feed_forward_residual"])

    source, source_mask = sources_of([7, 4, 6])
    target = random_tokens(3, 5)

    def embed(ids):
        return model.model.shared(ids) * 4 + sinusoids(torch.arange(ids.shape[1]), 16)  # 4 = √16

    padding = source_mask == 0
    memory = encoder(embed(source), src_key_padding_mask=padding)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    hidden = decoder(embed(target), memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
    expected = hidden @ model.model.shared.weight.t()

    logits = model(input_ids=source, attention_mask=source_mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_equal_marian_under_a_permutation_of_features():
    """Marian puts all sines before all cosines; the same permutation of every d_model axis makes up for it."""
    model = tiny_model(d_k=8, d_v=8, attention_bias=True, layer_norm_eps=1e-5)
    randomize(model)
    config = MarianConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
    )
    marian = MarianModel(config).eval()
    halves = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    renamed = {
        "self_attn_residual.norm": "self_attn_layer_norm",
        "encoder_attn_residual.norm": "encoder_attn_layer_norm",
        "feed_forward_residual.norm": "final_layer_norm",
        "feed_forward.": "",
        "o_proj": "out_proj",
    }
    weights = {}
    for name, weight in model.model.state_dict().items():
        reads_features = weight.dim() == 2 and not name.endswith(("o_proj.weight", "fc2.weight"))
        writes_features = name.endswith(("norm.weight", "norm.bias", "o_proj.weight", "o_proj.bias"))
        writes_features |= name.endswith(("fc2.weight", "fc2.bias"))
        if reads_features:
            weight = weight[:, halves]
        elif writes_features:
            weight = weight[halves]
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        weights[name] = weight
    missing, unexpected = marian.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("embed_positions" in name for name in missing)

    source, mask = sources_of([7, 4])
    target = random_tokens(2, 5)
    hidden = marian(input_ids=source, attention_mask=mask, decoder_input_ids=target).last_hidden_state
    expected = hidden @ marian.shared.weight.t()
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention_implementations_agree(implementation):
    model = tiny_model(d_v=8)  # a power of two, as flex attention needs before torch 2.7
    source, mask = sources_of([7, 4])
    target = random_tokens(2, 5)
    model.set_attn_implementation("eager")
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    model.set_attn_implementation(implementation)
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


# What a decoder and its masks must do


@torch.no_grad()
def test_no_position_sees_a_later_one(model):
    source, target = random_tokens(2, 6), random_tokens(2, 8)
    changed = target.clone()
    changed[:, 5:] = (changed[:, 5:] - 3 + 11) % 37 + 3
    before = model(input_ids=source, decoder_input_ids=target).logits
    after = model(input_ids=source, decoder_input_ids=changed).logits
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("position_embedding", ["sinusoidal", "learned"])
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_padding_changes_nothing(side, position_embedding):
    model = tiny_model(position_embedding=position_embedding)
    source, source_mask = sources_of([7, 4, 1], side)
    target, target_mask = sources_of([3, 6, 2], side)
    together = model(
        input_ids=source,
        attention_mask=source_mask,
        decoder_input_ids=target,
        decoder_attention_mask=target_mask,
    ).logits
    for i in range(3):
        alone = model(
            input_ids=source[i, source_mask[i] == 1][None], decoder_input_ids=target[i, target_mask[i] == 1][None]
        ).logits
        torch.testing.assert_close(together[i, target_mask[i] == 1], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 8, [3, 5], [1, 4, 3], [8]])
@torch.no_grad()
def test_cached_decoding_equals_uncached(model, chunks):
    source, mask = sources_of([7, 4])
    target = random_tokens(2, 8)
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    encoded = model.get_encoder()(source, attention_mask=mask)
    cache, logits = None, []
    for chunk in target.split(chunks, dim=1):
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=chunk,
            past_key_values=cache,
            use_cache=True,
        )
        cache = outputs.past_key_values
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_cache_for_the_target_alone_is_completed(model):
    source, target = random_tokens(2, 5), random_tokens(2, 6)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    first = model(input_ids=source, decoder_input_ids=target[:, :4], past_key_values=DynamicCache(), use_cache=True)
    second = model(input_ids=source, decoder_input_ids=target[:, 4:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cached_decoding_of_left_padded_targets_equals_uncached(model):
    source, target = random_tokens(2, 5), random_tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    expected = model(input_ids=source, decoder_input_ids=target, decoder_attention_mask=mask).logits
    first = model(
        input_ids=source, decoder_input_ids=target[:, :4], decoder_attention_mask=mask[:, :4], use_cache=True
    )
    second = model(
        input_ids=source,
        decoder_input_ids=target[:, 4:],
        decoder_attention_mask=mask,
        past_key_values=first.past_key_values,
    )
    logits = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_generation_is_the_same_with_and_without_cache(model, num_beams):
    source, mask = sources_of([7, 4, 5])
    options = {
        "num_beams": num_beams,
        "max_new_tokens": 12,
        "attention_mask": mask,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    cached = model.generate(source, use_cache=True, **options)
    uncached = model.generate(source, use_cache=False, **options)
    assert torch.equal(cached.sequences, uncached.sequences)
    for a, b in zip(cached.scores, uncached.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len(cached.scores) > 0


# Weights


def is_tied(model: VaswaniForConditionalGeneration) -> bool:
    inner = model.model
    matrices = (inner.encoder.embed_tokens, inner.decoder.embed_tokens, inner.shared, model.lm_head)
    return len({matrix.weight.data_ptr() for matrix in matrices}) == 1


def test_the_three_matrices_are_one(model, tmp_path):
    assert is_tied(model)
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert is_tied(loaded)
    loaded.resize_token_embeddings(48, mean_resizing=False)
    assert is_tied(loaded)
    assert (loaded.config.vocab_size, tuple(loaded.lm_head.weight.shape)) == (48, (48, 16))
    torch.testing.assert_close(loaded.lm_head.weight[:40], model.lm_head.weight)


def test_an_untied_projection_leaves_the_embeddings_one(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded, report = VaswaniForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    loaded.resize_token_embeddings(48, mean_resizing=False)
    inner = loaded.model
    assert inner.encoder.embed_tokens.weight is inner.decoder.embed_tokens.weight is inner.shared.weight
    assert inner.shared.weight.data_ptr() != loaded.lm_head.weight.data_ptr()
    torch.testing.assert_close(inner.shared.weight[:40], model.model.shared.weight)
    torch.testing.assert_close(loaded.lm_head.weight[:40], model.lm_head.weight)


@torch.no_grad()
def test_a_saved_model_computes_the_same(model, tmp_path):
    randomize(model)
    model.save_pretrained(tmp_path)
    source, target = random_tokens(2, 6), random_tokens(2, 4)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    for name, auto in (("from class", VaswaniForConditionalGeneration), ("from auto", AutoModelForSeq2SeqLM)):
        loaded = auto.from_pretrained(tmp_path)
        assert torch.equal(loaded(input_ids=source, decoder_input_ids=target).logits, expected), name


def test_auto_classes_know_the_model():
    config = AutoConfig.for_model("vaswani", d_model=16, num_heads=2, vocab_size=40)
    assert type(config) is VaswaniConfig
    assert type(AutoModel.from_config(config)) is VaswaniModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is VaswaniForConditionalGeneration


def test_encoder_and_decoder_can_be_had(model):
    assert model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.decoder


def test_initial_weights_follow_the_documented_table():
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=500, d_model=256, d_ff=512, encoder_layers=1, decoder_layers=1, attention_bias=True)
    )
    layer = model.model.encoder.layers[0]
    assert model.model.shared.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    for linear in (layer.self_attn.q_proj, layer.feed_forward.fc1):
        bound = math.sqrt(6 / sum(linear.weight.shape))  # Glorot uniform
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert not linear.bias.any()
    assert layer.self_attn_residual.norm.weight.eq(1).all()


def test_sublayers_have_their_shapes(model):
    attention = model.model.decoder.layers[0].encoder_attn
    assert tuple(attention.q_proj.weight.shape) == (2 * 4, 16)
    assert tuple(attention.v_proj.weight.shape) == (2 * 6, 16)
    assert tuple(attention.o_proj.weight.shape) == (16, 2 * 6)
    assert attention.q_proj.bias is None


def test_hidden_states_and_attentions_are_recorded(model):
    model.set_attn_implementation("eager")
    outputs = model(
        input_ids=random_tokens(2, 6),
        decoder_input_ids=random_tokens(2, 4),
        output_hidden_states=True,
        output_attentions=True,
    )
    assert [tuple(w.shape) for w in outputs.encoder_attentions] == [(2, 2, 6, 6)] * 2
    assert [tuple(w.shape) for w in outputs.decoder_attentions] == [(2, 2, 4, 4)] * 2
    assert [tuple(w.shape) for w in outputs.cross_attentions] == [(2, 2, 4, 6)] * 2
    assert [tuple(h.shape) for h in outputs.encoder_hidden_states] == [(2, 6, 16)] * 3
    assert [tuple(h.shape) for h in outputs.decoder_hidden_states] == [(2, 4, 16)] * 3


def test_embeddings_can_be_given_instead_of_tokens(model):
    source, target = random_tokens(2, 6), random_tokens(2, 4)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    embed = model.get_input_embeddings()
    logits = model(inputs_embeds=embed(source), decoder_inputs_embeds=embed(target)).logits
    torch.testing.assert_close(logits, expected)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(input_ids=source, inputs_embeds=embed(source), decoder_input_ids=target)


def test_encoder_outputs_can_be_given(model):
    source, target = random_tokens(2, 6), random_tokens(2, 4)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    hidden = model.get_encoder()(source).last_hidden_state
    for encoded in (BaseModelOutput(last_hidden_state=hidden), (hidden,)):
        torch.testing.assert_close(model(encoder_outputs=encoded, decoder_input_ids=target).logits, expected)


# Dropout (section 5.4)


def test_dropout_is_where_the_paper_has_it(monkeypatch):
    """On every sub-layer's output, before the residual sum, and on both embedded inputs; nowhere else by default."""
    active = []

    def record(hidden_states, p, training):
        active.append(p > 0 and training)
        return torch.zeros_like(hidden_states) if active[-1] else hidden_states

    monkeypatch.setattr(modeling_vaswani, "dropout", record)
    model = tiny_model(dropout=0.3).train()
    states = torch.randn(1, 5, 16)
    hidden = model.model.encoder.layers[0](states)
    twice_normed = F.layer_norm(F.layer_norm(states, (16,), eps=1e-6), (16,), eps=1e-6)
    torch.testing.assert_close(hidden, twice_normed)  # with all of both sub-layers dropped, the residuals remain

    active.clear()
    model(input_ids=random_tokens(1, 5), decoder_input_ids=random_tokens(1, 5))
    assert sum(active) == 2 * 2 + 2 * 3 + 2  # encoder sub-layers, decoder sub-layers, embedded inputs


# Loss (section 5.4)


def labelled_batch() -> dict[str, torch.Tensor]:
    source, mask = sources_of([7, 4, 6])
    labels, labels_mask = sources_of([3, 6, 5])
    return {
        "input_ids": source,
        "attention_mask": mask,
        "labels": labels.masked_fill(labels_mask == 0, -100),
    }


@pytest.mark.parametrize("training", [True, False])
def test_loss_without_logits_equals_loss_with_logits(model, training):
    model.train(training)
    batch = labelled_batch()
    with_logits = model(**batch)
    gradient = torch.autograd.grad(with_logits.loss, model.lm_head.weight)[0]
    without = model(**batch, skip_logits=True)
    assert without.logits is None
    torch.testing.assert_close(without.loss, with_logits.loss)
    torch.testing.assert_close(torch.autograd.grad(without.loss, model.lm_head.weight)[0], gradient)


def test_evaluation_loss_is_plain_and_gives_the_perplexity(model):
    batch = labelled_batch()
    probabilities = model(**batch).logits.log_softmax(-1)
    kept = batch["labels"] != -100
    gold = probabilities[kept].gather(-1, batch["labels"][kept][:, None])
    assert model(**batch).loss.item() == pytest.approx(-gold.mean().item(), rel=1e-5)
    perplexity = torch.exp(-gold.mean()).item()  # the inverse geometric mean of the gold tokens' probabilities
    assert model(**batch).loss.exp().item() == pytest.approx(perplexity, rel=1e-5)
    smoothed = model.train()(**batch).loss.item()
    assert smoothed != pytest.approx(-gold.mean().item(), rel=1e-3)


def test_loss_is_divided_by_the_labels_of_the_whole_update(model):
    batch = labelled_batch()
    total = model(**batch).loss * 14  # 3 + 6 + 5 labels
    for skip_logits in (False, True):
        loss = model(**batch, num_items_in_batch=torch.tensor(28), skip_logits=skip_logits).loss
        torch.testing.assert_close(loss, total / 28)


def test_a_batch_without_labels_adds_nothing(model):
    batch = {
        "input_ids": torch.tensor([[EOS]]),
        "attention_mask": torch.tensor([[1]]),
        "labels": torch.tensor([[-100]]),
    }
    loss = model.train()(**batch, num_items_in_batch=10, skip_logits=True).loss
    assert loss.item() == 0
    loss.backward()
    assert all(w.grad is None or not w.grad.any() for w in model.parameters())


def test_loss_without_gradients_is_the_same_and_computes_none(model):
    batch = labelled_batch()
    expected = model(**batch, skip_logits=True).loss
    with torch.no_grad():
        loss = model(**batch, skip_logits=True).loss
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad


def test_a_projection_that_is_more_than_its_weight_is_asked_for_the_logits(model):
    class Doubled(nn.Linear):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    batch = labelled_batch()
    doubled = Doubled(16, 40, bias=False)
    doubled.weight = model.lm_head.weight
    model.lm_head = doubled
    torch.testing.assert_close(model(**batch, skip_logits=True).loss, model(**batch).loss)


def test_labels_that_are_all_ignored_give_no_loss(model):
    batch = labelled_batch()
    batch["labels"][:] = -100
    for skip_logits in (False, True):
        assert model(**batch, skip_logits=skip_logits).loss.item() == 0


def test_skipping_logits_needs_labels(model):
    with pytest.raises(ValueError, match="skip_logits needs labels"):
        model(input_ids=random_tokens(1, 3), decoder_input_ids=random_tokens(1, 3), skip_logits=True)


def test_decoder_reads_the_labels_shifted_right(model):
    labels = torch.tensor([[5, 6, EOS], [7, EOS, -100]])
    expected = torch.tensor([[BOS, 5, 6], [BOS, 7, EOS]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), expected)


def test_bfloat16_loss_is_close_to_float32(model):
    batch = labelled_batch()
    model.train()
    expected = model(**batch, skip_logits=True).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch, skip_logits=True).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_gradient_checkpointing_changes_no_gradient():
    batch = labelled_batch()
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**batch).loss.backward()
        gradients.append([w.grad for w in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain)
