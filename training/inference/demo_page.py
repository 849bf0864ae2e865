"""Page of `hf-vaswani demo`: translation with n-best lists, log probabilities and attention, in Gradio."""

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

from ..files import write_whole
from .attention_maps import attention_maps, attention_page
from .corpus import Line, RequestBuilder, translate_window
from .loading import load_checkpoint, source_limit
from .search import Search, Translation
from .workers import Processes


MAX_LINES = 100
MAX_BEAMS = 16
# Limit of a text whose attention is shown, because the page holds the weights of all token pairs, layers and heads.
MAX_ATTENTION_TOKENS = 100

COLUMNS = {"line": "number", "rank": "number", "score": "number", "log probability": "number", "translation": "str"}

APP = '''"""Translate with {model}: the page of `hf-vaswani demo`."""

from hf_vaswani_training.inference.demo_page import SERVER, make_page
from hf_vaswani_training.publishing.introduction import introduce


page = make_page("{model}", introduction=introduce("{model}"))

if __name__ == "__main__":
    page.launch(app_kwargs=SERVER)
'''

CARD = """---
{metadata}
---

# Translate with {model}

Translate with [{model}](https://huggingface.co/{model}). The page shows the n-best list, the log probability of every
token and the attention. Written by `hf-vaswani demo --model {model} --write-space`.
"""


class NoUploads:
    """ASGI middleware that refuses file uploads before they are read. Gradio accepts them on every page.

    Args:
        app: ASGI application that answers all other requests.
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
        await send({"type": "http.response.body", "body": b"This page accepts no files."})


# Arguments of the FastAPI application that serves the page. Its middleware is a list of (class, args, kwargs).
SERVER = {"middleware": [(NoUploads, (), {})]}


@dataclass(frozen=True)
class Found:
    """One of the translations of a line.

    Attributes:
        line (`int`): Number of the line, counted from 1.
        rank (`int`): Rank of the translation; the best one has rank 1.
        source (`str`): Text of the line.
        translation (`Translation`): Translation with its score and the log probability of every token.
    """

    line: int
    rank: int
    source: str
    translation: Translation

    @property
    def row(self) -> list:
        """Row of the n-best list, in the order of `COLUMNS`."""
        numbers = [round(number, 4) for number in (self.translation.score, self.translation.log_probability)]
        return [self.line, self.rank, *numbers, self.translation.text]

    @property
    def label(self) -> str:
        """Entry of the menu that selects a translation."""
        return f"{self.line}.{self.rank}  {self.translation.text[:80]}"


class Translator:
    """Translator of the text that is typed into the page.

    Args:
        model (`PreTrainedModel`): Model in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer
        self.limit = source_limit([model])
        self.processes = Processes(cpu=model.device.type == "cpu")

    def __call__(
        self, text: str, n_best: int = 1, num_beams: int | None = None, length_penalty: float | None = None
    ) -> tuple[list[Found], str]:
        """Translate a text line by line.

        Args:
            text (`str`): One or more lines.
            n_best (`int`): Number of translations per line.
            num_beams (`int`, *optional*), length_penalty (`float`, *optional*): Search options; default to the
                checkpoint's.

        Returns:
            The translations of each line, best first, without empty lines; and a notice about lines that were split,
            empty if there are none.

        Raises:
            ValueError: The text is empty or has too many lines, a line cannot be split to the model's maximum length,
                or `n_best` exceeds `num_beams`.
        """
        lines = [Line(number, line) for number, line in enumerate(text.split("\n"), start=1)]
        if not text.strip():
            raise ValueError("There is nothing to translate: the text is empty.")
        if len(lines) > MAX_LINES:
            raise ValueError(
                f"The text has {len(lines)} lines, where {MAX_LINES} are allowed; `hf-vaswani translate` translates "
                "files of any length."
            )
        options = {"num_beams": num_beams, "length_penalty": length_penalty}
        options = {name: value for name, value in options.items() if value is not None}
        search = Search([self.model], self.tokenizer, n_best=n_best, scores=True, log_probabilities=True, **options)
        corpus = RequestBuilder(search, "the text", None, self.limit, split=True)
        translations = translate_window(search, corpus.requests(lines), self.processes, tqdm(disable=True))
        candidates = [
            Found(line.number, rank, line.text, translation)
            for line, ranked in zip(lines, translations)
            for rank, translation in enumerate(ranked, start=1)
            if line.text.strip()
        ]
        return candidates, " ".join(corpus.notices())

    def attention(self, candidate: Found) -> str:
        """Render the attention over a line and one of its translations as HTML.

        The attention page is in an iframe whose sandbox isolates its scripts from the surrounding page. For a text
        that is too long, the result is a sentence that says so.
        """
        limit = min(MAX_ATTENTION_TOKENS, self.limit)
        sides = {"text": candidate.source, "text_target": candidate.translation.text}
        longest = max(len(self.tokenizer(**{side: text})["input_ids"]) for side, text in sides.items())
        if longest > limit:
            return f"<p>Attention is shown for texts of at most {limit} tokens. This text has {longest}.</p>"
        maps = attention_maps(self.model, self.tokenizer, candidate.source, candidate.translation.text)
        page = attention_page(maps)
        style = "width: 100%; height: 48rem; border: 0"
        return f'<iframe title="Attention" sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'


