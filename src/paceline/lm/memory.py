"""Explanations of out-of-memory errors, with what helps."""

import re

import torch

_HELP = (
    "a smaller micro_batch_size, activation_checkpointing, precision bfloat16 or a shorter length need less"
)


def explain_memory(error: BaseException) -> str | None:
    """Return a sentence about an out-of-memory error; None for any other error."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        free = re.search(r"of which ([\d.]+ \w+) is free", text)
        needed = f"{asked[1]} more were needed" if asked else "more was needed"
        left = f", {free[1]} are free" if free else ""
        return f"the GPU's memory is full: {needed}{left}; {_HELP}, and so do fewer runs in parallel"
    asked = re.search(r"(?:you tried to allocate|unable to mmap) (\d+) bytes", text)
    if isinstance(error, MemoryError) or asked or "Cannot allocate memory" in text:
        needed = f"{int(asked[1]):,} bytes more were needed" if asked else "more was needed"
        return f"memory is full: {needed}{_free()}; {_HELP}"
    return None


def _free() -> str:
    free = available()
    return "" if free is None else f", {free:,} are free"


def available() -> int | None:
    """Return how many bytes of memory a program may still take; None if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 (not a path of the user's)
            known = dict(line.split(":", 1) for line in file)
        return int(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
