"""Pushes to the Hub during training: the files that make the model, and nothing that describes the machine."""

from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from transformers import PreTrainedModel, Seq2SeqTrainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from ..data.two_sided_tokenizer import TARGET_TOKENIZER


# Not pushed: pickles (training arguments, optimiser state), records and logs, which contain paths, and adapters, which
# name the folder of their base model. `hf-vaswani publish` pushes the records without the paths.
PUSHED = [
    *("model*.safetensors", "model.safetensors.index.json", "*_vaswani.py", "checksums.json", "README.md"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", TARGET_TOKENIZER),
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
    """Upload the files of a folder that make a model, in one commit.

    Args:
        folder (`Path`): Folder of a checkpoint or of a run. Its subfolders are left out.
        repo_id (`str`): Repository.
        message (`str`): Commit message.
        path_in_repo (`str`, *optional*): Folder in the repository, by default its root.
        token (`str`, *optional*): The user's token.
        revision (`str`, *optional*): Branch.
        blocking (`bool`): Wait for the upload to finish.

    Returns:
        The commit, or a `Future` of it if not `blocking`.
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


class PushingTrainer(Seq2SeqTrainer):
    """Base class that pushes only the files of `PUSHED`. Subclasses call `push_checkpoint` on finished checkpoints."""

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> CommitInfo | None:
        """Save the model and push it with its card.

        Args:
            commit_message, blocking, token, revision, private: The stock Trainer's arguments.
            **kwargs: Arguments of `create_model_card`.

        Returns:
            The commit, or a `Future` of it if not `blocking`. `None` in all processes but the first.
        """
        args, token = self.args, token or self.args.hub_token
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        model_name = kwargs.pop("model_name", None) or self.hub_model_id.split("/")[-1]
        self.create_model_card(model_name=model_name, **kwargs)
        if self.push_in_progress is not None:
            self.push_in_progress.wait_until_done()
        places = Path(args.output_dir), self.hub_model_id
        options = {"token": token, "revision": revision or args.hub_revision, "blocking": blocking}
        return push_model(*places, commit_message, **options)

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Push the model of a finished checkpoint in the background, as `hub_strategy` and `hub_always_push` say.

        Args:
            checkpoint (`Path`): Folder of the checkpoint.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if not isinstance(self.model, PreTrainedModel):  # adapters name the folder of their base model
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        places = [None]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            places.append("last-checkpoint" if self.args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name)
        message = f"Training in progress, step {self.state.global_step}"
        options = {"token": self.args.hub_token, "revision": self.args.hub_revision, "blocking": False}
        jobs = [push_model(checkpoint, self.hub_model_id, message, place, **options) for place in places]
        if busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the stock Trainer calls this before the checkpoint is finished, and would push its pickles."""
