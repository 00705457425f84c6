"""Memory that is full: what is free, and what helps."""

import torch

_HELP = (
    "a smaller micro_batch_size, activation_checkpointing, precision bfloat16 or fewer runs at once need less"
)


def explain_memory(error: BaseException) -> str | None:
    """Return a sentence about an out-of-memory error; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory is full; {_HELP}"
    if isinstance(error, MemoryError) or "llocate memory" in str(error) or "unable to mmap" in str(error):
        return f"memory is full; {_HELP}"
    return None


def available() -> int | None:
    """Return how many bytes of memory a program may still take; None if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 (not a path of the user's)
            known = dict(line.split(":", 1) for line in file)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
