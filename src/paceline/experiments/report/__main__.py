"""Make the table of docs/compare.md again: `python -m paceline.experiments.report docs COMPARISON`.

`paceline report` makes the page of a comparison; this is about the page of the documentation that shows one.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.experiments.pages import markdown, refill
from paceline.experiments.report.results import Outcomes, find_runs, read_run
from paceline.experiments.report.tables import results_table


def outcomes_of(comparison: Path) -> Outcomes:
    """What came out of it."""
    found = (read_run(run) for run in find_runs([comparison]))
    return Outcomes(tuple(result for result in found if result is not None))


def tables(comparison: Path) -> dict[str, Callable[[], str]]:
    """Of docs/compare.md: what each method came to at each learning rate."""

    def losses() -> str:
        table = results_table(outcomes_of(comparison))
        return markdown(table.columns, table.rows)

    return {"losses": losses}


def main(docs: Path, comparison: Path) -> None:
    """In the page in that folder."""
    page = docs / "compare.md"
    refill(page, tables(comparison))
    print(page)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not all(Path(folder).is_dir() for folder in sys.argv[1:]):
        sys.exit("usage: python -m paceline.experiments.report docs COMPARISON")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