def best_translations(candidates: list[Found], lines: int) -> str:
    """Join the best translations of all lines, one per line. Empty lines stay empty."""
    best = {candidate.line: candidate.translation.text for candidate in candidates if candidate.rank == 1}
    return "\n".join(best.get(number, "") for number in range(1, lines + 1))


def token_table(translation: Translation) -> str:
    """Render the tokens of a translation as HTML, each above its log probability."""
    cells = [
        f"<ruby style='ruby-position: under; margin-right: .4em'>{escape(text.strip() or '␣')}"
        f"<rt style='font-size: .7em'>{number:.2f}</rt></ruby>"
        for text, number in translation.tokens
    ]
    return f"<p translate='no' style='line-height: 2.4'>{' '.join(cells)}</p>"


def import_gradio() -> ModuleType:
    """Import Gradio.

    Raises:
        ImportError: Gradio is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The page needs Gradio: pip install 'hf-vaswani[demo]'.") from error
    return gradio


@dataclass(frozen=True)
class Introduction:
    """Languages and an example for the page.

    Attributes:
        languages (`tuple[str, str]`, *optional*): Source and target language, such as "en" and "de".
        example (`str`): Source sentence that the page opens with.
    """

    languages: tuple[str, str] | None = None
    example: str = ""

    @property
    def labels(self) -> tuple[str, str]:
        """Labels of the source and of the translation."""
        source, target = (f" ({language})" for language in self.languages) if self.languages else ("", "")
        return f"Source{source}, one sentence per line", f"Translation{target}"


def make_page(
    name: str,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    introduction: Introduction = Introduction(),
):
    """Build the page as a `gradio.Blocks`, whose `launch()` serves it.

    Args:
        name (`str`): Checkpoint folder or Hub repository.
        dtype (`str`), trust_remote_code (`bool`): See `load_checkpoint`.
        introduction (`Introduction`): Languages and example.

    Raises:
        ImportError: Gradio is not installed.
        OSError, ValueError: See `load_checkpoint`.
    """
    gr = import_gradio()
    translator = Translator(*load_checkpoint(name, dtype, trust_remote_code=trust_remote_code))
    default = translator.model.generation_config
    source_label, translation_label = introduction.labels

    @contextlib.contextmanager
    def show_errors() -> Iterator[None]:
        """Context that shows a ValueError in the page."""
        try:
            yield
        except ValueError as error:
            raise gr.Error(escape(str(error), quote=False), print_exception=False) from error  # Gradio renders HTML

    def look_into(candidates: list[Found], index: int) -> tuple[str, str]:
        with show_errors():
            return token_table(candidates[index].translation), translator.attention(candidates[index])

    def translate(text: str, beams: float, alpha: float | None, n_best: float) -> tuple:
        with show_errors():
            candidates, notice = translator(text, int(n_best), int(beams), alpha)
        if notice:
            gr.Warning(notice)
        labels = [(candidate.label, index) for index, candidate in enumerate(candidates)]
        rows = [candidate.row for candidate in candidates]
        text_lines = text.count("\n") + 1
        return (
            best_translations(candidates, text_lines),
            rows,
            gr.Dropdown(choices=labels, value=0),
            candidates,
            *look_into(candidates, 0),
        )

    with gr.Blocks(title=f"Translate with {name}", analytics_enabled=False) as page:
        gr.Markdown(f"# Translate with {name}")
        with gr.Row():
            text = gr.Textbox(introduction.example, label=source_label, lines=6, autofocus=True)
            translation = gr.Textbox(label=translation_label, lines=6, interactive=False, buttons=["copy"])
        with gr.Row():
            beams = gr.Slider(1, max(MAX_BEAMS, default.num_beams or 1), default.num_beams or 1, step=1, label="Beams")
            alpha = gr.Number(default.length_penalty, label="Length penalty α", minimum=0, maximum=10, step=0.1)
            n_best = gr.Slider(1, MAX_BEAMS, 1, step=1, label="Translations per sentence")
        button = gr.Button("Translate", variant="primary")
        table = gr.Dataframe(
            headers=list(COLUMNS),
            datatype=list(COLUMNS.values()),
            column_widths=["8%", "8%", "12%", "16%", "56%"],
            label="N-best list",
            interactive=False,
            wrap=True,
        )
        chosen = gr.Dropdown([], label="Translation to inspect", type="value")
        tokens, attention = gr.HTML(), gr.HTML()
        state = gr.State([])
        # One request at a time, because computing the attention weights switches the whole model to eager attention.
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
    """Write the files of a Hugging Face Space that serves the page: `app.py`, `requirements.txt` and `README.md`.

    Args:
        model (`str`): Name of the model on the Hub.
        folder (`str`): Folder to write to, created if it does not exist.
        gradio_version (`str`): Version of Gradio that the Space installs.

    Returns:
        `list[Path]`: The files.

    Raises:
        FileExistsError: One of the files already exists.
        ValueError: `model` is a local folder, or not a name of the form user/name.
    """
    if Path(model).exists():
        raise ValueError(f"{model} is a local folder; expected the name of a model on the Hub, user/name.")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ValueError(f"{model} is not the name of a model on the Hub, expected user/name: {error}") from None
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
    if existing := [str(path) for path in paths if os.path.lexists(path)]:
        raise FileExistsError(f"Files exist and are not overwritten: {', '.join(existing)}.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values()):
        write_whole(path, text)
    return paths
