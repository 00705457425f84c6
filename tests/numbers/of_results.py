"""Numbers of docs/results.md that are in sentences, and what README says of them."""

from functools import cache

from said import RECORDS, Numbers

from paceline.experiments.evidence import studies
from paceline.experiments.evidence.claims import AVERAGE, EMA, LIVE, LONG, OURS, TIE, Claim
from paceline.experiments.evidence.studies import GPU
from paceline.experiments.evidence.tables import Row, rows_of
from paceline.experiments.paper import lines


@cache
def rows() -> list[Row]:
    """The basin of pretraining."""
    results = lines.read(sorted(RECORDS.glob("*evidence*.jsonl")))
    return rows_of(studies.basin(GPU, results), results)


def over(ours, theirs, times=None):
    """A difference of losses, each at its best rate or both at a multiple of AdamW's."""
    return Claim(ours=ours, theirs=theirs, times=times).difference(rows()).loss


def at(side, lr):
    """The loss of seed 1."""
    return side.row(rows()).losses[lr, 1]


def twice_from_one_seed():
    """How far apart a run ended that two files have."""
    first, second = (lines.read([RECORDS / f"2026-11-{day}-evidence-gpt.jsonl"]) for day in (16, 17))
    (name,) = first.keys() & second.keys()
    ends = [one[name].evaluations[-1][1]["average"] for one in (first, second)]
    return abs(ends[0] - ends[1])


def results_page():
    return [
        f"{-over(AVERAGE, LIVE):.3f} below the one and {over(AVERAGE, EMA):.3f} above the other",
        f"within {over(LONG, EMA):.3f} of the EMA",
        f"{at(EMA, 3e-2):.3f} for the EMA, {at(AVERAGE, 3e-2):.3f} for PACE,",
        f"{at(OURS, 3e-2):.3f} for our default",
        f"ended {twice_from_one_seed():.3f} apart",
        f"more than {TIE:g};",
        "65.5M tokens",
    ]


def readme():
    wide = [f"{over(OURS, EMA, times):+.3f}" for times in (2, 3)]
    return [
        f"{over(OURS, EMA):+.3f}, {wide[0]} and {wide[1]} nats",
        f"at ten times it ends at {at(OURS, 3e-2):.2f} where that EMA ends at {at(EMA, 3e-2):.2f}",
        f"{over(AVERAGE, EMA):.3f} above that EMA",
    ]


RESULTS = Numbers(
    measured={"README.md": readme, "docs/results.md": results_page},
    fixed={
        "README.md": ["torch 2.10", "power 0.2", "power 0.7", "power 0.5", "Apache-2.0"],
        "docs/distributed.md": ["waits 30 seconds for its ranks", "given up after 10 minutes"],
        "docs/results.md": [
            "from 0.006 on",
            "c = 0.01",
            "κ = 0.3",
            "κ = 0.7",
            "2.5B",
            "0.3, 0.5, 0.6, 0.7 and 0.8",
        ],
    },
)
