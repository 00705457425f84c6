"""What many runs cost together on one GPU, one after the other or several at once; and in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from paceline.experiments.config import ConfigError, Run
from paceline.experiments.cost.estimate import ROOM, estimate
from paceline.experiments.cost.hardware import Hardware

TITLES = ("tokens", "operations", "time", "memory")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Of a run, or of several."""

    tokens: int = 0
    """Trained on."""
    evaluated: int = 0
    """Tokens of evaluations, of every set of weights."""
    operations: float = 0.0
    """Of both."""
    seconds: float | None = 0.0
    """One after the other. None: nobody knows."""
    busy: float | None = 0.0
    """Seconds of these that the GPU has work; for the rest it waits for the host."""
    memory: float | None = 0.0
    """Bytes of the largest."""

    def lasting(self, jobs: int) -> float | None:
        """Seconds with so many runs at once on the GPU: as the hosts allow, or as the GPU does.

        >>> small = Price(seconds=800.0, busy=200.0)
        >>> small.lasting(1), small.lasting(2), small.lasting(8)
        (800.0, 400.0, 200.0)
        """
        if self.seconds is None or self.busy is None:
            return None
        return max(self.seconds / jobs, self.busy)

    def words(self, jobs: int = 1) -> tuple[str, str, str, str]:
        """Under `TITLES`.

        >>> Price(tokens=2 * 10**9, operations=3e18, seconds=7200.0, memory=10.4e9).words()
        ('2.00B', '3.00 EFLOP', '2.0 h', '10 GB')
        """
        seconds = self.lasting(jobs)
        time = "?" if seconds is None else _time(seconds)
        memory = "?" if self.memory is None else f"{self.memory / 1e9:,.0f} GB"
        tokens = _scaled(self.tokens, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")))
        sizes = ((1e21, " ZFLOP"), (1e18, " EFLOP"), (1e15, " PFLOP"), (1e12, " TFLOP"), (1e9, " GFLOP"))
        return tokens, _scaled(self.operations, sizes), time, memory


def of_run(run: Run, hardware: Hardware, parameters: float | None = None) -> Price | None:
    """What a run costs; None if its budget depends on data that are not looked at.

    Of a model of which nothing but the number of its `parameters` is known, 6 operations for each and token.
    """
    try:
        found = estimate(run, hardware)
    except ConfigError:
        if parameters is None or run.steps is None:
            return None
        steps = run.steps - (run.after[1] if run.after else 0)
        tokens = steps * run.batch_size * run.length
        return Price(tokens=tokens, operations=6 * parameters * tokens, seconds=None, busy=None, memory=None)
    of_gpu = run.device != "cpu"
    return Price(
        tokens=found.tokens,
        evaluated=found.evaluated_tokens,
        operations=found.operations,
        seconds=found.seconds if of_gpu else None,
        busy=found.busy_seconds if of_gpu else None,
        memory=found.memory if of_gpu else None,
    )


def together(prices: Iterable[Price]) -> Price:
    """All of them."""
    all_of = list(prices)
    seconds = [price.seconds for price in all_of if price.seconds is not None]
    busy = [price.busy for price in all_of if price.busy is not None]
    memory = [price.memory for price in all_of if price.memory is not None]
    return Price(
        tokens=sum(price.tokens for price in all_of),
        evaluated=sum(price.evaluated for price in all_of),
        operations=sum(price.operations for price in all_of),
        seconds=sum(seconds) if len(seconds) == len(all_of) else None,
        busy=sum(busy) if len(busy) == len(all_of) else None,
        memory=max(memory, default=0.0) if len(memory) == len(all_of) else None,
    )


def explained(price: Price, hardware: Hardware, jobs: int = 1) -> list[str]:
    """What to know of a price: on which GPU, how many runs at once, and what is in it."""
    tokens, operations, time, memory = price.words(jobs)
    looked = _scaled(price.evaluated, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")))
    said = f"{tokens} tokens trained on and {looked} evaluated, {operations}"
    if price.seconds is None:
        return [f"to do: {said}; how long is not known of models without a shape, nor of a CPU"]
    how = f"one after the other, up to {memory}" if jobs == 1 else f"{jobs} at once, up to {memory} each"
    found = [
        f"to do: {said}, about {time} on one {hardware.name}, {how}",
        "by the arithmetic of `paceline cost` (docs/cost.md), without saving, compiling and reading data",
    ]
    if price.memory is not None and price.memory > ROOM * hardware.memory:
        found.append(
            f"some need more memory than a {hardware.name} has, {hardware.memory / 1e9:.0f} GB: "
            "--micro-batch-size or --activation-checkpointing make it less"
        )
    return found


def _time(seconds: float) -> str:
    for size, word in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.{0 if seconds >= 100 * size else 1}f} {word}"
    return f"{seconds:.0f} s"


def _scaled(value: float, sizes: tuple[tuple[float, str], ...]) -> str:
    for size, word in sizes:
        if value >= size:
            return f"{value / size:,.3g}{word}" if value >= 100 * size else f"{value / size:.2f}{word}"
    return f"{value:.0f}"
