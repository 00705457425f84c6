"""GPA: gradients between an average and the weights that the base optimizer moves."""

from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim import weights
from paceline.optim.checks import is_number, require
from paceline.optim.loading import Format
from paceline.optim.rule import move_average_
from paceline.optim.state import State, take_averages
from paceline.optim.wrapper import Wrapper, refuse_averaging_base


def _check(group: dict[str, Any]) -> None:
    mu_x, mu_y = group["mu_x"], group["mu_y"]
    require(is_number(mu_x) and 0 <= mu_x < 1, "mu_x value", mu_x, "0 <= mu_x < 1")
    require(is_number(mu_y) and 0 <= mu_y <= 1, "mu_y value", mu_y, "0 <= mu_y <= 1")


def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
    return ("average", "fast")


@final
class GPA(Wrapper):
    """Generalized Primal Averaging (Defazio et al., arXiv 2512.17131) around any optimizer.

    .. code-block:: text

        fast'    = base(fast), with the gradient taken at live
        average' = mu_x · average + (1 − mu_x) · fast'
        live'    = mu_y · average' + (1 − mu_y) · fast'

    `live` is the paper's y and sits in the parameters, `fast` its z, `average` its x, which is evaluated
    and returned. Two copies of the weights are kept, so that showing the average is exact.

    The authors' settings: mu_y = 0.7, mu_x = 0.9^(1/H), as smooth as DiLoCo with H inner steps (H = 32:
    0.9967), on AdamW. Decoupled weight decay is the base's, and acts on `fast`, as in the paper; their code
    lets a decayed `fast` into the update of y twice, so that with weight decay the two differ.
    mu_x = 0 is the base itself; mu_y = 0 the base with an EMA beside it; on SGD with rate lr/(1 − μ),
    mu_x = mu_y = μ is Nesterov momentum μ and mu_x = μ, mu_y = 1 heavy-ball momentum μ.

    >>> import torch
    >>> from paceline.optim.baselines import GPA
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = GPA(torch.optim.AdamW(model.parameters()), mu_x=0.9 ** (1 / 16))
    """

    format = Format(
        prefix="gpa_",
        reads="GPA loads its own states and those of its base optimizer",
        check=_check,
        wanted=_wanted,
        on_device=False,
    )

    def __init__(self, base: Optimizer, *, mu_x: float = 0.9967, mu_y: float = 0.7) -> None:
        refuse_averaging_base(base, "GPA")
        super().__init__(base, {"mu_x": mu_x, "mu_y": mu_y})
        if self._needs_closure:
            raise ValueError(
                f"GPA cannot wrap {type(base).__name__}, which takes its gradients itself, at other weights"
            )

    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self._memory[parameter]
            if state["step"] == 0:
                take_averages(parameter, state, _wanted(group))
            parameter.copy_(state["fast"])

    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: None) -> None:
        for parameter in moved:
            state = self._memory[parameter]
            state["step"] += 1
            state["fast"].copy_(parameter)
            move_average_(state["average"], state["fast"], 1 - group["mu_x"])
            self._place_live(parameter, state, group)

    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self._place_live(parameter, self._memory[parameter], group)

    def _place_live(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        parameter.copy_(torch.lerp(state["fast"], state["average"], group["mu_y"]))

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        return state["average"]

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        weights.show_average_(parameter, state, "average")

    def _hide(self, parameter: Tensor, state: State) -> None:
        weights.show_live_(parameter, state, "average")
