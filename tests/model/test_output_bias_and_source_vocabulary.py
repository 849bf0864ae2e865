"""Fields that models of other toolkits need: a bias in the output projection, a vocabulary of the source's own.

The logits are compared with MarianMT's in tests/conversion.
"""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani import VaswaniConfig, VaswaniTranslationPipeline
from support.models import batch_of, noisy_model, random_tokens, sources_of, tiny_model
from training.inference.checkpoint_files import count_parameters


FIELDS = {"output_bias": True, "source_vocab_size": 55}
SOURCES = batch_of([6, 9, 3], vocab_size=55)


def foreign_model(seed: int = 0, **fields):
    """A random model with both fields, nothing zero."""
    return noisy_model(seed, **{**FIELDS, **fields})


def test_the_paper_has_neither():
    config, model = VaswaniConfig(), tiny_model()
    assert (config.output_bias, config.source_vocab_size) == (False, None)
    assert model.lm_head.bias is None
    assert model.model.encoder.embed_tokens.weight is model.get_input_embeddings().weight


@torch.no_grad()
def test_the_bias_is_added_to_every_logit():
    model, inputs = foreign_model(source_vocab_size=None), batch_of([5, 3])
    biased = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    bias = model.lm_head.bias.clone()
    model.lm_head.bias.zero_()
    plain = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    torch.testing.assert_close(biased, plain + bias)
    assert bias.abs().min() > 0


@torch.no_grad()
def test_source_tokens_have_rows_of_their_own():
    model, target = foreign_model(), random_tokens(3, 4)
    assert model.model.encoder.embed_tokens.weight.shape == (55, 16)
    assert SOURCES["input_ids"].max() > model.config.vocab_size
    logits = model(**SOURCES, decoder_input_ids=target).logits
    embedded = model.model.encoder.embed_tokens(SOURCES["input_ids"])
    expected = model(inputs_embeds=embedded, attention_mask=SOURCES["attention_mask"], decoder_input_ids=target).logits
    assert logits.shape == (3, 4, 40)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_of_the_target_alone_is_shared(tied, tmp_path):
    model = foreign_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    inner = loaded.model
    assert inner.shared.weight is inner.decoder.embed_tokens.weight is loaded.get_input_embeddings().weight
    assert (loaded.lm_head.weight is inner.shared.weight) == tied
    assert inner.encoder.embed_tokens is loaded.get_encoder().get_input_embeddings()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert count_parameters(loaded.config) == sum(weight.numel() for weight in loaded.parameters())


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_resized_vocabulary_leaves_the_source_and_the_other_logits_alone(tied):
    model, target = foreign_model(tie_word_embeddings=tied), random_tokens(3, 4)
    before = model(**SOURCES, decoder_input_ids=target).logits
    for size in (48, 43):
        model.resize_token_embeddings(size, mean_resizing=False)
        assert model.model.encoder.embed_tokens.weight.shape == (55, 16)
        assert (model.config.vocab_size, model.config.source_vocab_size) == (size, 55)
        logits = model(**SOURCES, decoder_input_ids=target).logits
        assert logits.shape == (3, 4, size)
        torch.testing.assert_close(logits[..., :40], before)
    assert model.lm_head.bias[40:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_and_its_gradients_equal_torchs(dtype):
    model = foreign_model().train()
    labels = random_tokens(3, 7)
    labels[1, 4:] = -100
    results = []
    for fused in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = model(**SOURCES, labels=labels, skip_logits=fused)
        loss = outputs.loss
        if not fused:
            logits = outputs.logits.float().flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)
        loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        results.append((loss.detach(), gradients))
    (loss, gradients), (expected_loss, expected) = results
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
    assert {"lm_head.bias", "model.shared.weight", "model.encoder.embed_tokens.weight"} <= gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * (1 + expected[name].norm()), name


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_beams", [1, 4])
@torch.no_grad()
def test_the_fast_loops_generate_what_the_librarys_do(kind, num_beams):
    model = foreign_model(5)
    model = model.to_int8() if kind == "int8" else model.to(getattr(torch, kind))
    options = {**SOURCES, "num_beams": num_beams, "max_new_tokens": 9}
    with model.fixed_weights():
        fast = model.generate(**options)
    slow = model.generate(**options, fast_decoding=False)
    if kind != "bfloat16":  # where hypotheses of nearly the same score may change places
        assert fast.tolist() == slow.tolist()
    model.lm_head.bias[7] += 1000
    assert model.generate(**options)[:, 1:].tolist() == [[7] * 9] * 3


def test_an_ensemble_needs_one_source_vocabulary():
    with pytest.raises(ValueError, match=r"source_vocab_size 70, this one 55"):
        foreign_model().generate(**SOURCES, max_new_tokens=2, ensemble=[foreign_model(source_vocab_size=70)])


def test_a_pipeline_compares_the_tokenizer_with_the_sources_vocabulary(tokenizer):
    size = len(tokenizer)
    translator = VaswaniTranslationPipeline(foreign_model(source_vocab_size=size, vocab_size=40), tokenizer=tokenizer)
    ids = translator("three dogs sleep", return_tensors=True, max_new_tokens=4)[0]["translation_token_ids"]
    assert ids.max() < 40
    with pytest.raises(ValueError, match=rf"{size} tokens.*{size - 1}"):
        VaswaniTranslationPipeline(foreign_model(source_vocab_size=size - 1, vocab_size=size), tokenizer=tokenizer)


def test_an_impossible_vocabulary_is_refused():
    with pytest.raises(Exception, match="source_vocab_size must be at least 1, got 0"):
        VaswaniConfig(source_vocab_size=0)


def test_adapters_leave_both_alone():
    peft = pytest.importorskip("peft")
    from training.trainer.fine_tuning import ADAPTED

    model = foreign_model()
    inputs = {**SOURCES, "decoder_input_ids": random_tokens(3, 4)}
    expected = model(**inputs).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=ADAPTED))
    adapted(**inputs, labels=random_tokens(3, 4), skip_logits=True).loss.backward()
    assert not any(weight.requires_grad for name, weight in adapted.named_parameters() if "lora" not in name)
    torch.testing.assert_close(adapted.merge_and_unload()(**inputs).logits, expected)


def test_padding_of_either_side_changes_nothing():
    model, target = foreign_model(), random_tokens(2, 5)
    for side in ("right", "left"):
        ids, mask = sources_of([6, 4], side)
        short = ids[1][mask[1].bool()][None]
        both = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(both[1:], model(input_ids=short, decoder_input_ids=target[1:]).logits)
