"""Optional kernels in C++ for 8-bit models on a CPU: built once, then used by every process.

    hf-vaswani compile

This needs a C++ compiler and ninja (`pip install 'hf-vaswani[compiled]'`). The library stays in Hugging Face's cache
(`HF_HOME`), under a name for the machine, the version of PyTorch and the source. Without it, PyTorch computes the same
numbers.
"""

import hashlib
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from huggingface_hub import constants


NAME = "hf_vaswani_kernels"
SOURCE = Path(__file__).with_name("kernels.cpp")
# The numbers of PyTorch, in wide registers.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def kernel_file() -> Path:
    """Where the library for this kind of machine and this version of PyTorch and of the source is kept."""
    parts = (platform.machine(), torch.__version__, *FLAGS, SOURCE.read_text(encoding="utf-8"))
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    return Path(constants.HF_ASSETS_CACHE) / "hf_vaswani" / f"kernels-{key}.so"


def load() -> None:
    """Load the library if it has been built; otherwise, or where it cannot be loaded, nothing happens."""
    path = kernel_file()
    if not path.exists():
        return
    try:
        torch.ops.load_library(path)
    except OSError as error:
        logging.getLogger(__name__).warning("%s cannot be loaded, so PyTorch's operations are used: %s", path, error)


def build() -> Path:
    """Build the library, unless it exists.

    Returns:
        Its path.

    Raises:
        ImportError: ninja is missing.
        OSError: There is no compiler.
        RuntimeError: Compiling fails.
    """
    from torch.utils import cpp_extension  # imports setuptools

    path = kernel_file()
    if path.exists():
        return path
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # where pip puts ninja
    if not cpp_extension.is_ninja_available():
        raise ImportError("Compiling needs ninja: pip install 'hf-vaswani[compiled]'.")
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler.split()[0]) is None:  # it may have a launcher in front
        raise OSError(
            f"Compiling needs a C++ compiler: {compiler} was not found. The environment variable CXX names one."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        cpp_extension.load(NAME, [SOURCE], extra_cflags=FLAGS, build_directory=folder, is_python_module=False)
        os.replace(Path(folder) / f"{NAME}.so", path)
    return path
