"""The work around the step of a base optimizer: averages, and a control the same for all coordinates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from paceline.optim.averages import Average
from paceline.optim.foreach import move_averages_
from paceline.optim.rule import step_scalars
from paceline.optim.settings import AverageDtype, Control, Settings, check
from paceline.optim.sharding import local
from paceline.optim.state import (
    STEP,
    Entry,
    State,
    average_entry,
    average_of,
    entries_of_average,
    keep_average_,
)
from paceline.optim.weights import AverageRule


@dataclass(slots=True)
class Work:
    """The data of one step of the base, for one parameter."""

    live: Tensor
    state: State
    group: dict[str, Any]
    averages: list[Tensor] = field(default_factory=list)
    """Those of the control, made whole from before the base's step until after it."""
    gap: Tensor | None = None
    """Average − live before the base's step, where the control reads it there."""


class Rule(AverageRule):
    """A rule of what is done around the step of a base; by default nothing.

    For each parameter `before_`, the base's step, `after_`; or `before_`, `undo_`. Undoing twice, or what
    was only begun, does no harm.
    """

    settings: Mapping[str, Any]
    """Entries of every parameter group."""
    moves_live = False
    """Whether `before_` changes live, where a closure takes its gradient."""

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a group is out of range."""

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("average",)

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        """Return what is kept of a parameter; averages begin as live before its first step."""
        return {"step": STEP, "average": average_entry(live)}

    def factor(self, group: dict[str, Any]) -> float:
        """Return the factor on the base's learning rate."""
        return 1.0

    def before_(self, work: Work) -> None:
        """Prepare a parameter for the base's step."""

    def undo_(self, work: Work) -> None:
        """Undo `before_`, after a step that was broken off."""

    def after_(self, works: list[Work], t: int) -> None:
        """Finish step t of parameters of one group, device and dtype, which the base has moved."""


@final
class Steering(Rule):
    """Averages beside a base, and the control that steers it, if there is one."""

    def __init__(
        self, control: Control | None, further: Mapping[str, Average], average_dtype: AverageDtype
    ) -> None:
        self.settings = {"control": control, "average_dtype": average_dtype}
        own = () if control is None else ("average",)
        self.kept = (*own, *(f"{name}_{part}" for name, average in further.items() for part in average.parts))
        self.further = dict(further)

    def check(self, group: dict[str, Any]) -> None:
        control = group["control"]
        check({"average_dtype": group["average_dtype"], **({} if control is None else {"control": control})})
        if control is not None and control.strength != 0 and control.sizing == "paper":
            raise ValueError(
                "Control.paper() is sized by the second moments of AdamW: use PACE, or Control.push() and "
                "Control.pull() with other optimizers"
            )

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        control: Control | None = group["control"]
        return (*(() if control is None else control.averages[::-1]), *self.further)

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        control, entries = group["control"], {"step": STEP}
        for name in () if control is None else control.averages:
            entries |= entries_of_average(name, live, group["average_dtype"])
        for name, average in self.further.items():
            entries |= {f"{name}_{part}": average_entry(live) for part in average.parts}
        return entries

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor | None:
        if name not in self.further:
            return super().value(name, parameter, state, live)
        average = self.further[name]
        parts = {part: state[f"{name}_{part}"] for part in average.parts if f"{name}_{part}" in state}
        has_begun = len(parts) == len(average.parts) and state["step"].item() > 0
        return average.returned(parts, live) if has_begun else None

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0 if group["control"] is None else float(group["control"].step)

    def before_(self, work: Work) -> None:
        control, live = work.group["control"], work.live.detach()
        if control is not None:
            work.averages = [local(average_of(work.state, name, live)) for name in control.averages]
            if control.strength != 0 and control.gap == "before":
                work.gap = work.averages[0] - local(live)

    def after_(self, works: list[Work], t: int) -> None:
        lives = [local(work.live.detach()) for work in works]
        control = works[0].group["control"]
        if control is not None:
            _steer_(works, lives, control, t)
        for name, average in self.further.items():
            parts = {part: [local(work.state[f"{name}_{part}"]) for work in works] for part in average.parts}
            average.move_(parts, lives, t)


def _steer_(works: list[Work], lives: list[Tensor], control: Control, t: int) -> None:
    """Take step t of a control: pull live and move its averages, as `pace_step_` does."""
    names, group = control.averages, works[0].group
    at = step_scalars(t, Settings(lr=float(group.get("lr", 1.0)), control=control))
    for work in works:  # a closure that evaluates leaves averages in other memory
        kept = zip(names, work.averages, strict=True)
        work.averages = [local(work.state.get(name, average)) for name, average in kept]
    steering = [work.averages[0] for work in works]
    if control.order == "average, then pull":
        move_averages_(steering, lives, at.rate)
    if at.pulling:
        found = zip(works, lives, steering, strict=True)
        gaps = [average - live if work.gap is None else work.gap for work, live, average in found]
        torch._foreach_mul_(gaps, min(at.numerator, at.limit))
        torch._foreach_add_(lives, gaps)
    if control.order == "pull, then average":
        move_averages_(steering, lives, at.rate)
    if len(names) > 1:
        move_averages_([work.averages[1] for work in works], lives, at.return_rate)
    if group["average_dtype"] != "float32":
        for work in works:
            for name, average in zip(names, work.averages, strict=True):
                keep_average_(work.state, name, work.live, average)
