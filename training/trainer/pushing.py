"""Pushes of a run to the Hub while it trains: what makes a model, and nothing that tells of the machine."""

from pathlib import Path

from huggingface_hub import CommitInfo, HfApi


# Not pushed: pickles (the arguments, the optimiser's state), records and logs with paths, adapters, which name the
# folder of the model that they adapt. `hf-vaswani publish` pushes the records without the paths.
PUSHED = [
    *("model*.safetensors", "model.safetensors.index.json", "*_vaswani.py", "checksums.json", "README.md"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
]


def push_model(
    folder: Path,
    repo_id: str,
    message: str,
    path_in_repo: str | None = None,
    token: str | None = None,
    revision: str | None = None,
    blocking: bool = True,
) -> CommitInfo:
    """Uploads the files of a folder that make a model, in one commit.

    Args:
        folder (`Path`): Of a checkpoint, or of a run; its folders are left out.
        repo_id (`str`), revision (`str`, *optional*): Repository and branch.
        message (`str`): Of the commit.
        path_in_repo (`str`, *optional*): Folder of the repository.
        token (`str`, *optional*): Of the user.
        blocking (`bool`): Whether to wait for it.

    Returns:
        The commit, or a `Future` of it where nobody waits.
    """
    return HfApi().upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        path_in_repo=path_in_repo,
        commit_message=message,
        token=token,
        revision=revision,
        allow_patterns=PUSHED,
        ignore_patterns=["*/*"],
        run_as_future=not blocking,
    )
