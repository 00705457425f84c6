"""Make the tables and pictures of docs/cost.md again: `python -m paceline.experiments.cost docs records`."""

import sys
from pathlib import Path

from paceline.experiments.cost import checks
from paceline.experiments.cost.pictures import draw
from paceline.experiments.cost.tables import TABLES
from paceline.experiments.pages import refill


def main(docs: Path, records: Path) -> None:
    """Into the page in that folder, and beside it."""
    page = docs / "cost.md"
    tables = {**TABLES, **checks.tables(records)}
    refill(page, tables)
    for path in (page, *draw(docs)):
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not all(Path(folder).is_dir() for folder in sys.argv[1:]):
        sys.exit("usage: python -m paceline.experiments.cost docs records")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
