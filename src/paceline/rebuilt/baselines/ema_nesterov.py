"""EMA-Nesterov: a push of live along the slow trend of its own steps."""

from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.rebuilt.attach import Attachment, Work
from paceline.rebuilt.settings import is_number, require
from paceline.rebuilt.sharding import local
from paceline.rebuilt.state import Entry, State, average_dtype

Base = TypeVar("Base", bound=Optimizer)


def ema_nesterov(
    base: Base, *, push: float = 0.3, decay: float = 0.99, start: int = 0, stop: int | None = None
) -> Base:
    """Attach EMA-Nesterov (Yau et al., arXiv 2605.25395) to an optimizer, and return it.

    The paper's x are the base's iterates; gradients are taken at y = x + β m, which is live:

    .. code-block:: text

        x' = base(y)        m' = decay · m + (1 − decay) · (x' − x)        y' = x' + β m'

    What is evaluated and returned is x. β = push · lr/(largest lr so far) after step `start` until step
    `stop` (None: to the end), and 0 before and after. The paper's settings: decay 0.99; push 0.6 on Muon
    from 16 % to 76 % of the run and 0.3 on Aurora from 10 % to 67 %, with a decaying rate.
    """
    Attachment(
        base, _EMANesterov({"push": push, "decay": decay, "start": start, "stop": stop, "largest_lr": 0.0})
    )
    return base


@final
class _EMANesterov:
    """The rule of `ema_nesterov`."""

    kept: tuple[str, ...] = ("average",)
    moves_live = False

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def check(self, group: dict[str, Any]) -> None:
        push, decay, start, stop = (group[name] for name in ("push", "decay", "start", "stop"))
        require(is_number(push) and 0 <= push < float("inf"), "push", push, ">= 0 and finite")
        require(is_number(decay) and 0 < decay < 1, "decay", decay, "0 < decay < 1")
        require(isinstance(start, int) and start >= 0, "start", start, "an integer >= 0")
        ok = stop is None or (isinstance(stop, int) and stop >= start)
        require(ok, "stop", stop, "None, or an integer >= start")

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0

    def returned(self, group: dict[str, Any]) -> str:
        return "average"

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        return {
            "step": Entry(torch.float64, (), on_host=True),
            "average": Entry(average_dtype(live), is_average=True),  # x
            "trend": Entry(average_dtype(live)),  # m
        }

    def before_(self, work: Work) -> None:
        """Note the largest learning rate."""
        group = work.group
        group["largest_lr"] = max(group["largest_lr"], float(group.get("lr", 1.0)))

    def undo_(self, work: Work) -> None:
        """Undo nothing: nothing was changed."""

    def after_(self, works: list[Work], t: int) -> None:
        """Take the base's step in, and push live along the trend."""
        group = works[0].group
        is_on = (
            group["start"] < t and (group["stop"] is None or t <= group["stop"]) and group["largest_lr"] > 0
        )
        push = group["push"] * float(group.get("lr", 1.0)) / group["largest_lr"] if is_on else 0.0
        for work in works:
            live, x, trend = (
                local(v) for v in (work.live.detach(), work.state["average"], work.state["trend"])
            )
            trend.mul_(group["decay"]).add_(live - x, alpha=1 - group["decay"])
            x.copy_(live)
            live.add_(trend, alpha=push)

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        return state[name]
