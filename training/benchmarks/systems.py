"""Systems of the decoding benchmark, with the same weights and the same search as far as each has it.

| system | search |
|---|---|
| `ours` | `Search` of `hf-vaswani translate`, with the paper's settings (section 6.1) |
| `marian` | `generate()` of MarianMT, with its own length penalty, `length ** 0.6` |
| `engine` | `hf-vaswani translate --engine ctranslate2`, with the paper's settings |
| `ctranslate2` | CTranslate2's own client, with its own length penalty, exponent 0.6 |

All have 4 beams and at most 50 tokens more than the source. Everything else is each system's default. CTranslate2's
own defaults, which are not used, are 2 beams, exponent 1 and at most 256 tokens.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniForConditionalGeneration

from ..inference.loading import load_checkpoint, load_tokenizer
from ..inference.search import Request, Search
from ..paper import GENERATION
from ..settings import KERNELS
from .peers import to_marian


SYSTEMS = [
    *("ours-float32", "ours-bfloat16", "ours-int8"),
    *("marian-float32", "marian-bfloat16"),
    *("engine-float32", "engine-bfloat16", "engine-int8"),
    *("ctranslate2-float32", "ctranslate2-bfloat16", "ctranslate2-int8"),
]
BEAMS, EXTRA_TOKENS, ALPHA = (GENERATION[name] for name in ("num_beams", "max_extra_tokens", "length_penalty"))
CPU = torch.device("cpu")

Result = TypeVar("Result")
Translate = Callable[[list[list[int]]], list[str]]


@dataclass
class System:
    """A loaded system. All searches go from token ids to texts.

    Attributes:
        batched (`Sequence`): Searches of many sentences by batch size, in groups. In each group the rate rises with
            the batch size up to some size, and then falls.
        single (`Callable`): Search of one sentence of ids with a number of beams.
        fixed_weights (`Callable`): Context in which single searches share packed weights, where there is one.
    """

    batched: Sequence[Mapping[str, Translate]]
    single: Callable[[list[int], int], str]
    fixed_weights: Callable[[], AbstractContextManager] = nullcontext

    def search(self, batch: str) -> Translate:
        """The batched search with this label."""
        return next(group[batch] for group in self.batched if batch in group)


def in_process(function: Callable[..., Result], *args) -> Result:
    """Run a function in a process of its own, whose memory and kernel caches are its own too.

    Processes are forked from one that has imported this module, which takes no time, and computed nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def convert(
    system: str, model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, root: Path
) -> None:
    """Write the weights in the format of a system to a folder in `root`, if it is not there.

    Raises:
        ImportError: CTranslate2 is not installed.
        ValueError: The system cannot represent the model, or does not compute in this type on this processor.
    """
    name, dtype = system.split("-")
    folder = _folder(system, root)
    if folder.exists():
        return
    if name == "marian":
        folder.mkdir()
        torch.save(to_marian(model).to(getattr(torch, dtype)), folder / "marian.pt")
        tokenizer.save_pretrained(folder)
    elif name == "ours":
        model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).save_pretrained(folder)
        model.float()
        tokenizer.save_pretrained(folder)
    else:
        from ctranslate2 import get_supported_compute_types

        from ..conversion.ctranslate2 import write

        if dtype not in (possible := get_supported_compute_types("cpu")):
            raise ValueError(f"CTranslate2 does not compute in {dtype} here, but in {', '.join(sorted(possible))}.")
        convert("ours-float32", model, tokenizer, root)  # the engine reads its settings
        write(model, tokenizer, folder, dtype)


def _folder(system: str, root: Path) -> Path:
    name, dtype = system.split("-")
    if name == "engine":
        return root / f"ctranslate2-{dtype}"
    return root / ("ours-float32" if system == "ours-int8" else system)


def with_papers_search(model: VaswaniForConditionalGeneration) -> VaswaniForConditionalGeneration:
    """Replace the search settings of a model by the paper's, in place."""
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(model.config, name) for name in ids}, **GENERATION)
    return model


