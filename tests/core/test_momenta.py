"""Momenta of heavy tails: their law, their energy, and what chains do with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from scenarios import (
    NO_DATA,
    assert_mean_of_chains,
    chain_keys,
    gumbel,
    run_chains,
    target_of_density,
)

from haiku_posteriors.core import momenta
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.hmc import hmc
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.momenta import Momenta

FREEDOM, SIZE = 6.0, 12
MASSES = {"a": jnp.full((), 0.5), "b": jnp.linspace(1.0, 3.0, SIZE - 3)}
SHAPES = {"a": jnp.zeros(3), "b": jnp.zeros(SIZE - 3)}
WIDTH, NUM_SCALED = 0.5, 20


def varying_scale(w):
    """x ~ N(0, WIDTH^2), the others N(0, exp(2 x)): log p varies by NUM_SCALED x, as with noise."""
    x, others = w[0], w[1:]
    return jnp.concatenate([-(w[:1] ** 2) / (2 * WIDTH**2), -x - others**2 * jnp.exp(-2 * x) / 2])


def test_drawn_momenta_have_the_law_of_their_energy():
    """q / D has an F distribution, and K the variance of a logarithm of a beta variable."""
    heavy = Momenta(MASSES, jnp.array(1 / FREEDOM))
    keys = chain_keys(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: heavy.draw(key, SHAPES))(keys)
    square = 0.5 * np.sum(drawn["a"] ** 2, 1) + np.sum(drawn["b"] ** 2 * MASSES["b"], 1)
    law = scipy.stats.f(SIZE, FREEDOM)
    assert scipy.stats.kstest(square / SIZE, law.cdf).pvalue > 1e-4
    directions = np.asarray(drawn["b"] * np.sqrt(MASSES["b"])) / np.sqrt(square)[:, None]
    np.testing.assert_allclose((directions**2).mean(0), 1 / SIZE, rtol=0.15)  # 6 errors
    energies = jax.vmap(heavy.energy)(drawn)
    spread = scipy.special.polygamma(1, [FREEDOM / 2, (FREEDOM + SIZE) / 2])
    expected = (FREEDOM + SIZE) ** 2 / 4 * (spread[0] - spread[1])
    assert np.var(energies) == pytest.approx(expected, rel=0.2)
    # The rule's formula: within a fifth down to D / b of 2, and its own inverse.
    assert expected == pytest.approx(SIZE / 2 * (1 + SIZE / FREEDOM), rel=0.25)
    found = momenta.matching_weight(jnp.array(SIZE / 2 * (1 + SIZE / FREEDOM)), SIZE)
    assert found == pytest.approx(1 / FREEDOM, rel=1e-5)


def test_energy_speed_and_change_belong_together():
    """dK/dv = s m v by automatic differentiation; Gaussian momenta are the limit."""
    with jax.enable_x64(True):
        masses = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), MASSES)
        shapes = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), SHAPES)
        old, new = (Momenta(masses).draw(jax.random.key(i), shapes) for i in range(2))
        for weight in (0.0, 1e-9, 0.2, 3.0):
            law = Momenta(masses, jnp.array(weight))
            velocity = jax.grad(law.energy)(old)
            for name in old:
                expected = law.speed(old) * masses[name] * old[name]
                np.testing.assert_allclose(velocity[name], expected, rtol=1e-6)
            change = law.energy(new) - law.energy(old)
            np.testing.assert_allclose(law.energy_change(new, old), change, rtol=1e-6)
            if weight < 1e-6:
                gaussian = Momenta(masses).energy(new)
                np.testing.assert_allclose(law.energy(new), gaussian, rtol=1e-6)


def test_moments_of_a_skewed_target():
    """As with Gaussian momenta in test_hmc.py, at a step that rejects a third and more."""
    method = hmc(
        target_of_density(gumbel, 5),
        step_size=0.9,
        trajectory_length=1.8,
        num_burn_in=0,
        degrees_of_freedom=4.0,
    )
    _, draws, info = run_chains(method, NO_DATA, num_chains=8, num_steps=2100)
    assert 0.3 < info["accepted"].mean() < 0.8
    centred = draws["x"]["w"][:, 100:] - np.euler_gamma
    assert_mean_of_chains(centred, 0)
    assert_mean_of_chains(centred**2, np.pi**2 / 6)
    assert_mean_of_chains(np.exp(-info["energy_error"][:, 100:]), 1)


@pytest.mark.slow
def test_tails_follow_a_log_joint_that_varies_much_and_no_other():
    """Heavy where log p varies by 10 times D / 2: E-BFMI rises, the known law is met."""
    target = target_of_density(varying_scale, 1 + NUM_SCALED)
    settings = {"num_burn_in": 200, "target_accept": 0.9}
    found = {}
    for name, freedom in (("adapted", None), ("gaussian", np.inf)):
        method = hmc(target, degrees_of_freedom=freedom, **settings)
        states, draws, info = run_chains(method, NO_DATA, num_chains=4, num_steps=1200)
        found[name] = diagnostics.energy_bfmi(info["energy"][:, 200:]).mean()
        if name == "adapted":
            weight = np.asarray(states.tails.weight)
            assert np.all(weight == weight[0]) and weight[0] * (1 + NUM_SCALED) > 4
            scale = draws["x"]["w"][:, 200:, 0]
            assert_mean_of_chains(scale, 0)
            assert_mean_of_chains(scale**2, WIDTH**2)
    assert found["gaussian"] < 0.3 and found["adapted"] > 2 * found["gaussian"], found
    plain = hmc(target_of_density(lambda w: -(w**2) / 2, 21), **settings)
    states, _, _ = run_chains(plain, NO_DATA, num_chains=4, num_steps=210)
    assert np.all(momenta.usable_weight(states.tails.weight, 21) == 0)
    assert np.all(np.abs(states.tails.weight * 21) < 0.5)  # log p varies by D / 2


def test_refusal():
    with pytest.raises(UserError, match="degrees_of_freedom must be positive"):
        hmc(target_of_density(gumbel, 2), degrees_of_freedom=0.0)
