"""The control of PACE around any other optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple, final, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim import weights
from paceline.optim.foreach import Lists, chunks, control_, denominators_of, gaps_of
from paceline.optim.loading import Format
from paceline.optim.moments import SecondMoment, model_scale, second_moment
from paceline.optim.recipe import Gain, Gap, Recipe, check_control, completed
from paceline.optim.rule import At, Scalar, at_step, on_device_of, seed_average_, stays_on_device
from paceline.optim.state import State, averages_of, returned_key
from paceline.optim.wrapper import Wrapper, refuse_averaging_base


def _check(group: dict[str, Any]) -> None:
    check_control(group, gains=(*get_args(Gain), None))


@final
class Pullback(Wrapper):
    """The pull of PACE toward an average of the live weights, around any torch optimizer.

    `Pullback(torch.optim.AdamW(...), gain="scaled")` is `PACE` bit for bit, in float32 and float64; use
    `PACE` there, it is faster. Around another optimizer it takes that one's step for the raw step:

    .. code-block:: text

        rate     = (1 + t)^-ema_power
        raw      = base(live)
        gain     = min(rate · ratio, max_gain)
        live'    = raw + gain · (average − live)
        average' = (1 − rate) · average + rate · live'

    With strength 0 it is a passive average beside any optimizer. A step keeps the gap, one copy of the
    live weights in at least float32, until the base's step is taken (none under gap="lookahead"), and
    works on chunks of 2^24 elements after it.

    The wrapper is an Optimizer itself: give it, not the base, to schedulers, scalers and checkpoints.
    Settings below may differ between groups: put them into the base's groups.

    Arguments:
        base: the optimizer to wrap. Schedule-Free optimizers and PACE are refused.
        pullback_strength: c of gain="paper" and "scaled"; the dimensionless R of the other two. None: as in
            `PACE`, by the gain that is given here; 3e-3 where none is.
        gain: "paper" (lr · c / (√v̂ + eps)) and "scaled" use the base's second moment and are
            refused where it keeps none. None: "paper" where it keeps one, else "uniform" (R for all
            coordinates), decided at the first step, group by group.
        ema_power, update_every, ema_offset, ema_scale, max_gain, gap, return_power: as in `PACE`.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = paceline.Pullback(base, pullback_strength=0.5)
    >>> scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> with paceline.averaged_weights(optimizer):
    ...     loss = model(torch.ones(4, 2)).square().mean()
    """

    format = Format(
        prefix="pullback_",
        reads="Pullback loads its own states and those of its base optimizer",
        check=_check,
        wanted=averages_of,
    )

    def __init__(
        self,
        base: Optimizer,
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
    ) -> None:
        refuse_averaging_base(base, "Pullback")
        settings = {
            "pullback_strength": pullback_strength,
            "gain": gain,
            "ema_power": ema_power,
            "update_every": update_every,
            "ema_offset": ema_offset,
            "ema_scale": ema_scale,
            "max_gain": max_gain,
            "gap": gap,
            "return_power": return_power,
        }
        super().__init__(base, completed(settings))
        self.defaults["return_power"] = return_power  # as it was said: a loaded state may have none

    # Of the step that is being taken, where a group asked for it.
    _scale_now: Scalar | None = None

    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> "list[Chunk]":
        recipe = recipe_of(group)
        if group is self.param_groups[0]:
            self._scale_now = None
        scale: Scalar = 1.0
        if recipe.gain == "scaled" and recipe.pullback_strength != 0:
            scale = self._scale_now = self._scale() if self._scale_now is None else self._scale_now
        return prepare(self._memory, parameters, stays_on_device(recipe), lambda t: recipe, scale)

    def _scale(self) -> Scalar:
        """The root mean square of √v̂ over all that the base will move, as its last step left it."""
        state, groups = self.base.state, self.param_groups
        return model_scale(
            [(p, state.get(p, {}), group) for group in groups for p in group["params"] if p.grad is not None]
        )

    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: "list[Chunk]") -> None:
        state, among = self.base.state, set(map(id, moved))

        def moment_of(parameter: Tensor) -> SecondMoment | None:
            return second_moment(state.get(parameter, {}), group)

        if group["gain"] is None and moved:
            group["gain"] = "uniform" if any(moment_of(p) is None for p in moved) else "paper"
        recipe = recipe_of(group)
        for chunk in prepared:
            finish_(chunk, among, moment_of, recipe, type(self.base).__name__)

    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Nothing was changed."""

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        return state[returned_key(state)]

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        weights.show_average_(parameter, state, returned_key(state))

    def _hide(self, parameter: Tensor, state: State) -> None:
        weights.show_live_(parameter, state, returned_key(state))


_CONTROL = (
    "pullback_strength",
    "gain",
    "ema_power",
    "update_every",
    "ema_offset",
    "ema_scale",
    "max_gain",
    "gap",
    "return_power",
)


def recipe_of(group: dict[str, Any]) -> Recipe:
    """The settings of a group of a Pullback."""
    return control_recipe(group, {name: group[name] for name in _CONTROL})


