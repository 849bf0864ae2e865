"""Peak memory of a process."""

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process on a device so far, in bytes. On a CPU, it is the resident set size."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
