"""Training that ends by itself: the rule by hand, and a member that has stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scenarios import LinearGaussian

from haiku_posteriors.core import plateau
from haiku_posteriors.core.sgd import PLATEAU_GAIN, sgd

INPUTS = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)


def reached_after(values, window, tolerance):
    """The number of epochs after which the rule first says that training is over."""
    watched = plateau.start(jnp.float32)
    for number, value in enumerate(values, start=1):
        watched = plateau.update(watched, jnp.float32(value), window, tolerance)
        if watched.is_reached:
            return number
    return None


def test_it_is_reached_at_the_end_of_a_window_that_gained_too_little():
    # Means by window of two: -9, -5, -4, -3.5.
    values = [-10, -8, -6, -4, -4, -4, -4, -3]
    assert reached_after(values, 2, 0.4) is None
    assert reached_after(values, 2, 0.9) == 8
    assert reached_after(values, 2, 2.0) == 6
    assert reached_after([0.0, -1.0], 1, 0.5) == 2  # the first window has none before it


def test_a_member_stops_at_the_mode_and_stays():
    exact = LinearGaussian(INPUTS, INPUTS[:, :1], noise_std=0.5, prior_std=1.0)
    log_joint, data = exact.log_joint(), exact.data()
    method = sgd(log_joint, optax.adam(0.05), batch_size=30, plateau_window=10)
    state, step = method.init(jax.random.key(0), None), jax.jit(method.step)
    for epoch in range(200):
        if state.plateau.is_reached:
            break
        state, info = step(jax.random.key(epoch), state, data)
    assert 10 < epoch < 199 and epoch % 10 == 0
    mode = {"linear": {"w": exact.mean[1:, None], "b": exact.mean[:1]}}
    highest = log_joint(jax.tree.map(lambda leaf: leaf.astype(np.float32), mode), data)
    gain = PLATEAU_GAIN * 3
    assert highest - gain * 20 < info["log_joint"][0] <= highest
    again, _ = step(jax.random.key(1000), state, data)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
