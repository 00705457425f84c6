"""Words for a terminal: names and messages may come from files of others."""


def printable(text: str) -> str:
    r"""The text with ? for what is not to be seen: escape codes, line breaks, halves of characters.

    >>> printable("a run\x1b[2J\ncalled §")
    'a run?[2J?called §'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
