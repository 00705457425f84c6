"""GPA: gradients between an average and the weights that the base optimizer moves."""

from typing import Any, final

import torch
from torch import Tensor

from paceline.optim.attach import Attachment, Base
from paceline.optim.rule import move_average_
from paceline.optim.settings import SHARE, check, is_number
from paceline.optim.sharding import local
from paceline.optim.state import STEP, Entry, average_entry
from paceline.optim.steering import Rule, Work


def gpa(base: Base, *, mu_x: float = 0.9967, mu_y: float = 0.7) -> Base:
    """Attach Generalized Primal Averaging (Defazio et al., arXiv 2512.17131) to an optimizer, and return it.

    .. code-block:: text

        fast'    = base(fast), with the gradient taken at live
        average' = mu_x · average + (1 − mu_x) · fast'
        live'    = mu_y · average' + (1 − mu_y) · fast'

    `live` is the paper's y, `fast` its z, `average` its x, which is evaluated and returned. The authors'
    settings: mu_y = 0.7, mu_x = 0.9^(1/H), as smooth as DiLoCo with H inner steps (H = 32: 0.9967). Weight
    decay is the base's and acts on `fast`, as in the paper. The authors' code lets a decayed `fast` into
    live twice.
    """
    Attachment(base, _GPA(mu_x, mu_y))
    return base


@final
class _GPA(Rule):
    """The rule of `gpa`."""

    kept = ("average", "fast")
    moves_live = True

    def __init__(self, mu_x: float, mu_y: float) -> None:
        self.settings = {"mu_x": mu_x, "mu_y": mu_y}

    def check(self, group: dict[str, Any]) -> None:
        check(group, {"mu_x": (lambda v: is_number(v) and 0 <= v < 1, "0 <= mu_x < 1"), "mu_y": SHARE})

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        return {"step": STEP, "average": average_entry(live), "fast": average_entry(live)}

    def before_(self, work: Work) -> None:
        """Put the fast weights into the parameter."""
        work.live.detach().copy_(work.state["fast"])

    def undo_(self, work: Work) -> None:
        """Put live back between the average and the fast weights."""
        average, fast = local(work.state["average"]), local(work.state["fast"])
        local(work.live.detach()).copy_(torch.lerp(fast, average, work.group["mu_y"]))

    def after_(self, works: list[Work], t: int) -> None:
        """Take the base's step in, and place live."""
        for work in works:
            work.state["fast"].copy_(work.live.detach())
            average, fast = local(work.state["average"]), local(work.state["fast"])
            move_average_(average, fast, 1 - work.group["mu_x"])
            self.undo_(work)