def load(system: str, root: Path) -> System:
    """Load a system from its folder in `root`, where `convert` has written it."""
    disable_progress_bar()
    name, dtype = system.split("-")
    folder = _folder(system, root)
    if name == "engine":
        return _load_engine(dtype, folder, root / "ours-float32")
    return {"ours": _load_ours, "marian": _load_marian, "ctranslate2": _load_ctranslate2}[name](dtype, folder)


def _load_ours(dtype: str, folder: Path) -> System:
    os.environ.update(KERNELS)  # as `hf-vaswani translate` does
    model, tokenizer = load_checkpoint(str(folder), dtype, CPU)

    def single(sentence: list[int], beams: int) -> str:
        ids = torch.tensor([sentence])
        [output] = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams)
        return tokenizer.decode(output, skip_special_tokens=True)

    batched = {f"{size} tokens": partial(_in_order, Search([model], tokenizer, size)) for size in (512, 1024, 2048)}
    return System([batched], single, model.fixed_weights)


def _load_engine(dtype: str, folder: Path, checkpoint: Path) -> System:
    from ..conversion.ctranslate2_engine import CTranslate2Search, load_translator

    model, tokenizer = load_checkpoint(str(checkpoint), "auto", CPU)
    model.to("meta")  # as `hf-vaswani translate` does
    translator = load_translator(folder, dtype, CPU)
    singles = {beams: CTranslate2Search(model, tokenizer, translator, num_beams=beams) for beams in (1, BEAMS)}
    batched = {
        f"{size} tokens": partial(_in_order, CTranslate2Search(model, tokenizer, translator, size))
        for size in (256, 512, 1024)
    }
    return System([batched], lambda sentence, beams: _in_order(singles[beams], [sentence])[0])


def _in_order(search: Search, sentences: list[list[int]]) -> list[str]:
    texts = [""] * len(sentences)
    for index, [best] in search.translate([Request(sentence) for sentence in sentences]):
        texts[index] = best.text
    return texts


def _load_marian(dtype: str, folder: Path) -> System:
    model = torch.load(folder / "marian.pt", weights_only=False, mmap=True)
    tokenizer = load_tokenizer(folder)

    def search(sentences: list[list[int]], beams: int) -> list[str]:
        batch = tokenizer.pad({"input_ids": sentences}, return_tensors="pt")
        longest = batch["input_ids"].shape[1] + EXTRA_TOKENS
        penalty = {"length_penalty": ALPHA} if beams > 1 else {}
        outputs = model.generate(**batch, num_beams=beams, **penalty, max_new_tokens=longest)
        return tokenizer.batch_decode(outputs, skip_special_tokens=True)

    def translate(sentences: list[list[int]], size: int) -> list[str]:
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        texts = [""] * len(sentences)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            for index, text in zip(batch, search([sentences[i] for i in batch], BEAMS)):
                texts[index] = text
        return texts

    batched = {f"{size} sentences": partial(translate, size=size) for size in (16, 32, 64)}
    return System([batched], lambda sentence, beams: search([sentence], beams)[0])


def _load_ctranslate2(dtype: str, folder: Path) -> System:
    import ctranslate2

    tokenizer, threads = load_tokenizer(folder), torch.get_num_threads()

    @cache
    def translator(inter: int):
        options = {"inter_threads": inter, "intra_threads": threads // inter}
        return ctranslate2.Translator(str(folder), compute_type=dtype, **options)

    def translate(sentences: list[list[int]], inter: int, size: int, beams: int = BEAMS) -> list[str]:
        results = translator(inter).translate_batch(
            [tokenizer.convert_ids_to_tokens(sentence) for sentence in sentences],
            beam_size=beams,
            length_penalty=ALPHA,
            max_batch_size=size,
            max_decoding_length=EXTRA_TOKENS + max(map(len, sentences)),
            max_input_length=0,
        )
        outputs = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return tokenizer.batch_decode(outputs, skip_special_tokens=True)

    batched = [
        {
            f"{size} sentences, {inter} x {threads // inter} threads": partial(translate, inter=inter, size=size)
            for size in (16, 32, 64)
        }
        for inter in sorted({1, threads}, reverse=True)
    ]
    return System(batched, lambda sentence, beams: translate([sentence], 1, 1, beams)[0])
