"""Script that test_versions.py runs under another version of transformers.

`python version_stranger.py write FOLDER OUTPUT` saves a model and its tokenizer, and what they compute, with this
package; `python -I version_stranger.py read FOLDER OUTPUT` loads them in a process that cannot import it, and saves
what they compute there.
"""

import sys
from pathlib import Path


SENTENCES = ["three dogs sleep", "the old man gives the child a book"]


class Hidden:
    """Finds no hf_vaswani, be it installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_vaswani", "hf_vaswani_training", "training"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def write(folder: str) -> None:
    """A small model whose weights make a difference, with the paper's search, and a tokenizer."""
    import torch

    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
    from training.data.tokenizer import train_tokenizer
    from training.demo_data import generate_pairs

    text = [sentence for pair in generate_pairs(300, seed=1) for sentence in pair]
    tokenizer = train_tokenizer(text, vocab_size=400, show_progress=False)
    config = {"d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2}
    torch.manual_seed(3)
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=len(tokenizer), **config)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2 if "shared" in name else 1.0)
    model.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_form="gnmt", max_extra_tokens=5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def behaviour(folder: str) -> dict:
    """Class and results of the checkpoint in a folder, for both sentences."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True).to_dict()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    translator = pipeline("translation", model=folder, trust_remote_code=True)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = model(**inputs, labels=inputs["input_ids"].flip(0))
        body = AutoModel.from_pretrained(folder, trust_remote_code=True)
        hidden = body(**inputs, decoder_input_ids=inputs["input_ids"]).last_hidden_state
    beam = model.generate(**inputs, return_dict_in_generate=True)
    seen = {
        "inputs": inputs["input_ids"],
        "logits": outputs.logits,
        "loss": outputs.loss,
        "hidden": hidden,
        "greedy": model.generate(**inputs, num_beams=1),
        "greedy of the library": model.generate(**inputs, num_beams=1, fast_decoding=False),
        "beam": beam.sequences,
        "scores": beam.sequences_scores,
        "beam of the library": model.generate(**inputs, fast_decoding=False),
        "n-best": model.generate(**inputs, length_penalty_form="length", num_return_sequences=3),
        "translations": translator(SENTENCES),
        "a single translation": translator(SENTENCES[0], num_beams=2, max_new_tokens=7),
    }
    # Which version wrote a file, and where it lies, is not the model's.
    config = {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}
    return {"seen": seen, "config": config, "module": type(model).__module__, "version": transformers.__version__}


def main(task: str, folder: str, output: str) -> None:
    """See the module."""
    if task == "write":
        sys.path.insert(0, str(Path(__file__).parents[2]))
        write(folder)
    else:
        sys.meta_path.insert(0, Hidden())
    import torch

    torch.save(behaviour(folder), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
