"""PACE for JAX: the numbers of torch's PACE, and at home among optax's transformations."""

import dataclasses
import doctest
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline import PACE

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import paceline.integrations.optax as ours  # noqa: E402
from paceline.integrations.optax import Control, PaceState, pace, pace_eval_params  # noqa: E402

ROOT = Path(__file__).parents[2]
CONTROLS = {
    "paper": ("paper", {}),
    "two averages": ("paper", {"c": 0.3, "power": 0.3, "return_power": 0.8}),
    "at its limit": ("paper", {"c": float("inf"), "power": 0.6}),
    "unclipped": ("paper", {"c": 300.0, "max_gain": float("inf")}),
    "push": ("push", {}),
    "pull": ("pull", {}),
    "none": ("none", {}),
    "lookahead": ("pull", {"strength": 0.7, "gap": "after", "order": "average, then pull"}),
    "gap before": ("push", {"order": "average, then pull"}),
    "rare": ("push", {"every": 3, "pull_every": 2}),
    "growing": ("push", {"strength": 0.75, "grow": 12}),
    "late": ("push", {"delay": 3.0, "slope": 0.5, "least_rate": 0.05}),
    "power 0": ("pull", {"power": 0.0, "return_power": None}),
}


def control_of(name):
    kind, fields = CONTROLS[name]
    return getattr(Control, kind)(**fields)


