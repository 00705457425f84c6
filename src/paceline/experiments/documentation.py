"""Every table and figure of the documentation, made again from code and records: `make figures`. No torch.

example:
  python -m paceline.experiments.documentation docs records
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.experiments.bench import tables as speed
from paceline.experiments.cost import checks
from paceline.experiments.cost.tables import TABLES as COST
from paceline.experiments.defaults import page as defaults
from paceline.experiments.defaults.tables import read_study
from paceline.experiments.evidence import claims
from paceline.experiments.evidence.studies import GPU
from paceline.experiments.pages import markdown, refill
from paceline.experiments.paper import lines
from paceline.experiments.paper.lines import Result
from paceline.experiments.report.results import read_outcomes
from paceline.experiments.report.tables import results_table

Tables = dict[str, Callable[[], str]]

COMPARISON = "2026-11-15-compare-enwiki-h200"
"""The one that docs/compare.md shows."""
SHOWN = "paper:0.003/power_0_5", "scaled:15,control:0.2/power_0_7", "schedule_free/average"
STUDIES = {
    "defaults.png": ("2026-11-1[56]-defaults-7m-2000-steps.jsonl", "adamw+wsd/live"),
    "defaults-sft.png": ("2026-11-1[56]-defaults-sft-150-steps.jsonl", "adamw+wsd/power_0_8"),
}
"""Figures of docs/defaults.md: records, and what AdamW with WSD returns in them."""


def tables(records: Path) -> dict[str, Tables]:
    """Of every page that has any, by their names there."""
    study = read_study(sorted(records.glob("*defaults*.jsonl")))
    return {
        "results.md": claims.tables(GPU, _evidence(records)),
        "cost.md": {**COST, **checks.tables(records)},
        "compare.md": {"losses": lambda: _compared(records / COMPARISON)},
        **{page: speed.tables(page, records) for page in speed.PAGES},
        **{page: defaults.tables(page, study) for page in defaults.PAGES},
    }


def _evidence(records: Path) -> dict[str, Result]:
    return lines.read(sorted(records.glob("*evidence*.jsonl")))


def _compared(comparison: Path) -> str:
    table = results_table(read_outcomes([comparison]))
    return markdown(table.columns, table.rows)


def figures(docs: Path, records: Path) -> Iterator[Path]:
    """All but docs/compare.png, a picture of a page; as they are drawn."""
    from paceline.experiments.cost import pictures
    from paceline.experiments.defaults import figures, regret
    from paceline.experiments.evidence.figures import all_figures

    yield from all_figures(GPU, _evidence(records), docs)
    yield from pictures.draw(docs)
    for name, (files, decayed) in STUDIES.items():
        results = regret.read(sorted(records.glob(files)))
        figures.draw(results, ("adamw", decayed, *SHOWN), docs / name)
        yield docs / name


def main() -> None:
    """The command."""
    folders = [Path(word) for word in sys.argv[1:]]
    if len(folders) != 2 or not all(folder.is_dir() for folder in folders):
        sys.exit(__doc__)
    docs, records = folders
    for page, made in tables(records).items():
        refill(docs / page, made)
        print(docs / page)
    for path in figures(docs, records):
        print(path)


if __name__ == "__main__":
    main()
