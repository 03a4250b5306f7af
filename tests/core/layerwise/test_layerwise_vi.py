"""The layerwise posterior against closed forms, dense computations and quadrature.

z-tests are at 5 standard errors, see `scenarios`.
"""

import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from scenarios import LinearGaussian, assert_mean

from haiku_posteriors.core import densities
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.layerwise import posteriors
from haiku_posteriors.core.layerwise.layerwise_vi import find_family, layerwise_vi
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

ROWS, NOISE, PRIOR_STD = 9, 0.7, 1.3
GENERATOR = np.random.default_rng(0)
INPUTS = GENERATOR.normal(size=(ROWS, 2)).astype(np.float32) @ np.array(
    [[1, 0.8], [0, 0.6]], np.float32
)
TARGETS = (INPUTS @ [[1.0], [-2.0]] + NOISE * GENERATOR.normal(size=(ROWS, 1))).astype(np.float32)


def two_layers(inputs):
    return hk.nets.MLP([3, 1], activation=jnp.tanh)(inputs)


def two_weights(inputs):
    hidden = jnp.tanh(hk.Linear(1, with_bias=False)(inputs))
    return hk.Linear(1, with_bias=False)(hidden)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_one_layer_contains_the_exact_posterior(temperature):
    """With U = X, v = y, l = 1 / (T noise^2): log p_T(w, D) - log q(w) is log Z_T at every w.

    A constant difference says that q is the posterior, mean and covariance included.
    """
    model = LinearGaussian(INPUTS, TARGETS, NOISE, PRIOR_STD, temperature)
    log_joint, data = model.log_joint(), model.data()
    family = find_family(log_joint, data.inputs)
    logs = jnp.full((ROWS, 1), -np.log(temperature * NOISE**2))

    @jax.jit
    def differences():
        params = log_joint.init(jax.random.key(1))
        start = posteriors.initial(jax.random.key(0), log_joint, family.shapes, params, data.inputs)
        exact = start._replace(
            pseudo={"linear": posteriors.Pseudo(data.targets, {"rows_and_units": logs})}
        )
        draws = family.sample(jax.random.key(2), exact, 20)
        far = jax.tree.map(lambda leaf: 3 * leaf + 1, draws)
        both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), draws, far)
        values = jax.vmap(lambda w: log_joint(w, data) - family.log_density(exact, w))(both)
        terms, _ = family.evidence_terms(jax.random.key(3), exact, data, 4000)
        ratios = densities.log_importance_ratios(
            jax.random.key(4), family, log_joint, exact, data, 20
        )
        return values, terms.elbo, ratios

    values, elbos, ratios = differences()
    np.testing.assert_allclose(values, model.log_normaliser(), rtol=1e-4)
    np.testing.assert_allclose(ratios, model.log_normaliser(), rtol=1e-4)
    assert_mean(elbos[:2000] / 2 + elbos[2000:] / 2, model.log_normaliser())  # pairs


def dense_log_density(params, q, inputs):
    """log q of `two_layers`, each unit's Gaussian written out, in float64."""
    total, hidden = 0.0, inputs.astype(float)
    for name in ("mlp/~/linear_0", "mlp/~/linear_1"):
        weights = np.concatenate([params[name]["w"], params[name]["b"][None]]).astype(float)
        features = np.concatenate([hidden, np.ones((len(hidden), 1))], axis=1)
        pseudo = q.pseudo[name]
        logs = sum(np.asarray(term, float) for term in pseudo.log_precisions.values())
        logs = np.broadcast_to(logs, (len(hidden), weights.shape[1]))
        for unit in range(weights.shape[1]):
            precisions = np.exp(logs[:, unit])
            covariance = np.linalg.inv(
                np.eye(len(weights)) / PRIOR_STD**2 + features.T @ np.diag(precisions) @ features
            )
            outputs = np.asarray(pseudo.outputs, float)[:, unit]
            mean = covariance @ features.T @ (precisions * outputs)
            total += scipy.stats.multivariate_normal.logpdf(weights[:, unit], mean, covariance)
        hidden = np.tanh(features @ weights)
    mean, raw = q.rest.mean["likelihood"], q.rest.raw_scale["likelihood"]
    std = np.log1p(np.exp(float(raw["log_noise_std"])))
    noise = float(params["likelihood"]["log_noise_std"])
    return total + scipy.stats.norm.logpdf(noise, float(mean["log_noise_std"]), std)


