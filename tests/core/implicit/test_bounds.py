"""Bounds of the evidence: exact where they should be, below the truth where that is known.

Where draws are compared with expectations, tests are at 5 standard errors, see `scenarios`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from scenarios import LinearGaussian

from haiku_posteriors.core import factors
from haiku_posteriors.core.implicit import (
    bounds,
    encoders,
    generators,
    implicit_vi,
    jacobian,
    objectives,
    whitening,
)
from haiku_posteriors.core.implicit.objectives import Estimator, Objective
from haiku_posteriors.core.implicit.samplers import Sampler, Start

RANDOM = np.random.default_rng(0)
ROWS, NOISE, PRIOR_STD = 24, 0.7, 1.3
INPUTS = (RANDOM.normal(size=(ROWS, 3)) @ [[1, 0.9, 0], [0, 0.45, 0], [0, 0, 2]]).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-2.0], [0.5]] + NOISE * RANDOM.normal(size=(ROWS, 1))).astype(
    np.float32
)
EXACT = LinearGaussian(INPUTS, TARGETS, NOISE, PRIOR_STD, with_bias=False)


def random_encoder(latent_size):
    """Far from what training would find."""
    encoder = encoders.init_encoder(jax.random.key(1), latent_size, jnp.float32)
    return jax.tree.map(lambda leaf: leaf + 0.3 * jnp.ones_like(leaf), encoder)


REVERSES = {
    "one start": bounds.laplace_reverse(2, jnp.float32, 1, prior_share=0.0),
    "five starts": bounds.laplace_reverse(2, jnp.float32, 5, prior_share=0.0),
    "any encoder": encoders.encoded_reverse(random_encoder(2), 2),
}


@pytest.mark.parametrize(
    ("name", "num_inner"), [("one start", 3), ("five starts", 0), ("any encoder", 3)]
)
def test_for_linear_maps_every_draw_gives_the_density(name, num_inner):
    """r(z | w) is then q(z | w), and q(w, z) / r(z | w) = q(w) at every z."""
    slope = np.array([[1.0, 0.3], [-0.5, 2.0], [0.2, 0.1]])
    scales = np.array([0.5, 0.1, 1.5])
    center = np.array([1.0, 2.0, 3.0])

    @jax.jit
    def value(key):
        keys = jax.random.split(key, 3)
        z, e = jax.random.normal(keys[0], (2,)), jax.random.normal(keys[1], (3,))
        found = bounds.entropy_bound(
            keys[2],
            lambda z: (
                jnp.asarray(center / scales, z.dtype)
                + jnp.asarray(slope / scales[:, None], z.dtype) @ z
            ),
            jnp.log(jnp.asarray(scales, jnp.float32)),
            z,
            e,
            REVERSES[name],
            num_inner,
        )
        return found, jnp.asarray(slope, z.dtype) @ z + jnp.asarray(scales, z.dtype) * e

    density = scipy.stats.multivariate_normal(cov=slope @ slope.T + np.diag(scales**2))
    for seed in range(4):
        found, offset = value(jax.random.key(seed))
        assert float(found) == pytest.approx(-density.logpdf(offset), abs=5e-4)


def test_at_the_posterior_every_draw_gives_the_log_evidence():
    """log p(w, D) - log q(w) is constant there."""
    scale = 0.5 * math.sqrt(np.linalg.eigvalsh(EXACT.covariance)[0])
    slope = np.linalg.cholesky(EXACT.covariance - scale**2 * np.eye(3))
    log_joint = EXACT.log_joint()
    generator = generators.make_generator(generators.MLP(3), log_joint.random_shapes)
    spread = {"linear": {"w": jnp.zeros(())}}
    center = {"linear": {"w": jnp.asarray(EXACT.mean, jnp.float32)[:, None]}}
    weights = generator.init(jax.random.key(0), center, spread)
    weights["output"]["w"] = jnp.asarray(slope.T * math.sqrt(3), jnp.float32)
    log_scale = {"linear": {"w": jnp.full((3, 1), math.log(scale))}}
    sampler = Sampler(weights, log_scale, {"linear": {"w": None}})
    values = jax.jit(
        lambda: bounds.hierarchical_bound(
            jax.random.key(1),
            log_joint,
            generator,
            sampler,
            EXACT.data(),
            bounds.laplace_reverse(3, jnp.float32, prior_share=0.0),
            num_samples=20,
            num_inner=2,
        )
    )()
    np.testing.assert_allclose(values, EXACT.log_evidence(), atol=2e-3)


MAPS = {  # functions of z, the noise, and how near K = 100 comes
    "square": (lambda z: z**2, 0.1, 0.03),
    "sin z": (jnp.sin, 0.05, 0.1),
    "sin 10 z": (lambda z: jnp.sin(10 * z), 0.05, 1.0),
}


def entropy_by_quadrature(function, scale):
    """Of g(z) + scale * e: the density by a fine sum over z, then a fine sum over w."""
    z = np.linspace(-6, 6, 24_001)
    mass = np.exp(-(z**2) / 2)
    values = np.asarray(function(z), float)
    cell = scale / 4
    w = np.arange(values.min() - 8 * scale, values.max() + 8 * scale, cell)
    density = np.zeros_like(w)
    for first in range(0, len(z), 1000):
        part = slice(first, first + 1000)
        density += scipy.stats.norm.pdf(w, values[part, None], scale).T @ (mass / mass.sum())[part]
    positive = density[density > 0]
    return -cell * np.sum(positive * np.log(positive))


@pytest.mark.parametrize(
    "name", ["square", pytest.param("sin z", marks=pytest.mark.slow), "sin 10 z"]
)
def test_folded_maps_stay_below_their_entropy(name):
    """And come nearer with K, where the linearised entropy is above it by far."""
    function, scale, near = MAPS[name]
    make = bounds.laplace_reverse(1, jnp.float32, 5)
    log_scale = jnp.log(jnp.array([scale]))

    @functools.partial(jax.jit, static_argnums=1)
    def values(key, num_inner):
        def one(key):
            keys = jax.random.split(key, 3)
            z, e = (jax.random.normal(k, (1,)) for k in keys[:2])
            return bounds.entropy_bound(
                keys[2], lambda z: function(z) / scale, log_scale, z, e, make, num_inner
            )

        return jax.vmap(one)(jax.random.split(key, 2000))

    truth = entropy_by_quadrature(function, scale)
    found = [np.asarray(values(jax.random.key(0), k), float) for k in (0, 100)]
    errors = [part.std() / math.sqrt(len(part)) for part in found]
    assert found[0].mean() < truth - 0.1  # not found by chance
    assert found[1].mean() < truth + 5 * errors[1]
    assert found[1].mean() > truth - near - 5 * errors[1]
    assert found[1].mean() > found[0].mean() + 0.1  # of the same (z, e)

    z = jax.random.normal(jax.random.key(1), (500, 1))
    half = jax.vmap(lambda z: jacobian.exact(function, z, jnp.array([scale])).value)(z)
    linearised = jax.vmap(lambda h: jacobian.linearised_entropy(h, log_scale, log_scale))(half)
    assert float(jnp.mean(linearised)) > truth + 0.1


@pytest.mark.slow
def test_a_reverse_model_that_saw_the_latent_would_be_no_bound():
    """Started at z_0, it finds the one fold of sin(10 z) that w came from: too high by a nat."""
    function, scale, _ = MAPS["sin 10 z"]

    @jax.jit
    @jax.vmap
    def values(key):
        keys = jax.random.split(key, 3)
        z, e = (jax.random.normal(k, (1,)) for k in keys[:2])
        return bounds.entropy_bound(
            keys[2],
            lambda z: function(z) / scale,
            jnp.log(jnp.array([scale])),
            z,
            e,
            lambda whitened, target: bounds.laplace_mixture(whitened, target, z[None]),
            100,
        )

    found = np.asarray(values(jax.random.split(jax.random.key(0), 1000)), float)
    error = found.std() / math.sqrt(len(found))
    assert found.mean() > entropy_by_quadrature(function, scale) + 5 * error + 0.3


def test_densities_are_those_of_the_draws():
    """A mixture in one dimension: it integrates to 1 and has the moments of its draws."""
    ones = jnp.ones((2, 1))
    mixture = bounds.LaplaceMixture(
        jnp.log(jnp.array([0.3, 0.7])),
        jnp.array([[-2.0], [1.0]]),
        ones[:, :, None],
        jnp.array([[4.0], [25.0]]),
        0.2,
    )
    grid = np.linspace(-8, 8, 4001)
    density = np.exp(np.asarray(mixture.log_density(jnp.asarray(grid, jnp.float32)[:, None])))
    cell = grid[1] - grid[0]
    assert density.sum() * cell == pytest.approx(1, abs=1e-4)
    draws = np.asarray(mixture.sample(jax.random.key(0), 20_000))[:, 0]
    for power in (1, 2):
        truth = (density * grid**power).sum() * cell
        error = np.std(draws**power) / math.sqrt(len(draws))
        assert abs(np.mean(draws**power) - truth) < 5 * error


def test_gaussian_reverse_models():
    precision = jnp.array([[4.0, 1.4], [1.4, 2.7]])
    mean = jnp.array([1.0, -1.0])
    z = jax.random.normal(jax.random.key(0), (5, 2))
    laplace = encoders.LaplaceReverse(mean, precision, factors.inverse_factor(precision))
    diagonal = encoders.DiagonalReverse(mean, jnp.log(jnp.diagonal(precision)))
    for reverse, matrix in (
        (laplace, np.asarray(precision)),
        (diagonal, np.diag(np.diagonal(precision))),
    ):
        known = scipy.stats.multivariate_normal(np.asarray(mean), np.linalg.inv(matrix))
        np.testing.assert_allclose(reverse.log_density(z), known.logpdf(z), rtol=1e-5)
        draws = np.asarray(reverse.sample(jax.random.key(1), 20_000))
        np.testing.assert_allclose(np.cov(draws.T), np.linalg.inv(matrix), atol=0.02)


def train(entropy, num_steps, num_samples=8):
    """A generator with a hidden layer on the linear-Gaussian model, and its sampler at the end."""
    log_joint = EXACT.log_joint()
    description = generators.MLP(3, (64,))
    generator = generators.make_generator(description, log_joint.random_shapes)
    method = implicit_vi.implicit_vi(
        log_joint,
        optax.adam(optax.cosine_decay_schedule(1e-2, num_steps)),
        ROWS,
        generator=generator,
        num_samples=num_samples,
        learn_noise_scale=False,
        start=Start(noise_scale=0.1),
        objective=Objective(entropy),
    )
    keys = jax.random.split(jax.random.key(0), num_steps)
    data = EXACT.data()
    state, infos = jax.jit(
        lambda state: jax.lax.scan(lambda s, key: method.step(key, s, data), state, keys)
    )(method.init(jax.random.key(0), None))
    return generator, state.sampler, infos


def bound_of(generator, sampler, num_inner=100, num_samples=2000):
    values = jax.jit(
        lambda sampler: bounds.hierarchical_bound(
            jax.random.key(7),
            EXACT.log_joint(),
            generator,
            sampler,
            EXACT.data(),
            bounds.laplace_reverse(3, jnp.float32),
            num_samples=num_samples,
            num_inner=num_inner,
        )
    )(sampler)
    values = np.asarray(values, float)
    return values.mean(), values.std() / math.sqrt(len(values))


@pytest.mark.slow
def test_training_on_the_bound_stays_below_the_evidence_and_on_the_estimate_does_not():
    """The same generator, noise 0.1, trained long by both objectives.

    The linearised number ends above the evidence, which no bound may; the hierarchical one, on new
    draws, does not, for either generator.
    """
    truth = EXACT.log_evidence()
    generator, sampler, _ = train("linearised", 10_000)
    terms, _ = jax.jit(
        lambda sampler: objectives.evidence_terms(
            jax.random.key(5),
            EXACT.log_joint(),
            generator,
            Estimator("exact"),
            sampler,
            EXACT.data(),
            2000,
        )
    )(sampler)
    claimed = np.asarray(terms.total, float)
    error = claimed.std() / math.sqrt(len(claimed))
    assert claimed.mean() > truth + 5 * error + 0.2
    value, error = bound_of(generator, sampler)
    assert value < truth + 5 * error

    generator, sampler, infos = train("hierarchical", 10_000)
    trained = np.asarray(infos["hierarchical_bound"][-1000:], float)
    assert trained.mean() < truth + 5 * trained.std() / math.sqrt(trained.size)
    value, error = bound_of(generator, sampler)
    assert truth - 0.3 < value < truth + 5 * error


@pytest.mark.slow
def test_a_fitted_encoder_tightens_the_bound(monkeypatch):
    """The form for large latents, on a small one: its precisions and its network learn."""
    monkeypatch.setattr(encoders, "LAPLACE_LIMIT", 0)
    monkeypatch.setattr(encoders, "FIT_STEPS", 300)
    log_joint = EXACT.log_joint()
    generator = generators.make_generator(generators.MLP(3), log_joint.random_shapes)
    spread = {"linear": {"w": jnp.full((), 0.5)}}
    center = {"linear": {"w": jnp.zeros((3, 1))}}
    weights = generator.init(jax.random.key(0), center, spread)
    log_scale = {"linear": {"w": jnp.full((3, 1), math.log(0.2))}}
    sampler = Sampler(weights, log_scale, {"linear": {"w": None}})
    whitened, _ = whitening.whitened_map(generator, sampler)
    flat = np.asarray(jax.jacfwd(whitened)(jnp.zeros(3)), float) * 0.2
    truth = scipy.stats.multivariate_normal(cov=flat @ flat.T + 0.04 * np.eye(3)).entropy()

    @jax.jit
    def entropy(encoder):
        value = bounds.outer_entropy(generator, sampler, encoders.encoded_reverse(encoder, 3))
        keys = jax.random.split(jax.random.key(2), 2)
        z, e = (jax.random.normal(key, (2000, 3)) for key in keys)
        return jax.vmap(value)(z, e)

    first = np.asarray(entropy(encoders.init_encoder(jax.random.key(0), 3, jnp.float32)), float)
    fitted = jax.jit(lambda key: encoders.fit_encoder(key, generator, sampler))(jax.random.key(0))
    last = np.asarray(entropy(fitted), float)
    assert last.mean() > first.mean() + 0.1
    assert last.mean() < truth + 5 * last.std() / math.sqrt(len(last))
