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
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lab_runs import BATCHES, Lab
from paceline.experiments.data import prepare_text
from paceline.experiments.paper import lines
from paceline.experiments.records import environment
from torch import Tensor, nn

from paceline.lm.batch import numbers_at
from paceline.lm.evaluate import held_out_loss, summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.shards import Windows
from paceline.optim import parameter_groups
from paceline.optim.baselines import AdEMAMix

POWERS = (0.5, 0.6, 0.7, 0.8)


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
            part = max(1, lab.steps // 8)
            if t == lab.steps or (t % part == 0 and t + part <= lab.steps):
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
