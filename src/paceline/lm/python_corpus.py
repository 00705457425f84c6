"""The embedded corpus: the English text that ships with every Python.

It consists of help topics (`pydoc_data`) and the docstrings of the standard library, about 2 MB. They are
read from the source files of the running Python; no module is imported. Versions of Python differ slightly
in their text, and so in the fingerprint.
"""

import ast
import hashlib
import os
import platform
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

_SKIPPED = {
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
_HELD_OUT = 0.05  # of the bytes


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in two parts that share no paragraph."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    python: str  # version

    @property
    def fingerprint(self) -> str:
        """The sha256 of all the text."""
        text = "\f\f".join("\f".join(part) for part in (self.training, self.held_out))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return JSON that identifies the corpus: version of Python and sha256."""
        return {"corpus": "python", "python": self.python, "sha256": self.fingerprint}


def python_corpus() -> Corpus:
    """Read the embedded corpus (some seconds)."""
    texts = dict(_topics_and_docstrings(Path(sysconfig.get_path("stdlib"))))
    held_out = _chosen(texts)
    # Topics and docstrings repeat each other. Only the first copy of a paragraph stays. Held-out documents
    # come first, so that they stay complete and none of their paragraphs is in the training part.
    seen: set[str] = set()
    unseen = {
        name: _without_seen(texts[name], seen) for name in sorted(texts, key=lambda n: (n not in held_out, n))
    }
    return Corpus(
        training=tuple(text for name, text in unseen.items() if text and name not in held_out),
        held_out=tuple(text for name, text in unseen.items() if text and name in held_out),
        python=platform.python_version(),
    )


def _chosen(texts: dict[str, str]) -> set[str]:
    """Return the names of the held-out documents: those that fit into their share, in order of a hash."""
    room = _HELD_OUT * sum(map(len, texts.values()))
    chosen = set()
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(texts[name]) <= room:
            chosen.add(name)
            room -= len(texts[name])
    return chosen


def _without_seen(text: str, seen: set[str]) -> str:
    """Return the text without paragraphs in `seen`, and add the others. Line breaks do not matter."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if words and words not in seen:
            seen.add(words)
            kept.append("\n".join(line.rstrip() for line in paragraph.splitlines()).strip("\n"))
    return "\n\n".join(kept)


def _topics_and_docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of every document: a help topic, or all docstrings of a module."""
    found = False
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith("config-")]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            found = True
            name = path.relative_to(library).as_posix()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about source files of Python
                tree = ast.parse(path.read_bytes())
            if name == "pydoc_data/topics.py":
                (topics,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
                yield from ((f"topic {topic}", textwrap.dedent(text)) for topic, text in topics.items())
            else:
                yield name, "\n\n".join(_docstrings(tree))
    if not found:
        raise FileNotFoundError(f"this Python has no sources of its standard library in {library}")


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module, class or function and of all inside it, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield from filter(None, [ast.get_docstring(node)])
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler) and not isinstance(child, ast.Expr | ast.Assign):
            yield from _docstrings(child)
