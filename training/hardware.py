"""The devices and processors that this process computes on."""

import os
import platform
import re
import sys
from pathlib import Path

import torch


def hardware(device: torch.device) -> dict:
    """What this process computes on: the kind of device, its name, and how many cores of the processor it may use."""
    return {"device": device.type, "name": device_name(device), "cores": cores()}


def cores() -> int | None:
    """Cores of the processor that this process may use; `None` where the system does not say."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def device_name(device: torch.device) -> str:
    """Make and model of an accelerator or of the processor."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).get_device_name(device)
    if device.type != "cpu":
        return device.type
    about = Path("/proc/cpuinfo")
    known = re.search(r"^model name\s*: *(.+)$", about.read_text(), re.MULTILINE) if about.is_file() else None
    return known[1] if known else platform.processor() or platform.machine()