@pytest.mark.parametrize(("num_inducing", "precision"), [(7, "unit"), (2, "factored")])
def test_density_and_divergence_of_two_layers(num_inducing, precision):
    """log q(w) is the dense one; the closed forms are its expectation, given the draws' features.

    With 7 inducing inputs all layers work on weights, with 2 on rows.
    """
    log_joint = make_log_joint(
        two_layers, INPUTS, make_prior(PRIOR_STD**-2), gaussian(NOISE, learn_noise=True)
    )
    data = jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS))
    inducing = data.inputs[:num_inducing]
    family = find_family(log_joint, inducing)
    generator = np.random.default_rng(3)

    @jax.jit
    def evaluate():
        start = posteriors.initial(
            jax.random.key(0),
            log_joint,
            family.shapes,
            log_joint.init(jax.random.key(1)),
            inducing,
            precision=precision,
            sigma_init=0.2,
        )
        q = jax.tree.map(
            lambda leaf: leaf + 0.3 * generator.normal(size=leaf.shape).astype(np.float32), start
        )
        terms, draws = family.evidence_terms(jax.random.key(4), q, data, 4000)
        densities = jax.vmap(lambda w: family.log_density(q, w))(draws)
        return q, terms, draws, densities, jax.vmap(log_joint.log_prior)(draws)

    q, terms, draws, densities, log_priors = evaluate()
    for index in range(3):
        params = jax.tree.map(lambda leaf: np.asarray(leaf[index]), draws)  # noqa: B023
        expected = dense_log_density(params, q, np.asarray(q.inducing_inputs))
        assert float(densities[index]) == pytest.approx(expected, abs=2e-3)
    assert_mean(terms.entropy + densities, 0.0)
    assert_mean(terms.expected_log_prior - log_priors, 0.0)


SMALL_INPUTS = np.linspace(-2, 2, 6, dtype=np.float32)[:, None]
SMALL_TARGETS = np.tanh(1.5 * SMALL_INPUTS) + 0.3 * np.cos(5 * SMALL_INPUTS)


@pytest.mark.parametrize("inducing", ["rows", "minibatch"])
def test_against_quadrature_over_two_weights(inducing):
    """y = b tanh(a x): q integrates to 1, its ELBO is that of quadrature and below the evidence.

    After training, so that the posterior's ridge a b = constant has bent q; with rows of
    minibatches as inducing inputs the same is true of the posterior that the last of them make.
    """
    log_joint = make_log_joint(two_weights, SMALL_INPUTS, make_prior(0.5), gaussian(0.4))
    data = jax.tree.map(jnp.asarray, make_data(SMALL_INPUTS, SMALL_TARGETS))
    method = layerwise_vi(
        log_joint,
        batch_size=6,
        inducing_inputs=SMALL_INPUTS[:3],
        inducing=inducing,
        num_samples=4,
    )
    family = find_family(log_joint, jnp.asarray(SMALL_INPUTS[:3]))
    axis = np.linspace(-7, 7, 281, dtype=np.float32)
    area = float(axis[1] - axis[0]) ** 2
    first, second = (grid.ravel() for grid in np.meshgrid(axis, axis))
    grid = {"linear": {"w": first[:, None, None]}, "linear_1": {"w": second[:, None, None]}}

    @jax.jit
    def evaluate():
        def body(number, state):
            return method.step(jax.random.fold_in(jax.random.key(5), number), state, data)[0]

        state = jax.lax.fori_loop(0, 400, body, method.init(jax.random.key(6), None))
        q = state.posterior
        densities = jax.vmap(lambda w: family.log_density(q, w))(grid)
        joints = jax.vmap(lambda w: log_joint(w, data))(grid)
        terms, _ = family.evidence_terms(jax.random.key(7), q, data, 4000)
        return densities, joints, terms.elbo

    densities, joints, elbos = (np.asarray(array, float) for array in evaluate())
    masses = np.exp(densities) * area
    assert masses.sum() == pytest.approx(1, abs=1e-3)
    evidence = np.log(np.exp(joints).sum() * area)
    elbo = np.sum(masses * (joints - densities))
    assert_mean((elbos[:2000] + elbos[2000:]) / 2, elbo)  # pairs of opposite noise
    assert evidence - 1.5 < elbo < evidence  # half of the posterior, by symmetry, is 0.69 away
    assert masses @ np.exp(joints - densities) == pytest.approx(np.exp(evidence), rel=1e-3)


