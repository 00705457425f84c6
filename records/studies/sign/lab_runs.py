"""The runs of lab.py: what is set, and the batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One run. `R` is the strength of a uniform control; R < 0 pushes away from the average of power `k`."""

    method: str
    lr: float  # of the base without a control; with one it runs at lr · (1 + R)
    base: str = "adamw"  # or nadamw, ademamix, muon
    R: float = 0.0
    k: float = 0.6
    growth: str = "constant"  # or R grows from 0, as strength() says
    gap: str = "before"  # or after: whether the gap is read before or after the base's step
    decay: float = 0.0  # the share of the run over which the rate falls linearly to 0
    forks: tuple[float, ...] = ()  # decays of branches that continue this run where each of them begins
    follow: bool = False  # whether the rates of averages follow a falling learning rate
    alpha: float = 5.0
    beta3: float = 0.999
    model: str = "gpt:7m"
    length: int = 256
    batch_size: int = 64
    steps: int = 4000
    warmup: float = 0.1  # the share of the run over which the rate grows linearly
    seed: int = 1

    @property
    def name(self) -> str:
        """What differs from the defaults, as a name."""
        fields = ("base", "growth", "gap", "decay", "follow", "warmup")
        odd = [f"{key}-{getattr(self, key)}" for key in fields if getattr(self, key) != getattr(Lab, key)]
        odd += [f"R{self.R:g}", f"k{self.k:g}"] if self.R else []
        return "_".join(["lab", self.method, *odd, f"lr{self.lr:g}", f"n{self.steps}", f"s{self.seed}"])

    def factor(self, t: int) -> float:
        """Return the rate of step t = 1, 2, … as a share of the highest."""
        warm, last = max(1, round(self.warmup * self.steps)), max(1, round(self.decay * self.steps))
        falling = (self.steps - t + 1) / last if self.decay else 1.0
        return min(t / warm, falling, 1.0)

    def strength(self, t: int) -> float:
        """Return R at step t. With "speed", slow motion gains speed in t while the base keeps its rate."""
        if self.growth == "speed":
            gained = -self.R / (1 + self.R) * t / self.steps
            return -gained / (1 + gained)
        share = {"constant": 1.0, "linear": t / self.steps, "log": math.log(t) / math.log(self.steps)}
        share |= {"rate": self.factor(t), "warmup": min(1.0, t / (self.warmup * self.steps))}
        return self.R * share[self.growth]

    def rate(self, t: int, power: float) -> float:
        """Return the rate of an average at step t."""
        fall = min(1.0, self.factor(t) / self.factor(t - 1)) if self.follow and t > 1 else 1.0
        return 1 - (1 - (1 + t) ** -power) * fall


def check() -> Iterator[Lab]:
    """Reproduce three differences between methods that were measured before this study."""
    yield Lab(method="adamw", lr=3e-3, forks=(0.2,))
    yield from (Lab(method="push", lr=3e-3, R=-0.5, k=k) for k in (0.5, 0.3))


def growth() -> Iterator[Lab]:
    """Compare strengths that grow, a gap read after the step, other bases, and a warm-up of 2 %."""
    forms = [{"R": R, "growth": how} for R in (-0.5, -0.7) for how in ("linear", "log", "warmup")]
    forms += [{"R": -0.5, "gap": "after"}, {"R": -0.7, "k": 0.5, "warmup": 0.02}]
    yield from (Lab(method="push", lr=3e-3, **own) for own in forms)
    yield from (Lab(method="nadamw", base="nadamw", lr=lr) for lr in (2e-3, 3e-3, 1.5e-3, 4.5e-3))
    mixed: dict[str, Any] = {"base": "ademamix", "lr": 2e-3, "beta3": 0.997}
    yield from (Lab(method="ademamix-push", R=R, **mixed) for R in (-0.3, -0.5))
    yield from (Lab(method="adamw", lr=2e-3, warmup=0.02), Lab(method="ademamix", warmup=0.02, **mixed))


def speeding(lr: float, gain: float, k: float, seed: int = 1, **own: Any) -> Lab:
    """Let slow motion gain speed over the run while the base keeps its rate, as in AdEMAMix."""
    R = -gain / (1 + gain)
    return Lab(method="push", lr=lr * 1e-3, R=R, k=k, growth="speed", seed=seed, **own)


def form() -> Iterator[Lab]:
    """Select among speeds: six settings, then edges of these, and seed 2 of the best four."""
    grid = [(2, 5, 0.5), (2, 5, 0.6), (2, 3, 0.5), (2, 3, 0.6), (1.5, 5, 0.5), (2, 5, 0.4), (2, 3, 0.7)]
    grid += [(2, 2, 0.6), (3, 3, 0.6), (3, 2, 0.6), (2, 5, 0.7), (2, 5, 0.8), (2, 8, 0.7), (2, 8, 0.8)]
    grid += [(1.5, 8, 0.7), (2.5, 5, 0.7), (1.5, 5, 0.7), (1.5, 12, 0.7), (2, 12, 0.8)]
    yield from (speeding(*setting) for setting in grid)
    yield from (speeding(*setting, 2) for setting in ((2, 3, 0.6), (2, 5, 0.7), (2, 8, 0.7), (2, 2, 0.6)))


def report() -> Iterator[Lab]:
    """Report the best of these speeds at 7M."""
    yield from (speeding(2, 3, 0.6, seed) for seed in range(11, 16))


def large() -> Iterator[Lab]:
    """Select among speeds at 27M, at AdamW's best rate and below it."""
    for setting in ((1, 3, 0.6), (0.67, 3, 0.6), (1, 5, 0.7), (0.67, 5, 0.7)):
        yield speeding(*setting, model="gpt:25m", steps=2500)


def large_report() -> Iterator[Lab]:
    """Report the better of `large` at 27M: set lr, gain and power from its records first."""
    yield from (speeding(1, 3, 0.6, seed, model="gpt:25m", steps=2500) for seed in range(11, 15))


def muon() -> Iterator[Lab]:
    """Report Muon with averages and its decayed branches, a push of it, and guards against its spikes."""
    for seed in (11, 12, 13):
        yield Lab(method="muon", base="muon", lr=4e-3, forks=(0.2, 0.4), seed=seed)
        for R, how in ((-0.5, "constant"), (-0.7, "constant"), (-0.7, "warmup")):
            yield Lab(method="muon-push", base="muon", lr=4e-3, R=R, k=0.7, growth=how, seed=seed)


BATCHES = {f.__name__: f for f in (check, growth, form, report, large, large_report, muon)}
