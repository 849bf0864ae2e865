"""Translate in the browser: a page with the n-best list, every token's log probability and the attention; also as a
Space of the Hub.

The page needs Gradio; what it shows is made without.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import ModuleType

from huggingface_hub import SpaceCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_vaswani

from .files import check_output_folder, write_whole
from .inference.attention_maps import attention_maps, attention_page
from .inference.corpus import Line, RequestBuilder, translate_window
from .inference.loading import DTYPES, load_checkpoint, source_limit
from .inference.search import Search, Translation
from .inference.workers import Processes
from .options import add_trust, positive


MOST_LINES = 100
MOST_BEAMS = 16
# Of a text whose attention is shown: the page holds a number for any two tokens, in every layer and head.
MOST_ATTENTION_TOKENS = 100

COLUMNS = {"line": "number", "rank": "number", "score": "number", "log probability": "number", "translation": "str"}

APP = '''"""Translate with {model}: the page of `hf-vaswani demo`."""

from hf_vaswani_training.demo import SERVER, make_page


page = make_page("{model}")

if __name__ == "__main__":
    page.launch(app_kwargs=SERVER)
'''

CARD = """---
{metadata}
---

# Translate with {model}

A page to translate with [{model}](https://huggingface.co/{model}), which shows the n-best list, the log probability of
every token and the attention. Written by `hf-vaswani demo --model {model} --write-space`.
"""


class NoUploads:
    """Middleware of the page's server that refuses files before they are read: Gradio takes them on every page.

    Args:
        app: What answers all other requests, by ASGI.
    """

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        kinds = [value.strip().lower() for name, value in scope.get("headers", ()) if name.lower() == b"content-type"]
        upload = scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload")
        if not upload and not any(kind.startswith(b"multipart/") for kind in kinds):
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": b"This page takes no files."})


# What the page's server is made with: middleware in the form that FastAPI takes, class and arguments.
SERVER = {"middleware": [(NoUploads, (), {})]}


@dataclass(frozen=True)
class Found:
    """One of the translations of a line.

    Attributes:
        line (`int`), rank (`int`): Both from 1; the best translation has rank 1.
        source (`str`): The line.
        translation (`Translation`): With its score, and every token's log probability.
    """

    line: int
    rank: int
    source: str
    translation: Translation

    @property
    def row(self) -> list:
        """A row of the n-best list, in the order of `COLUMNS`."""
        found = self.translation
        return [self.line, self.rank, round(found.score, 4), round(found.log_probability, 4), found.text]

    @property
    def label(self) -> str:
        return f"{self.line}.{self.rank}  {self.translation.text[:80]}"


class Translator:
    """Translates what is typed into the page, with one model.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Of the same checkpoint.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer
        self.limit = source_limit([model])
        self.processes = Processes(cpu=model.device.type == "cpu")

    def __call__(
        self, text: str, n_best: int = 1, num_beams: int | None = None, length_penalty: float | None = None
    ) -> tuple[list[Found], str]:
        """Translations of lines, best first, none of an empty line; and what is to be said of lines that were cut.

        Args:
            text (`str`): One line or several.
            n_best (`int`): Translations of each line.
            num_beams (`int`, *optional*), length_penalty (`float`, *optional*): Instead of the checkpoint's.

        Raises:
            ValueError: The text is empty or has too many lines, a line cannot be cut to the model's length, or there
                are not as many beams as translations to find.
        """
        lines = [Line(number, line) for number, line in enumerate(text.split("\n"), start=1)]
        if not text.strip():
            raise ValueError("There is nothing to translate: the text is empty.")
        if len(lines) > MOST_LINES:
            raise ValueError(
                f"The text has {len(lines)} lines, where {MOST_LINES} are allowed; `hf-vaswani translate` translates "
                "files of any length."
            )
        options = {"num_beams": num_beams, "length_penalty": length_penalty}
        options = {name: value for name, value in options.items() if value is not None}
        search = Search([self.model], self.tokenizer, n_best=n_best, scores=True, log_probabilities=True, **options)
        corpus = RequestBuilder(search, "the text", None, self.limit, split=True)
        translations = translate_window(search, corpus.requests(lines), self.processes, tqdm(disable=True))
        found = [
            Found(line.number, rank, line.text, translation)
            for line, ranked in zip(lines, translations)
            for rank, translation in enumerate(ranked, start=1)
            if line.text.strip()
        ]
        return found, corpus.notice()

    def attention(self, found: Found) -> str:
        """The attention over a line and one of its translations, as HTML: a page of its own within the page.

        Its scripts cannot reach what is around it. Where a text is too long for it, a sentence says so instead.
        """
        limit = min(MOST_ATTENTION_TOKENS, self.limit)
        longest = max(len(self.tokenizer(text)["input_ids"]) for text in (found.source, found.translation.text))
        if longest > limit:
            return f"<p>Attention is shown of texts of at most {limit} tokens; here are {longest}.</p>"
        page = attention_page(attention_maps(self.model, self.tokenizer, found.source, found.translation.text))
        style = "width: 100%; height: 48rem; border: 0"
        return f'<iframe title="Attention" sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'


def best_translations(found: list[Found], lines: int) -> str:
    """The best translation of every line, a line each; empty where the line was."""
    best = {each.line: each.translation.text for each in found if each.rank == 1}
    return "\n".join(best.get(number, "") for number in range(1, lines + 1))


def token_table(translation: Translation) -> str:
    """The tokens of a translation, each above its log probability, as HTML."""
    cells = [
        f"<ruby style='ruby-position: under; margin-right: .4em'>{escape(text.strip() or '␣')}"
        f"<rt style='font-size: .7em'>{number:.2f}</rt></ruby>"
        for text, number in translation.tokens
    ]
    return f"<p translate='no' style='line-height: 2.4'>{' '.join(cells)}</p>"


def import_gradio() -> ModuleType:
    """The module `gradio`.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The page needs Gradio: pip install 'hf-vaswani[demo]'.") from error
    return gradio


def make_page(name: str, dtype: str = "auto", trust_remote_code: bool = False):
    """The page, as a `gradio.Blocks` whose `launch()` serves it.

    Args:
        name (`str`): Checkpoint folder or Hub repository.
        dtype (`str`), trust_remote_code (`bool`): As of `load_checkpoint`.

    Raises:
        ImportError: Gradio is not installed.
        OSError: No such checkpoint.
    """
    gr = import_gradio()
    translator = Translator(*load_checkpoint(name, dtype, trust_remote_code=trust_remote_code))
    default = translator.model.generation_config

    @contextlib.contextmanager
    def mistakes_shown() -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise gr.Error(escape(str(error), quote=False), print_exception=False) from error  # it may be HTML

    def look_into(found: list[Found], index: int) -> tuple[str, str]:
        with mistakes_shown():
            return token_table(found[index].translation), translator.attention(found[index])

    def translate(text: str, beams: float, alpha: float | None, n_best: float) -> tuple:
        with mistakes_shown():
            found, notice = translator(text, int(n_best), int(beams), alpha)
        if notice:
            gr.Warning(notice)
        choice = gr.Dropdown(choices=[(each.label, index) for index, each in enumerate(found)], value=0)
        rows = [each.row for each in found]
        return best_translations(found, text.count("\n") + 1), rows, choice, found, *look_into(found, 0)

    with gr.Blocks(title=f"Translate with {name}", analytics_enabled=False) as page:
        gr.Markdown(f"# Translate with {name}")
        with gr.Row():
            text = gr.Textbox(label="Text, a sentence a line", lines=6, autofocus=True)
            translation = gr.Textbox(label="Translation", lines=6, interactive=False, buttons=["copy"])
        with gr.Row():
            beams = gr.Slider(
                1, max(MOST_BEAMS, default.num_beams or 1), default.num_beams or 1, step=1, label="Beams"
            )
            alpha = gr.Number(default.length_penalty, label="Length penalty α", minimum=0, maximum=10, step=0.1)
            n_best = gr.Slider(1, MOST_BEAMS, 1, step=1, label="Translations of each sentence")
        button = gr.Button("Translate", variant="primary")
        table = gr.Dataframe(
            headers=list(COLUMNS),
            datatype=list(COLUMNS.values()),
            column_widths=["8%", "8%", "12%", "16%", "56%"],
            label="N-best list",
            interactive=False,
            wrap=True,
        )
        chosen = gr.Dropdown([], label="Look into", type="value")
        tokens, attention = gr.HTML(), gr.HTML()
        state = gr.State([])
        # One at a time: attention is computed in a form that the whole model is switched to.
        one_by_one = {"concurrency_id": "model", "concurrency_limit": 1}
        button.click(
            translate,
            [text, beams, alpha, n_best],
            [translation, table, chosen, state, tokens, attention],
            api_name="translate",
            show_progress_on=translation,
            **one_by_one,
        )
        chosen.input(
            look_into,
            [state, chosen],
            [tokens, attention],
            api_name="look_into",
            show_progress_on=chosen,
            **one_by_one,
        )
    return page


def write_space(model: str, folder: str, gradio_version: str) -> list[Path]:
    """Write what a Space of the Hub needs to show the page: `app.py`, `requirements.txt` and `README.md`.

    Args:
        model (`str`): The model's name on the Hub.
        folder (`str`): Where to; made if it is not there.
        gradio_version (`str`): For the Space to install.

    Raises:
        FileExistsError: One of the files is there already.
        ValueError: `model` is a folder, or no name of the form user/name.
    """
    if Path(model).exists():
        raise ValueError(f"{model} is a folder of this machine; a Space loads a model from the Hub: user/name.")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ValueError(f"{model} is not the name of a model on the Hub, user/name: {error}") from None
    metadata = SpaceCardData(
        title=f"Translate with {model}",
        sdk="gradio",
        sdk_version=gradio_version,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",  # a Space's own default is too old
        app_file="app.py",
        models=[model],
    )
    files = {
        "app.py": APP.format(model=model),
        "requirements.txt": f"hf-vaswani[train,demo]=={hf_vaswani.__version__}\n",
        "README.md": CARD.format(model=model, metadata=metadata.to_yaml()),
    }
    paths = [Path(folder) / name for name in files]
    if there := [str(path) for path in paths if os.path.lexists(path)]:
        raise FileExistsError(f"Already there, and not overwritten: {', '.join(there)}.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values()):
        write_whole(path, text)
    return paths


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani demo`."""
    parser = argparse.ArgumentParser(
        prog="hf-vaswani demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to compute with (that of the weights)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; 0.0.0.0 is all (%(default)s)")
    parser.add_argument("--port", type=positive, help="port to serve at (the first free one from 7860)")
    parser.add_argument("--share", action="store_true", help="serve at a public address too, through gradio.live")
    parser.add_argument("--write-space", metavar="FOLDER", help="serve nothing: write a Space that does, for the Hub")
    add_trust(parser)
    args = parser.parse_args(argv)
    if args.write_space is not None:
        check_output_folder(args.write_space, "--write-space")
    version = import_gradio().__version__
    if args.write_space is not None:
        print(*write_space(args.model, args.write_space, version), sep="\n")
        return
    page = make_page(args.model, args.dtype, args.trust_remote_code)
    page.launch(server_name=args.host, server_port=args.port, share=args.share, app_kwargs=SERVER)


if __name__ == "__main__":
    main()
