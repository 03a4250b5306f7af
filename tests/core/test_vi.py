"""Mean-field VI against the closed forms of a linear-Gaussian model.

z-tests are at 5 standard errors per coordinate, see `scenarios`.
"""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
from jax.flatten_util import ravel_pytree
from scenarios import LinearGaussian, coefficients, linear, tanh_mlp, z_scores

from haiku_posteriors.core import kl_weights, trees, vi
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior

ROWS, FEATURES, NOISE, PRIOR_STD = 23, 3, 0.7, 1.3
GENERATOR = np.random.default_rng(0)
# Correlated columns, so that mean-field and exact posterior differ.
INPUTS = (GENERATOR.normal(size=(ROWS, FEATURES)) @ [[1, 0.8, 0], [0, 0.6, 0], [0, 0, 2]]).astype(
    np.float32
)
TARGETS = (INPUTS @ [[1.0], [-2.0], [0.5]] + 0.3 + NOISE * GENERATOR.normal(size=(ROWS, 1))).astype(
    np.float32
)
FAMILIES = ("laplace", "logistic", "scale_mixture", "student_t")


def build(network=linear, family="gaussian", learn_noise=False, weight_decay=None, **settings):
    prior = make_prior(PRIOR_STD**-2 if weight_decay is None else weight_decay, family)
    return make_log_joint(network, INPUTS, prior, gaussian(NOISE, 1, learn_noise), **settings)


class MeanFieldForms(LinearGaussian):
    """Closed forms of the ELBO's terms for q = N(mean, diag(std)^2) over (bias, weights)."""

    def expected_log_likelihood(self, mean, std):
        spread = self.design**2 @ std**2
        squares = (self.observed - self.design @ mean) ** 2 + spread
        return np.sum(-0.5 * squares / NOISE**2 - np.log(NOISE) - 0.5 * np.log(2 * np.pi))

    def kl(self, mean, std):
        ratio = std / PRIOR_STD
        return np.sum(0.5 * (ratio**2 + (mean / PRIOR_STD) ** 2 - 1) - np.log(ratio))

    def elbo(self, mean, std):
        return self.expected_log_likelihood(mean, std) - self.kl(mean, std)

    def kl_to_posterior(self, mean, std):
        difference = mean - self.mean
        return 0.5 * (
            np.sum(np.diag(self.precision) * std**2)
            + difference @ self.precision @ difference
            - len(mean)
            - np.sum(np.log(std**2))
            - np.linalg.slogdet(self.precision)[1]
        )


EXACT = MeanFieldForms(INPUTS, TARGETS, NOISE, PRIOR_STD)
DATA = EXACT.data()


NO_POINT = {"linear": {"b": None, "w": None}}


def tree_of(values):
    """(bias, weights) as the linear network's parameters."""
    return {"linear": {"b": values[:1], "w": values[1:, None]}}


def variational(mean, std):
    """q of the linear network with mean and std in the order (bias, weights)."""
    trees_of_both = [
        tree_of(jnp.asarray(values, jnp.float32)) for values in (mean, np.log(np.expm1(std)))
    ]
    return vi.VariationalParams(*trees_of_both, NO_POINT, {})


def over_keys(function, num_keys, seed=0):
    """function(key) for many keys, in one program."""
    keys = jax.random.split(jax.random.key(seed), num_keys)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(function))(keys))


@functools.cache
def estimates(estimator, microbatches=1, temperature=1.0, num_samples=1):
    """(mean, std, keys) -> for each key, the terms and the ELBO's gradient by (mean, raw scale)."""
    log_joint = build(num_microbatches=microbatches, temperature=temperature)

    def elbo(q, key):
        terms = vi.evidence_terms(key, log_joint, q, DATA, estimator, num_samples=num_samples)
        return terms.expected_log_likelihood - terms.divergence, terms

    def one(mean, raw, key):
        q = vi.VariationalParams(tree_of(mean), tree_of(raw), NO_POINT, {})
        (_, terms), gradient = jax.value_and_grad(elbo, has_aux=True)(q, key)
        leaves = [g["linear"][name].ravel() for g in gradient[:2] for name in ("b", "w")]
        return terms, jnp.concatenate(leaves)

    program = jax.jit(jax.vmap(one, (None, None, 0)))

    def run(mean, std, num_keys=20_000, seed=0):
        arrays = (jnp.asarray(values, jnp.float32) for values in (mean, np.log(np.expm1(std))))
        keys = jax.random.split(jax.random.key(seed), num_keys)
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), program(*arrays, keys))

    return run