@pytest.fixture(autouse=True)
def quickly_compiled():
    """Most of the time here is the compiler's. Less of it where its optimizations are not tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


TREE = {
    "layer": {"w": np.linspace(-1, 1, 12).reshape(4, 3), "b": np.ones(())},
    "head": np.linspace(2, 3, 12).reshape(4, 3),
}


def gradients(params, t):
    """Return gradients at params, with noise of step t, in numpy."""
    noise = np.random.default_rng(t)

    def leaf(p):
        values = 0.3 * np.asarray(p, np.float64) + noise.normal(size=np.shape(p))
        return values.astype(np.asarray(p).dtype)

    return jax.tree.map(leaf, params)


def train(optimizer, params, steps, state=None, start=0):
    """Return params and state after some steps."""
    state = optimizer.init(params) if state is None else state
    for t in range(start, start + steps):
        updates, state = optimizer.update(gradients(params, t), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def close(one, other, tolerance=1e-12):
    def leaf(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)

    jax.tree.map(leaf, one, other)


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


# --- The numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROLS)
def test_equals_torch(name, x64):
    """Each with the gradients at its own weights, and a schedule that ends at 0."""
    kind, fields = CONTROLS[name]
    lrs = 1e-2 * (1 - np.arange(13) / 12)
    optimizer = pace(lambda count: jnp.asarray(lrs)[count], control=control_of(name))
    params, state = train(optimizer, TREE, 13)
    leaves, structure = jax.tree.flatten(TREE)
    live = [torch.tensor(np.array(leaf), requires_grad=True) for leaf in leaves]
    twin = PACE(live, lr=1e-2, control=getattr(paceline.Control, kind)(**fields))
    for t in range(13):
        found = gradients(jax.tree.unflatten(structure, [p.detach().numpy() for p in live]), t)
        for parameter, gradient in zip(live, jax.tree.leaves(found), strict=True):
            parameter.grad = torch.tensor(gradient)
        twin.param_groups[0]["lr"] = float(lrs[t])
        twin.step()
    close(jax.tree.leaves(params), [p.detach().numpy() for p in live])
    close(jax.tree.leaves(state.average), [twin.state[p]["average"].numpy() for p in live])
    twin.eval()
    close(jax.tree.leaves(pace_eval_params(state, params)), [p.detach().numpy() for p in live])
    assert (state.returned is None) == ("returned" not in twin.state[live[0]])


def test_control_is_that_of_torch():
    mine, theirs = (
        {field.name: field.default for field in dataclasses.fields(kind)}
        for kind in (Control, paceline.Control)
    )
    assert str(mine) == str(theirs)
    for kind, fields in [*CONTROLS.values(), *((kind, {}) for kind in ("paper", "push", "pull", "none"))]:
        one, other = (getattr(of, kind)(**fields) for of in (Control, paceline.Control))
        assert dataclasses.asdict(one) == dataclasses.asdict(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_control_is_optax_adamw_to_the_bit_with_an_average_next_to_it(dtype):
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), TREE)
    mask = {"layer": {"w": True, "b": False}, "head": True}
    expected, _ = train(optax.adamw(1e-2, weight_decay=1e-2, mask=mask), start, 20)
    params, state = train(pace(1e-2, control=Control.none(), mask=mask), start, 20)
    equal(params, expected)
    average = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), start)
    for t in range(1, 21):
        live, rate = train(optax.adamw(1e-2, weight_decay=1e-2, mask=mask), start, t)[0], (1.0 + t) ** -0.7
        average = jax.tree.map(
            lambda a, p, r=rate: (1 - r) * a + r * np.asarray(p, np.float64), average, live
        )
    close(state.average, average, 1e-6)


@pytest.mark.parametrize("control", [Control.paper(float("inf")), Control.push()], ids=["paper", "push"])
def test_lr_0_moves_and_steers_nothing(control, x64):
    params, state = train(pace(0.0, control=control), TREE, 5)
    equal(params, jax.tree.map(jnp.asarray, TREE))
    close(state.average, TREE)


@pytest.mark.parametrize("limit", [1.0, float("inf")])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e200])
def test_no_nan_of_an_infinite_strength(size, limit, x64):
    optimizer = pace(1e-2, control=Control.paper(float("inf"), max_gain=limit))
    params = np.ones((4, 3))
    updates, state = optimizer.update(jnp.full((4, 3), size), optimizer.init(params), params)
    assert np.isfinite(updates).all() and np.isfinite(state.average).all()


def test_still_weights_have_a_still_average():
    """What shares have beyond 1 would add up to 3e-8 / rate."""
    optimizer = pace(1e-2, weight_decay=0.0, control=Control.none())
    params = jnp.asarray(np.random.default_rng(0).normal(size=100), jnp.float32)

    def step(state, _):
        _, state = optimizer.update(jnp.zeros_like(params), state, params)
        return state._replace(count=state.count - 1), None

    state = optimizer.init(params)._replace(count=jnp.asarray(9_000, jnp.int32))
    state = jax.jit(lambda state: jax.lax.scan(step, state, length=20_000)[0])(state)
    np.testing.assert_allclose(state.average, params, rtol=3e-7)


# --- Which weights, in which precision ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_averages_are_float32_and_of_the_params_as_they_are_rounded(dtype):
    """Power 0 makes the average live: to the bit, what apply_updates has made of params and updates."""
    optimizer = pace(1e-3, control=Control.paper(power=0.0))
    params = jnp.asarray(np.random.default_rng(0).normal(size=1000), dtype)
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(3):
        updates, state = step(gradients(params, t), state, params)
        params = optax.apply_updates(params, updates)
        assert state.average.dtype == jnp.float32 and updates.dtype == params.dtype == dtype
        np.testing.assert_array_equal(state.average, np.asarray(params, np.float32))
    assert pace_eval_params(state, params).dtype == dtype
    # Not every compiler drops casts; that none may is seen in what it is given.
    assert "reduce_precision" in str(jax.make_jaxpr(optimizer.update)(params, state, params))


def test_before_the_first_step_the_average_is_params(x64):
    """Also params that were loaded after init."""
    optimizer = pace(1e-2, control=Control.push())
    state = optimizer.init(jax.tree.map(np.zeros_like, TREE))
    equal(pace_eval_params(state, TREE), jax.tree.map(jnp.asarray, TREE))
    equal(optimizer.update(TREE, state, TREE), optimizer.update(TREE, optimizer.init(TREE), TREE))


# --- Compiled, saved, sharded ---------------------------------------------------------------------------


def test_compiles_once_with_a_schedule_and_donated_memory():
    optimizer = pace(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20), control=Control.push(every=2))
    traced = []

    def step(params, state, grads):
        traced.append(1)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, "float32"), TREE)
    state = optimizer.init(params)
    for t in range(20):
        params, state = step(params, state, gradients(TREE, t))
    assert len(traced) == 1 and int(state.count) == 20
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


def test_a_saved_state_resumes_to_the_bit(x64):
    optimizer = pace(1e-2, control=Control.push())
    straight = train(optimizer, TREE, 8)
    params, state = pickle.loads(pickle.dumps(jax.device_get(train(optimizer, TREE, 3))))
    flat = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
    assert isinstance(flat, PaceState)
    equal(train(optimizer, params, 5, flat, start=3), straight)


SHARDED = """
import jax, numpy as np, optax, sys
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from paceline.integrations.optax import Control, pace, pace_eval_params
jax.config.update("jax_enable_x64", True)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
start = np.random.default_rng(0).normal(size=(4, 3))
optimizer, results = pace(1e-2, control=Control.push()), []