def test_the_objective_of_minibatches_is_the_mean_of_bounds():
    """11 rows in minibatches of 3 and 4, two of each U: the mean ELBO of q over all U on all rows.

    N / n for every row of a minibatch would count the rows that q knows best too often.
    """
    generator = np.random.default_rng(1)
    inputs = generator.normal(size=(11, 2)).astype(np.float32)
    targets = (5 * generator.normal(size=(11, 1))).astype(np.float32)
    model = LinearGaussian(inputs, targets, NOISE, PRIOR_STD)
    log_joint, data = model.log_joint(), model.data()
    method = layerwise_vi(
        log_joint,
        optax.sgd(0.0),
        batch_size=4,
        inducing_inputs=inputs[:2],
        inducing="minibatch",
        num_samples=2,
    )
    family = find_family(log_joint, jnp.asarray(inputs[:2]))
    pairs = np.array(list(itertools.combinations(range(11), 2)))

    @jax.jit
    def evaluate():
        state = method.init(
            jax.random.key(0), {"linear": {"w": jnp.ones((2, 1)), "b": jnp.ones(1)}}
        )
        keys = jax.random.split(jax.random.key(1), 4000)
        epochs = jax.lax.map(lambda key: method.step(key, state, data)[1]["elbo"], keys)

        def of_pair(rows):
            q = state.posterior._replace(inducing_inputs=data.inputs[rows])
            terms, _ = family.evidence_terms(jax.random.key(2), q, data, 2000)
            return jnp.mean(terms.elbo)

        return jnp.mean(epochs, axis=1), jnp.mean(jax.vmap(of_pair)(pairs))

    epochs, expected = evaluate()
    assert_mean(np.asarray(epochs, float), float(expected))


def test_training_finds_the_posterior_of_one_layer():
    """From afar, with four inducing inputs for three coefficients: the ELBO nears the evidence."""
    model = LinearGaussian(INPUTS, TARGETS, NOISE, PRIOR_STD)
    log_joint, data = model.log_joint(), model.data()
    schedule = optax.cosine_decay_schedule(0.1, 600)
    method = layerwise_vi(
        log_joint,
        optax.adam(schedule, b2=0.99),
        batch_size=ROWS,
        inducing_inputs=INPUTS[:4],
        num_samples=4,
    )
    family = find_family(log_joint, jnp.asarray(INPUTS[:4]))

    @jax.jit
    def evaluate():
        def body(number, state):
            return method.step(jax.random.fold_in(jax.random.key(8), number), state, data)[0]

        state = jax.lax.fori_loop(0, 600, body, method.init(jax.random.key(9), None))
        return family.evidence_terms(jax.random.key(10), state.posterior, data, 4000)[0].elbo

    elbos = np.asarray(evaluate(), float)
    # The first is 25 nats below; an error of 0.05 is five standard errors of this mean.
    assert elbos.mean() == pytest.approx(model.log_evidence(), abs=0.05)


def test_refusals():
    log_joint = LinearGaussian(INPUTS, TARGETS, NOISE, PRIOR_STD).log_joint()
    with pytest.raises(UserError, match="precision"):
        layerwise_vi(log_joint, precision="units")
    with pytest.raises(UserError, match="num_samples"):
        layerwise_vi(log_joint, num_samples=0)
    method = layerwise_vi(log_joint, batch_size=ROWS, inducing="minibatch")
    data = jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS))
    with pytest.raises(UserError, match="10 inducing inputs cannot be rows of a minibatch of 9"):
        jax.eval_shape(method.step, jax.random.key(0), method.init(jax.random.key(1), None), data)
    method = layerwise_vi(log_joint, batch_size=5, inducing_inputs=INPUTS[:4], inducing="minibatch")
    with pytest.raises(UserError, match="minibatch of 4, of which some must be others"):
        jax.eval_shape(method.step, jax.random.key(0), method.init(jax.random.key(1), None), data)
