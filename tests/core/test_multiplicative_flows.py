"""Multiplicative flows: the bound against densities by hand, and below the evidence after training.

z-tests are at 5 standard errors, see `scenarios`.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from scenarios import assert_mean, chain_keys, correlated_model

from haiku_posteriors.core import multiplicative_flows
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.multiplicative_flows import MultiplicativeFamily
from haiku_posteriors.core.priors import make_prior

MODEL = correlated_model()
GENERATOR = np.random.default_rng(2)
LOG_JOINT, DATA = MODEL.log_joint(), MODEL.data()
start = functools.partial(
    multiplicative_flows.initial_multiplicative, num_couplings=2, hidden_size=8
)


def moved(q, size):
    """With flows that do something: every array of theirs changed at random."""

    def change(leaf):
        return leaf + size * GENERATOR.normal(size=leaf.shape).astype(np.float32)

    return q._replace(flows=jax.tree.map(change, q.flows), reverse=jax.tree.map(change, q.reverse))


def test_at_the_start_the_bound_is_the_elbo():
    """There q(w_i) = N(mu_i, sigma_i^2 + mu_i^2 t^2), and r is q(z | w): the entropy is exact."""
    center = {"linear": {"b": jnp.full(1, 0.3), "w": jnp.array([[1.0], [-2.0], [0.5]])}}
    family = MultiplicativeFamily(LOG_JOINT)

    @jax.jit
    def evaluate():
        q = start(jax.random.key(0), LOG_JOINT, center, sigma_init=0.1)
        terms, draws = family.evidence_terms(jax.random.key(1), q, DATA, 20_000)
        return terms, draws

    terms, draws = evaluate()
    squares = (multiplicative_flows.FIRST_SPREAD * np.array([1.0, -2.0, 0.5])) ** 2
    variances = np.concatenate([[0.01], 0.01 + squares])
    entropy = scipy.stats.multivariate_normal(cov=np.diag(variances)).entropy()
    assert_mean(terms.entropy, entropy)
    weights = np.asarray(draws["linear"]["w"][:, :, 0], float)
    assert_mean((weights - [1.0, -2.0, 0.5]) ** 2, variances[1:])
    priors = jax.vmap(LOG_JOINT.log_prior)(draws)
    assert_mean(terms.expected_log_prior - priors, 0.0)


def test_flows_have_their_determinants_and_layers_their_latents():
    """log |det| is that of the Jacobian; z is an input of a Linear, an output of a convolution."""

    def network(inputs):
        hidden = hk.Conv2D(3, 2)(inputs)
        return hk.Linear(1)(hidden.reshape(len(inputs), -1))

    log_joint = make_log_joint(
        network, np.zeros((2, 4, 4, 2), np.float32), make_prior(1.0), gaussian(1.0)
    )
    assert multiplicative_flows.multiplied_weights(log_joint) == {"conv2_d/w": -1, "linear/w": -2}

    @jax.jit
    def evaluate():
        q = moved(start(jax.random.key(0), log_joint, log_joint.init(jax.random.key(1))), 0.5)
        couple = functools.partial(multiplicative_flows._couple, q.flows["linear/w"]["couplings"])
        z = jax.random.normal(jax.random.key(2), (48,))
        jacobian = jax.jacobian(lambda z: couple(z)[0])(z)
        draw = MultiplicativeFamily(log_joint).draw(jax.random.key(3), q)
        return couple(z)[1], jnp.linalg.slogdet(jacobian)[1], draw

    found, expected, draw = evaluate()
    assert float(found) == pytest.approx(float(expected), abs=2e-3)
    assert abs(float(found)) > 0.1
    assert draw["conv2_d"]["w"].shape == (2, 2, 2, 3)


@pytest.mark.slow  # some seconds of training
def test_below_the_evidence_and_above_mean_field():
    """Of a correlated posterior, for r and F as they are at any time of training, and at the end.

    For any flows and any r the bound is below the evidence, also where nothing was trained.
    """
    evidence = MODEL.log_evidence()
    family = MultiplicativeFamily(LOG_JOINT)
    schedule = optax.cosine_decay_schedule(0.03, 6000, alpha=0.02)
    method = multiplicative_flows.multiplicative_flow_vi(
        LOG_JOINT, optax.adam(schedule), len(MODEL.inputs), sigma_init=0.1, num_samples=16
    )

    @jax.jit
    def run():
        keys = chain_keys(jax.random.key(1), 6000)
        state, _ = jax.lax.scan(
            lambda state, key: method.step(key, state, DATA),
            method.init(jax.random.key(0), None),
            keys,
        )
        some = start(jax.random.key(0), LOG_JOINT, state.variational.mean, sigma_init=0.1)
        bounds = [
            family.evidence_terms(jax.random.key(2), q, DATA, 20_000)[0].elbo
            for q in (state.variational, moved(state.variational, 0.1), moved(some, 0.3))
        ]
        return [(jnp.mean(bound), jnp.std(bound) / jnp.sqrt(20_000)) for bound in bounds]

    trained, *others = run()
    for mean, error in (trained, *others):
        assert mean < evidence + 5 * error
    mean_field = evidence - MODEL.mean_field_gap()
    assert trained[0] - 5 * trained[1] > mean_field + MODEL.mean_field_gap() / 2
