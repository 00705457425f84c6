"""PACE as a torch optimizer: settings, groups, state, choice of path. The update itself is in rule.py."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from paceline.optim import recipe, weights
from paceline.optim.loading import Saved, admit, take_in
from paceline.optim.recipe import Gain, Gap, Recipe
from paceline.optim.sharded import same_values
from paceline.optim.state import (
    allocate,
    is_expanded,
    is_seeded,
    name_of,
    returned_key,
    take_averages,
)
from paceline.optim.work import all_finite, plan


@final
class PACE(Optimizer):
    r"""AdamW plus a clipped, per-coordinate pull of the live weights toward their average.

    A drop-in for `torch.optim.AdamW` that returns the average of the training iterates and trains for
    it (Au & Block, *Training for the Model You Return*, Algorithm 1). At every step t of a parameter

    .. code-block:: text

        raw      = AdamW(live)
        gain     = min(lr · pullback_strength · rate / (√v̂ + eps), max_gain)    rate = (1 + t)^-ema_power
        live'    = raw + gain · (average − live)
        average' = (1 − rate) · average + rate · live'

    The parameters always hold the live weights; the average is optimizer state. Evaluate it with
    `averaged_weights`, export it with `averaged_state_dict` or `save_averaged`.

    Arguments:
        params: parameters or parameter groups; any setting below may differ between groups.
        lr: learning rate, float or 1-element Tensor. Under gain="paper" it also scales the pull.
        betas, eps, weight_decay: AdamW's.
        pullback_strength: c in the paper. 0 is exactly AdamW with an EMA beside it.
        gain: how a coordinate's pull is sized. "paper": as above. "uniform": rate · strength for all.
            "relative": rate · strength · clip(rms(√v̂)/(√v̂+eps), ¼, 4), which does not depend on loss
            scale, learning rate or size. For the last two a strength in (−1, 0) pushes away.
        ema_power: κ in the paper, 0 to 1. 1 averages all iterates alike, 0 makes the average live.
        update_every: pull and average at every n-th step only.
        ema_offset, ema_scale: the averaging rate is (ema_offset + ema_scale · t)^-ema_power.
        max_gain: clip of the gain; inf for none.
        gap: "pre" pulls by the gap before the AdamW step, Algorithm 1. "lookahead" averages first and
            moves toward the new average; an infinite strength is then Lookahead with one inner step.
        return_power: a second average with this power is kept and is the one that is shown, exported
            and returned; it never influences training. None: the control average is returned.
        skip_nonfinite: skip the whole step if any gradient has a NaN or Inf (one host read a step).
        foreach, maximize, capturable, differentiable: as in torch.optim.AdamW.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters(), lr=1e-2)
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> with paceline.averaged_weights(optimizer):
    ...     loss = model(torch.ones(4, 2)).square().mean()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        pullback_strength: float = 3e-3,
        gain: Gain = "paper",
        ema_power: float = 0.5,
        update_every: int = 1,
        ema_offset: float = 1.0,
        ema_scale: float = 1.0,
        max_gain: float = 1.0,
        gap: Gap = "pre",
        return_power: float | None = None,
        skip_nonfinite: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "pullback_strength": pullback_strength,
            "gain": gain,
            "ema_power": ema_power,
            "update_every": update_every,
            "ema_offset": ema_offset,
            "ema_scale": ema_scale,
            "max_gain": max_gain,
            "gap": gap,
            "return_power": return_power,
            "skip_nonfinite": skip_nonfinite,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            # Not a setting: every checkpoint says which weights the parameters held when it was made.
            "parameters_hold": "live",
        }
        recipe.check(defaults)
        # Live weights that came with a loaded state, until the first step after it.
        self._loaded_live: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)

    # --- Groups and state -------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its settings are checked and its state exists from here on."""
        if isinstance(param_group, dict):
            recipe.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["parameters_hold"] = self.param_groups[0]["parameters_hold"]
        for i, parameter in enumerate(group["params"]):
            if not is_lazy(parameter) and is_expanded(parameter):
                self.param_groups.pop()
                raise ValueError(
                    f"{name_of(group, len(self.param_groups), i)} is an expanded tensor (strides "
                    f"{parameter.stride()}): several elements share one memory; clone it first"
                )
        # Frozen parameters get their state when they are thawed: beside adapters they are most of a model.
        for parameter in group["params"]:
            if parameter.requires_grad and not is_lazy(parameter):
                self.state[parameter] = allocate(parameter, group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_loaded_live": self._loaded_live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict; otherwise unpickled or copied
            state = self._adopt(**state)
        super().__setstate__(state)

    def _members(self) -> Iterator[Tensor]:
        """Each parameter once."""
        yield from dict.fromkeys(parameter for group in self.param_groups for parameter in group["params"])

    # --- The step ---------------------------------------------------------------------------------

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the live weights and update the averages.

        After a forgotten `eval()` the live weights are put back first.
        """
        if weights.in_block(self):
            raise RuntimeError(
                "step() inside averaged_weights: the parameters hold the average; step outside"
            )
        if self._notice_stale_load():
            warnings.warn(
                "the model was loaded after the optimizer, from a checkpoint of the average; this gradient "
                "was taken at the average. Call optimizer.train() after loading, or load the model first",
                stacklevel=4,
            )
        self._put_live_back()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._put_live_back()  # a closure that evaluates may end in eval()

        work = [plan(self.state, group, number) for number, group in enumerate(self.param_groups)]
        if not all_finite([slot.grad for w in work if w.group["skip_nonfinite"] for slot in w.slots]):
            return loss
        for group, parameters, slots, path in work:
            self._seed(parameters)
            if slots:
                path(slots, Recipe.of(group))
        return loss

    def _seed(self, parameters: list[Tensor]) -> None:
        """Take averages anew where a reset or a load asked for it. At a first step the rule itself does."""
        for parameter in parameters:
            state = self.state[parameter]
            if "unseeded" in state:
                take_averages(parameter, state)
                del state["unseeded"]

    # --- Which weights the parameters hold --------------------------------------------------------

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its returned average; one whose average is still live is left out."""
        for parameter in self._members():
            state = self.state.get(parameter)
            if state and is_seeded(state):
                yield parameter, state[returned_key(state)]

    def shows_average(self) -> bool:
        """Whether the parameters hold the average at present."""
        return bool(self.param_groups[0]["parameters_hold"] == "average")

    # Evaluation often runs in inference mode, where new tensors could not be written to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters, until `train()` or the next `step()`."""
        self._notice_stale_load()
        if self.shows_average():
            return
        self._mark("average")
        try:
            for parameter, _ in list(self.returned_averages()):
                state = self.state[parameter]
                weights.show_average_(parameter, state, returned_key(state))
        except BaseException:
            self._put_live_back()
            raise

    def train(self) -> None:
        """Put the live weights back into the parameters; nothing happens if they are there."""
        if self.shows_average() and weights.in_block(self):
            raise RuntimeError("train() inside averaged_weights: leave the block instead")
        self._put_live_back()

    def _put_live_back(self) -> None:
        self._notice_stale_load()
        if self.shows_average():
            self._restore_live()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _restore_live(self) -> None:
        # Backwards, so that parameters sharing one storage end as they began.
        for parameter in reversed(list(self._members())):
            state = self.state.get(parameter, {})
            if "live" in state:
                weights.show_live_(parameter, state, returned_key(state))
        self._mark("live")

    def _notice_stale_load(self) -> bool:
        """Whether a model checkpoint made of the average was loaded over live weights that came with ours.

        A checkpoint taken while the average was shown has the average in the model's part and live in
        the optimizer's; torch's set_state_dict loads the model's last. The average is then shown again.
        """
        loaded, self._loaded_live = self._loaded_live, {}
        stale = False
        for parameter, live in loaded.items():
            state = self.state.get(parameter, {})
            average = state.get(returned_key(state))
            if average is not None and same_values(parameter.detach(), average.to(parameter)):
                state["live"] = live
                stale = True
        if stale:
            self._mark("average")
        return stale

    def _mark(self, held: str) -> None:
        for group in self.param_groups:
            group["parameters_hold"] = held

    # --- Saving and loading -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's. While the parameters hold the average, it also has the `live` weights."""
        self._notice_stale_load()
        with self.register_state_dict_post_hook(_settle, prepend=True):
            self._refresh_unseeded()
            return super().state_dict()

    @torch.no_grad()
    def _refresh_unseeded(self) -> None:
        for parameter in self._members():
            state = self.state.get(parameter)
            if state and not is_seeded(state):
                take_averages(parameter, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of PACE or of torch.optim.AdamW; every tensor keeps its precision.

        A state without averages (AdamW's) seeds them from the live weights of the next step, with a
        warning. A state saved while the parameters held the average puts its live weights back into
        them. If anything does not fit, ValueError says what, and nothing is changed.
        """
        notes: list[str] = []
        # Last of all pre-hooks: torch would cast what it sees to the parameter's precision.
        with self.register_load_state_dict_pre_hook(partial(admit, notes)):
            super().load_state_dict(state_dict)
        for note in notes:
            warnings.warn(note, stacklevel=2)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt(self, state: dict[Any, Any], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Take in a state that `admit` let pass and torch mapped to our parameters."""
        # A fresh optimizer in eval mode shows nothing yet; what is loaded next is live.
        showed = any("live" in self.state.get(parameter, {}) for parameter in self._members())
        self._put_live_back()
        self.param_groups = param_groups
        self._mark("live")
        adopted: dict[Any, Any] = {k: v for k, v in state.items() if not isinstance(v, Saved)}
        for group in param_groups:
            for parameter in group["params"]:
                self.state.pop(parameter, None)  # its memory first
                saved = state.get(parameter)
                if saved is None:
                    if parameter.requires_grad and not is_lazy(parameter):
                        adopted[parameter] = allocate(parameter, group)
                    continue
                adopted[parameter] = take_in(parameter, saved.entries, group)
                if "live" in saved.entries:
                    parameter.copy_(saved.entries["live"])
                    if is_seeded(adopted[parameter]):
                        self._loaded_live[parameter] = parameter.detach().clone()
        self.state = defaultdict(dict, adopted)
        if showed:
            self._loaded_live.clear()
            self.eval()
        return {"state": self.state, "param_groups": self.param_groups}


def reset_average(optimizer: PACE) -> None:
    """Start the averages anew from the live weights, e.g. for a second phase of training.

    Until its next step a parameter's average is again its live weight, so weights may still be loaded.
    Moments and step counts stay, and with them the averaging rate.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> paceline.reset_average(optimizer)
    """
    weights.keeper_of(optimizer).train()
    for state in optimizer.state.values():
        if "average" in state:
            state["unseeded"] = torch.tensor(True)


def _settle(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """While averages are shown, copy what changes places when live comes back, and give all of them live."""
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        if packed["parameters_hold"] == "live":
            continue
        for parameter, key in zip(group["params"], packed["params"], strict=True):
            entries = state_dict["state"].get(key)
            if entries:
                moving = {"live": parameter.detach(), **entries}
                moving = {k: moving[k].clone() for k in ("live", returned_key(entries))}
                state_dict["state"][key] = {**entries, **moving}
