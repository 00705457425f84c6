"""Docstrings as the site's pages want them. In the source they are for `help()` and for doctest."""

import re
from typing import Any

from griffe import Extension, Object

DIRECTIVE = re.compile(r"^\.\. code-block:: \w+\n\n", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*\Z", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"\bdocs/(\w+\.md)")


def as_markdown(text: str) -> str:
    """Doctests at the end become a section of examples, mentioned pages become links, blocks of text stay."""
    text = PAGE.sub(r"[\1](\1)", DIRECTIVE.sub("", text))
    return DOCTEST.sub(lambda found: "Examples:\n    " + found[0].replace("\n", "\n    "), text)


class Docstrings(Extension):
    """Changes docstrings on their way to the pages."""

    def on_object(self, *, obj: Object, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
