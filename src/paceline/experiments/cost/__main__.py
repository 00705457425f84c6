"""Make the tables and pictures of docs/cost.md again: `python -m paceline.experiments.cost docs`."""

import sys
from pathlib import Path

from paceline.experiments.cost.pictures import draw
from paceline.experiments.cost.tables import TABLES
from paceline.experiments.pages import filled


def main(folder: Path) -> None:
    """Into the page in that folder, and beside it."""
    page = folder / "cost.md"
    page.write_text(filled(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
    for path in (page, *draw(folder)):
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "cost.md").is_file():
        sys.exit("usage: python -m paceline.experiments.cost docs")
    main(Path(sys.argv[1]))