MEAN, STD = np.array([0.4, 0.8, -1.5, 0.3]), np.array([0.3, 0.5, 0.2, 0.1])


def test_the_closed_forms_of_this_file_agree():
    """ELBO + KL(q || posterior) = log evidence, for any q; so the ELBO never exceeds it."""
    for scale in (0.1, 1.0, 3.0):
        total = EXACT.elbo(scale * MEAN, scale * STD) + EXACT.kl_to_posterior(
            scale * MEAN, scale * STD
        )
        assert total == pytest.approx(EXACT.log_evidence(), rel=1e-10)


@pytest.mark.parametrize(
    ("estimator", "microbatches"),
    [
        ("reparameterization", 1),
        ("local", 1),
        ("local", 3),
        ("flipout", 1),
        pytest.param("flipout", 3, marks=pytest.mark.slow),
    ],
)
def test_terms_have_their_exact_mean_and_variance(estimator, microbatches):
    """Each term against its closed form, and the log-likelihood's variance over keys too.

    With a_ik = x_ik sigma_k and residuals r: plain draws share noise between rows, `local` does
    not (the sum of the rows' variances), and flipout's rows are uncorrelated up to squares, which
    share |e_k|. Noise shared by mistake, e.g. between microbatches, shows in the variance, which
    20,000 keys give to 2 % (heavy tails included).
    """
    terms, _ = estimates(estimator, microbatches)(MEAN, STD)
    values = terms.expected_log_likelihood
    assert abs(z_scores(values, EXACT.expected_log_likelihood(MEAN, STD))) < 5
    np.testing.assert_allclose(terms.divergence, EXACT.kl(MEAN, STD), rtol=1e-5)
    assert np.mean(values - terms.divergence) < EXACT.log_evidence()

    a, r = EXACT.design * STD, EXACT.observed - EXACT.design @ MEAN
    spread = np.sum(a**2, axis=1)
    variance = np.sum(4 * r**2 * spread + 2 * spread**2)
    if estimator == "reparameterization":
        variance = 4 * np.sum((a.T @ r) ** 2) + 2 * np.sum((a.T @ a) ** 2)
    elif estimator == "flipout":
        shared = 2 * a**2 @ (a**2).T
        variance += np.sum(shared) - np.trace(shared)
    assert values.var() == pytest.approx(variance / (4 * NOISE**4), rel=0.1)


@pytest.mark.parametrize(
    ("estimator", "temperature"),
    [("reparameterization", 1.0), ("reparameterization", 0.25), ("local", 1.0), ("flipout", 1.0)],
)
def test_the_mean_field_solution_is_the_optimum(estimator, temperature):
    """At mu = posterior mean, sigma_i^2 = T / P_ii all gradients vanish on average."""
    run = estimates(estimator, temperature=temperature)
    std = np.sqrt(temperature / np.diag(EXACT.precision))
    _, gradient = run(EXACT.mean, std)
    assert np.all(np.abs(z_scores(gradient, 0)) < 5)
    _, elsewhere = run(EXACT.mean + 0.1 * std, 1.2 * std)
    assert np.all(np.abs(z_scores(elsewhere, 0)) > 5)


def test_gradients_are_unbiased_and_vary_less_by_local_and_flipout():
    """Every coordinate's mean against the exact gradient; the summed variances as ratios."""
    wide = np.log(np.expm1(STD))

    def elbo(values):
        return EXACT.elbo(values[:4], np.log1p(np.exp(values[4:])))

    exact = scipy.optimize.approx_fprime(np.concatenate([MEAN, wide]), elbo, 1e-6)
    variance = {}
    for estimator in vi.ESTIMATORS:
        _, gradient = estimates(estimator)(MEAN, STD)
        assert np.all(np.abs(z_scores(gradient, exact)) < 5), estimator
        variance[estimator] = gradient.var(axis=0).sum()
    plain = variance["reparameterization"]
    for estimator in ("local", "flipout"):
        print(f"gradient variance of {estimator}: {variance[estimator] / plain:.3f} of plain")
    assert variance["local"] < 0.5 * plain
    assert variance["flipout"] < 0.5 * plain


