"""Tokenizer with segmentations of its own for source and target, as two SentencePiece models have them.

The tokenizer of a checkpoint encodes sources and decodes translations. `target_tokenizer.json` beside it encodes
given translations, by `tokenizer(text_target=...)`. Other tokenizers of transformers accept `text_target` as well, so
callers need not know which one they have.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast


TARGET_TOKENIZER = "target_tokenizer.json"
TARGET_VOCAB_SIZE = "target_vocab_size"  # field of tokenizer_config.json that tells of a target side


class TwoSidedTokenizer(PreTrainedTokenizerFast):
    """Fast tokenizer whose `text_target` is encoded by a second `tokenizers` object.

    It is saved as an ordinary fast tokenizer and `target_tokenizer.json`, so `AutoTokenizer` loads the source side
    without code.

    Args:
        source (`PreTrainedTokenizerFast`): Tokenizer of the source side.
        target (`tokenizers.Tokenizer`): Segmentation of the target side, which has the settings of the source side.
        target_vocab_size (`int`): Tokens that the model writes. Higher ids of the target side, those of pieces that
            the vocabulary lacks, become the unknown token.

    Raises:
        ValueError: The target side has fewer tokens, or a special token has different ids on both sides.
    """

    def __init__(self, source: PreTrainedTokenizerFast, target: Tokenizer, target_vocab_size: int):
        settings = {name: value for name, value in source.init_kwargs.items() if name not in source.vocab_files_names}
        super().__init__(
            tokenizer_object=source.backend_tokenizer, **{**settings, TARGET_VOCAB_SIZE: target_vocab_size}
        )
        names = ("model_max_length", "model_input_names", "padding_side", "truncation_side", "split_special_tokens")
        self.target_side = PreTrainedTokenizerFast(
            tokenizer_object=target,
            **source.special_tokens_map,
            **{name: getattr(source, name) for name in names},
        )
        self.target_side.backend_tokenizer.no_padding()  # a saved tokenizer remembers its last call
        self.target_side.backend_tokenizer.no_truncation()
        self.target_vocab_size = target_vocab_size
        if not isinstance(target_vocab_size, int) or not 0 < target_vocab_size <= len(self.target_side):
            raise ValueError(
                f"{TARGET_VOCAB_SIZE}: expected a number up to {len(self.target_side)}, the tokens of "
                f"{TARGET_TOKENIZER}, found {target_vocab_size!r}."
            )
        for token in self.all_special_tokens:
            ids = [side.convert_tokens_to_ids(token) for side in (self, self.target_side)]
            if ids[0] != ids[1]:
                raise ValueError(f"{TARGET_TOKENIZER}: {token}: expected the id {ids[0]}, found {ids[1]}.")

    def __call__(self, text=None, text_pair=None, text_target=None, text_pair_target=None, **options) -> BatchEncoding:
        """Encode sources, given translations, or both, which gives `labels`; see `PreTrainedTokenizerBase`."""
        target_length = options.pop("max_target_length", None)
        if text_target is None:
            return super().__call__(text, text_pair, **options)
        of_target = options if target_length is None else {**options, "max_length": target_length}
        target = self.target_side(text_target, text_pair_target, **of_target)
        self._replace_unknown(target["input_ids"])
        if text is None:
            return target
        encoding = super().__call__(text, text_pair, **options)
        encoding["labels"] = target["input_ids"]
        return encoding

    def _replace_unknown(self, ids) -> None:
        """Replace, in place, the ids that the model's output lacks. `ids` is a list, a list of lists or an array."""
        if self.target_vocab_size == len(self.target_side):
            return
        if not isinstance(ids, list):
            ids[ids >= self.target_vocab_size] = self.unk_token_id
            return
        for row in ids if ids and isinstance(ids[0], list) else [ids]:
            row[:] = [token if token < self.target_vocab_size else self.unk_token_id for token in row]

    def save_pretrained(self, save_directory, **kwargs) -> tuple[str, ...]:
        """Save both sides. `tokenizer_config.json` names the class of the source side, which needs no code."""
        files = super().save_pretrained(save_directory, **kwargs)
        config, target = (Path(save_directory, name) for name in ("tokenizer_config.json", TARGET_TOKENIZER))
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["tokenizer_class"] = PreTrainedTokenizerFast.__name__
        config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.target_side.backend_tokenizer.save(str(target))
        return (*files, str(target))


def definition(tokenizer: PreTrainedTokenizerBase) -> str:
    """Serialised form of a fast tokenizer, of both sides if it has two. Equal forms encode equally."""
    source = tokenizer.backend_tokenizer.to_str()
    if not isinstance(tokenizer, TwoSidedTokenizer):
        return source
    return json.dumps([source, tokenizer.target_side.backend_tokenizer.to_str(), tokenizer.target_vocab_size])
