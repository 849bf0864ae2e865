"""Models of other toolkits for training.py, as large as a configuration, with the loss of their trainers.

| | joeynmt | EOLE |
|---|---|---|
| layer normalisation | post-norm | pre-norm: its decoder has no other |
| embedding | one for both sides and the output | one for both sides and the output |
| biases beside those of the feed-forward network | in attention | in the output projection |
| loss | its own, by KL divergence | `CrossEntropyLoss`, as its trainer makes it, without statistics |

Neither is a requirement of this package. Their ids are ours plus one: unknown, padding, start, end, other tokens.
"""

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_vaswani import VaswaniConfig

from ..data.batching import PairCollator, TokenBudgetSampler
from ..data.encoding import lengths


UNKNOWN, PADDING, START, END = SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
SHIFT = 1  # from our ids to theirs

Batch = dict[str, torch.Tensor]


class JoeyModel(nn.Module):
    """Transformer of joeynmt.

    Raises:
        ImportError: joeynmt is not installed.
    """

    def __init__(self, config: VaswaniConfig):
        from joeynmt.model import build_model
        from joeynmt.vocabulary import Vocabulary

        super().__init__()
        names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL))
        ids = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3, "sep_id": None}
        symbols = SimpleNamespace(**names, **ids, sep_token=None, lang_tags=[])
        vocabulary = Vocabulary(_other_tokens(config), symbols)
        stack = {
            "type": "transformer",
            "num_heads": config.num_heads,
            "hidden_size": config.d_model,
            "ff_size": config.d_ff,
            "dropout": config.dropout,
            "layer_norm": "post",
            "embeddings": {"embedding_dim": config.d_model, "scale": True, "dropout": config.dropout},
        }
        layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        stacks = {name: {**stack, "num_layers": number} for name, number in layers.items()}
        self.model = build_model({"tied_embeddings": True, "tied_softmax": True, **stacks}, vocabulary, vocabulary)
        self.model.loss_function = ("crossentropy", config.label_smoothing)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all tokens of `target` `(batch, 1 + length)` behind the first."""
        return self.model(
            return_type="loss",
            src=source,
            src_mask=(source != SHIFT)[:, None],
            src_length=(source != SHIFT).sum(-1),
            trg_input=target[:, :-1],
            trg=target[:, 1:],
            trg_mask=(target[:, 1:] != SHIFT)[:, None],
        )[0]


class EoleModel(nn.Module):
    """Transformer of EOLE.

    Raises:
        ImportError: EOLE is not installed.
    """

    def __init__(self, config: VaswaniConfig):
        import pyonmttok
        from eole.config.models import TransformerModelConfig
        from eole.config.training import TrainingConfig
        from eole.models.model import get_model_class

        super().__init__()
        vocabulary = pyonmttok.build_vocab_from_tokens(_other_tokens(config), special_tokens=list(SPECIAL))
        names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL))
        size = TransformerModelConfig(
            encoder={"encoder_type": "transformer", "layers": config.encoder_layers},
            decoder={"decoder_type": "transformer", "layers": config.decoder_layers},
            hidden_size=config.d_model,
            heads=config.num_heads,
            transformer_ff=config.d_ff,
            mlp_activation_fn=config.activation_function,
            add_ffnbias=True,
            share_embeddings=True,
            share_decoder_embeddings=True,
            embeddings={"position_encoding_type": "SinusoidalInterleaved", "word_vec_size": config.d_model},
        )
        training = TrainingConfig(dropout=[config.dropout], attention_dropout=[config.attention_dropout])
        vocabularies = {"src": vocabulary, "tgt": vocabulary, "specials": names}
        self.model = get_model_class(size).for_training(size, vocabularies, training, device_id=-1)
        options = {"ignore_index": SHIFT, "reduction": "sum", "label_smoothing": config.label_smoothing}
        self.loss = nn.CrossEntropyLoss(**options)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """As [`JoeyModel.forward`]."""
        states = self.model(source, target, (source != SHIFT).sum(-1)).dec_out
        return self.loss(self.model.generator(states).flatten(0, 1), target[:, 1:].flatten())


TOOLKITS: dict[str, type[nn.Module]] = {"joeynmt": JoeyModel, "eole": EoleModel}


def _other_tokens(config: VaswaniConfig) -> list[str]:
    return [f"token {index}" for index in range(config.vocab_size - len(SPECIAL) + SHIFT)]


def updates(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tokens: int, part_tokens: int) -> Iterator[list]:
    """Batches of each update, without end: those of this package's Trainer, so that the toolkits have no more padding.

    Args:
        dataset (`Dataset`): Tokenised pairs.
        tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
        tokens (`int`): Tokens per update, on each side.
        part_tokens (`int`): Maximum tokens per batch, on each side.
    """
    parts = -(-tokens // part_tokens)
    sampler = TokenBudgetSampler(*lengths(dataset), tokens // parts, tokens // parts, accumulation=parts)
    collate = PairCollator(tokenizer.pad_token_id, tokenizer.eos_token_id)
    for epoch in count():
        sampler.set_epoch(epoch)
        batches: list[Batch] = []
        for indices in sampler:
            batches.append(collate([dataset[int(index)] for index in indices]))
            if len(batches) == parts:
                yield batches
                batches = []


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], dtype: str) -> None:
    """Train on the batches of one update. The loss is a mean over its target tokens."""
    labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    device = next(model.parameters()).device
    for batch in batches:
        source, target = their_ids(batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(source.to(device), target.to(device))
        (loss / labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def their_ids(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of a batch in the toolkits' ids. Targets begin with the start token."""
    target = batch["labels"].masked_fill(batch["labels"] == -100, 0) + SHIFT
    return batch["input_ids"] + SHIFT, nn.functional.pad(target, (1, 0), value=SPECIAL.index(START))