@jax.jit
def step(params, state, x):
    grads = jax.grad(lambda p: ((p * x).sum() - 1.0) ** 2)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

for place in (jnp.asarray, lambda v: jax.device_put(v, rows)):
    params = place(start)
    state = optimizer.init(params)
    for i in range(10):
        params, state = step(params, state, np.random.default_rng(i).normal(size=(4, 3)))
    results.append((params, pace_eval_params(state, params)))
assert len(jax.devices()) == 2
assert all(leaf.sharding.is_equivalent_to(rows, 2) for leaf in (*results[1], state.average, state.returned))
for one, other in zip(*results, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-13)
assert "torch" not in sys.modules
print("same")
"""


@pytest.mark.slow
def test_sharded_over_two_devices_it_gives_the_same_numbers():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "same", done.stderr


# --- Among optax's transformations ----------------------------------------------------------------------


def shown(optimizer, steps=6):
    params, state = train(optimizer, TREE, steps)
    return pace_eval_params(state, params)


def test_in_a_chain_and_with_injected_hyperparameters(x64):
    own = pace(1e-2, control=Control.push())
    close(shown(optax.chain(optax.clip_by_global_norm(1e9), own)), shown(own))
    injected = optax.inject_hyperparams(pace)(learning_rate=1e-2, control=Control.push())
    close(shown(injected), shown(own))


def test_in_multi_steps_the_average_moves_with_the_params(x64):
    optimizer = optax.MultiSteps(pace(1e-2), every_k_schedule=2)
    params, state = train(optimizer, TREE, 4)
    assert int(optax.tree.get(state.inner_opt_state, "count", filtering=lambda path, _: len(path) == 1)) == 2
    assert float(np.abs(pace_eval_params(state, params)["head"] - params["head"]).max()) > 1e-4


def test_masked_and_partitioned_leaves(x64):
    masked = optax.masked(pace(1e-2), {"layer": False, "head": True})
    params, state = train(masked, TREE, 1)
    equal(pace_eval_params(state, params)["layer"], params["layer"])
    close(pace_eval_params(state, params)["head"], shown(pace(1e-2), 1)["head"])

    labels = {"layer": {"w": "slow", "b": "frozen"}, "head": "fast"}
    parts = {"slow": pace(1e-3), "fast": pace(1e-1, control=Control.push()), "frozen": optax.set_to_zero()}
    found = shown(optax.partition(parts, labels))
    equal(found["layer"]["b"], TREE["layer"]["b"])
    alone = {"layer": {"w": True, "b": False}, "head": False}
    close(found["layer"]["w"], shown(optax.masked(parts["slow"], alone))["layer"]["w"], 1e-2)
    close(found["head"], shown(optax.masked(parts["fast"], {"layer": False, "head": True}))["head"], 1e-1)


# --- What is refused ------------------------------------------------------------------------------------

BAD = {"strength": -0.1, "sizing": "scaled", "power": 1.5, "return_power": -0.1, "step": 0.0, "every": True}
BAD |= {
    "grow": -1,
    "pull_every": 1.5,
    "slope": -1.0,
    "delay": float("inf"),
    "least_rate": 2.0,
    "max_gain": 0.0,
}
BAD |= {"gap": "pre", "order": "pull"}


@pytest.mark.parametrize("name", BAD)
def test_bad_controls_are_refused_like_torch_does(name):
    for kind in (Control, paceline.Control):
        for value in (BAD[name], float("nan")):
            with pytest.raises(ValueError, match=f"Invalid {name} value"):
                kind(**{"strength": 0.5, "sizing": "paper", "power": 0.5, name: value})
        with pytest.raises(ValueError, match="Invalid strength value"):
            kind(strength=-1.0, sizing="uniform", power=0.5)


def test_bad_settings_and_trees_are_refused():
    for bad in ({"learning_rate": -1.0}, {"b1": 1.0}, {"b2": float("nan")}, {"eps": -1.0}, {"eps": "small"}):
        with pytest.raises(ValueError, match=f"Invalid {next(iter(bad))} value"):
            pace(**bad)
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        pace().update(TREE, pace().init(TREE))
    with pytest.raises(ValueError, match=r"dtype of params\['n'\] value: 'int32'; allowed: real floats"):
        pace().init({"n": jnp.ones(2, jnp.int32)})
    with pytest.raises(ValueError, match="a tuple without a PaceState in it"):
        pace_eval_params(optax.adamw(1e-3).init(TREE), TREE)


def test_documented_example():
    failed, attempted = doctest.testmod(ours)
    assert failed == 0 and attempted > 5
