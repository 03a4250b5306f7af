"""Observation models: from a network's outputs to the log-likelihood of each datum.

If an observation model has a parameter (learned noise), it joins the network's parameters in one
pytree, under `likelihood/`, so that every method treats it like any other.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core.errors import check_positive
from haiku_posteriors.core.trees import Params

NAMES = ("categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian")
PARAMETER_GROUP = "likelihood"  # the key beside the network's modules
# The prior of a learned noise scale is that of noise_std / (3 |x|), x ~ N(0, 1): an inverse gamma
# law of the variance. The noise is 1/6 to 5 times the stated one with a probability of 0.9.
NOISE_PRIOR_FACTOR = 1 / 3
UNLIKELY_NOISE = NOISE_PRIOR_FACTOR / 1.96  # over noise_std: below it with a probability of 0.05
LOG_NOISE_PRIOR_STD = math.pi / math.sqrt(8)  # of -log |x|


class Likelihood(NamedTuple):
    """p(target | network output).

    Attributes:
      log_likelihood: (outputs (rows, k), targets, own parameters) -> (rows,), normalised.
      predict: (outputs (rows, k), own parameters) -> (rows, p): class probabilities, or the means
        followed by the standard deviations of each target.
      curvature: (outputs (rows, k), own parameters) -> (rows, k), the diagonal of the Fisher
        information about the outputs, E[-d^2 log p(y | f) / df^2] over y ~ p(. | f).
      init: () -> own parameters, an empty dict when there are none.
      log_prior: own parameters -> scalar.
      sample_prior: rng_key -> a draw of the own parameters from that prior.
      num_outputs: how many outputs the network must have.
      noise_std: own parameters -> the standard deviation of a Gaussian noise that is the same
        everywhere; None for other observation models.
      prior_std: the prior's standard deviation of every own parameter.
      curvature_root: (outputs (rows, k), own parameters) -> S (rows, k, k), with S S' the Fisher
        information about the outputs; None where that is diagonal.
    """

    log_likelihood: Callable[[jax.Array, jax.Array, Params], jax.Array]
    predict: Callable[[jax.Array, Params], jax.Array]
    curvature: Callable[[jax.Array, Params], jax.Array]
    init: Callable[[], Params]
    log_prior: Callable[[Params], jax.Array]
    sample_prior: Callable[[jax.Array], Params]
    num_outputs: int
    noise_std: Callable[[Params], jax.Array] | None = None
    prior_std: float = LOG_NOISE_PRIOR_STD
    curvature_root: Callable[[jax.Array, Params], jax.Array] | None = None


def _no_parameters() -> Params:
    return {}


def _no_log_prior(params: Params) -> jax.Array:
    return jnp.zeros(())


def _no_prior_draw(rng_key: jax.Array) -> Params:
    return {}


def categorical(num_classes: int) -> Likelihood:
    """log p(y | f) = log softmax(f)_y; targets (rows,) integers, outputs (rows, num_classes).

    Targets (rows, num_classes) are probabilities p of y: then it is the mean over y ~ p.
    """

    def log_likelihood(outputs: jax.Array, targets: jax.Array, params: Params) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(outputs)
        if targets.ndim == 2:
            return jnp.sum(targets * log_probabilities, axis=1)
        return jnp.take_along_axis(log_probabilities, targets[:, None], axis=1)[:, 0]

    def curvature(outputs: jax.Array, params: Params) -> jax.Array:
        probabilities = jax.nn.softmax(outputs)
        return probabilities * (1 - probabilities)

    def curvature_root(outputs: jax.Array, params: Params) -> jax.Array:
        # diag(p) - p p' = S S' with S = diag(sqrt p) - p sqrt(p)', since the p sum to 1.
        probabilities = jax.nn.softmax(outputs)
        roots = jnp.sqrt(probabilities)
        diagonal = roots[:, :, None] * jnp.eye(num_classes, dtype=outputs.dtype)
        return diagonal - probabilities[:, :, None] * roots[:, None, :]

    return Likelihood(
        log_likelihood,
        lambda outputs, params: jax.nn.softmax(outputs),
        curvature,
        _no_parameters,
        _no_log_prior,
        _no_prior_draw,
        num_classes,
        curvature_root=curvature_root,
    )


def bernoulli() -> Likelihood:
    """log p(y | f) = log sigmoid((2 y - 1) f); targets (rows,) in {0, 1}, one output, a logit.

    Predictions are the probabilities of both classes, as for `categorical`, and so are targets
    (rows, 2), over which the mean is taken.
    """

    def log_likelihood(outputs: jax.Array, targets: jax.Array, params: Params) -> jax.Array:
        if targets.ndim == 2:
            both = jax.nn.log_sigmoid(jnp.concatenate([-outputs, outputs], axis=1))
            return jnp.sum(targets * both, axis=1)
        sign = (2 * targets - 1).astype(outputs.dtype)
        return jax.nn.log_sigmoid(sign * outputs[:, 0])

    def predict(outputs: jax.Array, params: Params) -> jax.Array:
        return jax.nn.sigmoid(jnp.concatenate([-outputs, outputs], axis=1))

    def curvature(outputs: jax.Array, params: Params) -> jax.Array:
        return jax.nn.sigmoid(outputs) * jax.nn.sigmoid(-outputs)

    return Likelihood(
        log_likelihood, predict, curvature, _no_parameters, _no_log_prior, _no_prior_draw, 1
    )


def _gaussian_log_density(residual: jax.Array, std: jax.Array) -> jax.Array:
    """Sum over targets of log N(residual; 0, std^2); (rows, targets) -> (rows,)."""
    log_density = -0.5 * (residual / std) ** 2 - jnp.log(std) - 0.5 * math.log(2 * math.pi)
    return jnp.sum(log_density, axis=1)


def gaussian(noise_std: float = 1.0, num_targets: int = 1, learn_noise: bool = False) -> Likelihood:
    """y ~ N(f, noise_std^2), the same noise everywhere; targets and outputs (rows, targets).

    With `learn_noise`, log_noise_std is a parameter t = log(noise_std / 3) - log |x|, x ~ N(0, 1):

      log p(t) = log(2 / pi) / 2 + log x(t) - x(t)^2 / 2,    x(t) = noise_std / 3 exp(-t)

    A network with as many weights as there are rows can pass through them all, and its likelihood
    then grows as exp(-rows t) as the noise falls. Here the prior falls faster than any such
    power, and the log-joint has a mode; a log-normal prior of the same width does not keep the
    noise from all but nil.
    """
    check_positive(noise_std=noise_std)

    def std(params: Params) -> jax.Array:
        return jnp.exp(params["log_noise_std"]) if learn_noise else jnp.array(noise_std)

    def log_likelihood(outputs: jax.Array, targets: jax.Array, params: Params) -> jax.Array:
        return _gaussian_log_density(targets - outputs, std(params).astype(outputs.dtype))

    def predict(outputs: jax.Array, params: Params) -> jax.Array:
        return jnp.concatenate(
            [outputs, jnp.full_like(outputs, std(params).astype(outputs.dtype))], axis=1
        )

    def curvature(outputs: jax.Array, params: Params) -> jax.Array:
        return jnp.full_like(outputs, (std(params) ** -2).astype(outputs.dtype))

    def init() -> Params:
        # An explicit dtype: a weakly typed state would be compiled for again after the first step.
        return {"log_noise_std": jnp.array(math.log(noise_std), float)} if learn_noise else {}

    def log_prior(params: Params) -> jax.Array:
        if not learn_noise:
            return jnp.zeros(())
        inverse = NOISE_PRIOR_FACTOR * noise_std * jnp.exp(-params["log_noise_std"])
        return 0.5 * math.log(2 / math.pi) + jnp.log(inverse) - 0.5 * inverse**2

    def sample_prior(rng_key: jax.Array) -> Params:
        def draw(start: jax.Array) -> jax.Array:
            inverse = jnp.abs(jax.random.normal(rng_key, start.shape, start.dtype))
            return math.log(NOISE_PRIOR_FACTOR * noise_std) - jnp.log(inverse)

        return jax.tree.map(draw, init())

    return Likelihood(
        log_likelihood, predict, curvature, init, log_prior, sample_prior, num_targets, std
    )


def heteroscedastic_gaussian(num_targets: int = 1, noise_floor: float = 1e-3) -> Likelihood:
    """y ~ N(mean, std^2), both from the network; outputs (rows, 2 * targets): means, raw scales.

    std = noise_floor + softplus(raw scale). The floor keeps the density bounded: without it, a
    network that meets one target exactly has infinite likelihood. Targets (rows, 2 * targets) are
    means and standard deviations of y, over which the mean of log p is taken.
    """

    def split(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, raw_scale = jnp.split(outputs, 2, axis=1)
        return mean, noise_floor + jax.nn.softplus(raw_scale)

    def log_likelihood(outputs: jax.Array, targets: jax.Array, params: Params) -> jax.Array:
        mean, std = split(outputs)
        if targets.shape[1] == 2 * num_targets:
            target_mean, target_std = jnp.split(targets, 2, axis=1)
            expected = _gaussian_log_density(target_mean - mean, std)
            return expected - jnp.sum(jnp.square(target_std / std), axis=1) / 2
        return _gaussian_log_density(targets - mean, std)

    def curvature(outputs: jax.Array, params: Params) -> jax.Array:
        _, std = split(outputs)
        slope = jax.nn.sigmoid(jnp.split(outputs, 2, axis=1)[1])  # of std by the raw scale
        return jnp.concatenate([std**-2, 2 * (slope / std) ** 2], axis=1)

    return Likelihood(
        log_likelihood,
        lambda outputs, params: jnp.concatenate(split(outputs), axis=1),
        curvature,
        _no_parameters,
        _no_log_prior,
        _no_prior_draw,
        2 * num_targets,
    )
