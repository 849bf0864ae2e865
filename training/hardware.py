"""Devices and processors of this process."""

import os
import platform
import re
import sys
from pathlib import Path

import torch


def hardware(device: torch.device) -> dict:
    """Device type, device name, and number of processor cores that this process may use."""
    return {"device": device.type, "name": device_name(device), "cores": cores()}


def cores() -> int | None:
    """Number of processor cores that this process may use; `None` where the system does not report it."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def device_name(device: torch.device) -> str:
    """Make and model of an accelerator or of the processor."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).get_device_name(device)
    if device.type != "cpu":
        return device.type
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: *(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return model[1] if model else platform.processor() or platform.machine()
