"""Train small GPTs with controls that the product does not have: the part of the study outside the engine.

Model, data, order of samples and initial weights are the engine's: a seed means the same run in both. A
control may grow, read its gap after the base's step, or act on Muon, NAdam or AdEMAMix. For example:
    python records/studies/sign/lab.py check --text wiki --held-out first.jsonl --keep new.jsonl --jobs 12
"""

import argparse
import copy
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.experiments.data import prepare_text
from paceline.experiments.paper import lines
from paceline.experiments.records import environment
from paceline.lm.batch import numbers_at
from paceline.lm.evaluate import held_out_loss, summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.shards import Windows
from paceline.optim import parameter_groups
from paceline.optim.baselines import AdEMAMix

POWERS = (0.5, 0.6, 0.7, 0.8)


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


def bases_of(lab: Lab, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Make the base: one optimizer, or two for Muon, which takes hidden matrices only."""
    groups, cuda = parameter_groups(model, 0.01), next(model.parameters()).is_cuda
    plain: dict[str, Any] = {"lr": lab.lr, "betas": (0.9, 0.999)}
    if lab.base == "adamw":
        return [torch.optim.AdamW(groups, **plain, fused=cuda)]
    if lab.base == "nadamw":
        return [torch.optim.NAdam(groups, **plain, decoupled_weight_decay=True)]
    if lab.base == "ademamix":
        betas, warm = (0.9, 0.999, lab.beta3), lab.steps
        return [AdEMAMix(groups, lab.lr, betas, alpha=lab.alpha, alpha_warmup=warm, beta3_warmup=warm)]
    hidden = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    rest = [{**g, "params": [p for _, p in g["params"] if id(p) not in map(id, hidden)]} for g in groups]
    muon = torch.optim.Muon(hidden, lr=lab.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, **plain, fused=cuda)]


def flat_(model: nn.Module) -> Tensor:
    """Move all parameters and gradients into one vector each, and return that of the parameters."""
    parameters = list(model.parameters())
    whole = torch.cat([p.detach().flatten() for p in parameters])
    grads, at = torch.zeros_like(whole), 0
    for p in parameters:
        part = slice(at, at := at + p.numel())
        p.data, p.grad = whole[part].view_as(p), grads[part].view_as(p)
    model.gradient = grads  # type: ignore[assignment]
    return whole


def train(lab: Lab, text: str, held_out: str) -> Iterator[dict[str, Any]]:
    """Train one run, then its branches, and yield a line for each."""
    began, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    data = prepare_text((text,), (held_out,), "auto", "bpe:4096", lambda said: None)
    samples, judges = Windows(data.training, lab.length), Windows(data.held_out, lab.length)
    torch.manual_seed(lab.seed)
    shape = replace(shape_of(lab.model, data.vocabulary.size, lab.length), vocabulary_multiple=64)
    model = GPT(shape).to(device)
    live, bases = flat_(model), bases_of(lab, model)
    grads: Tensor = model.gradient  # type: ignore[assignment]
    loss_of = torch.compile(summed_loss) if device == "cuda" else summed_loss
    averages = {"control": live.clone(), **{f"power_{p:g}".replace(".", "_"): live.clone() for p in POWERS}}
    powers = dict(zip(averages, (lab.k, *POWERS), strict=True))
    saved: dict[int, Any] = {}

    def judge() -> dict[str, float]:
        kept, losses = live.clone(), {}
        for view in ("live", *list(averages)[1:]):
            live.copy_(averages.get(view, kept))
            losses[view] = held_out_loss(model, judges, device=torch.device(device), loss_of=loss_of,
                                         batch_size=lab.batch_size, precision=torch.bfloat16)  # fmt: skip
        live.copy_(kept)
        return losses

    def steps(lab: Lab, start: int) -> Iterator[tuple[int, dict[str, float]]]:
        for t in range(start + 1, lab.steps + 1):
            numbers = numbers_at(t - 1, batch_size=lab.batch_size, samples=len(samples), seed=lab.seed)
            batch = samples.batch(numbers).to(torch.device(device))
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(model, batch) / (lab.batch_size * lab.length)
            grads.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
            R = lab.strength(t)
            with torch.no_grad():
                grads.mul_((1 / (grads.norm() + 1e-6)).clamp(max=1.0))
                for group in (group for base in bases for group in base.param_groups):
                    group["lr"] = lab.lr * lab.factor(t) * (1 if lab.growth == "speed" else 1 + R)
                before = averages["control"] - live
                for base in bases:
                    base.step()
                gap = before if lab.gap == "before" else averages["control"] - live
                live.add_(gap, alpha=R * lab.rate(t, lab.k))
                for view, average in averages.items():
                    average.lerp_(live, lab.rate(t, powers[view]))
            if t in (lab.steps - round(d * lab.steps) for d in lab.forks):
                saved[t] = copy.deepcopy((live, averages, [base.state_dict() for base in bases]))
            if t % max(1, lab.steps // 8) == 0:
                yield t, judge()

    for one in (lab, *(replace(lab, decay=d, forks=(), method=f"{lab.method}-wsd") for d in lab.forks)):
        start = 0 if one is lab else lab.steps - round(one.decay * lab.steps)
        if start:
            weights, kept, states = copy.deepcopy(saved[start])
            live.copy_(weights)
            for view, average in kept.items():
                averages[view].copy_(average)
            for base, state in zip(bases, states, strict=True):
                base.load_state_dict(state)
        found = [[t, {view: round(x, 6) for view, x in losses.items()}] for t, losses in steps(one, start)]
        ended = bool(found) and found[-1][0] == lab.steps and math.isfinite(found[-1][1]["live"])
        yield {
            "format": lines.FORMAT, "name": one.name, "config": asdict(one), "environment": environment(),
            "parameters": live.numel(), "outcome": "finished" if ended else "diverged", "lr": one.lr,
            "data": {"fingerprint": samples.fingerprint, "held_out_fingerprint": judges.fingerprint},
            "seconds": round(time.time() - began, 1), "evaluations": found, "train": [], "pull": [],
            "method": one.method, "setting": asdict(one), "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }  # fmt: skip


def check() -> Iterator[Lab]:
    """Reproduce three differences between methods that were measured before this study."""
    yield Lab(method="adamw", lr=3e-3, forks=(0.2,))
    yield from (Lab(method="push", lr=3e-3, R=-0.5, k=k) for k in (0.5, 0.3))


def growth() -> Iterator[Lab]:
    """Compare strengths that grow, a gap read after the step, other bases, and a shorter warm-up."""
    for R in (-0.5, -0.7):
        for how in ("linear", "log", "warmup"):
            yield Lab(method="push", lr=3e-3, R=R, growth=how)
    yield Lab(method="push", lr=3e-3, R=-0.5, gap="after")
    yield from (Lab(method="nadamw", base="nadamw", lr=lr) for lr in (2e-3, 3e-3, 1.5e-3, 4.5e-3))
    # A push away from an average of AdEMAMix, and a warm-up of 2 % of the run.
    yield from (Lab(method="ademamix-push", base="ademamix", lr=2e-3, R=R, beta3=0.997) for R in (-0.3, -0.5))
    yield Lab(method="push", lr=3e-3, R=-0.7, k=0.5, warmup=0.02)
    yield Lab(method="adamw", lr=2e-3, warmup=0.02)
    yield Lab(method="ademamix", base="ademamix", lr=2e-3, beta3=0.997, warmup=0.02)


def form() -> Iterator[Lab]:
    """Let slow motion gain speed over the run while the base keeps its rate, as in AdEMAMix."""
    for lr, gain, k in ((2, 5, 0.5), (2, 5, 0.6), (2, 3, 0.5), (2, 3, 0.6), (1.5, 5, 0.5), (2, 5, 0.4)):
        yield Lab(method="push", lr=lr * 1e-3, R=-gain / (1 + gain), k=k, growth="speed")


def muon() -> Iterator[Lab]:
    """Report Muon with averages and its decayed branches, a push of it, and guards against its spikes."""
    for seed in (11, 12, 13):
        yield Lab(method="muon", base="muon", lr=4e-3, forks=(0.2, 0.4), seed=seed)
        for R, how in ((-0.5, "constant"), (-0.7, "constant"), (-0.7, "warmup")):
            yield Lab(method="muon-push", base="muon", lr=4e-3, R=R, k=0.7, growth=how, seed=seed)


BATCHES = {"check": check, "growth": growth, "form": form, "muon": muon}


def _done(job: tuple[Lab, str, str]) -> list[dict[str, Any]]:
    return list(train(*job))


def main() -> None:
    """Parse the command line and train what no record has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("batches", nargs="+", choices=tuple(BATCHES))
    parser.add_argument("--text", required=True, help="folder made by `paceline data`")
    parser.add_argument("--held-out", required=True, help="file of the held-out articles")
    parser.add_argument("--keep", type=Path, required=True, help="file that gets a line for each run")
    parser.add_argument("--jobs", type=int, default=8, help="runs in parallel [8]")
    given = parser.parse_args()
    known = set(lines.read(sorted(Path(__file__).parent.glob("2*.jsonl"))))
    runs = {one.name: (batch, one) for batch in given.batches for one in BATCHES[batch]()}
    jobs = [(one, given.text, given.held_out) for name, (_, one) in runs.items() if name not in known]
    start = multiprocessing.get_context("spawn").Pool
    with start(given.jobs, maxtasksperchild=1) as pool, given.keep.open("a") as file:
        for found in pool.imap_unordered(_done, jobs):
            for line in found:
                line["batch"] = runs.get(line["name"], ("forks",))[0]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                print(line["seconds"], line["name"], line["evaluations"][-1:], flush=True)
            file.flush()


if __name__ == "__main__":
    main()
