"""Push a checkpoint to the Hub: weights, tokenizer, the code they need, and a model card."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

import hf_vaswani
from hf_vaswani import VaswaniForConditionalGeneration

from .average import RECORD
from .translate import load_checkpoint


CARD = "README.md"
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
CODE = sorted(path.name for path in Path(hf_vaswani.__file__).parent.glob("*_vaswani.py"))
# What makes a checkpoint; not the optimiser's state and other pickles that the Trainer leaves beside it.
FILES = [
    CARD,
    RECORD,
    *WEIGHTS,
    *CODE,
    "checksums.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
]


def check_checkpoint(folder: Path) -> None:
    """Raises an error where somebody who pulls the checkpoint could not use it.

    Raises:
        FileNotFoundError: A file is missing that a stranger needs, such as the model's code.
        OSError: The weights are damaged.
        ValueError: The tokenizer does not belong to the model, or the weights are not all there.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder.")
    load_checkpoint(str(folder))
    _, report = VaswaniForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    if wrong := {name: sorted(keys) for name, keys in report.items() if keys}:
        raise ValueError(f"{folder}: the weights do not fit the model: {wrong}.")
    needed = {*CODE, "checksums.json", "generation_config.json", "tokenizer.json"}
    if missing := sorted(name for name in needed if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: load the model and save it again.")


def card(languages: list[str] | None, license: str | None) -> ModelCard:
    """A minimal card, with the metadata that lets the Hub find and load the model."""
    data = ModelCardData(
        language=languages,
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vaswani", "attention-is-all-you-need"],
    )
    loading = 'pipeline("translation", model="...", trust_remote_code=True)'
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# Transformer\n\n"
        'The model of "Attention Is All You Need" (arXiv 1706.03762), trained with hf-vaswani.\n\n'
        f"```python\nfrom transformers import pipeline\n\ntranslator = {loading}\n```\n"
    )


def publish(
    folder: str,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload the model",
    languages: list[str] | None = None,
    license: str | None = None,
) -> str:
    """Push a checkpoint in one commit. What is on the Hub already is not sent again.

    Args:
        folder (`str`): Checkpoint folder.
        repo_id (`str`): Repository, `user/name`; made if it is not there.
        private (`bool`, *optional*): Whether a new repository is private.
        revision (`str`, *optional*): Branch to push to, made if it is not there; the main one when not given.
        message (`str`): Of the commit.
        languages (`list[str]`, *optional*), license (`str`, *optional*): For the card, which is written where neither
            the folder nor the repository has one.

    Returns:
        The commit's address.

    Raises:
        FileNotFoundError: The folder lacks something that a stranger needs.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses; nothing is changed there.
    """
    check_checkpoint(Path(folder))
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    if not (Path(folder) / CARD).is_file() and not api.file_exists(repo_id, CARD, revision=revision):
        card(languages, license).push_to_hub(repo_id, revision=revision, commit_message="Add a model card")
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=FILES,
        ignore_patterns="*/*",
        delete_patterns=WEIGHTS,  # of an earlier model with other files; what is uploaded stays
        commit_message=message,
        revision=revision,
    )
    return commit.commit_url


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani publish`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani publish", description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="checkpoint folder")
    parser.add_argument("--repo", required=True, help="repository on the Hub, user/name; made if it is not there")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to push to (main)")
    parser.add_argument("--message", default="Upload the model", help="of the commit (%(default)s)")
    parser.add_argument("--languages", nargs="+", help="of the card: en de")
    parser.add_argument("--license", help="of the card: cc-by-4.0")
    args = parser.parse_args(argv)
    url = publish(args.checkpoint, args.repo, args.private, args.revision, args.message, args.languages, args.license)
    print(url)


if __name__ == "__main__":
    main()
