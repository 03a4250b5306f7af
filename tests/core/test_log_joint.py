"""The log-joint against NumPy, its minibatch form, microbatches, temperature and refusals."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scenarios import log_noise_density

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import make_data, minibatch_indices, num_minibatches, take
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

ROWS = 23
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
TARGETS = np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32)


def network(inputs):
    return hk.nets.MLP([4, 1], activation=jnp.tanh)(inputs)


def build(**settings):
    arguments = {"prior": make_prior(2.0), "likelihood": gaussian(0.5)} | settings
    return make_log_joint(network, INPUTS, **arguments)


@pytest.fixture(scope="module")
def params():
    return build().init(jax.random.key(0))


def expected_terms(params):
    """Prior and likelihood written out in NumPy, in float64."""
    leaves = {name: np.asarray(leaf, float) for name, leaf in trees.named_leaves(params).items()}
    log_prior = sum(scipy.stats.norm.logpdf(w, scale=0.5**0.5).sum() for w in leaves.values())
    hidden = np.tanh(INPUTS @ leaves["mlp/~/linear_0/w"] + leaves["mlp/~/linear_0/b"])
    mean = hidden @ leaves["mlp/~/linear_1/w"] + leaves["mlp/~/linear_1/b"]
    return log_prior, scipy.stats.norm.logpdf(TARGETS, mean, 0.5).sum()


def test_value_equals_numpy(params):
    terms = build().terms(params, make_data(INPUTS, TARGETS))
    np.testing.assert_allclose(terms, expected_terms(params), rtol=1e-5)


def test_padding_changes_nothing(params):
    log_joint = build()
    plain = log_joint(params, make_data(INPUTS, TARGETS))
    padded = make_data(INPUTS, TARGETS, multiple_of=8)
    assert padded.inputs.shape == (24, 2) and padded.num_rows == ROWS
    np.testing.assert_allclose(log_joint(params, padded), plain, rtol=1e-6)


def test_temperature_divides_the_whole_once(params):
    data = make_data(INPUTS, TARGETS)
    warm, cold = build(), build(temperature=0.25)
    np.testing.assert_allclose(cold.terms(params, data), np.multiply(4, warm.terms(params, data)))


@pytest.mark.parametrize("pieces", [1, 3])
def test_difference_keeps_digits_that_the_values_lose(params, pieces):
    """A prior of huge precision puts the log-joint near 1e6; the step changes it by 1e-2."""
    log_joint = build(prior=make_prior(1e6), num_microbatches=pieces, temperature=0.5)
    data = make_data(INPUTS, TARGETS)
    moved = jax.tree.map(lambda leaf: leaf + 1e-8 * jnp.sign(leaf), params)

    def exact(tree):
        leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
        return -0.5e6 * sum((leaf**2).sum() for leaf in leaves) / 0.5

    assert abs(exact(params)) > 1e6
    expected = exact(moved) - exact(params)
    assert float(log_joint.difference(moved, params, data)) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("pieces", [1, 3])
def test_difference_of_values(params, pieces):
    log_joint = build(num_microbatches=pieces, temperature=2.0)
    data = make_data(INPUTS, TARGETS)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    expected = float(log_joint(moved, data)) - float(log_joint(params, data))
    assert float(log_joint.difference(moved, params, data)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 5, 22, ROWS])
def test_minibatches_partition_the_rows_and_are_unbiased(params, batch_size):
    """sum_b (n_b / N) * estimate_b is the full sum exactly, whatever the batch size."""
    data = jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS, multiple_of=4))
    log_joint = build()
    indices, weights = minibatch_indices(jax.random.key(1), ROWS, batch_size, jnp.float32)
    assert len(indices) == num_minibatches(ROWS, batch_size)
    real = np.asarray(weights) > 0
    assert sorted(np.asarray(indices)[real]) == list(range(ROWS))
    sizes = real.sum(axis=1)
    assert sizes.max() <= batch_size and sizes.max() - sizes.min() <= 1

    @jax.jit
    @jax.vmap
    def log_likelihood(rows, row_weights):
        return log_joint.log_likelihood(params, take(data, rows, row_weights))

    estimates = np.asarray(log_likelihood(indices, weights))
    np.testing.assert_allclose(estimates @ sizes / ROWS, expected_terms(params)[1], rtol=1e-5)


def test_each_minibatch_alone_is_unbiased(params):
    """The first and the (smaller) last minibatch, averaged over shufflings.

    A two-sided z-test at 5 standard errors: a false failure once in 1.7 million seeds.
    """
    log_joint, data = build(), jax.tree.map(jnp.asarray, make_data(INPUTS, TARGETS))

    @jax.jit
    @jax.vmap
    def estimates(key):
        indices, weights = minibatch_indices(key, ROWS, 5, jnp.float32)
        first, last = (take(data, indices[b], weights[b]) for b in (0, -1))
        return jnp.stack([log_joint.log_likelihood(params, batch) for batch in (first, last)])

    values = np.asarray(estimates(jax.random.split(jax.random.key(2), 4000)), float)
    error = values.mean(axis=0) - expected_terms(params)[1]
    assert np.all(np.abs(error) < 5 * values.std(axis=0) / np.sqrt(len(values)))


@pytest.mark.parametrize(("pieces", "multiple_of"), [(2, 1), (24, 1), (3, 12)])
def test_microbatches_equal_the_single_pass(params, pieces, multiple_of):
    """In pieces that do not divide the rows, in more pieces than rows, and in padded data."""
    data = make_data(INPUTS, TARGETS, multiple_of)

    @jax.jit
    def both(params, data):
        joints = (build(), build(num_microbatches=pieces))
        return [jax.value_and_grad(joint)(params, data) for joint in joints]

    whole, split = both(params, data)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_microbatches_lower_peak_memory():
    """The temporary memory of the compiled gradient falls with the number of pieces."""
    rows = np.zeros((4096, 2), np.float32)

    def wide_network(inputs):
        return hk.nets.MLP([64, 64, 1], activation=jnp.tanh)(inputs)

    def temporary_bytes(pieces):
        log_joint = make_log_joint(
            wide_network, rows, make_prior(1.0), gaussian(), num_microbatches=pieces
        )
        gradient = jax.jit(jax.value_and_grad(log_joint))
        data = make_data(rows, rows[:, :1])
        compiled = gradient.lower(log_joint.init(jax.random.key(0)), data).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16) < temporary_bytes(1) / 4


def test_learned_noise_is_a_parameter_with_its_own_prior():
    log_joint = build(likelihood=gaussian(0.5, learn_noise=True))
    params = log_joint.init(jax.random.key(0))
    assert "likelihood/log_noise_std" in trees.named_leaves(params)
    moved = {**params, "likelihood": {"log_noise_std": jnp.log(jnp.array(1.5))}}
    difference = log_joint.log_prior(moved) - log_joint.log_prior(params)
    heights = log_noise_density(np.log([1.5, 0.5]), 0.5)
    assert float(difference) == pytest.approx(heights[0] - heights[1], rel=1e-4)
    gradient = jax.jit(jax.grad(log_joint))(moved, make_data(INPUTS, TARGETS))
    assert float(gradient["likelihood"]["log_noise_std"]) != 0


def test_stochastic_params_alone_carry_the_prior(params):
    log_joint = build(stochastic_params="linear_1")
    random, point = log_joint.partition(params)
    assert list(trees.named_leaves(random)) == ["mlp/~/linear_1/b", "mlp/~/linear_1/w"]
    merged = trees.merge(random, point)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, merged, params))
    last = scipy.stats.norm.logpdf(params["mlp/~/linear_1"]["w"], scale=0.5**0.5).sum()
    last += scipy.stats.norm.logpdf(params["mlp/~/linear_1"]["b"], scale=0.5**0.5).sum()
    assert float(log_joint.log_prior(params)) == pytest.approx(last, rel=1e-5)


def test_refusals():
    def batch_statistics(inputs):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(1)(inputs), is_training=True)

    # Haiku's batch normalisation itself does not run under the tests' strict promotion.
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(UserError, match="non-trainable state"),
    ):
        make_log_joint(batch_statistics, INPUTS, make_prior(1.0), gaussian())
    with pytest.raises(UserError, match="temperature must be positive"):
        build(temperature=-1.0)
    with pytest.raises(UserError, match="num_microbatches"):
        build(num_microbatches=0)
    with pytest.raises(UserError, match=r"outputs of shape \(rows, 2\)"):
        build(likelihood=gaussian(num_targets=2))
    with pytest.raises(UserError, match="matches no parameter"):
        build(stochastic_params="convolution")
    with pytest.raises(UserError, match="not a regular expression"):
        build(stochastic_params="(")
    with pytest.raises(UserError, match="batch_size must be between 1 and"):
        num_minibatches(10, 11)
    with pytest.raises(UserError, match="23 rows of inputs but 22"):
        make_data(INPUTS, TARGETS[:-1])


def test_expected_log_prior():
    """Of a quadratic function E f(m + s e) = (f(m + s) + f(m - s)) / 2, by groups of weights."""
    prior = make_prior(0.8, groups=[("w$", 3.0)])
    log_joint = make_log_joint(network, INPUTS, prior, gaussian(0.3, learn_noise=True))
    mean = log_joint.init(jax.random.key(0))
    scale = jax.tree.map(lambda leaf: 0.1 + jnp.abs(jnp.sin(leaf + 1)), mean)
    scale["likelihood"] = jax.tree.map(jnp.zeros_like, mean["likelihood"])
    ends = [
        log_joint.log_prior(jax.tree.map(lambda m, s: m + sign * s, mean, scale))  # noqa: B023
        for sign in (1, -1)
    ]
    found = log_joint.expected_log_prior(mean, scale, mean)
    np.testing.assert_allclose(found, (ends[0] + ends[1]) / 2, rtol=1e-6)
    drawn = jax.tree.map(lambda m, s: m + s, mean, scale)
    other = make_log_joint(network, INPUTS, make_prior(0.8, "laplace"), gaussian(0.3))
    weights = {name: leaf for name, leaf in drawn.items() if name != "likelihood"}
    assert other.expected_log_prior(mean, scale, weights) == other.log_prior(weights)


@pytest.mark.parametrize("pattern", ["", "/w$", "linear_0|likelihood"])
def test_prior_draws_have_the_structure_of_the_random_parameters(pattern):
    log_joint = build(likelihood=gaussian(0.5, learn_noise=True), stochastic_params=pattern)
    drawn = log_joint.sample_prior(jax.random.key(0))
    assert jax.tree.structure(drawn) == jax.tree.structure(log_joint.random_shapes)
    point = log_joint.partition(log_joint.init(jax.random.key(1)))[1]
    again = log_joint.sample_prior(jax.random.key(2))
    for a, b in zip(*map(jax.tree.leaves, (drawn, again)), strict=True):
        assert np.all(a != b)
    assert np.isfinite(log_joint.log_prior(trees.merge(drawn, point)))
