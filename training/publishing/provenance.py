"""The original of a converted model, and its conversion, as Markdown and as the Hub's metadata."""

from pathlib import Path
from urllib.parse import quote, urlsplit

from hf_vaswani import VaswaniConfig

from ..inference.choices import LICENSE
from ..inference.origin import Origin
from ..markdown import as_code, as_markdown, one_line
from .records import Run


HUB = "https://huggingface.co"
KINDS = {
    "marian": "MarianMT of transformers",
    "npz": "Marian's own files",
    "fsmt": "FSMT of transformers",
    "fairseq": "fairseq's own files",
}
# Relations of the Hub are adapter, finetune, merge and quantized; without one, it assumes finetune. It lists models in
# another format, such as GGUF or ONNX, as quantized, also those that keep every bit.
CONVERSION, FINE_TUNING = "quantized", "finetune"


def original_name(origin: Origin) -> str:
    """The original as Markdown: a link to the Hub, or the name of a folder without its path."""
    if repository := origin.get("repository"):
        return f"[{as_markdown(repository)}]({HUB}/{quote(repository, safe='/', errors='replace')})"
    return as_code(_folder_name(origin))


def conversion_rows(origin: Origin, config: VaswaniConfig) -> list[tuple[str, str]]:
    """Rows of a card about the conversion, as `(label, Markdown)`."""
    state = origin.get("commit") or origin.get("revision")
    place, compared = as_markdown(origin["checked_on"]), as_markdown(origin["compared"])
    measured = (
        f"checked on {place} before anything was written: {compared} differ by at most {origin['logits']:.1e} of the "
        f"largest, {origin['equal']:,} of {origin['sentences']:,} translations are equal"
    )
    return [
        ("Converted from", f"{original_name(origin)}{f', revision {as_code(state)}' if state else ''}"),
        ("Format of the original", KINDS.get(origin["format"]) or as_markdown(origin["format"])),
        ("Positions", _positions(origin, config)),
        ("Agreement of the conversion", measured),
        ("Tokenizer", as_markdown(origin["tokenizer"])),
    ]


def _positions(origin: Origin, config: VaswaniConfig) -> str:
    table = f"a table of {config.max_position_embeddings:,}"
    if origin.get("as_trained"):
        return f"those of Marian's training, as {table}; so is the ε of layer normalisation, {config.layer_norm_eps:g}"
    if config.position_embedding == "learned":
        return f"those of the original, as {table}"
    return "those of MarianMT in transformers, which differ slightly from those of Marian's training"


def license_of(run: Run) -> str | None:
    """Licence of a conversion, if its original states one of the Hub's form; `None` for models trained further."""
    stated = run.origin.get("license") if run.is_converted else None
    return stated if stated and LICENSE.fullmatch(stated) else None


def original_license(origin: Origin) -> str:
    """Sentence about the licence of the original."""
    if not origin.get("license"):
        return "The licence of the original is not known: its files name none."
    named = f" ({as_markdown(origin['license_name'])})" if origin.get("license_name") else ""
    return f"The model card of the original names the licence {as_markdown(origin['license'])}{named}."


def metadata_of(run: Run, license: str | None) -> dict[str, str]:
    """Metadata of a model that goes back to a conversion: base model, relation, and the name and link of its licence.

    The Hub knows models of its own as base models only, so a conversion of a folder has none.

    Args:
        run (`Run`): Records of the model.
        license (`str`, *optional*): Licence of the card.
    """
    if (origin := run.origin) is None:
        return {}
    found = {}
    if repository := origin.get("repository"):
        relation = CONVERSION if run.is_converted else FINE_TUNING
        found |= {"base_model": one_line(repository), "base_model_relation": relation}
    if license is not None and license == license_of(run):
        named = {"license_name": origin.get("license_name"), "license_link": _license_link(origin)}
        found |= {name: one_line(value) for name, value in named.items() if value}
    return found


def _license_link(origin: Origin) -> str | None:
    """Address of the licence. A file of the original's repository gets that of its page."""
    link, repository = origin.get("license_link"), origin.get("repository")
    if not link or urlsplit(link).scheme in ("http", "https"):
        return link
    place = f"{repository}/blob/{origin.get('commit') or 'main'}/{link}"
    return f"{HUB}/{quote(place, safe='/', errors='replace')}" if repository else None


def published(origin: Origin) -> dict:
    """Record without the path of a local folder."""
    return {**origin, "source": origin.get("repository") or _folder_name(origin)}


def _folder_name(origin: Origin) -> str:
    return Path(origin["source"]).name or origin["source"]
