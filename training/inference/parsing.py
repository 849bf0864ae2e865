"""Trees of raw sentences in memory, by the search of `hf-vaswani translate --format tree`."""

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.trees import restore, tree_words
from .corpus import Line, RequestBuilder
from .loading import source_limit
from .search import Search
from .tree_search import tree_constraint


def parse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_tokens: int = 1024,
    progress: tqdm | None = None,
    *,
    file: str,
    skip: bool = False,
    **generate_kwargs,
) -> list[str]:
    """Parse sentences. The search is restricted to well-formed trees with one tag per word.

    Args:
        model (`PreTrainedModel`): Parser in evaluation mode. Its `generation_config` defines the search and the
            maximum length of the output.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        sentences (`list[str]`): Words, separated by white space. An empty sentence has an empty tree.
        batch_tokens (`int`): Source tokens per batch, padding included.
        progress (`tqdm`, *optional*): Progress bar, advanced once per sentence.
        file (`str`): Name of the sentences in messages.
        skip (`bool`): Leave the trees of sentences that are too long empty, and log their lines. Otherwise they are an
            error.
        **generate_kwargs: Options of `generate()`.

    Returns:
        `list[str]`: One tree in brackets per sentence, over exactly its words, in the same order.

    Raises:
        LineError: A sentence is too long, or its tree may be.
        ValueError: The model is not a parser, or nothing limits the length of its outputs.
    """
    search = Search([model], tokenizer, batch_tokens, **generate_kwargs)
    search.constraint = tree_constraint(search)
    builder = RequestBuilder(search, file, None, source_limit([model]), split=False, skip=skip, trees=True)
    requests = builder.requests([Line(number, text) for number, text in enumerate(sentences, start=1)])
    parsed = [index for index, parts in enumerate(requests) if parts]
    trees = [""] * len(sentences)
    if progress is not None:
        progress.update(len(sentences) - len(parsed))
    for position, [best] in search.translate([requests[index][0] for index in parsed]):
        index = parsed[position]
        tree, _ = restore(best.text.split(), tree_words(sentences[index]))
        trees[index] = str(tree)
        if progress is not None:
            progress.update()
    builder.report()
    return trees
