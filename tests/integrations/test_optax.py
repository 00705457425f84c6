"""PACE for JAX: the same numbers as the paper's and torch's, and at home among optax's transformations."""

import doctest
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import VARIANTS, make_gradients, make_parameters
from reference import Reference, step_model
from trajectories import DATA, META, OFFERED, settings

from paceline import PACE
from paceline.optim import recipe

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import paceline.integrations.optax as ours  # noqa: E402
from paceline.integrations.optax import PaceState, pace, pace_eval_params  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quickly_compiled():
    """Most of the time here is XLA's. Less of it where its optimizations are not what is tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized(quickly_compiled):
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def make(options, learning_rate):
    """A pace of settings of torch's PACE. To maximize, one negates the gradient."""
    rest = {name: value for name, value in options.items() if name not in ("maximize", "betas")}
    return pace(learning_rate, *options.get("betas", (0.9, 0.999)), **rest)


def trajectory(optimizer, params, gradients, compiled=True):
    """Params and states after every step; gradients are stacked along the first axis.

    Either one compiled loop, or operation by operation: XLA then compiles each once for all tests.
    """

    def step(carry, grads):
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state)

    def loop(params, gradients):
        return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

    if compiled:
        return jax.device_get(jax.jit(loop)(params, gradients))
    carry, rows = (params, optimizer.init(params)), []
    for i in range(len(jax.tree.leaves(gradients)[0])):
        carry, row = step(carry, jax.tree.map(lambda g, i=i: np.asarray(g)[i], gradients))
        rows.append(jax.device_get(row))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def final(optimizer, params, gradients):
    return jax.tree.map(lambda leaf: leaf[-1], trajectory(optimizer, params, gradients))


def stepper(optimizer, gradient=None):
    """A compiled step of params and state, with the gradients given or those of a function."""

    def step(params, state, grads=None):
        grads = grads if gradient is None else gradient(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def close(one, other, tolerance=1e-12):
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1e-30)


SHAPES = [(4, 3), ()]


def problem(steps, dtype="float64"):
    """Params and gradients, stacked along the first axis, of two leaves."""
    params = [p.detach().numpy() for p in make_parameters(shapes=SHAPES)]
    steps = [[g.numpy() for g in grads] for grads in make_gradients(steps, shapes=SHAPES)]
    stacked = [np.stack(grads) for grads in zip(*steps, strict=True)]
    return [jnp.asarray(p, dtype) for p in params], [jnp.asarray(g, dtype) for g in stacked]


