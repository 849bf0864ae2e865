"""Script that test_hub.py runs in a process that cannot import hf_vaswani.

`python -I hub_stranger.py REPOSITORY AGAIN OUTPUT` pulls a repository with the code that it carries, saves and pushes
it again as another one, pulls that too, and writes what it saw to a file for the tests to judge.
"""

import sys
from pathlib import Path


SENTENCES = ["der alte Mann gibt dem Kind ein Buch .", "the dogs sleep"]


class Hidden:
    """Finds no hf_vaswani, be it installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_vaswani", "hf_vaswani_training", "training"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def behaviour(model, tokenizer) -> dict:
    """Logits of two sentences given as each other's translation, and what the model generates from them, by its own
    generation configuration and, so that every logit counts, by sampling."""
    import torch

    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    torch.manual_seed(3)
    with torch.no_grad():
        return {
            "logits": model(**inputs, decoder_input_ids=inputs["input_ids"].flip(0)).logits,
            "generated": model.generate(**inputs),
            "sampled": model.generate(**inputs, num_beams=1, do_sample=True, max_new_tokens=20),
        }


def main(repository: str, again: str, output: str) -> None:
    """See the module."""
    sys.meta_path.insert(0, Hidden())
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

    seen = {"refusals": {}}
    try:
        import hf_vaswani  # noqa: F401
    except ModuleNotFoundError as error:
        seen["import error"] = str(error)

    attempts = {
        "AutoConfig": lambda **more: AutoConfig.from_pretrained(repository, **more),
        "AutoModel": lambda **more: AutoModel.from_pretrained(repository, **more),
        "AutoModelForSeq2SeqLM": lambda **more: AutoModelForSeq2SeqLM.from_pretrained(repository, **more),
        "pipeline": lambda **more: pipeline("translation", model=repository, **more),
    }
    for name, attempt in attempts.items():
        for how, more in (("not said", {}), ("refused", {"trust_remote_code": False})):
            try:
                attempt(**more)
            except ValueError as error:
                seen["refusals"][name, how] = str(error)
    seen["modules before"] = sorted(name for name in sys.modules if name.endswith("_vaswani"))

    model = AutoModelForSeq2SeqLM.from_pretrained(repository, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(repository, trust_remote_code=True)
    seen["behaviour"] = behaviour(model, tokenizer)
    seen["module"] = type(model).__module__
    seen["encoder"] = AutoModel.from_pretrained(repository, trust_remote_code=True).state_dict()
    seen["config"] = AutoConfig.from_pretrained(repository, trust_remote_code=True).to_dict()
    translator = pipeline("translation", model=repository, trust_remote_code=True)
    seen["translations"] = translator(SENTENCES)

    saved = Path(output).parent / "saved"
    model.save_pretrained(saved)
    seen["saved"] = {path.name: path.read_bytes() for path in saved.iterdir()}
    model.push_to_hub(again)
    tokenizer.push_to_hub(again)
    pulled = AutoModelForSeq2SeqLM.from_pretrained(again, trust_remote_code=True)
    seen["behaviour again"] = behaviour(pulled, AutoTokenizer.from_pretrained(again))
    translator = pipeline("translation", model=again, trust_remote_code=True)
    seen["translations again"] = translator(SENTENCES)
    seen["module again"] = type(pulled).__module__
    translator.save_pretrained(saved.with_name("saved pipeline"))
    seen["saved pipeline"] = {path.name: path.read_bytes() for path in saved.with_name("saved pipeline").iterdir()}
    torch.save(seen, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
