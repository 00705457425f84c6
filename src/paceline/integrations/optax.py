"""PACE for JAX, as an optax transformation. It imports jax and optax, and no torch.

Two sets of weights: `params` are live, where gradients are taken; the average is in the state, and is what
`pace_eval_params` gives to evaluate and return. `paceline.optim.rule` states the same update for torch.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

Gain = Literal["paper", "uniform", "scaled"]
Gap = Literal["pre", "lookahead"]
Tree = Any
"""A pytree of arrays."""
Scalar = Any
"""A number; or an array of no dimensions, where hyperparameters are injected."""
Mask = Any
"""A pytree of True and False that params begin with, or a function that makes one of params."""

USUAL: dict[str, dict[str, float | None]] = {
    "paper": {"pullback_strength": 3e-3, "ema_power": 0.5, "return_power": None},
    "uniform": {"ema_power": 0.5},
    "scaled": {"pullback_strength": 15.0, "ema_power": 0.2, "return_power": 0.7},
}
"""What is taken where the user says nothing: `paceline.optim.recipe.USUAL`, which is behind torch."""


class PaceState(NamedTuple):
    """All that PACE knows between two steps. Trees are shaped like params."""

    count: Any  # () int32, steps taken
    mu: Tree | None  # first moment; None with b1 = 0: it is the gradient
    nu: Tree  # second moment
    average: Tree  # at least float32: the target of the pull. While count is 0 it stands for params
    returned: Tree | None  # likewise: what is returned instead of it, with return_power


def pace(
    learning_rate: Scalar | Callable[[Any], Any] = 1e-3,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    *,
    pullback_strength: Scalar | None = None,
    gain: Gain | None = None,
    ema_power: Scalar | None = None,
    update_every: Scalar = 1,
    ema_offset: Scalar = 1.0,
    ema_scale: Scalar = 1.0,
    max_gain: Scalar = 1.0,
    gap: Gap = "pre",
    return_power: Scalar | None = None,
    mask: Mask | None = None,
    pull_mask: Mask | None = None,
    average_dtype: Any = None,
    moment_dtype: Any = None,
) -> Any:
    """AdamW plus a clipped, per-coordinate pull of the live weights toward their average.

    The optax form of `paceline.PACE`, whose documentation tells what each setting does; names and defaults
    are the same, betas are b1 and b2, and `optax.adamw`'s `mask` is here too. `update` needs params. It must
    be the last of a chain: the average is of params + updates. The scale of gain="scaled" is taken over
    all leaves that this transformation is given.

    Arguments:
        learning_rate: a number, or a schedule: a function of the steps taken so far.
        mask: which leaves have weight decay. None: all.
        pull_mask: which leaves are pulled; the others are only averaged. None: all.
        average_dtype: of the averages; None: that of the params, at least float32.
        moment_dtype: of both moments; None: that of the params, as in torch and optax.

    >>> import jax, optax
    >>> from paceline.integrations.optax import pace, pace_eval_params
    >>> loss = lambda params: ((params["w"] - 3.0) ** 2).sum()
    >>> params = {"w": jax.numpy.zeros(2)}
    >>> optimizer = pace(optax.linear_schedule(0.1, 0.0, 100))
    >>> @jax.jit
    ... def step(params, state):
    ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> state = optimizer.init(params)
    >>> for _ in range(100):
    ...     params, state = step(params, state)
    >>> float(loss(pace_eval_params(state, params))) < 1.0
    True
    """
    settings = _completed(
        pullback_strength=pullback_strength, gain=gain, ema_power=ema_power, return_power=return_power
    )
    recipe = _Recipe(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        update_every=update_every,
        ema_offset=ema_offset,
        ema_scale=ema_scale,
        max_gain=max_gain,
        gap=gap,
        average_dtype=average_dtype,
        moment_dtype=moment_dtype,
        **settings,
    )
    _check(recipe)

    def init(params: Tree) -> PaceState:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jnp.asarray(leaf).dtype
            _require(
                jnp.issubdtype(dtype, jnp.inexact),
                f"dtype of params{jax.tree_util.keystr(path)}",
                str(dtype),
                "float and complex ones; leave others out by optax.masked or optax.partition",
            )

        def moment() -> Tree:
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_moment_dtype(p, recipe)), params)

        def copy() -> Tree:  # of its own memory, so that params and state can be donated together
            return jax.tree.map(lambda p: jnp.array(p, dtype=_average_dtype(p, recipe), copy=True), params)

        return PaceState(
            count=jnp.zeros((), jnp.int32),
            mu=None if _is_zero(recipe.b1) else moment(),
            nu=moment(),
            average=copy(),
            returned=None if recipe.return_power is None else copy(),
        )

    def update(
        updates: Tree, state: PaceState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, PaceState]:
        del extra  # of other transformations of a chain
        if params is None:
            raise ValueError(
                "pace averages the params and needs them: call update(grads, state, params); got params=None"
            )
        live, structure = jax.tree.flatten(params)
        grads = _leaves(structure, updates, "grads")
        decayed = _leaves(structure, _spread(mask, params, "mask"), "mask")
        pulled = _leaves(structure, _spread(pull_mask, params, "pull_mask"), "pull_mask")
        at = _at_step(state, recipe, len(live) > 0 and any(pulled))
        kept = [
            [None] * len(live) if tree is None else _leaves(structure, tree, "state")
            for tree in (state.mu, state.nu, state.average, state.returned)
        ]
        moved = [
            _step(_Slot(*leaf), at, recipe, decay, pull)
            for *leaf, decay, pull in zip(live, grads, *kept, decayed, pulled, strict=True)
        ]

        def tree(values: list[Any]) -> Tree:
            return jax.tree.unflatten(structure, values)

        return tree([leaf.update for leaf in moved]), PaceState(
            count=optax.safe_increment(state.count),
            mu=None if state.mu is None else tree([leaf.mu for leaf in moved]),
            nu=tree([leaf.nu for leaf in moved]),
            average=tree([leaf.average for leaf in moved]),
            returned=None if state.returned is None else tree([leaf.returned for leaf in moved]),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def pace_eval_params(state: Any, params: Tree) -> Tree:
    """The average to evaluate, save and return, in the dtypes of params. Nothing is changed.

    `state` may be that of any transformation that has `pace` somewhere in it: `optax.chain`, `optax.masked`,
    `optax.partition`, `optax.MultiSteps`, `optax.inject_hyperparams`. Leaves that no `pace` has seen are
    those of params.
    """
    found = [
        part
        for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, PaceState))
        if isinstance(part, PaceState)
    ]
    if not found:
        raise ValueError(
            f"Invalid state: a {type(state).__name__} without a PaceState in it; allowed: the state of pace, "
            "or of a transformation around it"
        )
    shown = params
    for part in found:
        shown = _shown(part, shown)
    return shown


def _shown(state: PaceState, params: Tree) -> Tree:
    def leaf(average: Any, live: Any) -> Any:
        if isinstance(average, optax.MaskedNode):  # live may be a whole branch here
            return live
        live = jnp.asarray(live)
        return jnp.where(state.count == 0, live, average.astype(live.dtype))

    average = state.average if state.returned is None else state.returned
    return jax.tree.map(leaf, average, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


# --- The step -------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """All that the update of one leaf takes."""

    live: Any
    grad: Any
    mu: Any | None
    nu: Any
    average: Any
    returned: Any | None


class _Moved(NamedTuple):
    """All that it gives."""

    update: Any  # in the dtype of live
    mu: Any | None
    nu: Any
    average: Any
    returned: Any | None


class _At(NamedTuple):
    """The scalars of one step, as precise as jax is set to: at least float32."""

    first: Any  # whether no step has been taken
    lr: Any  # η in force at this step
    mu_correction: Any  # 1 − β₁ᵗ
    nu_correction: Any  # 1 − β₂ᵗ
    rate: Any  # β_t of the control average
    return_rate: Any  # β_t of the returned average
    averaging: Any  # whether averages move at this step
    pulling: Any  # whether live is pulled at this step
    scale: Any  # root mean square of √v̂ over the model, before this step; 1 but for gain="scaled"


def _at_step(state: PaceState, recipe: "_Recipe", pulling: bool) -> _At:
    t = jnp.asarray(state.count + 1, dtype=float)
    lr = recipe.learning_rate
    lr = jnp.asarray(lr(state.count) if callable(lr) else lr, dtype=float)
    averaging = t % recipe.update_every == 0
    strength = recipe.pullback_strength
    scaled = pulling and recipe.gain == "scaled" and not _is_zero(strength)
    return_power = recipe.ema_power if recipe.return_power is None else recipe.return_power
    return _At(
        first=state.count == 0,
        lr=lr,
        mu_correction=_correction(recipe.b1, t),
        nu_correction=_correction(recipe.b2, t),
        rate=(recipe.ema_offset + recipe.ema_scale * t) ** -recipe.ema_power,
        return_rate=(recipe.ema_offset + recipe.ema_scale * t) ** -return_power,
        averaging=averaging,
        pulling=averaging & (lr != 0) & (jnp.asarray(strength) != 0),
        scale=_model_scale(state, recipe) if scaled else jnp.ones((), float),
    )


def _correction(beta: Scalar, t: Any) -> Any:
    """1 − βᵗ. In float32, 1 − 0.999 would be off by 1e-5."""
    if _is_zero(beta):
        return jnp.ones_like(t)
    log = math.log(beta) if _is_number(beta) else jnp.log(beta)
    return -jnp.expm1(t * log)


def _model_scale(state: PaceState, recipe: "_Recipe") -> Any:
    """The root mean square of √v̂ over all leaves, as the last step left it.

    A leaf with a NaN or Inf counts as 0: it spoils itself, and must not spoil the rest. At the first step
    there is no gap, and any scale will do.
    """
    leaves = [_parts(leaf) for leaf in jax.tree.leaves(state.nu)]
    sums = [jnp.sum(leaf, dtype=float) for leaf in leaves]
    total = sum(jnp.where(jnp.isfinite(part), part, 0.0) for part in sums)
    correction = jnp.where(state.count == 0, 1.0, _correction(recipe.b2, jnp.asarray(state.count, float)))
    mean = total / correction / max(1, sum(leaf.size for leaf in leaves))
    return jnp.sqrt(mean)


def _step(slot: _Slot, at: _At, recipe: "_Recipe", decayed: bool, pulled: bool) -> _Moved:
    """One step of Algorithm 1 for one leaf.

    The update is a sum of moves, not a difference of weights: it keeps a precision of its own.
    """
    whole = jnp.asarray(slot.live)
    live, grad, mu, nu, average, returned = _Slot(
        *(None if leaf is None else _parts(jnp.asarray(leaf)) for leaf in slot)
    )
    dtype = jnp.promote_types(live.dtype, jnp.float32)
    at = _At(*(s if s.dtype == bool else s.astype(dtype) for s in at))
    start, g = live.astype(dtype), grad.astype(dtype)
    average = jnp.where(at.first, live.astype(average.dtype), average)
    returned = None if returned is None else jnp.where(at.first, live.astype(returned.dtype), returned)

    m = g if mu is None else _blend(mu.astype(dtype), g, recipe.b1)
    v = _blend(nu.astype(dtype), g * g, recipe.b2)
    denominator = jnp.sqrt(v / at.nu_correction) + _number(recipe.eps, dtype)
    move = -at.lr * (m / at.mu_correction / denominator)
    if decayed and not _is_zero(recipe.weight_decay):
        move = move - at.lr * _number(recipe.weight_decay, dtype) * start

    pull = None
    if pulled and not _is_zero(recipe.pullback_strength):
        pull = jnp.where(at.pulling, _gain(denominator, at, recipe), 0.0)
    if recipe.gap == "lookahead":
        raw = start + move
        average = _moved_average(average, raw, at.rate, at.averaging, recipe.ema_power)
        if pull is not None:
            move = move + pull * (average.astype(dtype) - raw)
    elif pull is not None:
        wide = jnp.promote_types(average.dtype, dtype)
        move = move + pull * (average.astype(wide) - start.astype(wide)).astype(dtype)

    update = _rounded(move, live.dtype)
    new = _rounded(start + update.astype(dtype), live.dtype)
    if recipe.gap == "pre":
        average = _moved_average(average, new, at.rate, at.averaging, recipe.ema_power)
    if returned is not None:
        returned = _moved_average(returned, new, at.return_rate, at.averaging, recipe.return_power)
    return _Moved(
        update=_whole(update, whole),
        mu=None if mu is None else _whole(m.astype(mu.dtype), whole),
        nu=_whole(v.astype(nu.dtype), whole),
        average=_whole(average, whole),
        returned=None if returned is None else _whole(returned, whole),
    )


def _gain(denominator: Any, at: _At, recipe: "_Recipe") -> Any:
    """λ_{t,i} = min(β_t R_i, max_gain). Finite also for c = inf and unclipped: inf · 0 would be NaN."""
    dtype = denominator.dtype
    largest = jnp.finfo(dtype).max
    strength = at.rate * _number(recipe.pullback_strength, dtype)
    if recipe.gain == "uniform":
        gain = jnp.broadcast_to(strength, denominator.shape)
    else:
        gain = jnp.minimum(at.lr * at.scale * strength, largest) / denominator
    return jnp.minimum(gain, jnp.minimum(_number(recipe.max_gain, dtype), largest))


def _blend(moment: Any, new: Any, beta: Scalar) -> Any:
    """β · moment + (1 − β) · new; 1 − β in double where it is a number."""
    return _number(beta, moment.dtype) * moment + _number(1 - beta, moment.dtype) * new


def _moved_average(average: Any, live: Any, rate: Any, averaging: Any, power: Scalar) -> Any:
    """(1 − rate) · average + rate · live, with shares that sum to exactly 1 so that still weights stay."""
    live = live.astype(average.dtype)
    keep = (1 - rate).astype(average.dtype)
    # With power 0 the average is live, also where it has been infinite.
    moved = live if _is_zero(power) else keep * average + (1 - keep) * live
    return jnp.where(averaging, moved, average)


def _rounded(values: Any, dtype: Any) -> Any:
    """In fewer bits for good: compilers drop a cast to bfloat16 and back, and average what no one has."""
    if jnp.finfo(dtype).bits < jnp.finfo(values.dtype).bits:
        info = jnp.finfo(dtype)
        values = jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return values.astype(dtype)


def _number(value: Scalar, dtype: Any) -> Any:
    return jnp.asarray(value).astype(dtype) if not isinstance(value, Real) else jnp.asarray(value, dtype)


def _parts(values: Any) -> Any:
    """Complex numbers as pairs of real ones, as torch's optimizers see them."""
    return jnp.stack([values.real, values.imag]) if jnp.iscomplexobj(values) else values


