"""The settings of one parameter group, and what is allowed in them."""

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, get_args

from torch import Tensor

from paceline.optim.checks import is_number, require

Gain = Literal["paper", "uniform", "scaled"]
Gap = Literal["pre", "lookahead"]
AverageDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the update of one parameter group needs to know; see `PACE` for the meaning of each."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    pullback_strength: float
    gain: Gain
    ema_power: float
    update_every: int
    ema_offset: float
    ema_scale: float
    max_gain: float
    gap: Gap
    return_power: float | None
    maximize: bool
    capturable: bool

    @staticmethod
    def of(group: dict[str, Any]) -> "Recipe":
        return Recipe(**{name: group[name] for name in _NAMES if name in group})


_NAMES = tuple(field.name for field in fields(Recipe))


USUAL: dict[str, dict[str, float | None]] = {
    "paper": {"pullback_strength": 3e-3, "ema_power": 0.5, "return_power": None},
    "uniform": {"ema_power": 0.5},
    "scaled": {"pullback_strength": 15.0, "ema_power": 0.2, "return_power": 0.7},
}
"""What is taken where the user says nothing. Strengths of two gains have nothing to do with each other."""


def completed(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group, with what suits its gain in place of None.

    Where nothing is pulled, the average that pulls is the one to return; and a second average of the same
    power would be the first. In both cases only one is kept.
    """
    full = dict(group)
    usual = USUAL.get(group["gain"] or "paper", {})
    if _pulls_nothing(group):
        powers = (group["return_power"], usual.get("return_power"), usual.get("ema_power"))
        usual = {"ema_power": next((power for power in powers if power is not None), None)}
    for name, value in usual.items():
        if full[name] is None:
            full[name] = value
    if full["return_power"] == full["ema_power"]:
        full["return_power"] = None
    return full


def with_gain(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of PACE, with the usual gain where none is given.

    A strength is a number of its gain, so it is not guessed which one is meant.
    """
    if group["gain"] is not None:
        return group
    strength = group["pullback_strength"]
    if strength is not None and not _pulls_nothing(group):
        raise ValueError(
            f"pullback_strength={strength!r} needs its gain beside it, since it means another thing in each: "
            'gain="scaled" (what PACE takes by itself; usual strength 15), gain="paper" (c of the paper; '
            "usual 3e-3), or another"
        )
    return {**group, "gain": "scaled"}


def _pulls_nothing(group: dict[str, Any]) -> bool:
    strength = group["pullback_strength"]
    return is_number(strength) and strength == 0


def _check_number(group: dict[str, Any], name: str, low: float, high: float, allowed: str) -> None:
    value = group[name]
    # A NaN fails both comparisons, so it is refused with the rest.
    require(is_number(value) and low <= float(value) <= high, f"{name} value", value, allowed)


def _check_learning_rate(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if group["foreach"] and not group["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True; "
                "use a float, foreach=False or capturable=True"
            )
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element; got shape {tuple(lr.shape)}")
    elif not is_number(lr):
        raise ValueError(f"Invalid learning rate: {lr!r}; allowed: a number or a 1-element Tensor")
    require(bool(0.0 <= lr < float("inf")), "learning rate", lr, "0 <= lr < inf")


def _check_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    require(isinstance(betas, tuple | list) and len(betas) == 2, "betas", betas, "a pair of floats")
    tensors = [isinstance(beta, Tensor) for beta in betas]
    if tensors[0] != tensors[1]:
        raise ValueError(
            f"betas must be either both floats or both Tensors; got {betas!r}. PACE takes floats"
        )
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            raise ValueError(
                f"betas[{i}] as a Tensor is not supported for capturable=False and foreach=True; "
                "PACE takes floats in all cases"
            )
        ok = is_number(beta) and 0.0 <= beta < 1.0
        require(ok, f"beta parameter at index {i}", beta, "0 <= beta < 1")


def _check_strength(group: dict[str, Any]) -> None:
    strength = group["pullback_strength"]
    if group["gain"] in ("paper", None):
        _check_number(group, "pullback_strength", 0.0, float("inf"), '>= 0 for gain="paper"')
    elif group["gain"] == "scaled":
        _check_number(group, "pullback_strength", 0.0, 1e308, '>= 0 and finite for gain="scaled"')
    else:
        require(
            is_number(strength) and strength > -1.0,
            "pullback_strength value",
            strength,
            f'> -1 for gain="{group["gain"]}" (a negative strength pushes away from the average)',
        )


def _check_averages(group: dict[str, Any]) -> None:
    every = group["update_every"]
    ok = isinstance(every, Integral) and not isinstance(every, bool) and int(every) >= 1
    require(ok, "update_every value", every, "an integer >= 1")
    _check_number(group, "ema_power", 0.0, 1.0, "0 <= ema_power <= 1")
    if group["return_power"] is not None:
        _check_number(group, "return_power", 0.0, 1.0, "None, or 0 <= return_power <= 1")
    largest = 1e308
    _check_number(group, "ema_offset", 0.0, largest, ">= 0 and finite")
    _check_number(group, "ema_scale", 0.0, largest, ">= 0 and finite")
    # Below 1, the first averaging rate (offset + scale)^-power would exceed 1 and overshoot live.
    first = group["ema_offset"] + group["ema_scale"]
    require(first >= 1.0, "ema_offset + ema_scale", first, ">= 1, so that no averaging rate exceeds 1")


def _check_switches(group: dict[str, Any]) -> None:
    for name in ("maximize", "capturable"):
        require(isinstance(group[name], bool), f"{name} value", group[name], "True or False")
    require(group["foreach"] in (None, True, False), "foreach value", group["foreach"], "None, True, False")
    _check_fused(group)
    _check_storage(group)


def _check_fused(group: dict[str, Any]) -> None:
    require(group["fused"] in (None, True, False), "fused value", group["fused"], "None, True, False")
    if group["fused"] and group["foreach"]:
        raise ValueError("fused=True and foreach=True exclude each other; use one of the two")


def _check_storage(group: dict[str, Any]) -> None:
    kept, allowed = group["average_dtype"], get_args(AverageDtype)
    require(kept in allowed, "average_dtype value", kept, ", ".join(map(repr, allowed)))


def check(group: dict[str, Any]) -> None:
    """Raise ValueError with name, value and allowed range if a setting of the group is out of range."""
    _check_switches(group)
    _check_learning_rate(group)
    _check_betas(group)
    _check_number(group, "eps", 0.0, 1e308, ">= 0 and finite")
    _check_number(group, "weight_decay", 0.0, 1e308, ">= 0 and finite")
    check_control(group, gains=get_args(Gain))


def check_control(group: dict[str, Any], gains: tuple[str | None, ...]) -> None:
    """Likewise for the settings of the pull and the averages alone."""
    for name, choices in (("gain", gains), ("gap", get_args(Gap))):
        require(group[name] in choices, f"{name} value", group[name], ", ".join(map(repr, choices)))
    _check_strength(group)
    _check_averages(group)
    ok = is_number(group["max_gain"]) and group["max_gain"] > 0.0
    require(ok, "max_gain value", group["max_gain"], "> 0 (inf: unclipped)")
