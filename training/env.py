"""Print versions and devices for a bug report, without names of users or machines and without paths."""

import argparse
import os
import platform
import sys

from .options import Parser
from .running import run
from .versions import OWN, version


PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "datasets", "evaluate"),
    *("sacrebleu", "numpy", "pyarrow", "peft", "torchao", "deepspeed", "flash-attn", "gradio", "matplotlib"),
)
GIB = 2**30


def environment() -> dict[str, str]:
    """Names and values of the properties of this environment that results can depend on, in report order."""
    import torch

    from hf_vaswani.kernels_vaswani import compiled_kernels

    from .hardware import cores, device_name

    facts = {OWN: version(OWN)}
    facts["Python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    facts["operating system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts["processor"] = f"{device_name(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}"
    facts["cores"] = f"{cores()} of {os.cpu_count()}"
    facts["threads"] = f"{torch.get_num_threads()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    facts["accelerators"] = "; ".join(accelerators()) or "none"
    facts["PyTorch built for"] = f"CUDA {torch.version.cuda or 'no'}, ROCm {torch.version.hip or 'no'}"
    facts["compiled kernels"] = "no" if compiled_kernels(torch.device("cpu")) is None else "yes"
    return facts | {name: version(name) for name in PACKAGES}


def accelerators() -> list[str]:
    """Descriptions of the accelerators that PyTorch sees, with their memory where it is known."""
    import torch

    from .hardware import device_name

    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    memory = [torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else None for device in devices]
    sizes = ["" if size is None else f", {size / GIB:.0f} GiB" for size in memory]
    return [f"{device}: {device_name(device)}{size}" for device, size in zip(devices, sizes)]


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani env`."""
    return Parser(prog="hf-vaswani env", description=__doc__)


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani env`."""
    make_parser().parse_args(argv)
    facts = environment()
    width = max(map(len, facts))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


if __name__ == "__main__":
    sys.exit(run("env"))
