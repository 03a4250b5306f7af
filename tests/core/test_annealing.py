"""Annealed Hamiltonian steps against linear-Gaussian models, whose evidence is known.

z-tests are at 5 standard errors, see `scenarios`.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scenarios import LinearGaussian, assert_mean

from haiku_posteriors.core import annealing, trees, vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.layerwise import posteriors
from haiku_posteriors.core.layerwise.layerwise_vi import find_family
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

GENERATOR = np.random.default_rng(0)
MIXED = np.array([[1, 0.9], [0, 0.45]])
INPUTS = (GENERATOR.normal(size=(7, 2)) @ MIXED).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-1.0]] + 0.7 * GENERATOR.normal(size=(7, 1))).astype(np.float32)
NUM_STEPS, NUM_DRAWS = 8, 4000


def mean_field(log_joint):
    """A q that is off in place and width, and knows nothing of correlations."""
    params = jax.tree.map(lambda leaf: leaf * 0 + 0.3, log_joint.init(jax.random.key(0)))
    return vi.initial_variational(log_joint, params, sigma_init=0.4)


def test_weights_average_to_the_evidence():
    """E[W] = p_T(D) for any schedule; learning raises E[log W], which stays below.

    Where W has heavy tails the first says little; a wrong sign of the momenta's term was seen by
    the second.
    """
    model = LinearGaussian(INPUTS, TARGETS, 0.7, 1.3, temperature=2.0)
    log_joint, data = model.log_joint(), model.data()
    family, q = vi.MeanFieldFamily(log_joint), mean_field(log_joint)
    method = annealing.annealing(log_joint, family, NUM_STEPS)

    @jax.jit
    def learn(state):
        def body(index, state):
            return method.step(jax.random.fold_in(jax.random.key(1), index), state, data)[0]

        return jax.lax.fori_loop(0, 150, body, state)

    @jax.jit
    def follow(schedule):
        return annealing.paths(
            jax.random.key(2),
            log_joint,
            family,
            q,
            schedule,
            data,
            num_steps=NUM_STEPS,
            num_draws=NUM_DRAWS,
        )

    start = method.init(jax.random.key(0), q)
    wild = start.schedule._replace(
        log_step=jnp.asarray(np.log(0.5), jnp.float32), damping=jnp.zeros(())
    )
    evidence, means = model.log_normaliser(), []
    for schedule in (start.schedule, wild, learn(start).schedule):
        values, draws = follow(schedule)
        assert_mean(np.exp(np.asarray(values, float) - evidence), 1.0)
        means.append(np.mean(values))
    elbo = np.mean(family.evidence_terms(jax.random.key(3), q, data, NUM_DRAWS)[0].elbo)
    error = np.std(values) / np.sqrt(NUM_DRAWS)
    assert elbo + 0.3 < means[-1] < evidence + 5 * error
    assert means[0] < means[-1]
    assert evidence - means[-1] < (evidence - elbo) / 2
    # Weighted by W, the ends are draws of the posterior.
    weights = np.exp(np.asarray(values, float) - evidence)
    for index, key in ((0, "b"), (slice(1, None), "w")):
        ends = np.reshape(draws["linear"][key], (NUM_DRAWS, -1))
        for column in (weights[:, None] * (ends - model.mean[index])).T:
            assert_mean(column, 0.0)


@pytest.mark.parametrize("num_inputs", [2, 6])
def test_the_layerwise_transport_knows_its_volume(num_inputs):
    """log N(x) - log q(T(x)) is what the density says, with fewer rows than weights, and more."""

    def network(inputs):
        return hk.nets.MLP([3, 1], activation=jnp.tanh)(inputs)

    log_joint = make_log_joint(network, INPUTS, make_prior(1.7), gaussian())
    family = find_family(log_joint, jnp.asarray(INPUTS[:num_inputs]))

    @jax.jit
    def differences(key):
        params = log_joint.init(key)
        q = posteriors.initial(key, log_joint, family.shapes, params, INPUTS[:num_inputs])
        like = family.noise_like(q)
        noise = trees.normal_like(
            key, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        )
        drawn, volume = family.transport(q, noise)
        return noise, volume + family.log_density(q, drawn)

    noise, found = differences(jax.random.key(3))
    expected = sum(
        scipy.stats.norm.logpdf(np.asarray(leaf, float)).sum() for leaf in jax.tree.leaves(noise)
    )
    assert float(found) == pytest.approx(expected, abs=2e-3)


def test_no_steps_are_refused():
    model = LinearGaussian(INPUTS, TARGETS, 0.7, 1.3)
    log_joint = model.log_joint()
    with pytest.raises(UserError, match="at least 1"):
        annealing.annealing(log_joint, vi.MeanFieldFamily(log_joint), 0)
