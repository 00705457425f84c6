"""Words for a terminal: names and messages may come from files of others, and from several processes."""

import os


def own_rank() -> int | None:
    """Which of the processes that torchrun started this is; None if it is the only one."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return int(os.environ["RANK"]) if several and "RANK" in os.environ else None


def printable(text: str) -> str:
    r"""The text with ? for what is not to be seen: escape codes, line breaks, halves of characters.

    >>> printable("a run\x1b[2J\ncalled §")
    'a run?[2J?called §'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
