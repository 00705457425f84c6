"""EMA-Nesterov: a push of live along the slow trend of its own steps."""

from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.checks import is_number, require
from paceline.optim.loading import Format
from paceline.optim.pullback import Chunk, control_recipe, finish_, prepare
from paceline.optim.recipe import Recipe
from paceline.optim.state import State
from paceline.optim.weights import show_computed_, show_kept_
from paceline.optim.wrapper import Wrapper, refuse_averaging_base


def _check(group: dict[str, Any]) -> None:
    push, decay, start, stop = (group[name] for name in ("push", "decay", "start", "stop"))
    require(is_number(push) and 0 <= push < float("inf"), "push value", push, ">= 0 and finite")
    require(is_number(decay) and 0 < decay < 1, "decay value", decay, "0 < decay < 1")
    require(isinstance(start, int) and start >= 0, "start value", start, "an integer >= 0")
    ok = stop is None or (isinstance(stop, int) and stop >= start)
    require(ok, "stop value", stop, "None, or an integer >= start")


def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
    return ("average",)


@final
class EMANesterov(Wrapper):
    """EMA-Nesterov (Yau et al., arXiv 2605.25395) around any optimizer.

    The paper's x are the base's iterates; gradients are taken at y = x + β m, where the parameters are:

    .. code-block:: text

        x' = base(y)        m' = decay · m + (1 − decay) · (x' − x)        y' = x' + β m'

    Kept here is the EMA E of x instead of m: m = (1 − decay)/decay · (x − E), so that this is PACE's
    family with a negative strength, −β/decay, under gap="lookahead". What is evaluated and returned is x.

    β = push · lr / (largest lr so far) from step `start` until step `stop`, and 0 before and after: the
    off switch. The paper's settings: decay 0.99; push 0.6 on Muon from 16 % to 76 % of the run and 0.3 on
    Aurora from 10 % to 67 % (modded-nanogpt's pull requests 308 and 309), with a decaying rate.

    Arguments:
        base: the optimizer to wrap.
        push: β at the largest learning rate. 0 is the base itself.
        decay: of the EMA, γ in the paper. Towards 0 this is Nesterov's method.
        start, stop: the steps between which it pushes; stop None: to the end.

    >>> import torch
    >>> from paceline.optim.baselines import EMANesterov
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = EMANesterov(torch.optim.AdamW(model.parameters()), push=0.3, start=10, stop=70)
    """

    format = Format(
        prefix="nesterov_",
        reads="EMANesterov loads its own states and those of its base optimizer",
        check=_check,
        wanted=_wanted,
        scalars=("beyond",),
        on_device=False,
    )

    def __init__(
        self,
        base: Optimizer,
        *,
        push: float = 0.3,
        decay: float = 0.99,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        refuse_averaging_base(base, "EMANesterov")
        settings = {"push": push, "decay": decay, "start": start, "stop": stop, "largest_lr": 0.0}
        super().__init__(base, settings)

    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Chunk]:
        group["largest_lr"] = max(group["largest_lr"], float(group.get("lr", 1.0)))
        return prepare(self._memory, parameters, on_device=False, recipe_at=lambda t: _recipe(group, t))

    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: list[Chunk]) -> None:
        among = set(map(id, moved))
        for chunk in prepared:
            recipe = _recipe(group, float(chunk.ats[0].t))
            finish_(chunk, among, lambda parameter: None, recipe, type(self.base).__name__)
            for parameter, state in zip(chunk.parameters, chunk.states, strict=True):
                if id(parameter) in among:  # how far y is beyond x, in units of x − E
                    beyond = -recipe.pullback_strength * (1 - group["decay"])
                    state["beyond"] = torch.tensor(beyond, dtype=torch.float64)

    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Nothing was changed."""

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        """x, from y = x + beyond · (x − E)."""
        beyond = state["beyond"].item()
        share = beyond / (1 + beyond)
        # Not lerp: of a number that changes from call to call, sharded tensors would remember each.
        return (live.to(state["average"].dtype) * (1 - share)).add_(state["average"], alpha=share)

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        show_computed_(parameter, state, self._average(name, parameter, state, parameter.detach()))

    def _hide(self, parameter: Tensor, state: State) -> None:
        show_kept_(parameter, state)


def _recipe(group: dict[str, Any], t: float) -> Recipe:
    """The settings of step t, in terms of a pull."""
    on = group["start"] < t and (group["stop"] is None or t <= group["stop"]) and group["largest_lr"] > 0
    push = group["push"] * float(group.get("lr", 1.0)) / group["largest_lr"] if on else 0.0
    return control_recipe(
        group,
        {
            "pullback_strength": -push / group["decay"],
            "gain": "uniform",
            "gap": "lookahead",
            "ema_power": 1.0,
            "ema_offset": 1 / (1 - group["decay"]),
            "ema_scale": 0.0,
            "update_every": 1,
            "max_gain": 1.0,
            "return_power": None,
        },
    )
