"""PACE for JAX, as an optax transformation. It imports jax and optax, and no torch.

`params` are the live weights, where gradients are taken. The average is in the state: evaluate and return
`pace_eval_params(state, params)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

Tree = Any
"""A pytree of arrays."""
Scalar = Any
"""A number, or an array without dimensions, as `optax.inject_hyperparams` passes it."""


# --- Settings -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A setting of how training is steered for the average, and of which average is returned.

    `paceline.Control` documents the fields; this copy of it does not import torch. Make one with `paper`,
    `push`, `pull` or `none`.

    >>> Control.push().strength, Control.push().step
    (-0.5, 0.5)
    """

    strength: float
    sizing: Literal["paper", "uniform"]
    power: float
    return_power: float | None = None
    step: float = 1.0
    grow: int = 0
    every: int = 1
    pull_every: int | None = None
    slope: float = 1.0
    delay: float = 0.0
    least_rate: float = 0.0
    max_gain: float = 1.0
    gap: Literal["before", "after"] = "before"
    order: Literal["pull, then average", "average, then pull"] = "pull, then average"

    def __post_init__(self) -> None:
        _choose("sizing", self.sizing, ("paper", "uniform"))
        _choose("gap", self.gap, ("before", "after"))
        _choose("order", self.order, ("pull, then average", "average, then pull"))
        for name in ("power", "return_power", "least_rate"):
            _between(name, getattr(self, name), 0.0, 1.0, optional=name == "return_power")
        for name in ("slope", "delay"):
            _between(name, getattr(self, name), 0.0, _LARGEST)
        _between("step", self.step, _LEAST, _LARGEST)
        _between("max_gain", self.max_gain, _LEAST, math.inf)
        _between("strength", self.strength, 0.0 if self.sizing == "paper" else -_BELOW_1, math.inf)
        for name, least in (("every", 1), ("pull_every", 1), ("grow", 0)):
            value = getattr(self, name)
            ok = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
            _require(ok or (value is None and name == "pull_every"), name, value, f"an integer >= {least}")
        _require(math.isfinite(self.strength) or not self.grow, "strength", self.strength, "finite, to grow")

    @classmethod
    def paper(cls, c: float = 3e-3, power: float = 0.5, **further: Any) -> "Control":
        """Return Algorithm 1 of the paper: a pull of c · lr/(√v̂ + eps) toward the average."""
        return cls(strength=c, sizing="paper", power=power, **further)

    @classmethod
    def push(
        cls, strength: float = 0.5, power: float = 0.6, return_power: float | None = 0.7, **further: Any
    ) -> "Control":
        """Return a push away from the average, with a step of 1 − strength, or of 1 if it grows."""
        _between("strength", strength, 0.0, _BELOW_1)
        own = {"step": 1.0 if further.get("grow") else 1 - strength, **further}
        return cls(strength=-strength, sizing="uniform", power=power, return_power=return_power, **own)

    @classmethod
    def pull(
        cls, strength: float = 1.0, power: float = 0.2, return_power: float | None = 0.7, **further: Any
    ) -> "Control":
        """Return a pull toward the average, the same for all coordinates."""
        _between("strength", strength, 0.0, math.inf)
        own = {"step": 1 + strength if math.isfinite(strength) else 1.0, **further}
        return cls(strength=strength, sizing="uniform", power=power, return_power=return_power, **own)

    @classmethod
    def none(cls, power: float = 0.7, **further: Any) -> "Control":
        """Return no control: training is that of `optax.adamw`, and an average is kept next to it."""
        return cls(strength=0.0, sizing="uniform", power=power, **further)

    @property
    def keeps_second(self) -> bool:
        """Return whether a second average is kept, which is returned and never steers."""
        return self.strength != 0 and self.return_power not in (None, self.power)


_LEAST, _BELOW_1, _LARGEST = 5e-324, math.nextafter(1.0, 0.0), 1e308


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"Invalid {name} value: {value!r}; allowed: {allowed}")


def _choose(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, value, ", ".join(map(repr, choices)))


def _between(name: str, value: Any, low: float, high: float, optional: bool = False) -> None:
    # A NaN fails both comparisons.
    ok = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
    allowed = f"{low:g} <= {name} <= {high:g}"
    _require(ok or (optional and value is None), name, value, f"None, or {allowed}" if optional else allowed)


# --- The transformation ---------------------------------------------------------------------------------


class PaceState(NamedTuple):
    """The state of PACE between two steps. Averages are trees like params, in at least float32."""

    count: Any  # () int32, steps taken
    adamw: Any  # the state of optax.adamw
    average: Tree  # the average that steers; not used while count is 0
    returned: Tree | None  # the average that is returned, if the control has a return_power


