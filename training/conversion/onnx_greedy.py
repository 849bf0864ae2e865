"""Greedy translation with the files of `hf-vaswani convert --to onnx`: an example to copy.

It needs onnxruntime, NumPy and tokenizers, but neither PyTorch nor this package:

python onnx_greedy.py FOLDER < sentences > translations
"""

import json
import sys
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession
from tokenizers import Tokenizer


CACHE = "past_key_values."
CONSTANT = "cross_attention_cache"  # keys and values of the source, which no step changes


class OnnxTranslator:
    """Graphs of a model: `encoder`, `prefill` for the first target token, `decode` for one more."""

    def __init__(self, folder: str | Path):
        names = ("encoder", "prefill", "decode")
        self.encoder, self.prefill, self.decode = (InferenceSession(f"{folder}/{name}.onnx") for name in names)
        self.grown = [out.name for out in self.decode.get_outputs() if CACHE in out.name and CONSTANT not in out.name]
        settings = json.loads(Path(folder, "generation_config.json").read_text(encoding="utf-8"))
        self.start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
        self.ends = settings.get("eos_token_id", [])
        self.pad = settings.get("pad_token_id", 0)

    def first(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> tuple[np.ndarray, dict]:
        """Logits `(batch, vocabulary)` of the first target token, and the inputs of `decode` but for the token."""
        source = {"input_ids": input_ids.astype(np.int64), "attention_mask": attention_mask.astype(np.int64)}
        [states] = self.encoder.run(["last_hidden_state"], source)
        inputs = {"attention_mask": source["attention_mask"], "encoder_outputs.last_hidden_state": states}
        start = np.full((len(input_ids), 1), self.start, dtype=np.int64)
        names = [out.name for out in self.prefill.get_outputs()]
        outputs = dict(zip(names, self.prefill.run(names, {"decoder_input_ids": start, **inputs})))
        cache = {f"input.{name}": value for name, value in outputs.items() if name.startswith(CACHE)}
        return outputs["logits"][:, -1], {**inputs, **cache}

    def next(self, tokens: np.ndarray, inputs: dict) -> tuple[np.ndarray, dict]:
        """Logits of the token after `tokens`, `(batch,)`, and the inputs of the next step."""
        feed = {"decoder_input_ids": tokens[:, None].astype(np.int64), **inputs}
        logits, *grown = self.decode.run(["logits", *self.grown], feed)
        return logits[:, -1], {**inputs, **{f"in{name[3:]}": value for name, value in zip(self.grown, grown)}}

    def __call__(self, input_ids: np.ndarray, attention_mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
        """Most likely tokens `(batch, target)` without the start token; padding follows the end of a sentence."""
        logits, inputs = self.first(input_ids, attention_mask)
        translation = [logits.argmax(axis=-1)]
        is_done = np.isin(translation[0], self.ends)
        while len(translation) < max_new_tokens and not is_done.all():
            logits, inputs = self.next(translation[-1], inputs)
            translation.append(np.where(is_done, self.pad, logits.argmax(axis=-1)))
            is_done |= np.isin(translation[-1], self.ends)
        return np.stack(translation, axis=1)


if __name__ == "__main__":
    translator, tokenizer = OnnxTranslator(sys.argv[1]), Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json")
    for line in sys.stdin:
        ids = np.array([tokenizer.encode(line.rstrip("\n")).ids])
        [tokens] = translator(ids, np.ones_like(ids), max_new_tokens=ids.size + 50)
        print(tokenizer.decode(tokens))
