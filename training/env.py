"""Print versions and devices for a bug report, without names of users or machines and without paths."""

import argparse
import os
import platform
import sys

import torch

from .hardware import cores, device_name
from .versions import OWN, version


PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "datasets", "evaluate"),
    *("sacrebleu", "numpy", "pyarrow", "peft", "torchao", "deepspeed", "flash-attn", "gradio", "matplotlib"),
)
GIB = 2**30


def environment() -> dict[str, str]:
    """Names and values of the properties of this environment that results can depend on, in report order."""
    facts = {OWN: version(OWN)}
    facts["Python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    facts["operating system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts["processor"] = f"{device_name(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}"
    facts["cores"] = f"{cores()} of {os.cpu_count()}"
    facts["threads"] = f"{torch.get_num_threads()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    facts["accelerators"] = "; ".join(accelerators()) or "none"
    facts["PyTorch built for"] = f"CUDA {torch.version.cuda or 'no'}, ROCm {torch.version.hip or 'no'}"
    return facts | {name: version(name) for name in PACKAGES}


def accelerators() -> list[str]:
    """Descriptions of the accelerators that PyTorch sees, with their memory where it is known."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return [f"{device}: {device_name(device)}{_memory(device)}" for device in devices]


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB"


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani env`."""
    argparse.ArgumentParser(prog="hf-vaswani env", description=__doc__).parse_args(argv)
    facts = environment()
    width = max(map(len, facts))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


if __name__ == "__main__":
    main()
