"""Search of a parser: linearised trees that are well formed (section 6.3 of the paper).

The constraint is a logits processor. It excludes every token that no well-formed tree can continue with, so the search
finds the likeliest of the well-formed trees that have one symbol for each word.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vaswani.decoding_vaswani import SentenceProcessor, end_tokens

from ..data.tag_lexicon import TagLexicon
from ..data.tokenizer import symbol_ids
from .search import Request, Search


OTHER, OPENING, CLOSING, TAG, END = range(5)  # kinds of tokens


@dataclass
class TreeSymbols:
    """Tokens of a parser by their kinds.

    Args:
        kinds (`torch.Tensor` of shape `(vocab_size,)`): `OPENING`, `CLOSING`, `TAG`, `END` or `OTHER`.
        closing (`torch.Tensor` of shape `(vocab_size,)`): The closing bracket of an opening one; 0 for other tokens.
        tokens (`torch.Tensor` of shape `(tokens,)`): The tokens that are not `OTHER`.
    """

    kinds: torch.Tensor
    closing: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "TreeSymbols":
        """Symbols of a parser, on its device. An opening bracket without a closing one counts as `OTHER`.

        Raises:
            ValueError: The vocabulary has no bracket symbols or no tags, so the model is not a parser.
        """
        ids = symbol_ids(tokenizer)
        pairs = {ids[f"({label}"]: ids[f"){label}"] for label in _labels(ids, "(") & _labels(ids, ")")}
        tags = [token for symbol, token in ids.items() if symbol[:1] not in ("(", ")", "")]
        if not pairs or not tags:
            raise ValueError(
                f"{model.name_or_path or 'The model'}: trees need a parser, whose vocabulary has brackets and tags as "
                f"symbols, like (NP, )NP and NN; found {len(pairs)} pairs of brackets and {len(tags)} tags."
            )
        kinds = torch.full((model.config.vocab_size,), OTHER)
        closing = torch.zeros_like(kinds)
        opening = torch.tensor(list(pairs))
        closing[opening] = torch.tensor(list(pairs.values()))
        for kind, tokens in ((OPENING, opening), (CLOSING, closing[opening]), (TAG, torch.tensor(tags))):
            kinds[tokens] = kind
        kinds[end_tokens(model.generation_config)] = END
        tokens = (kinds != OTHER).nonzero()[:, 0]
        return cls(*(values.to(model.device) for values in (kinds, closing, tokens)))


def _labels(symbols: dict[str, int], bracket: str) -> set[str]:
    return {symbol[1:] for symbol in symbols if symbol[:1] == bracket and len(symbol) > 1}


class TreeConstraint(SentenceProcessor):
    """Logits processor that leaves only well-formed trees: brackets balance, there is one root, no phrase is empty,
    every word has one tag, and the output ends only then and within its limit.

    Which tokens may follow depends on the tokens so far only, and not on earlier calls, so beams may change places.

    Args:
        symbols (`TreeSymbols`): Tokens by their kinds.
        words (`torch.Tensor` of shape `(sentences,)`): Number of words of each sentence, at least 1.
        limits (`torch.Tensor` of shape `(sentences,)`): Greatest number of tokens of each output, end token included;
            at least that of [`shortest`].
        lexicon (`torch.Tensor` of shape `(sentences, words, tokens)`, *optional*): True for the tokens that are no
            tags, and for the tags that each word may have, at least one.
    """

    def __init__(
        self, symbols: TreeSymbols, words: torch.Tensor, limits: torch.Tensor, lexicon: torch.Tensor | None = None
    ):
        super().__init__(len(words))
        self.symbols, self.words, self.limits, self.lexicon = symbols, words, limits, lexicon

    @staticmethod
    def shortest(words: int) -> int:
        """Number of tokens of the shortest tree, end token included: tags, and the brackets of a root over several."""
        return words + 1 + 2 * (words > 1)

    def process(self, input_ids: torch.LongTensor, scores: torch.Tensor, sentences: torch.Tensor) -> torch.Tensor:
        """Set the scores of excluded tokens to -inf; see `SentenceProcessor.process`."""
        rows_each = len(input_ids) // len(sentences)
        words = self.words[sentences].repeat_interleave(rows_each)
        limits = self.limits[sentences].repeat_interleave(rows_each)

        kinds = self.symbols.kinds[input_ids]  # (rows, length)
        is_opening = kinds == OPENING
        depths = (is_opening.int() - (kinds == CLOSING).int()).cumsum(-1)
        depth, words_left = depths[:, -1], words - (kinds == TAG).sum(-1)
        # The innermost open phrase is the last that was opened at this depth.
        places = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        innermost = ((is_opening & (depths == depth[:, None])) * places).argmax(-1, keepdim=True)
        closing = self.symbols.closing[input_ids.gather(1, innermost)]  # (rows, 1)

        is_outside, has_words = depth == 0, words_left > 0
        # A tag per word, a bracket per open phrase and the end token are still needed, two brackets for a new phrase.
        spare = limits - (input_ids.shape[1] - 1) - (words_left + depth + 1)
        may = torch.zeros(len(words), END + 1, dtype=torch.bool, device=scores.device)  # by kind
        may[:, OPENING] = has_words & (spare >= 2)
        may[:, TAG] = has_words & (~is_outside | (words == 1))
        may_close = ~is_outside & (kinds[:, -1] != OPENING) & ((depth > 1) | ~has_words)
        may[:, END] = ~(may.any(-1) | may_close)  # at the end, and where nothing else is possible
        tokens = self.symbols.tokens
        allowed = may[:, self.symbols.kinds[tokens]] | ((tokens == closing) & may_close[:, None])  # (rows, tokens)
        if self.lexicon is not None:
            next_word = (words - words_left).clamp(max=self.lexicon.shape[1] - 1)
            allowed &= self.lexicon[sentences.repeat_interleave(rows_each), next_word]
        kept = scores[:, tokens].masked_fill(~allowed, -torch.inf)
        return torch.full_like(scores, -torch.inf).index_copy_(1, tokens, kept)


def tree_constraint(search: Search, lexicon: TagLexicon | None = None) -> Callable[[list[Request]], TreeConstraint]:
    """Function that builds the constraint of a batch of requests.

    Args:
        search (`Search`): Search with the parser and its tokenizer.
        lexicon (`TagLexicon`, *optional*): Tags that each word may have. A word none of whose tags is a symbol of the
            parser may have any.

    Raises:
        ValueError: The model is not a parser, nothing limits the length of its outputs, or it knows no tag of the
            lexicon.
    """
    symbols = TreeSymbols.of(search.model, search.tokenizer)
    if search.longest_output(1) is None:
        raise ValueError(
            f"{search.model.name_or_path or 'The model'}: expected a limit for the length of trees, found none; set "
            "max_extra_tokens in generation_config.json, or --max-extra-tokens of `translate`."
        )

    ids = symbol_ids(search.tokenizer)
    if lexicon is not None and not any(tag in ids for tags in lexicon.counts.values() for tag in tags):
        raise ValueError(
            f"{search.model.name_or_path or 'The model'}: no tag of the lexicon is a symbol of the parser."
        )
    are_tags = symbols.kinds[symbols.tokens] == TAG

    def tokens_of(word: str) -> torch.Tensor:
        tags = torch.tensor([ids[tag] for tag in lexicon.tags(word) if tag in ids], device=symbols.tokens.device)
        allowed = torch.isin(symbols.tokens, tags)
        return allowed | ~are_tags if allowed.any() else torch.ones_like(are_tags)

    def of_batch(requests: list[Request]) -> TreeConstraint:
        words = torch.tensor([len(request.words) for request in requests], device=search.model.device)
        limits = [search.longest_output(len(request.ids)) for request in requests]
        allowed = None
        if lexicon is not None:
            each = [torch.stack([tokens_of(word) for word in request.words]) for request in requests]
            allowed = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=True)
        return TreeConstraint(symbols, words, torch.tensor(limits, device=search.model.device), allowed)

    return of_batch