def _whole(parts: Any, like: Any) -> Any:
    return jax.lax.complex(parts[0], parts[1]) if jnp.iscomplexobj(like) else parts


# --- Trees and dtypes -----------------------------------------------------------------------------


def _leaves(structure: Any, tree: Tree, name: str) -> list[Any]:
    """The leaves of a tree that must be shaped like params."""
    try:
        leaves: list[Any] = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} and params are trees of different structure: {error}") from None
    if any(leaf is None for leaf in leaves):
        raise ValueError(
            f"{name} has None where params has a leaf; allowed: an array. To leave leaves out use "
            "optax.masked or optax.partition"
        )
    return leaves


def _spread(mask: Mask | None, params: Tree, name: str) -> Tree:
    """A mask with a True or False for every leaf."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    given = mask(params) if callable(mask) else mask

    def spread(value: Any, branch: Tree) -> Tree:
        _require(isinstance(value, bool | np.bool_), f"{name} entry", value, "True and False")
        return jax.tree.map(lambda _: bool(value), branch)

    try:
        return jax.tree.map(spread, given, params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} does not fit params: {error}") from None


def _average_dtype(live: Any, recipe: "_Recipe") -> Any:
    wanted = recipe.average_dtype or jnp.promote_types(_parts_dtype(live), jnp.float32)
    return jnp.promote_types(wanted, jnp.complex64) if jnp.iscomplexobj(live) else wanted


def _moment_dtype(live: Any, recipe: "_Recipe") -> Any:
    wanted = recipe.moment_dtype or _parts_dtype(live)
    return jnp.promote_types(wanted, jnp.complex64) if jnp.iscomplexobj(live) else wanted


def _parts_dtype(live: Any) -> Any:
    return jnp.finfo(jnp.asarray(live).dtype).dtype


# --- Settings -------------------------------------------------------------------------------------


class _Recipe(NamedTuple):
    """The settings, complete. Numbers may be arrays, where they are injected; then they are not checked."""

    learning_rate: Any
    b1: Scalar
    b2: Scalar
    eps: Scalar
    weight_decay: Scalar
    pullback_strength: Scalar
    gain: str
    ema_power: Scalar
    update_every: Scalar
    ema_offset: Scalar
    ema_scale: Scalar
    max_gain: Scalar
    gap: str
    return_power: Scalar | None
    average_dtype: Any
    moment_dtype: Any


def _completed(**given: Any) -> dict[str, Any]:
    """The settings of the pull, with what suits its gain in place of None: `recipe.completed` of torch's."""
    strength, nothing = given["pullback_strength"], _is_zero(given["pullback_strength"])
    if given["gain"] is None:
        if strength is not None and not nothing:
            raise ValueError(
                f"pullback_strength={strength!r} needs its gain beside it, since it means another thing in "
                'each: gain="scaled" (what pace takes by itself; usual strength 15), gain="paper" (c of the '
                "paper; usual 3e-3), or another"
            )
        given["gain"] = "scaled"
    usual = USUAL.get(given["gain"], {})
    if nothing:  # the average that would pull is the one to return
        powers = (given["return_power"], usual.get("return_power"), usual.get("ema_power"))
        usual = {"ema_power": next((power for power in powers if power is not None), None)}
    full = {name: usual.get(name) if value is None else value for name, value in given.items()}
    known = _is_number(full["return_power"]) and _is_number(full["ema_power"])
    if known and full["return_power"] == full["ema_power"]:
        full["return_power"] = None
    return full


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_zero(value: object) -> bool:
    """Known to be 0 before anything runs."""
    return _is_number(value) and value == 0


