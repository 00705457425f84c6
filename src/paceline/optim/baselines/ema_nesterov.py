"""EMA-Nesterov: a push of live along the slow trend of its own steps."""

from typing import Any, final

from torch import Tensor

from paceline.optim.attach import Attachment, Base
from paceline.optim.settings import FROM_0, NOT_NEGATIVE, check, is_number
from paceline.optim.sharding import local
from paceline.optim.state import STEP, Entry, average_entry, least_float32
from paceline.optim.steering import Rule, Work


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
    Attachment(base, _EMANesterov(push, decay, start, stop))
    return base


@final
class _EMANesterov(Rule):
    """The rule of `ema_nesterov`."""

    def __init__(self, push: float, decay: float, start: int, stop: int | None) -> None:
        self.settings = {"push": push, "decay": decay, "start": start, "stop": stop, "largest_lr": 0.0}

    def check(self, group: dict[str, Any]) -> None:
        check(group, {
            "push": NOT_NEGATIVE,
            "decay": (lambda v: is_number(v) and 0 < v < 1, "0 < decay < 1"),
            "start": FROM_0,
            "stop": (lambda v: v is None or (isinstance(v, int) and v >= group["start"]),
                     "None, or an integer >= start"),
        })  # fmt: skip

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        trend = Entry(least_float32(live))  # m; the average is x
        return {"step": STEP, "average": average_entry(live), "trend": trend}

    def after_(self, works: list[Work], t: int) -> None:
        """Take the base's step in, and push live along the trend."""
        group, stop, lr = works[0].group, works[0].group["stop"], float(works[0].group.get("lr", 1.0))
        largest = group["largest_lr"] = max(group["largest_lr"], lr)
        is_on = group["start"] < t and (stop is None or t <= stop) and largest > 0
        push = group["push"] * lr / largest if is_on else 0.0
        for work in works:
            tensors = (work.live.detach(), work.state["average"], work.state["trend"])
            live, x, trend = (local(tensor) for tensor in tensors)
            trend.mul_(group["decay"]).add_(live - x, alpha=1 - group["decay"])
            x.copy_(live)
            live.add_(trend, alpha=push)
