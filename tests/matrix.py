"""Write a table of what is promised, the tests that hold it, and their last result.

    pytest --junit-xml build/junit/all.xml …     # as make test and make test-all do
    python tests/matrix.py build/junit/*.xml --out records/matrix.md

A promise that no test holds is a line that says so. Scripts that write records of their own are named too.
"""

import argparse
import ast
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".txt")


def promises():
    """Yield the part, the promise and its tests or scripts, from a table with a line for each promise."""
    part = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("# "):
            part = line[2:]
        elif line:
            promise, _, held = line.partition(" | ")
            yield part, promise, held.split()


def tests_of(path):
    """Return the names of the tests in a file."""
    nodes = ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
    return {
        node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def results(files):
    """Return how often each test passed, failed and was skipped, over its cases."""
    found = defaultdict(Counter)
    for path in files:
        for case in xml.parse(path).iter("testcase"):
            place = case.get("classname").removeprefix("tests.").replace(".", "/") + ".py"
            outcome = next(
                (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
            )
            found[place, case.get("name").partition("[")[0]][outcome] += 1
    return found


def said(held, found):
    """Return the result of a promise in words."""
    total = Counter()
    for one in held:
        path, _, name = one.partition("::")
        for (place, test), counts in found.items():
            if place == path and name in ("", test):
                total += counts
    shown = ("passed", "failure", "error", "skipped")
    return ", ".join(f"{total[key]} {key}" for key in shown if total[key]) or "not run here"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found, before = results(options.files), ""
    lines = ["# What is promised, and what holds it", "", f"Written by `tests/matrix.py` on {date.today()}."]
    for part, promise, held in promises():
        if part != before:
            lines += ["", f"## {part}", "", "| promise | tests | last result |", "| --- | --- | --- |"]
            before = part
        lines.append(f"| {promise} | {' '.join(f'`{one}`' for one in held)} | {said(held, found)} |")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