def _require(ok: bool, what: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"Invalid {what}: {value!r}; allowed: {allowed}")


def _is_injected(value: object) -> bool:
    """An array of no dimensions: its value may not be known yet."""
    return isinstance(value, jax.Array) and value.ndim == 0


def _check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    # A NaN fails both comparisons, so it is refused with the rest.
    ok = _is_injected(value) or (_is_number(value) and low <= value <= high)
    _require(ok, f"{name} value", value, allowed)


def _check(recipe: _Recipe) -> None:
    """Raise ValueError with name, value and allowed range if a setting is out of range."""
    largest, below_1 = 1e308, math.nextafter(1.0, 0.0)
    if not callable(recipe.learning_rate):
        allowed = "0 <= learning_rate < inf, or a schedule"
        _check_number("learning_rate", recipe.learning_rate, 0.0, largest, allowed)
    for name in ("b1", "b2"):
        _check_number(name, getattr(recipe, name), 0.0, below_1, f"0 <= {name} < 1")
    for name in ("eps", "weight_decay", "ema_offset", "ema_scale"):
        _check_number(name, getattr(recipe, name), 0.0, largest, ">= 0 and finite")
    for name, choices in (("gain", get_args(Gain)), ("gap", get_args(Gap))):
        value = getattr(recipe, name)
        _require(value in choices, f"{name} value", value, ", ".join(map(repr, choices)))
    _check_strength(recipe)
    every = recipe.update_every
    ok = isinstance(every, Integral) and not isinstance(every, bool) and int(every) >= 1
    _require(ok or _is_injected(every), "update_every value", every, "an integer >= 1")
    _check_number("ema_power", recipe.ema_power, 0.0, 1.0, "0 <= ema_power <= 1")
    if recipe.return_power is not None:
        _check_number("return_power", recipe.return_power, 0.0, 1.0, "None, or 0 <= return_power <= 1")
    # Below 1, the first averaging rate (offset + scale)^-power would exceed 1 and overshoot live.
    if not (_is_injected(recipe.ema_offset) or _is_injected(recipe.ema_scale)):
        first = recipe.ema_offset + recipe.ema_scale
        _require(first >= 1.0, "ema_offset + ema_scale", first, ">= 1, so that no averaging rate exceeds 1")
    limit = recipe.max_gain
    ok = _is_number(limit) and limit > 0
    _require(ok or _is_injected(limit), "max_gain value", limit, "> 0 (inf: unclipped)")
    _check_dtypes(recipe)


