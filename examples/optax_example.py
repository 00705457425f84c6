"""PACE in JAX: a small network learns a function, and its average is returned. Run it with python."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

from paceline.integrations.optax import Control, pace, pace_eval_params

STEPS = 500


def initial(key, sizes=(4, 32, 32, 1)):
    shapes = list(pairwise(sizes))
    keys = jax.random.split(key, len(shapes))
    weights = [jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]
    return [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights]


def network(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def batch(key, size=32, noise=0.5):
    inputs, errors = jax.random.split(key)
    x = jax.random.normal(inputs, (size, 4))
    y = jnp.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return x, y + noise * jax.random.normal(errors, y.shape)


@jax.jit
def loss_of(params, data):
    return jnp.mean((network(params, data[0]) - data[1]) ** 2)


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    pace(
        optax.warmup_constant_schedule(0.0, 1e-2, 20),
        control=Control.push(),
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),  # decay of matrices alone
    ),
)


@jax.jit
def step(params, state, key):
    grads = jax.grad(loss_of)(params, batch(key))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def main():
    params = jax.jit(initial)(jax.random.key(0))
    state = optimizer.init(params)
    for i in range(STEPS):
        params, state = step(params, state, jax.random.key(i + 1))
    averaged = pace_eval_params(state, params)  # what to evaluate, save and return

    held_out = batch(jax.random.key(STEPS + 1), 4096, noise=0.0)
    print(f"live: {loss_of(params, held_out):.4f}, average: {loss_of(averaged, held_out):.4f}")


if __name__ == "__main__":
    main()
