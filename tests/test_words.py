"""Plain words in docstrings: what a stranger can read without another file open."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "paceline"
FIRST = re.compile(r"^(The|A|An|One) \w|^[A-Z][a-z]+(?<!s)\b")
_WORDS = """
    Of As By Where What They Those Them These This It Its Likewise Alone Else Whether If When While With
    Without For From In On At To And Or But Not No None All Any Each Every Some Both Also Than That There
    Here How Who Which Whose Whatever Same True False
"""
NOT_VERBS = frozenset(_WORDS.split())
"""First words of sentences that need another sentence to be understood."""
LINKS = re.compile(r"\b(likewise|ditto)\b|\bas in [a-z_]+\.py\b(?! )|^None: ", re.IGNORECASE | re.MULTILINE)
OLD = re.compile(
    r"\b(recipes?|told|anew|at hand|so many|hardly|by turns|of the own|on the mean|at once|go(es)? on)\b",
    re.IGNORECASE,
)


def docstrings() -> Iterator[tuple[str, str, ast.AST]]:
    """Yield place, text and owner of each docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", text, node


ALL = list(docstrings())


def fault(text: str, node: ast.AST) -> str | None:
    """Return what is wrong with a docstring, or None."""
    first = text.split("\n", 1)[0]
    word = first.split()[0].rstrip(",:;.")
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if word in NOT_VERBS or (is_function and not FIRST.match(first)):
        return f"begins with neither a verb nor The/A: {first}"
    if LINKS.search(text):
        return f"needs another docstring: {first}"
    old = OLD.search(text)
    return f"has a word that is not plain, {old[0]!r}: {first}" if old else None


def test_docstrings_are_complete_in_themselves():
    assert len(ALL) > 100
    found = [(place, fault(text, node)) for place, text, node in ALL]
    assert not [f"{place} {reason}" for place, reason in found if reason is not None]


def test_a_name_of_a_function_has_one_meaning():
    """Public functions of a sub-package have different names."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for place, _, node in ALL:
        package = place.split("/")[0]
        is_public = isinstance(node, ast.FunctionDef) and node.col_offset == 0 and node.name[0] != "_"
        if is_public and package != "studies":  # whose files say what they read, write and run
            names[package, node.name].append(place)
    assert not {name: places for name, places in names.items() if len(places) > 1}