def pace(
    learning_rate: Scalar | Callable[[Any], Any] = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    *,
    control: Control = Control.paper(),  # noqa: B008  a frozen value
    mask: Any = None,
) -> Any:
    """Return `optax.adamw`, steered for an average that is kept in the state.

    By default this is Algorithm 1 of the paper. `update` needs params. It must be the last of a chain,
    because it averages params + updates.

    Arguments:
        learning_rate: a number, or a schedule: a function of the steps taken so far.
        b1, b2, eps, weight_decay, mask: those of `optax.adamw`; mask says which leaves are decayed.
        control: how training is steered, and which average is returned. For another control on some leaves
            give each part its own `pace` in `optax.partition`.

    >>> import jax, optax
    >>> from paceline.integrations.optax import Control, pace, pace_eval_params
    >>> loss = lambda params: ((params["w"] - 3.0) ** 2).sum()
    >>> params = {"w": jax.numpy.zeros(2)}
    >>> optimizer = pace(optax.linear_schedule(0.1, 0.0, 100), control=Control.push())
    >>> @jax.jit
    ... def step(params, state):
    ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> state = optimizer.init(params)
    >>> for _ in range(100):
    ...     params, state = step(params, state)
    >>> float(loss(pace_eval_params(state, params))) < 3.0
    True
    """
    _check_settings(learning_rate, b1, b2, eps, weight_decay)
    adamw = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)

    def init(params: Tree) -> PaceState:
        average = _copied(params)
        second = _copied(params) if control.keeps_second else None
        return PaceState(jnp.zeros((), jnp.int32), adamw.init(params), average, second)

    def update(
        updates: Tree, state: PaceState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, PaceState]:
        del extra  # for other transformations of a chain
        if params is None:
            raise ValueError("pace averages params and needs them: call update(grads, state, params)")
        moves, adamw_state = adamw.update(updates, state.adamw, params)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        at = _at_step(state.count, lr, b2, eps, control)
        live, structure = jax.tree.flatten(params)
        trees = (moves, optax.tree.get(adamw_state, "nu"), state.average, state.returned)
        lists = [[None] * len(live) if tree is None else jax.tree.leaves(tree) for tree in trees]
        leaves = [_steer(_Leaf(*leaf), at, control) for leaf in zip(live, *lists, strict=True)]
        move, average, returned = (
            jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(3)
        )
        second = None if state.returned is None else returned
        return move, PaceState(optax.safe_increment(state.count), adamw_state, average, second)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_settings(learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> None:
    for name, value, high in (
        ("learning_rate", learning_rate, _LARGEST),
        ("b1", b1, _BELOW_1),
        ("b2", b2, _BELOW_1),
        ("eps", eps, _LARGEST),
        ("weight_decay", weight_decay, _LARGEST),
    ):
        if not callable(value) and not isinstance(value, jax.Array):
            _between(name, value, 0.0, high)


def _copied(params: Tree) -> Tree:
    """Return params as an average that has not moved; raise for those that cannot be averaged."""

    def copied(path: Any, leaf: Any) -> Any:
        dtype = jnp.asarray(leaf).dtype
        name = f"dtype of params{jax.tree_util.keystr(path)}"
        allowed = "real floats; leave others out by optax.masked or optax.partition"
        _require(jnp.issubdtype(dtype, jnp.floating), name, str(dtype), allowed)
        # Without shared memory, so that params and state can both be donated.
        return jnp.array(leaf, dtype=_wide(leaf), copy=True)

    return jax.tree_util.tree_map_with_path(copied, params)


def pace_eval_params(state: Any, params: Tree) -> Tree:
    """Return the average to evaluate, save and return, in the dtypes of params. Nothing is changed.

    `state` may be that of any transformation with a `pace` in it: `optax.chain`, `optax.masked`,
    `optax.partition`, `optax.MultiSteps`, `optax.inject_hyperparams`. Leaves without a `pace` are returned
    as they are in params.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PaceState))
    found = [node for node in nodes if isinstance(node, PaceState)]
    if not found:
        raise ValueError(f"a {type(state).__name__} without a PaceState in it; give the state of pace")
    for part in found:
        params = _shown(part, params)
    return params


def _shown(state: PaceState, params: Tree) -> Tree:
    def leaf(average: Any, live: Any) -> Any:
        if isinstance(average, optax.MaskedNode):  # live may be a whole subtree
            return live
        live = jnp.asarray(live)
        return jnp.where(state.count == 0, live, average.astype(live.dtype))

    average = state.average if state.returned is None else state.returned
    return jax.tree.map(leaf, average, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


# --- One step -------------------------------------------------------------------------------------------


class _At(NamedTuple):
    """The scalars of one step."""

    first: Any  # whether no step has been taken
    rate: Any  # of the average that steers
    return_rate: Any  # of the returned average
    averaging: Any  # whether averages move at this step
    pulling: Any  # whether live is pulled at this step
    numerator: Any  # the gain is numerator/(√v̂ + eps), or numerator itself
    root_correction: Any  # √(1 − b2ᵗ)
    eps: Any


class _Leaf(NamedTuple):
    """The inputs of a step for one leaf."""

    live: Any
    move: Any  # AdamW's update
    nu: Any
    average: Any
    returned: Any | None


def _at_step(count: Any, lr: Any, b2: Any, eps: Any, control: Control) -> _At:
    t = count + 1
    late = control.power if control.return_power is None else control.return_power
    base = 1.0 + control.slope * jnp.maximum(0.0, jnp.asarray(t, float) - control.delay)
    rate, return_rate = (jnp.maximum(base**-power, control.least_rate) for power in (control.power, late))
    averaging = t % control.every == 0
    pulling = averaging if control.pull_every is None else t % control.pull_every == 0
    strength: Any = control.strength
    if control.grow:
        left = jnp.maximum(0.0, 1 - jnp.asarray(t, float) / control.grow)
        strength = strength * (1 - left) / (1 + strength * left)
    numerator = strength * rate * (lr if control.sizing == "paper" else 1.0)
    return _At(
        first=count == 0,
        rate=rate,
        return_rate=return_rate,
        averaging=averaging,
        pulling=pulling & (jnp.asarray(lr) != 0),
        numerator=numerator,
        root_correction=jnp.sqrt(1 - jnp.asarray(b2, float) ** t),
        eps=eps,
    )


def _steer(leaf: _Leaf, at: _At, control: Control) -> tuple[Any, Any, Any]:
    """Return the update of one leaf, in the dtype of AdamW's, and its averages after the step.

    The update is a sum of moves, because a difference of weights would lose precision.
    """
    live = jnp.asarray(leaf.live)
    start = live.astype(_wide(live))
    average = jnp.where(at.first, start, leaf.average)
    move = leaf.move.astype(start.dtype) * control.step
    gap = average - start
    if control.order == "average, then pull":
        average = _moved(average, start + move, at.rate, at.averaging)
    if control.strength != 0:
        if control.gap == "after":
            gap = average - (start + move)
        move = move + jnp.where(at.pulling, _gain(leaf.nu, at, control, start.dtype), 0.0) * gap
    update = _rounded(move, leaf.move.dtype)
    new = _rounded(start + update.astype(start.dtype), live.dtype).astype(start.dtype)
    if control.order == "pull, then average":
        average = _moved(average, new, at.rate, at.averaging)
    returned = leaf.returned
    if returned is not None:
        returned = _moved(jnp.where(at.first, start, returned), new, at.return_rate, at.averaging)
    return update, average, returned


def _gain(nu: Any, at: _At, control: Control, dtype: Any) -> Any:
    """Return the gain of every coordinate, clipped to a finite number."""
    # Infinity times a gap of 0 would be NaN.
    largest = jnp.finfo(dtype).max
    gain = jnp.minimum(at.numerator, largest).astype(dtype)
    if control.sizing == "paper":
        gain = gain / (jnp.sqrt(nu.astype(dtype)) / at.root_correction.astype(dtype) + at.eps)
    return jnp.minimum(gain, min(control.max_gain, float(largest)))


def _moved(average: Any, live: Any, rate: Any, averaging: Any) -> Any:
    """Return (1 − rate) · average + rate · live, with shares that sum to exactly 1."""
    # So the average of constant weights does not change.
    keep = (1 - rate).astype(average.dtype)
    moved = jnp.where(keep == 0, live, keep * average + (1 - keep) * live)  # 0 · inf would be NaN
    return jnp.where(averaging, moved, average)


def _rounded(values: Any, dtype: Any) -> Any:
    """Return values rounded to a dtype."""
    # By reduce_precision, because compilers remove a cast to bfloat16 and back.
    if jnp.finfo(dtype).bits < jnp.finfo(values.dtype).bits:
        info = jnp.finfo(dtype)
        values = jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return values.astype(dtype)


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(jnp.asarray(leaf).dtype, jnp.float32)