def _check_strength(recipe: _Recipe) -> None:
    strength = recipe.pullback_strength
    if recipe.gain == "paper":
        _check_number("pullback_strength", strength, 0.0, math.inf, '>= 0 for gain="paper"')
    elif recipe.gain == "scaled":
        _check_number("pullback_strength", strength, 0.0, 1e308, '>= 0 and finite for gain="scaled"')
    else:
        allowed = f'> -1 for gain="{recipe.gain}" (a negative strength pushes away from the average)'
        _check_number("pullback_strength", strength, math.nextafter(-1.0, 0.0), math.inf, allowed)


def _check_dtypes(recipe: _Recipe) -> None:
    for name, least in (("average_dtype", 32), ("moment_dtype", 0)):
        value = getattr(recipe, name)
        if value is None:
            continue
        allowed = "None, float32, or float64 where jax_enable_x64 is set"
        if not least:
            allowed += ", bfloat16, float16"
        try:
            dtype = jnp.dtype(value)
        except TypeError:
            dtype = jnp.dtype(int)
        ok = jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.canonicalize_dtype(dtype) == dtype
        # In bfloat16 an average stands still as soon as its rate is below 1/256.
        _require(bool(ok and jnp.finfo(dtype).bits >= least), f"{name} value", value, allowed)