# --- The numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OFFERED)
def test_golden_trajectory(case, x64):
    check_golden(case, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cosine_uf2_lookahead", "return_power"])
def test_golden_trajectory_compiled(case, x64, optimized):
    check_golden(case, compiled=True)


def check_golden(case, compiled):
    options = settings(META[case])
    lrs = DATA[f"{case}/lrs"]
    sign = -1.0 if options["maximize"] else 1.0
    for j in range(META[case]["tensors"]):
        # A tensor without a gradient takes no step; its own clock and its own state stand still.
        stepped = [i for i, g in enumerate(DATA[f"{case}/g/{j}"]) if not np.isnan(g).all()]
        optimizer = make(options, lambda count, lrs=lrs[stepped]: jnp.asarray(lrs)[count])
        start, gradients = jnp.asarray(DATA[f"{case}/p0/{j}"]), sign * DATA[f"{case}/g/{j}"][stepped]
        params, state = trajectory(optimizer, start, gradients, compiled)
        found = {"p": params, "ema": state.average}
        found["ret"] = state.average if state.returned is None else state.returned
        for key, values in found.items():
            for k, i in enumerate(stepped):
                close(values[k], DATA[f"{case}/{key}/{j}"][i])


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_reference(name, x64):
    options = VARIANTS[name]
    params, gradients = problem(12)
    references = [Reference(p, lr=1e-2, **options) for p in params]
    sign = -1.0 if options.get("maximize") else 1.0
    rows, states = trajectory(make(options, 1e-2), params, [sign * g for g in gradients], compiled=False)
    for i in range(12):
        step_model(references, [np.asarray(g[i]) for g in gradients])
        for j, reference in enumerate(references):
            close(rows[j][i], reference.live)
            close(states.average[j][i], reference.average)
            close(states.nu[j][i], reference.v)
            if states.mu is not None:
                close(states.mu[j][i], reference.m)
            if states.returned is not None:
                close(states.returned[j][i], reference.returned)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gain": "paper", "pullback_strength": 0.1}], ids=["usual", "paper"])
def test_trains_a_small_model_as_torch_does(options, x64, optimized):
    """200 steps, each with the gradients of its own framework at its own weights, and a schedule."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(64, 3)), generator.normal(size=(64, 1))
    shapes = [(3, 8), (8,), (8, 1), (1,)]
    start = [generator.normal(size=shape) for shape in shapes]

    lrs = 1e-2 * (1 - np.arange(200) / 200)

    def loss(params, tanh, x, y):
        w, b, u, c = params
        return ((tanh(x @ w + b) @ u + c - y) ** 2).mean()

    optimizer = pace(lambda count: jnp.asarray(lrs)[count], **options)
    params = [jnp.asarray(p) for p in start]
    state = jax.jit(optimizer.init)(params)
    step = stepper(optimizer, lambda params: jax.grad(loss)(params, jnp.tanh, x, y))
    theirs = [torch.tensor(p, requires_grad=True) for p in start]
    twin = PACE(theirs, lr=1e-2, **options)
    for t in range(200):
        params, state = step(params, state)
        twin.param_groups[0]["lr"] = float(lrs[t])
        twin.zero_grad()
        loss(theirs, torch.tanh, torch.tensor(x), torch.tensor(y)).backward()
        twin.step()
    shown = jax.jit(pace_eval_params)(state, params)
    twin.eval()
    for j, parameter in enumerate(theirs):
        close(shown[j], parameter.detach().numpy(), 1e-10)
    twin.train()
    for j, parameter in enumerate(theirs):
        close(params[j], parameter.detach().numpy(), 1e-10)


@pytest.mark.slow
def test_strength_0_is_optax_adamw_with_an_average_beside_it(x64):
    params, gradients = problem(30)
    rows, _ = trajectory(optax.adamw(1e-2, weight_decay=1e-2), params, gradients)
    ours_rows, states = trajectory(pace(1e-2, pullback_strength=0), params, gradients, compiled=False)
    assert states.returned is None
    for j, row in enumerate(rows):
        close(ours_rows[j], row)
        average = np.asarray(params[j])
        for t in range(30):
            rate = (2.0 + t) ** -0.7
            average = (1 - rate) * average + rate * np.asarray(row[t])
        close(states.average[j][-1], average)


@pytest.mark.slow
def test_float32_is_close_to_float64():
    params, gradients = problem(200, "float32")
    references = [Reference(p, lr=1e-2, gain="scaled") for p in params]
    for i in range(200):
        step_model(references, [np.asarray(g)[i] for g in gradients])
    params, state = final(pace(1e-2), params, gradients)
    for j, reference in enumerate(references):
        assert params[j].dtype == state.nu[j].dtype == state.returned[j].dtype == np.float32
        close(params[j], reference.live, 2e-6)
        close(state.returned[j], reference.returned, 2e-6)


@pytest.mark.slow
def test_complex_leaves_are_pairs_of_real_ones(x64):
    generator = np.random.default_rng(0)
    start, grads = generator.normal(size=(2, 3)), generator.normal(size=(20, 2, 3))
    reference = Reference(start, lr=1e-2, gain="scaled")
    for grad in grads:
        reference.step(grad)
    params, state = final(pace(1e-2), start[0] + 1j * start[1], grads[:, 0] + 1j * grads[:, 1])
    for paired, real in ((params, reference.live), (state.returned, reference.returned)):
        close([paired.real, paired.imag], real)


def test_a_leaf_with_nan_spoils_no_other(x64):
    params, gradients = problem(10)
    gradients[0] = np.array(gradients[0])
    gradients[0][3] = np.nan
    for options in ({}, {"gain": "uniform", "pullback_strength": 1.0}):
        rows, _ = trajectory(pace(1e-2, **options), params, gradients, compiled=False)
        after = [row[-1] for row in rows]
        assert np.isnan(after[0]).all()
        assert all(np.isfinite(leaf).all() for leaf in after[1:])


def first_step(gradient, **options):
    """Params after one step from ones, and the state."""
    optimizer, params = pace(1e-2, weight_decay=0.0, **options), np.ones((4, 3))
    updates, state = optimizer.update(gradient, optimizer.init(params), params)
    return np.asarray(params + updates), state


def test_a_nan_in_a_gradient_spoils_its_own_coordinate(x64):
    gradient = np.ones((4, 3))
    gradient[0, 0] = np.nan
    for options in ({}, {"gain": "uniform", "pullback_strength": 1.0}):
        params, _ = first_step(gradient, **options)
        assert np.isnan(params).sum() == 1


@pytest.mark.parametrize("limit", [1.0, float("inf")])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e200])
def test_no_nan_of_an_infinite_strength(size, limit, x64):
    """Of an infinite gain and no gap, or of an infinite strength over an infinite √v̂."""
    options = {"gain": "paper", "pullback_strength": float("inf"), "max_gain": limit}
    params, state = first_step(np.full((4, 3), size), **options)
    assert np.isfinite(params).all() and np.isfinite(state.average).all()


def test_power_0_forgets_an_average_that_was_infinite(x64):
    optimizer = pace(1e-2, gain="paper", pullback_strength=0.0, ema_power=0.0)
    state = optimizer.init(TREE)._replace(count=jnp.asarray(3, jnp.int32))
    state = state._replace(average=jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), TREE))
    _, state = optimizer.update(TREE, state, TREE)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.average))


def test_the_first_step_in_float32_is_of_the_length_of_the_learning_rate():
    """1 − 0.999 in float32 would be off by 1e-5."""
    params, _ = stepper(pace(1.0, weight_decay=0.0))(jnp.zeros(3), pace().init(jnp.zeros(3)), jnp.ones(3))
    close(params, -np.ones(3), 5e-7)


@pytest.mark.parametrize("options", [{}, {"gain": "paper", "pullback_strength": float("inf")}])
def test_lr_0_moves_and_pulls_nothing(options, x64):
    params, gradients = problem(5)
    params, state = trajectory(pace(0.0, **options), params, gradients, compiled=False)
    for leaf, average in zip(params, state.average, strict=True):
        assert (leaf == leaf[0]).all() and np.isfinite(leaf).all()
        close(average, leaf)


# --- Which weights --------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluated_params_are_the_returned_average_in_the_dtype_of_params():
    params, gradients = problem(10, "bfloat16")
    params, state = final(pace(1e-2), params, gradients)
    assert [leaf.dtype for leaf in params] == [jnp.bfloat16] * 2
    assert [leaf.dtype for leaf in state.average + state.returned] == [jnp.float32] * 4
    shown = jax.jit(pace_eval_params)(state, params)
    for leaf, returned in zip(shown, state.returned, strict=True):
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, returned.astype(jnp.bfloat16))
    alone = state._replace(returned=None)
    for leaf, average in zip(pace_eval_params(alone, params), state.average, strict=True):
        np.testing.assert_array_equal(leaf, average.astype(jnp.bfloat16))


def test_before_the_first_step_the_average_is_params(x64):
    """Also those that were loaded after init."""
    params, gradients = problem(1)
    optimizer = pace(1e-2)
    state = optimizer.init(jax.tree.map(np.zeros_like, params))
    for leaf, live in zip(pace_eval_params(state, params), params, strict=True):
        np.testing.assert_array_equal(leaf, live)
    grads = [np.asarray(g)[0] for g in gradients]
    late = optimizer.update(grads, state, params)
    soon = optimizer.update(grads, optimizer.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, late, soon)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_average_is_of_the_params_as_they_are_rounded(dtype, optimized):
    """Power 0 makes the average live: to the bit, what apply_updates has made of params and updates."""
    optimizer = pace(1e-3, gain="paper", ema_power=0.0, return_power=0.0)
    params = jnp.asarray(np.random.default_rng(0).normal(size=1000), dtype)
    state, step = optimizer.init(params), stepper(optimizer)
    for i in range(3):
        params, state = step(params, state, jnp.asarray(np.random.default_rng(i).normal(size=1000), dtype))
        np.testing.assert_array_equal(state.average, np.asarray(params, np.float32))
    # Not every compiler drops casts; that none may is seen in what it is given.
    assert "reduce_precision" in str(jax.make_jaxpr(optimizer.update)(params, state, params))


def test_bfloat16_params_do_not_stop_the_average():
    """After 20,000 steps the rate is 0.001, which a bfloat16 average would not feel."""
    optimizer = pace(0.0, gain="paper", ema_power=0.7)
    params = jnp.ones(3, jnp.bfloat16)
    state = optimizer.init(params)._replace(count=jnp.asarray(20_000, jnp.int32))
    _, state = stepper(optimizer)(params + jnp.bfloat16(0.0625), state, jnp.zeros_like(params))
    close(state.average, np.full(3, 1 + 0.0625 * 20_002**-0.7), 1e-6)


def test_still_weights_have_a_still_average():
    """At one small rate: what its shares have beyond 1 would add up to 3e-8 / rate."""
    optimizer = pace(1e-2, weight_decay=0.0)
    params = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)

    def step(state, _):
        _, state = optimizer.update(jnp.zeros_like(params), state, params)
        return state._replace(count=state.count - 1), None

    many_steps = jax.jit(lambda state: jax.lax.scan(step, state, length=20_000)[0])
    for late in (9_000, 20_000, 33_333):
        state = many_steps(optimizer.init(params)._replace(count=jnp.asarray(late, jnp.int32)))
        np.testing.assert_allclose(state.returned, params, rtol=3e-7)


def test_dtypes_of_the_state(x64):
    state = pace(1e-2, average_dtype="float64", moment_dtype=jnp.float32).init(jnp.ones(2, jnp.bfloat16))
    assert (state.average.dtype, state.mu.dtype, state.nu.dtype) == ("float64", "float32", "float32")
    plain = pace(1e-2).init(jnp.ones(2, jnp.bfloat16))
    assert (plain.average.dtype, plain.mu.dtype, plain.count.dtype) == ("float32", "bfloat16", "int32")
    assert pace(1e-2, b1=0).init(jnp.ones(2)).mu is None


# --- Compiled, saved, sharded ---------------------------------------------------------------------


@pytest.mark.slow
def test_compiles_once_with_a_schedule(optimized):
    optimizer = pace(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20), update_every=2)
    params, gradients = problem(20, "float32")
    traced = []

    @jax.jit
    def step(params, state, grads):
        traced.append(1)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for i in range(20):
        params, state = step(params, state, [np.asarray(g)[i] for g in gradients])
    assert len(traced) == 1 and step._cache_size() == 1
    assert int(state.count) == 20


@pytest.mark.slow
def test_eager_and_compiled_agree(x64, optimized):
    params, gradients = problem(3)
    eager = trajectory(pace(1e-2), params, gradients, compiled=False)
    same(trajectory(pace(1e-2), params, gradients), eager, 1e-14)


def test_state_goes_through_pickle_and_flattening_and_training_goes_on_to_the_bit(x64):
    optimizer = pace(1e-2)
    params, state, _ = run(optimizer, TREE, steps=3)
    leaves, structure = jax.tree.flatten(state)
    flat = jax.tree.unflatten(structure, leaves)
    assert isinstance(flat, PaceState) and structure == jax.tree.structure(optimizer.init(params))
    resumed = [optimizer.update(TREE, s, params) for s in (state, flat, pickle.loads(pickle.dumps(state)))]
    jax.tree.map(np.testing.assert_array_equal, *resumed[:2])
    jax.tree.map(np.testing.assert_array_equal, *resumed[1:])


@pytest.mark.slow
def test_params_and_state_can_be_donated_together():
    optimizer = pace(1e-2)
    params = jnp.ones(4)

    def step(params, state):
        updates, state = optimizer.update(jnp.ones(4), state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    params, state = donating(params, optimizer.init(params))  # not compiled: memory may be shared there
    params, state = donating(params, state)
    assert np.isfinite(params).all()


SHARDED = """
import jax, numpy as np, optax, sys
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from paceline.integrations.optax import pace, pace_eval_params
jax.config.update("jax_enable_x64", True)
assert len(jax.devices()) == 2
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
random = np.random.default_rng(0)
start = {"w": random.normal(size=(4, 3)), "b": random.normal(size=8)}
parts = {"w": pace(1e-2), "b": pace(1e-2, gain="uniform", pullback_strength=1.0)}
optimizer, results = optax.partition(parts, {"w": "w", "b": "b"}), []

@jax.jit
def step(params, state, x):
    grads = jax.grad(lambda p: ((p["w"] * x).sum() - 1.0) ** 2 + ((p["b"] - 1) ** 4).sum())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

for place in (lambda v: jnp.asarray(v), lambda v: jax.device_put(v, rows)):
    params = jax.tree.map(place, start)
    state = optimizer.init(params)
    kept = [leaf.sharding for leaf in jax.tree.leaves(state) if leaf.ndim]
    for i in range(10):
        params, state = step(params, state, np.random.default_rng(i).normal(size=(4, 3)))
    results.append(jax.tree.leaves((params, pace_eval_params(state, params))))
assert len(kept) == 7 and all(s.is_equivalent_to(rows, 1) for s in kept), kept
assert all(leaf.sharding.is_equivalent_to(rows, leaf.ndim) for leaf in results[1])
for one, other in zip(*results, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-13)
assert "torch" not in sys.modules
print("same")
"""


@pytest.mark.slow
def test_sharded_over_two_devices_it_gives_the_same_numbers():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "same", done.stderr


# --- Among optax's transformations ----------------------------------------------------------------


def run(optimizer, params, steps=10, compiled=False):
    """Params, the state, and the params to evaluate, after some steps toward 0.5."""

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.tree.map(lambda p: 2 * (p - 0.5), params), state, params)
        return (optax.apply_updates(params, updates), state), None

    def all_steps(params):
        carry = params, optimizer.init(params)
        if compiled:
            carry = jax.lax.scan(step, carry, length=steps)[0]
        else:
            for _ in range(steps):
                carry = step(carry, None)[0]
        params, state = carry
        return params, state, pace_eval_params(state, params)

    return jax.device_get((jax.jit(all_steps) if compiled else all_steps)(params))


def after(**options):
    return run(pace(1e-2, **options), TREE)


def same(one, other, tolerance=1e-12):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: close(a, b, tolerance), one, other)


TREE = {
    "layer": {"w": np.linspace(-1, 1, 12).reshape(4, 3), "b": np.ones(())},
    "head": np.linspace(2, 3, 12).reshape(4, 3),
}


def test_after_clipping_in_a_chain(x64):
    chained, _, shown = run(optax.chain(optax.clip_by_global_norm(0.1), pace(1e-2, gain="paper")), TREE)
    references = [Reference(leaf, lr=1e-2) for leaf in jax.tree.leaves(TREE)]
    for _ in range(10):
        grads = [2 * (reference.live - 0.5) for reference in references]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        step_model(references, [g * min(1, 0.1 / norm) for g in grads])
    for one, other, reference in zip(*map(jax.tree.leaves, (chained, shown)), references, strict=True):
        close(one, reference.live)
        close(other, reference.average)


@pytest.mark.slow
def test_in_multi_steps_the_average_moves_with_the_params(x64):
    params, state, shown = run(optax.MultiSteps(pace(1e-2), every_k_schedule=2), TREE, 20, compiled=True)
    once, _, own = after()
    same(params, once, 1e-6)  # optax takes its means and schedules in float32
    same(shown, own, 1e-6)
    assert int(optax.tree.get(state.inner_opt_state, "count")) == 10


@pytest.mark.slow
def test_with_hyperparameters_injected(x64):
    params, _, shown = run(optax.inject_hyperparams(pace)(learning_rate=1e-2), TREE, compiled=True)
    once, _, own = after()
    same(params, once)
    same(shown, own)


@pytest.mark.slow
def test_with_only_some_hyperparameters_injected(x64):
    schedule, options = optax.linear_schedule(1e-2, 0.0, 10), {"gain": "paper", "pullback_strength": 0.1}
    injected = optax.inject_hyperparams(pace, static_args=("b1", "b2", "mask"))
    _, _, shown = run(injected(schedule, mask=lambda tree: True, **options), TREE, compiled=True)
    _, _, own = run(pace(schedule, **options), TREE)
    same(shown, own, 1e-6)


@pytest.mark.parametrize("trained", [{"w": True, "b": False}, False], ids=["leaf", "branch"])
def test_leaves_outside_optax_masked_are_left_alone(trained, x64):
    optimizer = optax.masked(pace(1e-2, gain="paper"), {"layer": trained, "head": True})
    params, _, shown = run(optimizer, TREE, steps=1)
    expected, _, own = run(pace(1e-2, gain="paper"), TREE, steps=1)
    np.testing.assert_array_equal(params["head"], expected["head"])
    np.testing.assert_array_equal(shown["head"], own["head"])
    np.testing.assert_array_equal(params["layer"]["b"], TREE["layer"]["b"] + 1)  # its gradient
    np.testing.assert_array_equal(shown["layer"]["b"], params["layer"]["b"])


def test_two_of_them_and_frozen_leaves_in_a_partition(x64):
    labels = {"layer": {"w": "slow", "b": "none"}, "head": "fast"}
    parts = {
        "slow": pace(1e-3, gain="paper"),
        "fast": pace(1e-1, gain="uniform", pullback_strength=1.0),
        "none": optax.set_to_zero(),
    }
    params, _, shown = run(optax.partition(parts, labels), TREE)
    np.testing.assert_array_equal(shown["layer"]["b"], TREE["layer"]["b"])
    slow, _, slow_shown = run(parts["slow"], TREE)
    fast, _, fast_shown = run(parts["fast"], TREE)
    close(params["layer"]["w"], slow["layer"]["w"])
    close(params["head"], fast["head"])
    close(shown["layer"]["w"], slow_shown["layer"]["w"])
    close(shown["head"], fast_shown["head"])


STRONG = {"gain": "uniform", "pullback_strength": 3.0, "weight_decay": 0.5}
MASKS = {
    "tree": {"layer": {"w": True, "b": True}, "head": False},
    "beginning of a tree": {"layer": True, "head": False},
    "function": lambda params: {"layer": jax.tree.map(lambda _: True, params["layer"]), "head": False},
}


@pytest.mark.parametrize("name, without", [("mask", "weight_decay"), ("pull_mask", "pullback_strength")])
def test_masks_of_decay_and_of_the_pull(name, without, x64):
    everywhere, _, _ = after(**STRONG)
    nowhere, _, _ = after(**STRONG | {without: 0.0})
    assert np.abs(nowhere["head"] - everywhere["head"]).max() > 1e-3
    params, _, shown = after(**STRONG, **{name: MASKS["tree"]})
    close(params["head"], nowhere["head"])
    same(params["layer"], everywhere["layer"])
    assert np.abs(shown["head"] - params["head"]).max() > 1e-3  # averaged all the same


@pytest.mark.parametrize("form", MASKS)
def test_forms_of_a_mask(form):
    assert ours._spread(MASKS[form], TREE, "mask") == MASKS["tree"]
    hidden = {"layer": {"w": TREE["layer"]["w"], "b": optax.MaskedNode()}, "head": TREE["head"]}
    spread = ours._spread(MASKS[form], hidden, "mask")
    assert spread == {"layer": {"w": True, "b": optax.MaskedNode()}, "head": False}


def test_none_in_params_and_extra_arguments_are_passed_over(x64):
    optimizer = pace(1e-2)
    params = {"w": np.ones((4, 3)), "absent": None}
    updates, state = optimizer.update(params, optimizer.init(params), params, value=1.0)
    assert updates["absent"] is None and pace_eval_params(state, params)["absent"] is None


# --- What optax asks of every optimizer -----------------------------------------------------------


def parabola(params):
    return ((params - jnp.asarray([1.0, -1.0, 1.0])) ** 2).sum()


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


TARGETS = {
    "parabola": (parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
    "rosenbrock": (rosenbrock, [0.0, 0.0], [1.0, 1.0]),
}
KINDS = {
    "usual": {},
    "paper": {"gain": "paper"},
    "lookahead": {"gain": "uniform", "pullback_strength": 1.0, "gap": "lookahead"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_it_finds_the_minimum(target, kind):
    objective, start, end = TARGETS[target]
    optimizer = pace(1e-1, weight_decay=1e-4, **KINDS[kind])
    params = jnp.asarray(start)
    state = optax.tree_map_params(optimizer, lambda leaf: leaf, jax.jit(optimizer.init)(params))

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(jax.grad(objective)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.jit(lambda carry: jax.lax.fori_loop(0, 10_000, step, carry))((params, state))
    np.testing.assert_allclose(params, end, rtol=3e-2, atol=3e-2)
    np.testing.assert_allclose(jax.jit(pace_eval_params)(state, params), end, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_and_shapes_are_kept(dtype):
    optimizer = pace(1e-2, update_every=2)
    params = jnp.asarray([1.0, 2.0], dtype)
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert (updates.dtype, updates.shape, updates.weak_type) == (params.dtype, (2,), False)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(after)] == [
        (leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(state)
    ]


# --- Settings -------------------------------------------------------------------------------------


def test_defaults_are_those_of_torch():
    theirs = inspect.signature(PACE).parameters
    mine = inspect.signature(pace).parameters
    for name in mine.keys() & theirs.keys() - {"average_dtype"}:
        assert mine[name].default == theirs[name].default, name
    assert (mine["b1"].default, mine["b2"].default) == theirs["betas"].default
    assert mine["learning_rate"].default == theirs["lr"].default
    assert ours.USUAL == recipe.USUAL


@pytest.mark.parametrize("gain", ["scaled", "paper", "uniform", None])
@pytest.mark.parametrize("strength", [None, 0, 0.0, 2.0])
@pytest.mark.parametrize("power", [None, 0.2, 0.7])
@pytest.mark.parametrize("returned", [None, 0.2, 0.7])
def test_what_is_not_said_is_completed_as_in_torch(gain, strength, power, returned):
    given = {"pullback_strength": strength, "gain": gain, "ema_power": power, "return_power": returned}
    if gain is None and strength == 2.0:
        with pytest.raises(ValueError, match="needs its gain"):
            pace(1e-2, **given)
    else:
        assert ours._completed(**given) == recipe.completed(recipe.with_gain(given))


BAD = [
    {"eps": -1.0},
    {"eps": float("nan")},
    {"weight_decay": float("inf")},
    {"weight_decay": "much"},
    {"pullback_strength": -1.0, "gain": "paper"},
    {"pullback_strength": float("inf"), "gain": "scaled"},
    {"pullback_strength": -1.0, "gain": "uniform"},
    {"gain": "uniform"},
    {"gain": "adaptive"},
    {"gap": "post"},
    {"ema_power": 1.5},
    {"return_power": -0.1},
    {"update_every": 0},
    {"update_every": 1.5},
    {"update_every": True},
    {"ema_offset": 0.2, "ema_scale": 0.2},
    {"ema_offset": -1.0},
    {"max_gain": 0.0},
    {"max_gain": None},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_settings_are_refused_in_the_words_of_torch(bad):
    with pytest.raises(ValueError) as theirs:
        PACE([torch.zeros(1, requires_grad=True)], **bad)
    with pytest.raises(ValueError) as mine:
        pace(1e-2, **bad)
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"learning_rate": -1.0}, "Invalid learning_rate value: -1.0; allowed: 0 <= learning_rate < inf"),
        ({"learning_rate": "1e-3"}, "Invalid learning_rate value: '1e-3'; allowed: 0 <="),
        ({"learning_rate": np.zeros(2)}, "Invalid learning_rate value"),
        ({"b1": 1.0}, "Invalid b1 value: 1.0; allowed: 0 <= b1 < 1"),
        ({"b2": float("nan")}, "Invalid b2 value: nan; allowed: 0 <= b2 < 1"),
        ({"average_dtype": "bfloat16"}, "Invalid average_dtype value: 'bfloat16'; allowed: None, float32"),
        ({"average_dtype": "float64"}, "allowed: None, float32, or float64 where jax_enable_x64 is set"),
        ({"moment_dtype": "int8"}, "Invalid moment_dtype value: 'int8'; allowed: None, float32"),
        ({"moment_dtype": "wide"}, "Invalid moment_dtype value: 'wide'"),
    ],
    ids=str,
)
def test_bad_settings_of_its_own_are_refused(bad, message):
    with pytest.raises(ValueError) as error:
        pace(**{"learning_rate": 1e-2, **bad})
    assert message in str(error.value)


def test_bad_trees_are_refused():
    optimizer = pace(1e-2)
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\); got params=None"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match=r"grads and params are trees of different structure.*'b'"):
        optimizer.update({"w": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match="grads has None where params has a leaf"):
        optimizer.update({"w": jnp.ones(2), "b": None}, state, params)
    with pytest.raises(ValueError, match=r"dtype of params\['n'\]: 'int32'; allowed: float and complex ones"):
        optimizer.init({"n": jnp.ones(2, jnp.int32)})
    with pytest.raises(ValueError, match="mask entry: 'w'; allowed: True and False"):
        pace(1e-2, mask={"w": "w", "b": True}).update(params, state, params)
    with pytest.raises(ValueError, match="pull_mask does not fit params"):
        pace(1e-2, pull_mask={"v": True}).update(params, state, params)
    with pytest.raises(ValueError, match="a tuple without a PaceState in it"):
        pace_eval_params(optax.adamw(1e-3).init(params), params)


# --- Documents ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_documented_example():
    failed, attempted = doctest.testmod(ours)
    assert failed == 0 and attempted > 5


@pytest.mark.slow
def test_importing_leaves_torch_alone():
    code = "import sys, paceline.integrations.optax; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "False", done.stderr
