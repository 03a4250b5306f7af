"""Chains in one program: they pool after every step, and taking turns changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scenarios import LinearGaussian

from haiku_posteriors.core import METHODS
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils import chains, devices

INPUTS = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)


def first_device_mesh(num_chains):
    return devices.make_mesh(num_chains, jax.devices()[:1])


@pytest.mark.parametrize("num_chains", [1, 3])
def test_chains_pool_after_every_step(num_chains):
    """Every chain doubles its number, then all take the mean."""

    def pool(states):
        return jnp.broadcast_to(jnp.mean(states), states.shape)

    method = Method(
        lambda rng_key, params: params,
        lambda rng_key, state, data: (2 * state, {"log_joint": state}),
        lambda rng_key, state, num_draws: state,
        pool,
    )
    mesh = first_device_mesh(num_chains)
    program = chains.compile_method(method, 0, num_chains, mesh)
    start = jnp.arange(1.0, num_chains + 1, dtype=jnp.float32)
    data = devices.place_data(INPUTS, INPUTS[:, :1], mesh)
    state, info, _, reached = program.run(program.init(start), data, 0, 2)
    assert reached == 2
    mean = (num_chains + 1) / 2
    np.testing.assert_allclose(state, np.full(num_chains, 4 * mean), rtol=1e-6)
    np.testing.assert_allclose(info["log_joint"], np.full(num_chains, 2 * mean), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "hmc"])
def test_chains_in_turn_equal_chains_as_a_batch(name, monkeypatch):
    exact = LinearGaussian(INPUTS, INPUTS[:, :1], noise_std=0.5, prior_std=1.0)
    mesh = first_device_mesh(3)
    data = devices.place_data(INPUTS, INPUTS[:, :1], mesh)
    results = []
    for in_turn in (True, False):
        monkeypatch.setattr(devices, "chains_take_turns", lambda mesh, turns=in_turn: turns)
        method = METHODS[name](exact.log_joint())
        program = chains.compile_method(method, 0, 3, mesh)
        results.append(program.run(program.init(None), data, 0, 4)[0])
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_chains_take_turns_on_a_cpu_unless_devices_share_them():
    assert devices.chains_take_turns(first_device_mesh(4))
    assert not devices.chains_take_turns(devices.make_mesh(4, jax.devices()[:2]))


@pytest.mark.parametrize("in_turn", [True, False])
def test_no_step_is_made_once_all_chains_are_finished(in_turn, monkeypatch):
    """Chains count from 0, 1 and 2 until the last of them is at 5; the others go on with it."""
    monkeypatch.setattr(devices, "chains_take_turns", lambda mesh: in_turn)
    method = Method(
        lambda rng_key, params: params,
        lambda rng_key, state, data: (state + 1, {"log_joint": state[0]}),
        lambda rng_key, state, num_draws: state,
    )
    mesh = first_device_mesh(3)
    program = chains.compile_method(
        method, 0, 3, mesh, is_finished=lambda states: jnp.all(states[:, 0] >= 5)
    )
    start = jnp.array([[0.0], [1.0], [2.0]], jnp.float32)
    data = devices.place_data(INPUTS, INPUTS[:, :1], mesh)
    state, info, finite, reached = program.run(program.init(start), data, 10, 100)
    assert reached == 15 and finite
    np.testing.assert_array_equal(state[:, 0], [5, 6, 7])
    np.testing.assert_array_equal(info["log_joint"], [4, 5, 6])
    again, _, _, reached = program.run(state, data, 15, 100)
    assert reached == 15
    np.testing.assert_array_equal(again, state)
