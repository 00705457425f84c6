"""Gradients as a whole: their norm, by which they are clipped, and whether a step is to be skipped."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.optim.rule import Scalar
from paceline.optim.sharded import OverRanks, sums_of_gradients
from paceline.optim.work import ONE_PASS, Work


class Scaled(NamedTuple):
    """What a `torch.amp.GradScaler` says of gradients that it leaves to the optimizer."""

    scale: Tensor | None  # () by which they are too large; None: not at all
    found_inf: Tensor | None  # () not 0 if one of them has a NaN or Inf


class Gradients(NamedTuple):
    """What is to be made of them."""

    norm: Tensor | None  # () over all of them, if anything asks for it
    skip: bool | Tensor  # the step; () on the device, if it must not be read on the host
    scale: Tensor | None

    def factor(self, limit: float | None) -> Scalar:
        """How many times they count where their norm may be `limit` at most."""
        factor: Scalar = 1.0 if self.scale is None else 1.0 / self.scale
        if limit is not None and self.norm is not None:
            clip = (limit / (self.norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
            factor = factor * clip
        # What is on the host is a number; what is on a device stays there, as to read it would be to wait,
        # and so does what a compiler sees.
        on_host = isinstance(factor, Tensor) and factor.device.type == "cpu"
        return float(factor) if on_host and not torch.compiler.is_compiling() else factor


def look_at(works: list[Work], scaled: Scaled, over_ranks: OverRanks) -> Callable[[], Gradients]:
    """The gradients of a step, before it; told once all sums over ranks are asked for."""
    if scaled.found_inf is None and not [work for work in works if _asks(work.group)]:
        return lambda: Gradients(None, False, scaled.scale)
    skips = [work for work in works if work.group["skip_nonfinite"]]
    clips = any(work.group["max_grad_norm"] is not None for work in works)
    asked = {id(work): _ask_sums(work, over_ranks) for work in (works if clips else skips)}

    def sums(own: list[Work]) -> Tensor:
        """Of all their gradients, (2,) as in sharded.py."""
        parts = [part() for work in own for part in asked[id(work)]]
        return sum((part.to(parts[0]) for part in parts[1:]), parts[0]) if parts else torch.zeros(2)

    def look() -> Gradients:
        norm = sums(works)[0].sqrt() if clips else None
        if norm is not None and scaled.scale is not None:
            norm = norm / scaled.scale.to(norm)
        bad = sums(skips)[1] != 0 if skips else None
        skip: bool | Tensor = False
        if any(work.group["capturable"] for work in works):
            flags = [flag.to(torch.float32) for flag in (scaled.found_inf, bad) if flag is not None]
            skip = sum(flags[1:], flags[0]) if flags else False
        elif bad is not None:
            skip = bool(bad)
        return Gradients(norm, skip, scaled.scale)

    return look


def _asks(group: dict[str, Any]) -> bool:
    """Whether it has to be known of its gradients how large they are."""
    return group["max_grad_norm"] is not None or bool(group["skip_nonfinite"])


def refuse_to_skip(works: list[Work]) -> None:
    """Raise RuntimeError unless all of the step can be skipped on the device, before anything moves."""
    for work in works:
        if work.members.parameters and not work.can_skip():
            raise RuntimeError(
                "with capturable=True a step is skipped on the device, by the one pass over memory, but "
                "a group takes another path or has capturable=False: leave out skip_nonfinite or capturable, "
                'or what rules fused=True out (gain="relative", foreach, dtypes that it does not know)'
            )


def _ask_sums(work: Work, over_ranks: OverRanks) -> list[Callable[[], Tensor]]:
    """Of all gradients of a group, (2,) as in sharded.py; to be added up."""
    parameters = work.members.parameters
    if not work.members.memo["one pass"] or not work.is_cut_alike():
        grads = (p.grad for p in parameters if p.grad is not None)
        return sums_of_gradients(grads, over_ranks)
    found = []
    for kind, part in work.members.by_device().items():
        own = ONE_PASS[kind].sums_of_gradients(part, work.group["capturable"])
        # A rank that has nothing of any of them asks as the others do.
        total = sum(own[1:], own[0]) if own else torch.zeros(2, dtype=torch.float64, device=kind)
        found.append(over_ranks.ask(total, parameters[0]))
    return found
