"""`pipeline("translation")` for raw text, a task that transformers 5 removed."""

from contextlib import nullcontext

import torch
from tqdm.auto import tqdm
from transformers import Pipeline


class VaswaniTranslationPipeline(Pipeline):
    """Translation pipeline compatible with that of transformers 4.

    Inputs are a sentence, a list of sentences or a generator. The constructor and the call accept options of
    `generate()`.

    Example:

    ```python
    translator = pipeline("translation", model="runs/demo/average")
    translator("three dogs sleep")  # [{"translation_text": "..."}]
    translator(["a", "b"], num_return_sequences=2)  # a list of two such dictionaries for each sentence
    ```
    """

    _load_tokenizer = True

    BATCH_SIZE_OF_LISTS = 16
    SHOW_PROGRESS_FROM = 200  # sentences
    MOST_PADDING = 128  # upper bound on unused vocabulary entries, as from `pad_to_multiple_of`

    def __init__(self, *args, **kwargs):
        """
        Raises:
            ValueError: The sizes of the tokenizer and of the model's vocabulary do not match.
        """
        super().__init__(*args, **kwargs)
        # The tokenizer reads the source; models of other classes, which the pipeline accepts, may lack the field.
        size = getattr(self.model.config, "source_vocab_size", None) or self.model.config.vocab_size
        unused = size - len(self.tokenizer or [])
        if self.tokenizer is not None and not 0 <= unused < self.MOST_PADDING:
            raise ValueError(
                f"The tokenizer has {len(self.tokenizer)} tokens, but the model's vocabulary "
                f"{size}: they do not match."
            )

    def __call__(self, inputs, batch_size: int | None = None, progress: bool | None = None, **kwargs):
        """
        Args:
            inputs (`str`, `list[str]`, generator or `KeyDataset`): Raw text. Empty text gives empty text.
            batch_size (`int`, *optional*): Sentences per batch; by default, lists use 16 sentences of similar length.
            progress (`bool`, *optional*): Show a progress bar; by default, for lists of 200 sentences or more.
            return_tensors (`bool`, *optional*): Return the tokens as `translation_token_ids` instead of text.
            truncation (`bool`, *optional*): Truncate text to the tokenizer's `model_max_length`.
            clean_up_tokenization_spaces (`bool`, *optional*): Passed to the tokenizer's `decode`.
            **kwargs: Passed to `generate()`.

        Returns:
            For a sentence, a list of dictionaries `{"translation_text": ...}`, one for each returned sequence. For a
            list, one such dictionary for each sentence, or a list of them for several returned sequences. For a
            generator, an iterator over the results of the single sentences.

        Raises:
            TypeError: An input is not a `str`.
        """
        if not isinstance(inputs, list):
            return super().__call__(inputs, batch_size=batch_size, **kwargs)
        for index, text in enumerate(inputs):
            if not isinstance(text, str):
                raise TypeError(f"inputs[{index}] must be a str, got {type(text).__name__}.")
        # Sort by length, longest first, for batches with little padding.
        order = sorted(range(len(inputs)), key=lambda index: -len(inputs[index]))
        outputs = super().__call__(
            (inputs[index] for index in order),
            batch_size=batch_size or self._batch_size or self.BATCH_SIZE_OF_LISTS,
            **kwargs,
        )
        hide = len(inputs) < self.SHOW_PROGRESS_FROM if progress is None else not progress
        results: list = [None] * len(inputs)
        with getattr(self.model, "fixed_weights", nullcontext)():  # the pipeline accepts other models too
            for index, output in zip(order, tqdm(outputs, total=len(inputs), desc="Translating", disable=hide)):
                results[index] = output
        return [result[0] if len(result) == 1 else result for result in results]

    def _sanitize_parameters(
        self, return_tensors=None, clean_up_tokenization_spaces=None, truncation=None, **generate_kwargs
    ):
        preprocess = {} if truncation is None else {"truncation": truncation}
        postprocess = {
            "return_tensors": return_tensors,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        return preprocess, generate_kwargs, {name: value for name, value in postprocess.items() if value is not None}

    def preprocess(self, text: str, truncation: bool = False) -> dict:
        """Tokenise a sentence to `input_ids` and `attention_mask` of shape `(1, source)`."""
        if not isinstance(text, str):
            raise TypeError(f"The text to translate must be a str, got {type(text).__name__}.")
        encoded = self.tokenizer(text, return_tensors="pt", truncation=truncation)
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "is_empty": not text.strip(),
        }

    def _forward(self, model_inputs: dict, **generate_kwargs) -> dict:
        """Generate `output_ids` of shape `(batch, returned sequences, target)`."""
        is_empty = model_inputs.pop("is_empty")
        sequences = self.model.generate(**model_inputs, **generate_kwargs)
        if not isinstance(sequences, torch.Tensor):
            sequences = sequences.sequences
        return {"output_ids": sequences.unflatten(0, (len(model_inputs["input_ids"]), -1)), "is_empty": is_empty}

    def postprocess(self, model_outputs: dict, return_tensors=False, clean_up_tokenization_spaces=None) -> list[dict]:
        """Translations of one sentence, as text or tokens."""
        sequences = model_outputs["output_ids"][0]
        if model_outputs["is_empty"]:
            sequences = sequences[:, :0]
        if return_tensors:
            return [{"translation_token_ids": sequence} for sequence in sequences]
        texts = self.tokenizer.batch_decode(
            sequences, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
        )
        return [{"translation_text": text} for text in texts]


__all__ = ["VaswaniTranslationPipeline"]