def control_recipe(group: dict[str, Any], control: dict[str, Any]) -> Recipe:
    """A recipe of which only the control is used; the step itself is the base's."""
    return Recipe(
        lr=group.get("lr", 1.0),  # an optimizer without a rate is never at rate 0
        betas=(0.0, 0.0),
        eps=0.0,
        weight_decay=0.0,
        maximize=False,
        capturable=bool(group.get("capturable")),
        **control,
    )


# --- The control, around the step of another --------------------------------------------------------


class Chunk(NamedTuple):
    """Parameters of one device, dtype and step count, between the two halves of a step."""

    parameters: list[Tensor]
    states: list[State]
    ats: list[At]  # the scalars of the step that is being taken
    gaps: list[Tensor]  # average − live before it; empty where nothing is pulled by it


def prepare(
    memory: Any,
    parameters: list[Tensor],
    on_device: bool,
    recipe_at: Callable[[Any], Recipe],
    scale: Scalar = 1.0,
) -> list[Chunk]:
    """The first half, before the base's step: seed averages at a first step, take the gaps.

    `recipe_at` gives the settings in force at step t, for wrappers that change them over time; `scale` is
    that of gain="scaled".
    """
    remembered = ((parameter, memory[parameter]) for parameter in parameters)
    entries = [(p, state, None if on_device else state["step"].item()) for p, state in remembered]
    prepared = []
    for chunk in chunks(entries, lambda entry: (entry[0], entry[2])):
        alike, states, counts = (list(column) for column in zip(*chunk))
        recipe = recipe_at(states[0]["step"] + 1 if on_device else counts[0] + 1)
        there = on_device_of(alike[0], scale)
        ats = [at_step(state["step"] + 1, recipe, there) for state in (states if on_device else states[:1])]
        ats = ats if on_device else ats * len(states)
        lives = list(alike)
        if on_device or ats[0].t == 1:
            for live, state, at in zip(lives, states, ats, strict=True):
                for average in state.keys() & {"average", "returned"}:
                    seed_average_(state[average], live, at.t)
        averages = [state["average"] for state in states]
        prepared.append(Chunk(alike, states, ats, gaps_of(averages, lives, ats, recipe)))
    return prepared


def finish_(
    chunk: Chunk,
    among: set[int],
    moment_of: Callable[[Tensor], SecondMoment | None],
    recipe: Recipe,
    base: str,
) -> None:
    """The second half, after the base's step: count it, pull live, move the averages.

    Of the chunk, the parameters whose id is `among` these were moved. `base` names the optimizer, for
    messages. Second moments are asked for here, as those of an 8-bit base are made for a chunk at a time.
    """
    moved = [i for i, parameter in enumerate(chunk.parameters) if id(parameter) in among]
    if not moved:
        return
    states, ats = [chunk.states[i] for i in moved], [chunk.ats[i] for i in moved]
    torch._foreach_add_([state["step"] for state in states], 1)
    if ats[0].averaging is False:
        return
    averages = [state["average"] for state in states]
    denominators = averages
    if ats[0].pulling is not False and recipe.gain == "uniform":
        denominators = [torch.empty_like(average) for average in averages]
    elif ats[0].pulling is not False:
        denominators, ats = _sized([moment_of(chunk.parameters[i]) for i in moved], ats, recipe, base)
    lists = Lists(
        lives=[chunk.parameters[i] for i in moved],
        averages=averages,
        returned=[state["returned"] for state in states if "returned" in state],
        gaps=[chunk.gaps[i] for i in moved] if chunk.gaps else [],
        denominators=list(denominators),
    )
    control_(lists, ats, recipe)


def _sized(
    moments: list[SecondMoment | None], ats: list[At], recipe: Recipe, base: str
) -> tuple[list[Tensor], list[At]]:
    """Return √v̂ + ε, and the scalars with the base's own bias correction."""
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(moments):
        raise RuntimeError(
            f'gain="{recipe.gain}" sizes the pull by the second moment of the base optimizer, and {base} '
            'keeps none; use gain="uniform", whose strength is a plain number such as 0.3'
        )
    ats = _corrected(ats, [moment.root_correction for moment in known])
    return _denominators(known, ats), ats


def _denominators(moments: list[SecondMoment], ats: list[At]) -> list[Tensor]:
    """Return √v̂ + ε, written over the values that were made for this."""
    fresh = [moment.value for moment in moments if moment.is_fresh]
    if not fresh:
        return denominators_of([moment.value for moment in moments], ats, moments[0].eps)
    torch._foreach_sqrt_(fresh)
    kept = [moment.value for moment in moments if not moment.is_fresh]
    roots = iter(torch._foreach_sqrt(kept) if kept else ())
    denominators = [moment.value if moment.is_fresh else next(roots) for moment in moments]
    corrections: list[Any] = [at.root_correction for at in ats]
    torch._foreach_div_(denominators, corrections)
    torch._foreach_add_(denominators, moments[0].eps)
    return denominators


def _corrected(ats: list[At], roots: list[Scalar]) -> list[At]:
    """The scalars with these bias corrections."""
    if isinstance(ats[0].t, Tensor):
        return [at._replace(root_correction=root) for at, root in zip(ats, roots, strict=True)]
    # On the host all steps of a chunk are equal, and mostly so are the base's.
    made = {root: ats[0]._replace(root_correction=root) for root in set(roots)}
    return [made[root] for root in roots]
