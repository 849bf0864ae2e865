"""One BPE vocabulary for both languages (section 5.1 of the paper), in transformers' own fast tokenizer class.

The alphabet are the 256 bytes, so every Unicode text can be written with the vocabulary: there is no `<unk>`, and
decoding gives back exactly what was encoded.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast


PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2: the defaults of VaswaniConfig
SPECIAL_TOKENS = [PAD, BOS, EOS]
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], vocab_size: int, show_progress: bool = True) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from sentences of both languages.

    Every sentence gets one leading space, which decoding takes away again: a word at the beginning is then the same
    token as in the middle. Encoding appends the end token, to sources as to targets.

    Args:
        texts (`Iterable[str]`): Sentences, of both languages.
        vocab_size (`int`): Entries at most: special tokens, bytes and merges. Small data may have fewer merges to
            learn; `len(tokenizer)` tells.
        show_progress (`bool`): Whether to draw a progress bar.

    Raises:
        ValueError: `vocab_size` has no room for the special tokens and the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes), got {vocab_size}."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = (EOS, tokenizer.token_to_id(EOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in somebody's text is text, not the end of the sentence
    )