@pytest.mark.slow
def test_gradients_agree_between_estimators_in_a_deep_network():
    """Two hidden layers: each coordinate's mean over keys, by pairs; the summed variances."""

    def network(inputs):
        return hk.nets.MLP([6, 5, 1], activation=jnp.tanh)(inputs)

    log_joint = build(network)
    q = vi.initial_variational(log_joint, log_joint.init(jax.random.key(5)), sigma_init=0.2)
    samples = {}
    for seed, estimator in enumerate(vi.ESTIMATORS):

        def gradient(key, estimator=estimator):
            def elbo(q):
                terms = vi.evidence_terms(key, log_joint, q, DATA, estimator)
                return terms.expected_log_likelihood - terms.divergence

            return ravel_pytree(jax.grad(elbo)(q))[0]

        samples[estimator] = over_keys(gradient, 20_000, seed).astype(float)
    plain = samples.pop("reparameterization")
    for name, values in samples.items():
        error = np.sqrt((plain.var(axis=0) + values.var(axis=0)) / len(plain))
        assert np.all(np.abs(plain.mean(axis=0) - values.mean(axis=0)) < 5 * error)
        ratio = values.var(axis=0).sum() / plain.var(axis=0).sum()
        print(f"gradient variance of {name}, two hidden layers: {ratio:.3f} of plain")
        assert ratio < 0.7


@pytest.mark.slow
def test_several_samples_are_averaged():
    _, one = estimates("local")(MEAN, STD)
    _, four = estimates("local", num_samples=4)(MEAN, STD)
    assert one.var(axis=0).sum() / four.var(axis=0).sum() == pytest.approx(4, rel=0.1)


def train(log_joint, num_epochs, optimizer, state=None, **settings):
    """States and infos after training; the epochs are one program."""
    method = vi.mean_field_vi(log_joint, optimizer, **settings)
    state = method.init(jax.random.key(1), None) if state is None else state

    @jax.jit
    def run(state):
        keys = jax.random.split(jax.random.key(2), num_epochs)
        return jax.lax.scan(lambda s, key: method.step(key, s, DATA), state, keys)

    return run(state)


def test_training_finds_the_mean_field_solution_and_its_evidence_gap():
    """From a narrow start in the wrong place, in minibatches of 8 of 23 rows.

    The ELBO at the end is 1/2 (sum log P_ii - log det P) below the evidence. Tolerances are several
    times the deviation seen over seeds (means 0.01, stds 2 %).
    """
    schedule = optax.cosine_decay_schedule(0.05, 4500)
    state, infos = train(
        build(), 1500, optax.adam(schedule), batch_size=8, estimator="local", num_samples=4
    )
    mean, std = (
        coefficients(state.variational.mean),
        coefficients(jax.tree.map(jax.nn.softplus, state.variational.raw_scale)),
    )
    np.testing.assert_allclose(mean, EXACT.mean, atol=0.05)
    np.testing.assert_allclose(std, EXACT.mean_field_std(), rtol=0.1)
    gap = EXACT.log_evidence() - EXACT.elbo(mean, std)
    best = EXACT.mean_field_gap()
    assert best > 0.1 and gap == pytest.approx(best, abs=0.03)
    assert infos["elbo"].shape == (1500, 3)
    np.testing.assert_allclose(
        infos["elbo"], infos["expected_log_likelihood"] - infos["kl"], rtol=1e-5
    )


def reference_density(family):
    """The prior's density in SciPy's terms, as `tests/core/test_priors.py` has them."""
    if family == "scale_mixture":
        narrow = PRIOR_STD / math.sqrt(0.5 + 0.5 * 100)
        return lambda w: 0.5 * sum(scipy.stats.norm.pdf(w, scale=s) for s in (narrow, 10 * narrow))
    return {
        "gaussian": scipy.stats.norm(scale=PRIOR_STD),
        "laplace": scipy.stats.laplace(scale=PRIOR_STD / math.sqrt(2)),
        "logistic": scipy.stats.logistic(scale=PRIOR_STD * math.sqrt(3) / math.pi),
        "student_t": scipy.stats.t(5.0, scale=PRIOR_STD * math.sqrt(3 / 5)),
    }[family].pdf


