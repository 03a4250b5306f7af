"""Problems with known answers, and assertions about draws, shared by the tests of all methods.

Every statistical assertion is two-sided at 5 standard errors: a correct method fails one comparison
in 1.7 million choices of the seed, and seeds are fixed. An assertion over n numbers makes n
comparisons.
"""

import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data, make_data
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.priors import Prior, make_prior

NUM_ERRORS = 5
# For targets that are a prior alone: one row, which the network ignores.
NO_DATA = Data(*(np.zeros(shape, np.float32) for shape in ((1, 1), (1, 1), 1)), num_rows=1)


def linear(inputs):
    """y = x w + b."""
    return hk.Linear(1)(inputs)


def linear_without_bias(inputs):
    """y = x w."""
    return hk.Linear(1, with_bias=False)(inputs)


def tanh_mlp(inputs):
    """One hidden layer of 4 units: the smallest network with a posterior that is not Gaussian."""
    return hk.nets.MLP([4, 1], activation=jnp.tanh)(inputs)


class LinearGaussian:
    """y = X w + noise with w ~ N(0, prior_std^2): posterior and evidence in float64.

    Attributes:
      design: X, (rows, coefficients); its first column is 1 if there is a bias.
      observed: y, (rows,).
      mean, covariance, precision: of the posterior over (bias, weights), tempered.
    """

    def __init__(self, inputs, targets, noise_std, prior_std, temperature=1.0, with_bias=True):
        self.inputs, self.targets = inputs, targets
        self.noise_std, self.prior_std, self.temperature = noise_std, prior_std, temperature
        self.network = linear if with_bias else linear_without_bias
        ones = np.ones((len(inputs), int(with_bias)))
        self.design = np.concatenate([ones, inputs], axis=1).astype(float)
        self.observed = targets[:, 0].astype(float)
        identity = np.eye(self.design.shape[1])
        precision = self.design.T @ self.design / noise_std**2 + identity / prior_std**2
        self.mean = np.linalg.solve(precision, self.design.T @ self.observed / noise_std**2)
        self.precision = precision / temperature
        self.covariance = np.linalg.inv(self.precision)

    def log_joint(self, network=None, **settings):
        """The same model for a method; any other network in place of the linear one."""
        arguments = {
            "prior": make_prior(self.prior_std**-2),
            "likelihood": gaussian(self.noise_std),
            "temperature": self.temperature,
        } | settings
        return make_log_joint(network or self.network, self.inputs, **arguments)

    def data(self):
        """All rows, on the device."""
        return jax.tree.map(jnp.asarray, make_data(self.inputs, self.targets))

    def log_evidence(self):
        """log p(D)."""
        noise = self.noise_std**2 * np.eye(len(self.design))
        covariance = noise + self.prior_std**2 * self.design @ self.design.T
        return scipy.stats.multivariate_normal.logpdf(self.observed, cov=covariance)

    def log_normaliser(self):
        """log int exp(log p_T(w, D)) dw: the log-evidence at temperature 1, else what tempers it.

        The log-joint is quadratic around the mean: its value there, over T, and the volume.
        """
        residual = self.observed - self.design @ self.mean
        densities = scipy.stats.norm.logpdf(residual, scale=self.noise_std).sum()
        densities += scipy.stats.norm.logpdf(self.mean, scale=self.prior_std).sum()
        log_det = np.linalg.slogdet(self.precision)[1]
        return densities / self.temperature + 0.5 * (len(self.mean) * np.log(2 * np.pi) - log_det)

    def mean_field_std(self):
        """The standard deviations of the best mean-field posterior, 1 / sqrt(P_ii)."""
        return 1 / np.sqrt(np.diag(self.precision))

    def mean_field_gap(self):
        """By how much the best mean-field ELBO is below the log-evidence."""
        log_det = np.linalg.slogdet(self.precision)[1]
        return 0.5 * (np.sum(np.log(np.diag(self.precision))) - log_det)


def correlated_model():
    """Bias and three weights of correlated inputs: mean-field VI misses 2.2 nats."""
    generator = np.random.default_rng(1)
    mixing = np.array([[1, 0.8, 0.4], [0, 0.6, 0.5], [0, 0, 0.8]])
    inputs = (0.5 + generator.normal(size=(12, 3)) @ mixing).astype(np.float32)
    noise = 0.6 * generator.normal(size=(12, 1))
    targets = (inputs @ [[1.0], [-2.0], [0.5]] + noise).astype(np.float32)
    return LinearGaussian(inputs, targets, noise_std=0.6, prior_std=1.3)


