"""PACE in JAX: a small network learns a function, and its average is what is kept.

pip install 'paceline[optax]'
python examples/optax_example.py
"""

import jax
import jax.numpy as jnp
import optax

from paceline.integrations.optax import pace, pace_eval_params

STEPS = 500


def initial(key, sizes=(4, 32, 32, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


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
    x, y = data
    return jnp.mean((network(params, x) - y) ** 2)


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    # Weight decay for matrices only, as with optax.adamw.
    pace(
        optax.warmup_constant_schedule(0.0, 1e-2, 20),
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
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

    held_out = batch(jax.random.key(STEPS + 1), size=4096, noise=0.0)
    for name, weights in (("live weights", params), ("average", averaged)):
        print(f"error of the {name}: {loss_of(weights, held_out):.4f}")


if __name__ == "__main__":
    main()
