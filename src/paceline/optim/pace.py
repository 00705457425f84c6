"""PACE as a torch optimizer: settings, groups, state, choice of path. The update itself is in rule.py."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)

from paceline.optim import recipe, weights
from paceline.optim.averaging import Averaging
from paceline.optim.gradients import Scaled, look_at, refuse_to_skip
from paceline.optim.loading import ADAMW_ONLY_SETTINGS, Format, Saved, take_in
from paceline.optim.members import Fits, Members
from paceline.optim.recipe import AverageDtype, Gain, Gap, Recipe, Rounding
from paceline.optim.sharded import OverRanks
from paceline.optim.state import (
    State,
    allocate,
    average_of,
    averages_of,
    is_expanded,
    kept_as,
    name_of,
    refusal,
    returned_key,
    settled,
)
from paceline.optim.told import Tell
from paceline.optim.work import ONE_PASS_NAMES, Whole, path_name, plan_all, scale_before, will_tell


def _recipe(group: dict[str, Any], members: Members) -> Recipe:
    """That of a group: of the last step, if nothing was set since."""
    known: Recipe | None = members.memo.get("recipe")
    if known is None or not known.is_still(group):
        known = members.memo["recipe"] = Recipe.of(group)
    return known


def _packed(live: Tensor, state: State, group: dict[str, Any]) -> State:
    """As its group says, also where a load left it otherwise and no step has turned it yet."""
    return kept_as(group["average_dtype"], live, state, averages_of(group))


@final
class PACE(Averaging):
    r"""AdamW plus a clipped, per-coordinate pull of the live weights toward their average.

    A drop-in for `torch.optim.AdamW` that returns the average of the training iterates and trains for
    it (Au & Block, *Training for the Model You Return*, Algorithm 1). At every step t of a parameter

    .. code-block:: text

        rate     = (1 + t)^-ema_power
        raw      = AdamW(live)
        gain     = min(lr · strength · scale · rate / (√v̂ + eps), max_gain)
        live'    = raw + gain · (average − live)
        average' = (1 − rate) · average + rate · live'

    where the scale is the rms of √v̂ over the model; under gain="paper" it is 1. Alone, `PACE(params, lr)`
    pulls toward a short average and returns a longer one; docs/defaults.md tells how that was chosen.
    `PACE(params, lr, gain="paper")` is the paper's: c = 3e-3, and one average of power 0.5.

    The parameters always hold the live weights; averages are optimizer state. Evaluate the returned one with
    `averaged_weights`, export it with `averaged_state_dict` or `save_averaged`.

    Arguments:
        params: parameters or parameter groups; any setting below may differ between groups.
        lr: learning rate, float or 1-element Tensor. Under "scaled" and "paper" it also scales the pull.
        betas, eps, weight_decay: AdamW's. With betas[0] = 0 no first moment is kept: with one average, a step
            then takes the memory of AdamW.
        pullback_strength: c in the paper. 0 is exactly AdamW with an EMA beside it. None: 15 for "scaled",
            3e-3 for "paper"; the other gains have no usual one. A strength wants its gain beside it.
        gain: how a coordinate's pull is sized. "scaled", what None stands for: as above; the loss may have
            any scale, and weights are pulled whose gradients are small beside the model's, such as those of
            queries and keys. "paper": without the scale; c has the units of a curvature. "uniform": rate ·
            strength for all. "relative": rate · strength · clip(rms(√v̂)/(√v̂+eps), ¼, 4), the rms of each
            tensor, which does not depend on loss scale, learning rate or size. For these two a strength in
            (−1, 0) pushes away.
        ema_power: κ in the paper, 0 to 1. 1 averages all iterates alike, 0 makes the average live. None: 0.2
            for "scaled", else 0.5.
        update_every: pull and average at every n-th step only.
        ema_offset, ema_scale: the averaging rate is (ema_offset + ema_scale · t)^-ema_power.
        max_gain: clip of the gain; inf for none.
        gap: "pre" pulls by the gap before the AdamW step, Algorithm 1. "lookahead" averages first and
            moves toward the new average; an infinite strength is then Lookahead with one inner step.
        return_power: a second average with this power is kept and is the one that is shown, exported
            and returned; it never influences training. None: 0.7 for "scaled". Otherwise, where it equals
            ema_power, and with strength 0, there is only one average.
        average_dtype: how averages are kept, for memory: "float32" as they are, 4 bytes a weight each;
            "bfloat16" (2) and "int8" (1.03) as live − average, rounded at random (docs/storage.md). Whoever
            then changes live weights from outside moves their averages along. A loaded state is turned
            into what is asked for here.
        rounding: of bfloat16 weights; others have no need of it. "nearest", as in torch: a step below 1/256
            of a weight moves it nowhere. "stochastic": they and their moments are rounded up or down at
            random, right on the mean, and take no memory more. "master": the 16 bits that bfloat16 drops are
            kept beside them (2 bytes a weight) and moments in float32: float32 weights, bit for bit.
        offload: keep averages of weights on a GPU in the host's memory, which a step reaches over the bus: no
            bytes of the GPU, and slow but for a large update_every. For average_dtype="float32".
        max_grad_norm: gradients count as if clipped to this norm, taken over all of the optimizer's, as by
            torch's clip_grad_norm_; they are not changed, and on a GPU they are read once less. The norm of
            the last step is `optimizer.grad_norm`.
        skip_nonfinite: skip the whole step if a gradient of a group that says so has a NaN or Inf: one host
            read a step, none with capturable=True on a GPU. There a `torch.amp.GradScaler` leaves unscaling
            and skipping to us. Whether the last step was skipped is `optimizer.skipped`.
        foreach, maximize, capturable, differentiable: as in torch.optim.AdamW. foreach=True and False are the
            same to the bit in float32 and float64. None: on a CPU torch's fused AdamW takes the step, mostly
            with the pull, if gain is "paper" or "scaled" and gap is "pre": quicker, and rounded otherwise.
        fused: in one pass over memory. None: on a GPU where it can be, by one launch of a Triton kernel for
            all tensors of a precision. True also on a CPU, for float32, by a function in C that is built
            once, in seconds, with the compiler at hand. What the machine lacks for it is said in a warning;
            `repr(optimizer)` says which path is taken. It is not kept in saved states.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters(), lr=1e-2)
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> with paceline.averaged_weights(optimizer):
    ...     loss = model(torch.ones(4, 2)).square().mean()
    """

    format = Format(
        required=("step", "exp_avg_sq"),
        reads="PACE loads its own states and those of torch.optim.AdamW",
        check=recipe.check,
        wanted=averages_of,
        # How things are kept is for the optimizer at hand to say: whatever is loaded is turned into that.
        ignored=ADAMW_ONLY_SETTINGS | {"average_dtype", "rounding", "offload"},
        packed=_packed,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        pullback_strength: float | None = None,
        gain: Gain | None = None,
        ema_power: float | None = None,
        update_every: int = 1,
        ema_offset: float = 1.0,
        ema_scale: float = 1.0,
        max_gain: float = 1.0,
        gap: Gap = "pre",
        return_power: float | None = None,
        average_dtype: AverageDtype = "float32",
        rounding: Rounding = "nearest",
        offload: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
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
            "average_dtype": average_dtype,
            "rounding": rounding,
            "offload": offload,
            "max_grad_norm": max_grad_norm,
            "skip_nonfinite": skip_nonfinite,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        recipe.check(recipe.completed(recipe.with_gain(defaults)))
        self._fits = Fits()
        self.grad_norm: Tensor | None = None
        """Of all gradients of the last step, before they were clipped; () float64, with max_grad_norm."""
        self.skipped: bool | Tensor = False
        """Whether skip_nonfinite skipped the last step; with capturable=True on the device, where not 0 is
        yes."""
        self.telling: Tell | None = None
        """Where the next step, and no other, tells what it does; for `probe`."""
        super().__init__(params, defaults)

    # --- Groups and state -------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its settings are checked and its state exists from here on."""
        if isinstance(param_group, dict):
            settings = recipe.completed(recipe.with_gain({**self.defaults, **param_group}))
            recipe.check(settings)
            param_group.update((name, settings[name]) for name in ("gain", *recipe.USUAL["paper"]))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["parameters_hold"] = self.param_groups[0]["parameters_hold"]
        for i, parameter in enumerate(group["params"]):
            reason = refusal(parameter, group)
            if not is_lazy(parameter) and is_expanded(parameter):
                reason = (
                    f"is an expanded tensor (strides {parameter.stride()}): several elements share one "
                    "memory; clone it first"
                )
            if reason:
                self.param_groups.pop()
                raise ValueError(f"{name_of(group, len(self.param_groups), i)} {reason}")
        # Frozen parameters get their state when they are thawed: beside adapters they are most of a model.
        for parameter in group["params"]:
            if parameter.requires_grad and not is_lazy(parameter):
                self.state[parameter] = allocate(parameter, group)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_loaded_live", "_loaded_name", "_buffer_memory", "grad_norm", "skipped")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fits = Fits()  # first: what it keeps may be what makes room
        self.skipped = False  # of one that was pickled before there was such a thing
        self.telling = None
        super().__setstate__(state)
        for group in self.param_groups:  # of one that was pickled before there were such settings
            for name, value in (("rounding", "nearest"), ("offload", False), ("max_grad_norm", None)):
                group.setdefault(name, value)

    def __repr__(self) -> str:
        paths = [f"    step of group {i}: {path_name(group)}" for i, group in enumerate(self.param_groups)]
        return "\n".join([super().__repr__().removesuffix(")").rstrip(), *paths, ")"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `torch.amp.GradScaler`: whether step() unscales, and skips itself, on the device."""
        return all(
            group["capturable"] and path_name(group) == ONE_PASS_NAMES["cuda"] for group in self.param_groups
        )

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the average into the parameters, until `train()` or the next `step()`.

        Sharded parameters need the model: what FSDP2 has gathered of it is dropped.
        """
        self._fits.clear()  # averages change places
        super().eval(model)

    # --- The step ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the live weights and update the averages.

        After a forgotten `eval()` the live weights are put back first.
        """
        if _is_watched(self):
            return _watched_step(self) if closure is None else _watched_step(self, closure)
        if torch.compiler.is_compiling():
            return _compiled_step(self, closure)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.defaults["differentiable"])
        try:
            return self._step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        tell: Tell | None = None
        if not torch.compiler.is_compiling():
            tell, self.telling = self.telling, None
        self.make_ready_to_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._put_live_back()  # a closure that evaluates may end in eval()

        works = plan_all(self.state, self.param_groups, self._fits)
        scaled = Scaled(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        # Whatever is to be known of the whole model is added up over ranks at once.
        over_ranks = OverRanks()
        look = look_at(works, scaled, over_ranks)
        scale_of = scale_before(self.state, works, over_ranks)
        gradients = look()
        self.grad_norm, self.skipped = gradients.norm, gradients.skip
        if gradients.skip is True:
            return loss
        skip = gradients.skip if isinstance(gradients.skip, Tensor) else None
        if skip is not None:
            refuse_to_skip(works)
        scale = scale_of()
        for group, members, path, anew, _ in works:
            if anew:
                self._seed_again(members.parameters, group)
            if members.parameters:
                whole = Whole(scale, gradients.factor(group["max_grad_norm"]), skip, tell)
                path(members, _recipe(group, members), whole)
        return loss

    def will_tell(self, number: int) -> bool:
        """Whether the next step of a group can tell what it does: its path could, the last time."""
        return will_tell(self.param_groups[number], number, self._fits)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. While the parameters hold the average, it also has the `live` weights."""
        for parameter, state in self.state.items():
            if "average" in state:
                settled(state["average"], parameter)
        return super().state_dict()

    # --- Averages: what `Averaging` asks of us ----------------------------------------------------

    @property
    def _memory(self) -> defaultdict[Tensor, State]:
        return self.state

    @_memory.setter
    def _memory(self, memory: dict[Tensor, State]) -> None:
        self.state = defaultdict(dict, memory)

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        return average_of(state, returned_key(state), live)

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        key = returned_key(state)
        if key in state:
            weights.show_average_(parameter, state, key)
        else:
            weights.show_computed_(parameter, state, average_of(state, key, parameter))

    def _hide(self, parameter: Tensor, state: State) -> None:
        key = returned_key(state)
        if key in state:
            weights.show_live_(parameter, state, key)
        else:
            weights.show_kept_(parameter, state)

    def _take_groups(self, saved: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups

    def _take_in(self, parameter: Tensor, saved: Saved | None, group: dict[str, Any]) -> State | None:
        if saved is not None:
            return take_in(parameter, saved.own, group, self.format, group["average_dtype"])
        return allocate(parameter, group) if parameter.requires_grad and not is_lazy(parameter) else None


# --- Hooks, and what a profiler sees ------------------------------------------------------------------

# Torch wraps the `step` of every optimizer, to call hooks and to name it to a profiler. With neither, that
# takes a fifth of a step of 320 small tensors, so that here it is only done where there is one.
PACE.step.hooked = True  # type: ignore[attr-defined]  # by which torch sees that it need not
_compiled_step: Any = _use_grad_for_differentiable(PACE._step)
_watched_step: Any = Optimizer.profile_hook_step(_compiled_step)


def _is_watched(optimizer: PACE) -> bool:
    """Whether a step has hooks to call, or a profiler looks on, and torch does not see to them after all."""
    watched = (
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
    return bool(watched) and not _is_torchs(type(optimizer).step)


def _is_torchs(step: Any) -> bool:
    """Whether a step goes through torch's wrapper: others may have wrapped it too, and in any order."""
    while step is not None and getattr(step, "__code__", None) is not _watched_step.__code__:
        step = getattr(step, "__wrapped__", None)
    return step is not None
