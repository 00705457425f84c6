"""Make the tables of pages about speed again: `python -m paceline.experiments.bench docs records`."""

import sys
from pathlib import Path

from paceline.experiments.bench.tables import PAGES, tables
from paceline.experiments.pages import refill


def main(docs: Path, records: Path) -> None:
    """In the pages of a folder, from the records in another."""
    for name in PAGES:
        page = docs / name
        refill(page, tables(name, records))
        print(page)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not all(Path(folder).is_dir() for folder in sys.argv[1:]):
        sys.exit("usage: python -m paceline.experiments.bench docs records")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
