"""Prior distributions over network parameters, all normalised and with a stated variance.

Every family is a density of unit variance, f(u), scaled per parameter: with standard deviation s,

    log p(w) = sum_i [ log f(w_i / s_i) - log s_i ],        Var[w_i] = s_i^2 = 1 / weight_decay_i.

So a change of family does not change the prior's variance, and parameter groups differ by s only.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.trees import Params


class Family(NamedTuple):
    """A scalar distribution of mean 0 and variance 1.

    Attributes:
      log_density: normalised log-density, elementwise.
      sample: (rng_key, shape, dtype) -> independent draws.
    """

    log_density: Callable[[jax.Array], jax.Array]
    sample: Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


class Prior(NamedTuple):
    """A distribution over a parameter pytree.

    Attributes:
      log_density: params -> scalar, the sum over all parameters.
      log_densities: params -> each parameter's own log-density, in the shape of `params`; where
        parameters are correlated, terms of the same sum.
      sample: (rng_key, params) -> a draw in the shape of `params`.
      scale: leaf name -> the standard deviation s of that leaf's parameters.
      family: the name of the family of unit variance, for methods that know closed forms.
      is_whole: whether the likelihood's own parameters are among its parameters.
      precisions: params -> the diagonal of the precision matrix, of Gaussians not of mean 0
        and one variance a leaf; None for all others.
      is_correlated: whether that matrix has more than its diagonal.
    """

    log_density: Callable[[Params], jax.Array]
    log_densities: Callable[[Params], Params]
    sample: Callable[[jax.Array, Params], Params]
    scale: Callable[[str], float]
    family: str
    is_whole: bool = False
    precisions: Callable[[Params], Params] | None = None
    is_correlated: bool = False


def gaussian() -> Family:
    """N(0, 1)."""
    return Family(
        lambda u: -0.5 * u**2 - 0.5 * math.log(2 * math.pi),
        lambda key, shape, dtype: jax.random.normal(key, shape, dtype),
    )


def scale_mixture(weight: float = 0.5, ratio: float = 10.0) -> Family:
    """Two Gaussians (Blundell et al. 2015, arXiv 1505.05424, eq. 7), standardised.

    weight * N(0, a^2) + (1 - weight) * N(0, (ratio a)^2), with a so that the variance is 1.
    The component standard deviations (1e-3, 100) with equal weights, for instance, are
    ratio = 1e5 with a prior variance of (1e-6 + 1e4) / 2, i.e. weight_decay = 2e-4.
    """
    if not 0 < weight < 1:
        raise UserError(f"The weight of a scale mixture must lie between 0 and 1, not {weight}.")
    check_positive(ratio=ratio)
    narrow = 1.0 / math.sqrt(weight + (1 - weight) * ratio**2)
    wide = ratio * narrow

    def component(u: jax.Array, scale: float, probability: float) -> jax.Array:
        constant = math.log(probability) - math.log(scale) - 0.5 * math.log(2 * math.pi)
        return constant - 0.5 * (u / scale) ** 2

    def sample(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        which, normal = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        scales = jnp.where(jax.random.bernoulli(which, weight, shape), narrow, wide)
        return scales.astype(dtype) * jax.random.normal(normal, shape, dtype)

    return Family(
        lambda u: jnp.logaddexp(component(u, narrow, weight), component(u, wide, 1 - weight)),
        sample,
    )


def logistic() -> Family:
    """Logistic with scale b = sqrt(3) / pi: log f(u) = -|u|/b - log b - 2 log(1 + e^{-|u|/b})."""
    scale = math.sqrt(3) / math.pi

    def log_density(u: jax.Array) -> jax.Array:
        magnitude = jnp.abs(u) / scale
        return -magnitude - math.log(scale) - 2 * jnp.log1p(jnp.exp(-magnitude))

    return Family(
        log_density,
        lambda key, shape, dtype: scale * jax.random.logistic(key, shape, dtype),
    )


def laplace() -> Family:
    """Laplace with scale b = 1 / sqrt(2): log f(u) = -|u|/b - log(2 b)."""
    scale = 1 / math.sqrt(2)
    return Family(
        lambda u: -jnp.abs(u) / scale - math.log(2 * scale),
        lambda key, shape, dtype: scale * jax.random.laplace(key, shape, dtype),
    )


def student_t(degrees_of_freedom: float = 5.0) -> Family:
    """Student's t with nu > 2 degrees of freedom, scaled by sqrt((nu - 2) / nu) to variance 1."""
    nu = degrees_of_freedom
    if nu <= 2:
        raise UserError(f"degrees_of_freedom must exceed 2 for a finite variance, not {nu}.")
    scale = math.sqrt((nu - 2) / nu)
    constant = (
        math.lgamma((nu + 1) / 2)
        - math.lgamma(nu / 2)
        - 0.5 * math.log(nu * math.pi)
        - math.log(scale)
    )
    return Family(
        lambda u: constant - 0.5 * (nu + 1) * jnp.log1p((u / scale) ** 2 / nu),
        lambda key, shape, dtype: scale * jax.random.t(key, jnp.array(nu, dtype), shape, dtype),
    )


FAMILIES: dict[str, Callable[..., Family]] = {
    "gaussian": gaussian,
    "scale_mixture": scale_mixture,
    "logistic": logistic,
    "laplace": laplace,
    "student_t": student_t,
}


def make_prior(
    weight_decay: float,
    family: str = "gaussian",
    groups: Sequence[tuple[str, float]] = (),
    **family_arguments: float,
) -> Prior:
    """A prior of variance 1 / weight_decay over every parameter.

    Args:
      weight_decay: the prior precision.
      family: a name in FAMILIES.
      groups: (regular expression, weight decay) pairs; a parameter takes the weight decay of the
        first expression found in its name, and `weight_decay` when there is none.
      **family_arguments: passed to the family, e.g. `degrees_of_freedom`.

    Returns:
      The prior.
    """
    if family not in FAMILIES:
        raise unknown_name("prior family", family, FAMILIES)
    for precision in (weight_decay, *(precision for _, precision in groups)):
        check_positive(weight_decay=precision)
    density, draw = FAMILIES[family](**family_arguments)
    patterns = []
    for pattern, precision in groups:
        try:
            patterns.append((re.compile(pattern), precision))
        except re.error as error:
            raise UserError(f"'{pattern}' is not a regular expression: {error}.") from error

    def scale(name: str) -> float:
        matching = (precision for pattern, precision in patterns if pattern.search(name))
        return 1 / math.sqrt(next(matching, weight_decay))

    def log_densities(params: Params) -> Params:
        return trees.map_with_name(
            lambda name, leaf: density(leaf / scale(name)) - math.log(scale(name)), params
        )

    def log_density(params: Params) -> jax.Array:
        return trees.total(log_densities(params))

    def sample(rng_key: jax.Array, params: Params) -> Params:
        drawn = {
            name: scale(name) * draw(jax.random.fold_in(rng_key, index), leaf.shape, leaf.dtype)
            for index, (name, leaf) in enumerate(trees.named_leaves(params).items())
        }
        return trees.from_named_leaves(params, drawn)

    return Prior(log_density, log_densities, sample, scale, family)
