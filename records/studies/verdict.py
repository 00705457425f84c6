"""Simulate comparisons whose truth is known, and count what the verdict says of them.

    PYTHONPATH=src python records/studies/verdict.py [--count 2000] [--out FILE]

Each page holds the default methods of `paceline compare`: AdamW with two averages next to it, push, PACE, WSD
and Schedule-Free. Their losses differ by chance, and in the second table push and PACE are also truly lower.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.runs.records import environment
from paceline.studies.text import Listing
from paceline.studies.verdict import judge

METHODS = {
    "AdamW": 0,
    "AdamW · short EMA": 0,
    "AdamW · long EMA": 0,
    "PACE push": 1,
    "PACE": 2,
    "AdamW WSD": 3,
}
METHODS |= {"Schedule-Free": 4}
"""The methods of a page, and which of its training runs each belongs to."""
OWN = ("PACE push", "PACE")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SHARED = 0.8
"""Share of the variance that the averages of one run have in common."""
BASINS = {"one rate": (0.0,), "four rates, flat": (0.0,) * 4, "four rates, steep": (0.1, 0.0, 0.1, 0.4)}
"""How far each learning rate ends above the best one, for every method."""

Losses = dict[str, dict[float, dict[int, float | None]]]
"""By method, learning rate and seed."""


def pages(
    count: int, seeds: int, basin: str, sd: float, *, is_shared: bool, lower: float = 0.0, key: int = 1
) -> Iterator[Losses]:
    """Yield comparisons in which the methods of PACE are truly lower by so much, and nothing else differs."""
    chance, runs = np.random.default_rng(key), list(METHODS.values())
    offsets = np.array(BASINS[basin])
    shape = (count, max(runs) + 1, len(offsets), seeds)
    common = chance.normal(size=shape)[:, runs]
    own = chance.normal(size=(count, len(runs), len(offsets), seeds))
    share = SHARED if is_shared else 0.0
    noise = sd * (np.sqrt(share) * common + np.sqrt(1 - share) * own)
    truth = 3.2 - lower * np.isin(list(METHODS), OWN)
    values = (truth[:, None, None] + offsets[:, None] + noise).tolist()
    names, numbers = list(METHODS), range(1, seeds + 1)
    for page in values:
        yield {
            name: {
                lr: dict(zip(numbers, losses, strict=True))
                for lr, losses in zip(RATES, by_rate, strict=False)
            }
            for name, by_rate in zip(names, page, strict=True)
        }


Judge = Callable[[Losses], Mapping[str, str]]
"""What is said of a page: "lower", "higher" or "" for each place, of which "best" is the first."""


def rates_of_claims(said_of: Judge, count: int) -> list[dict[str, Any]]:
    """Return how often a page claims anything, where nothing differs, in percent."""
    rows = []
    for basin, seeds, sd, is_shared in itertools.product(BASINS, (2, 3, 5), (0.003, 0.02), (True, False)):
        said = [said_of(page) for page in pages(count, seeds, basin, sd, is_shared=is_shared)]
        claims = [set(each.values()) - {""} for each in said]
        rows.append(
            {"rates": basin, "seeds": seeds, "sd": sd, "averages": "shared" if is_shared else "separate"}
            | {"any": 100 * float(np.mean([bool(each) for each in claims]))}
            | {way: 100 * float(np.mean([way in each for each in claims])) for way in ("lower", "higher")}
        )
    return rows


def power(said_of: Judge, count: int) -> list[dict[str, Any]]:
    """Return how often the best place is settled right, and wrong, for true differences, in percent."""
    rows = []
    for basin, seeds, sd in itertools.product(list(BASINS)[:2], (2, 3, 5), (0.003, 0.02)):
        for lower in (0.005, 0.01, 0.02):
            drawn = pages(count, seeds, basin, sd, is_shared=True, lower=lower, key=2)
            said = [said_of(page)["best"] for page in drawn]
            rows.append(
                {"rates": basin, "seeds": seeds, "sd": sd, "difference": lower}
                | {"right": 100 * said.count("lower") / count, "wrong": 100 * said.count("higher") / count}
            )
    return rows


def today(page: Losses) -> dict[str, str]:
    """Return what the verdict says of a page."""
    trained = {name: str(run) for name, run in METHODS.items()}
    said = judge(page, own=OWN, trained=trained).comparisons
    places = {f"{one.is_best or one.lr}, {one.rival}": one.outcome if one.is_settled else "" for one in said}
    return {"best": said[0].outcome if said[0].is_settled else "", **places}


def tables(record: dict[str, Any]) -> str:
    """Return the tables of a record in Markdown."""
    parts = []
    for heading, of in record["verdicts"].items():
        for title, rows in of.items():
            head = tuple(rows[0])
            cells = tuple(
                tuple(f"{x:.1f}" if i > 3 else str(x) for i, x in enumerate(r.values())) for r in rows
            )
            parts.append(f"## {heading}: {title}\n\n{Listing(columns=head, rows=cells).markdown()}\n")
    return "\n".join(parts)


def main() -> None:
    """Simulate the verdict of this checkout, add it to a record if one is given, and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="pages of each cell [2000]")
    parser.add_argument("--out", type=Path, help="record to write into; verdicts that are in it stay")
    given = parser.parse_args()
    known = given.out and given.out.exists()
    record = json.loads(given.out.read_text(encoding="utf-8")) if known else {"verdicts": {}}
    record["verdicts"][f"paceline {environment()['commit'][:7]}"] = {
        "claims of a difference that is not there, %": rates_of_claims(today, given.count),
        "true differences settled at the best rates, %": power(today, given.count),
    }
    record |= {"count": given.count, "seed": [1, 2], "environment": environment()}
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(tables(record))


if __name__ == "__main__":
    main()