def coefficients(params):
    """(bias, weights) of linear networks, (..., coefficients), in float64."""
    leaves = trees.named_leaves(params)
    parts = [leaves["linear/b"]] if "linear/b" in leaves else []
    return np.concatenate([*parts, leaves["linear/w"][..., 0]], axis=-1).astype(float)


def target_of_prior(prior, params, temperature=1.0):
    """A log-joint of the prior alone; `params` says where chains start."""
    return LogJoint(
        init=lambda rng_key: params,
        network=lambda params, inputs: jnp.zeros((len(inputs), 1), inputs.dtype),
        prior=prior,
        likelihood=gaussian(),
        temperature=temperature,
    )


def target_of_density(log_density, num_dimensions, start=0.0):
    """Independent coordinates x/w of the given log-density."""
    prior = Prior(
        log_density=lambda params: trees.total(jax.tree.map(log_density, params)),
        log_densities=lambda params: jax.tree.map(log_density, params),
        sample=lambda rng_key, params: params,
        scale=lambda name: 1.0,
        family="none",
    )
    return target_of_prior(prior, {"x": {"w": jnp.full(num_dimensions, start, jnp.float32)}})


def gumbel(w):
    """A skewed log-density: mean Euler's constant, variance pi^2 / 6, third moment 2.404."""
    return -w - jnp.exp(-w)


def log_noise_density(log_noise, noise_std):
    """log p(log sigma) of a learned noise: sigma^2 ~ inverse gamma(1/2, noise_std^2 / 18)."""
    variance = np.exp(2 * np.asarray(log_noise, float))
    density = scipy.stats.invgamma.logpdf(variance, 0.5, scale=noise_std**2 / 18)
    return density + np.log(2 * variance)


def chain_keys(rng_key, num_chains):
    """A key per chain, derived from its index."""
    return jax.vmap(lambda chain: jax.random.fold_in(rng_key, chain))(jnp.arange(num_chains))


def run_chains(method, data, num_chains, num_steps, seed=0):
    """Vmapped chains as the loop runs them; states, and draws and info as (chains, steps, ...)."""

    def iterate(states, number):
        keys = chain_keys(jax.random.fold_in(jax.random.key(seed), number), num_chains)
        states, info = jax.vmap(method.step, (0, 0, None))(keys, states, data)
        states = method.pool(states) if method.pool else states
        draws = jax.vmap(lambda state: method.sample(keys[0], state, 1))(states)
        return states, (jax.tree.map(lambda leaf: leaf[:, 0], draws), info)

    @jax.jit
    def run(data):
        keys = chain_keys(jax.random.key(seed + 1), num_chains)
        states = jax.vmap(method.init, (0, None))(keys, None)
        return jax.lax.scan(iterate, states, jnp.arange(num_steps))

    states, results = run(data)
    draws, info = jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), 0, 1), results)
    return states, draws, info


def standard_errors(chains):
    """Of the means over (chains, draws, ...), from the chains' own effective sample sizes."""
    return chains.std(axis=(0, 1)) / np.sqrt(diagnostics.ess(chains))


def assert_mean_of_chains(chains, expected):
    """Every mean over correlated draws (chains, draws, ...) is the expected one."""
    chains = np.asarray(chains, float)
    z = (chains.mean(axis=(0, 1)) - expected) / standard_errors(chains)
    assert np.all(np.abs(z) < NUM_ERRORS), z


def z_scores(samples, expected):
    """Errors of the means over independent samples (samples, ...), in standard errors."""
    samples = np.asarray(samples, float)
    error = samples.std(axis=0) / math.sqrt(len(samples))
    return (samples.mean(axis=0) - expected) / np.maximum(error, 1e-12)


def assert_mean(samples, expected):
    """Every mean over independent samples (samples, ...) is the expected one."""
    z = z_scores(samples, expected)
    assert np.all(np.abs(z) < NUM_ERRORS), z


def assert_gaussian_moments(samples, mean, covariance, allowance=0.0):
    """Mean and full covariance of independent samples (samples, n) of a Gaussian.

    `allowance` is for a known bias: added to the 5 standard errors, relative to the deviations.
    """
    samples = np.asarray(samples, float)
    variance = np.diag(covariance)
    error = samples.mean(axis=0) - mean
    limit = NUM_ERRORS / np.sqrt(len(samples)) + allowance
    assert np.all(np.abs(error) < np.sqrt(variance) * limit), error
    sizes = np.sqrt(np.outer(variance, variance))
    standard_error = np.sqrt((sizes**2 + covariance**2) / len(samples))
    error = np.cov(samples.T) - covariance
    limit = NUM_ERRORS * standard_error + allowance * sizes
    assert np.all(np.abs(error) < limit), error / standard_error