@pytest.mark.parametrize(
    ("direction", "families"),
    [("reverse", ("gaussian", *FAMILIES)), ("forward", ("gaussian", "laplace", "scale_mixture"))],
)
def test_kl_equals_numerical_integration(direction, families):
    """Exactly for the Gaussian prior; by the mean over keys for the others."""
    q = variational(MEAN, STD)

    def divergences(key):
        return {
            family: vi.evidence_terms(key, build(family=family), q, DATA, kl=direction).divergence
            for family in families
        }

    values = over_keys(divergences, 20_000)
    w = np.unique(np.concatenate([np.linspace(-40, 40, 80_001), np.linspace(-2, 2, 80_001)]))
    for family in families:
        prior = np.log(reference_density(family)(w))
        expected = 0.0
        for mean, std in zip(MEAN, STD, strict=True):
            log_q = -0.5 * ((w - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
            first, second = (log_q, prior) if direction == "reverse" else (prior, log_q)
            expected += scipy.integrate.trapezoid(np.exp(first) * (first - second), w)
        if family == "gaussian":
            np.testing.assert_allclose(values[family], expected, rtol=1e-5)
        else:
            assert abs(z_scores(values[family], expected)) < 5, family


def test_both_divergences_vanish_at_the_prior():
    @jax.jit
    @jax.grad
    def gradient(q):
        key = jax.random.key(0)
        return sum(
            vi.evidence_terms(key, build(), q, DATA, kl=direction).divergence
            for direction in vi.KL_DIRECTIONS
        )

    at_prior = gradient(variational(np.zeros(4), np.full(4, PRIOR_STD)))
    assert all(np.abs(leaf).max() < 1e-5 for leaf in jax.tree.leaves(at_prior))
    elsewhere = gradient(variational(MEAN, STD))
    assert all(np.abs(leaf).min() > 1e-2 for leaf in jax.tree.leaves(elsewhere))


def test_kl_weights_sum_as_in_their_papers():
    """Beside a minibatch's own likelihood the weights sum to 1; beside all data's, M times that."""
    batches, parameters = 7, 50
    numbers = jnp.arange(1, batches + 1)

    def factors(name):
        weigh = kl_weights.KL_WEIGHTS[name]
        return np.array([float(weigh(number, batches, parameters)) for number in numbers])

    blundell = [2.0 ** (batches - i) / (2.0**batches - 1) for i in range(1, batches + 1)]
    np.testing.assert_allclose(factors("tempered_blundell"), blundell, rtol=1e-6)
    np.testing.assert_allclose(factors("blundell"), batches * np.array(blundell), rtol=1e-6)
    np.testing.assert_allclose(factors("tempered_graves"), 1 / batches)
    np.testing.assert_allclose(factors("graves"), 1)
    np.testing.assert_allclose(factors("parameters"), 1 / parameters)
    for name in ("tempered_graves", "tempered_blundell"):
        assert factors(name).sum() == pytest.approx(1)
    for name in ("graves", "blundell"):
        assert factors(name).mean() == pytest.approx(1)
    many = float(kl_weights.KL_WEIGHTS["blundell"](jnp.array(1), 5000, 1))
    assert many == pytest.approx(2500), "2^M must not overflow"


def test_kl_factor_along_the_steps():
    """Two epochs in 3 minibatches, with Blundell's weights halved and a warm-up over 4 steps.

    With plain gradient steps of size 1e-4, log c of the prior's scale moves by
    -1e-4 factor dKL/dlog c = -1e-4 factor (4 - sum (mu^2 + sigma^2) / s^2) where c = 1.
    """

    def weigh(number, batches, parameters):
        assert (batches, parameters) == (3, 4)
        return 0.5 * kl_weights.KL_WEIGHTS["blundell"](number, batches, parameters)

    method = vi.mean_field_vi(
        build(),
        optax.sgd(1e-4),
        8,
        kl_weight=weigh,
        kl_warmup_steps=4,
        learn_prior_scale="one",
        sigma_init=0.1,
    )
    state = method.init(jax.random.key(1), tree_of(jnp.zeros(4)))
    step = jax.jit(method.step)
    scales = []
    for epoch in range(2):
        state, info = step(jax.random.key(epoch), state, DATA)
        scales.append(np.log(info["prior_scale/*"]))
    factors = np.array([12, 6, 3, 12, 6, 3]) / 14 * [0.25, 0.5, 0.75, 1, 1, 1]
    moves = np.diff(np.append(np.concatenate(scales), state.variational.log_prior_scale["*"]))
    assert int(state.num_steps) == 6
    np.testing.assert_allclose(moves / moves[3], factors / factors[3], rtol=0.02)
    np.testing.assert_allclose(moves, -1e-4 * factors * 4, rtol=0.1)


@pytest.mark.parametrize("granularity", vi.PRIOR_SCALES)
def test_learned_prior_scale_has_the_closed_form_optimum(granularity):
    """For fixed q and a Gaussian prior: c^2 = mean over the group of (mu^2 + sigma^2) / s^2."""
    log_joint = build(tanh_mlp, learn_noise=True)
    q = vi.initial_variational(
        log_joint, log_joint.init(jax.random.key(3)), 0.3, learn_prior_scale=granularity
    )
    names = trees.named_leaves(q.mean)
    names.pop("likelihood/log_noise_std")
    groups = {
        "one": lambda name: "*",
        "module": lambda n: n.rpartition("/")[0],
        "leaf": lambda n: n,
    }
    squares = {}
    for name, mean in names.items():
        squares.setdefault(groups[granularity](name), []).append(
            np.ravel(np.square(mean) + 0.3**2) / PRIOR_STD**2
        )
    assert set(q.log_prior_scale) == set(squares)
    best = {g: jnp.asarray(0.5 * np.log(np.concatenate(s).mean())) for g, s in squares.items()}

    def divergence(scale):
        moved = q._replace(log_prior_scale=scale)
        return vi.evidence_terms(jax.random.key(0), log_joint, moved, DATA).divergence

    gradient = jax.jit(jax.grad(divergence))
    at_best, elsewhere = gradient(best), gradient(q.log_prior_scale)
    assert all(abs(float(value)) < 1e-4 for value in at_best.values())
    assert all(abs(float(value)) > 1e-2 for value in elsewhere.values())


def test_a_prior_scale_is_that_of_a_prior_with_another_weight_decay():
    key, q = jax.random.key(0), variational(MEAN, STD)
    doubled = q._replace(log_prior_scale={"*": jnp.log(jnp.array(2.0))})

    @jax.jit
    def both(family_params):
        return {
            family: [
                vi.evidence_terms(key, build(family=family, weight_decay=decay), q, DATA)[1]
                for q, decay in zip(family_params, (1.0, 0.25), strict=True)
            ]
            for family in ("gaussian", *FAMILIES)
        }

    for ours, theirs in both((doubled, q)).values():
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_training_learns_the_noise_and_the_prior_scale():
    """The noise against that of the least-squares residuals; the scale against its closed form.

    At the joint optimum c^2 s^2 = mean(mu^2 + sigma^2), and not before.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 1000))
    state, infos = train(
        build(learn_noise=True),
        1000,
        optimizer,
        batch_size=23,
        estimator="flipout",
        num_samples=4,
        learn_prior_scale="one",
    )
    q = state.variational
    mean, std = coefficients(q.mean), coefficients(jax.tree.map(jax.nn.softplus, q.raw_scale))
    learned = float(infos["prior_scale/*"][-1, -1]) * PRIOR_STD
    assert learned == pytest.approx(np.sqrt(np.mean(mean**2 + std**2)), rel=0.02)
    assert abs(learned - PRIOR_STD) > 0.05
    residual = (
        EXACT.observed - EXACT.design @ np.linalg.lstsq(EXACT.design, EXACT.observed, rcond=None)[0]
    )
    unbiased = math.sqrt(np.sum(residual**2) / (ROWS - FEATURES - 1))
    noise = float(jnp.exp(q.mean["likelihood"]["log_noise_std"]))
    assert noise == pytest.approx(unbiased, rel=0.1)


def test_stochastic_params_are_drawn_and_the_rest_copied_and_trained():
    log_joint = build(tanh_mlp, learn_noise=True, stochastic_params="linear_1/w|likelihood")
    method = vi.mean_field_vi(log_joint, batch_size=ROWS, sigma_init=0.1)
    start = method.init(jax.random.key(0), None)
    state, _ = jax.jit(method.step)(jax.random.key(1), start, DATA)
    draws = trees.named_leaves(
        jax.jit(method.sample, static_argnums=2)(jax.random.key(2), state, 4000)
    )
    mean, raw, point = (trees.named_leaves(tree) for tree in state.variational[:3])
    assert set(mean) == set(raw) == {"mlp/~/linear_1/w", "likelihood/log_noise_std"}
    assert set(mean) | set(point) == set(draws)
    for name, value in point.items():
        assert np.all(draws[name] == value), name
        assert np.all(trees.named_leaves(start.variational.point)[name] != value), name
    for name, value in mean.items():
        assert np.all(np.abs(z_scores(draws[name], value)) < 5), name
        np.testing.assert_allclose(
            np.std(draws[name], axis=0), jax.nn.softplus(raw[name]), rtol=0.08
        )
    given = method.init(jax.random.key(0), log_joint.init(jax.random.key(7)))
    assert jax.tree.all(
        jax.tree.map(
            jnp.array_equal,
            trees.merge(given.variational.mean, given.variational.point),
            log_joint.init(jax.random.key(7)),
        )
    )


def test_learned_noise_keeps_its_own_prior():
    """Its part of the KL is the reverse one, from draws, with E exp(-2 t) = exp(-0.4 + 2 0.3^2)."""
    log_joint = build(learn_noise=True)
    plain = variational(MEAN, STD)
    own = {"log_noise_std": jnp.array(0.2)}
    q = vi.initial_variational(log_joint, {**plain.mean, "likelihood": own}, 0.3)
    q = q._replace(raw_scale={**plain.raw_scale, "likelihood": q.raw_scale["likelihood"]})

    def differences(key):
        pairs = [
            [
                vi.evidence_terms(key, model, at, DATA, kl=direction).divergence
                for model, at in ((log_joint, q), (build(), plain))
            ]
            for direction in vi.KL_DIRECTIONS
        ]
        return jnp.stack([with_noise - without for with_noise, without in pairs])

    scale = NOISE / 3
    expected_log_prior = 0.5 * math.log(2 / math.pi) + math.log(scale) - 0.2
    expected_log_prior -= 0.5 * scale**2 * math.exp(-0.4 + 2 * 0.3**2)
    expected = -0.5 * math.log(2 * math.pi * math.e * 0.3**2) - expected_log_prior
    assert np.all(np.abs(z_scores(over_keys(differences, 4000), expected)) < 5)


@pytest.mark.parametrize(
    "estimator",
    [
        "reparameterization",  # the one that compiles fastest
        *(pytest.param(e, marks=pytest.mark.slow) for e in ("local", "flipout")),
    ],
)
def test_chains_float64_and_one_trace(estimator):
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, make_data(INPUTS.astype(float), TARGETS.astype(float)))
        traces = []

        def network(inputs):
            traces.append(inputs.shape)
            return linear(inputs)

        log_joint = make_log_joint(
            network, np.asarray(data.inputs), make_prior(1.0, "laplace"), gaussian(NOISE)
        )
        method = vi.mean_field_vi(
            log_joint, batch_size=ROWS, estimator=estimator, learn_prior_scale="module"
        )
        keys = jax.random.split(jax.random.key(0), 2)
        state = jax.jit(jax.vmap(lambda key: method.init(key, None)))(keys)
        step = jax.jit(jax.vmap(method.step, (0, 0, None)))
        new, info = step(keys, state, data)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
            lambda a: (a.shape, a.dtype), state
        )
        floats = [leaf for leaf in jax.tree.leaves((new, info)) if leaf.dtype.kind == "f"]
        assert all(leaf.dtype == jnp.float64 for leaf in floats)
        assert not np.allclose(info["elbo"][0], info["elbo"][1])
        count = len(traces)
        step(jax.random.split(jax.random.key(1), 2), new, data)
        assert len(traces) == count
        alone, _ = jax.jit(method.step)(keys[0], jax.tree.map(lambda a: a[0], state), data)
        for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(new), strict=True):
            np.testing.assert_allclose(one, many[0], rtol=1e-8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"estimator": "locall"}, "Did you mean 'local'"),
        ({"kl": "sideways"}, "Unknown kl"),
        ({"learn_prior_scale": "modules"}, "Did you mean 'module'"),
        ({"kl_weight": "grave"}, "Did you mean 'graves'"),
        ({"kl_weight": -1.0}, "kl_weight must be finite"),
        ({"sigma_init": 0.0}, "sigma_init must be positive"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"kl": "forward", "learn_prior_scale": "one"}, "the prior's scale fixed"),
    ],
)
def test_refusals(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        vi.mean_field_vi(build(), **settings)
    with pytest.raises(UserError, match="temperature must be 1"):
        vi.mean_field_vi(build(temperature=0.5), kl="forward")
