"""Memory of a process."""

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """The most that this process has held so far, in bytes, of a device."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
