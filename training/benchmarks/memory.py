"""Memory of a process."""

import resource


def peak_memory() -> int:
    """The most that this process has held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
