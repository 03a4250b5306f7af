"""A Gaussian over all random parameters as the prior: the posterior of data that came before.

    p(w) = N(w; m, S^2 + U U'),        S = diag(s), U of D x R; R = 0 for independent parameters

Of data in parts D_1, D_2, ... that are independent given w, p(w | D_1, D_2) is proportional to
p(D_2 | w) p(w | D_1): the posterior of one part is the prior of the next, exactly as far as it is
known exactly. With r = (w - m) / s, V = U / s and a = (I + V' V)^-1 V' r,

    log p(w) = -1/2 |r - V a|^2 - 1/2 |a|^2 - sum_i log s_i - 1/2 log det(I + V' V) - D/2 log 2 pi,

which loses no digits where V is large. The likelihood's own parameters are among the w.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.priors import Prior
from haiku_posteriors.core.trees import Params

FAMILY = "posterior"  # the name of these among the families of priors


class Gaussian(NamedTuple):
    """Host arrays by the parameter's name.

    Attributes:
      mean: m.
      scale: s, positive.
      factor: U', (R, ...) each; empty for independent parameters.
      point: values of the parameters that were point estimates.
    """

    mean: dict[str, np.ndarray]
    scale: dict[str, np.ndarray]
    factor: dict[str, np.ndarray]
    point: dict[str, np.ndarray]

    @property
    def rank(self) -> int:
        """R; 0 for independent parameters."""
        return len(next(iter(self.factor.values()))) if self.factor else 0


def precision_diagonal(gaussian: Gaussian) -> dict[str, np.ndarray]:
    """The diagonal of (S^2 + U U')^-1, by name: (1 - V_i (I + V' V)^-1 V_i') / s_i^2; float64.

    Its inverse is the variance of a parameter given all others, and so that of the mean-field q
    nearest to the Gaussian.
    """
    relative = _relative_factor(gaussian)
    inverse = np.linalg.inv(_gram(relative)) if relative else np.zeros((0, 0))
    found = {}
    for name, scale in gaussian.scale.items():
        rows = relative.get(name, np.zeros((0, *scale.shape)))
        explained = np.sum(rows * np.tensordot(inverse, rows, 1), axis=0)
        found[name] = (1 - explained) / np.square(scale, dtype=np.float64)
    return found


def _relative_factor(gaussian: Gaussian) -> dict[str, np.ndarray]:
    """V', (R, ...) each."""
    scale, factor = gaussian.scale, gaussian.factor
    return {name: factor[name].astype(np.float64) / scale[name] for name in factor}


def _gram(relative: dict[str, np.ndarray]) -> np.ndarray:
    """I + V' V."""
    flat = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in relative.values()], axis=1)
    return np.eye(len(flat)) + flat @ flat.T


def make_gaussian_prior(gaussian: Gaussian) -> Prior:
    """The prior; computed in float64 once, and in the parameters' own precision afterwards."""
    mean, scale, factor = gaussian.mean, gaussian.scale, gaussian.factor
    relative = _relative_factor(gaussian)
    rank = gaussian.rank
    gram = _gram(relative) if rank else np.eye(0)
    inverse = np.linalg.inv(gram)
    half_log_det = np.linalg.slogdet(gram)[1] / 2
    diagonal = precision_diagonal(gaussian)

    def constant(value: np.ndarray, like: jax.Array) -> jax.Array:
        return jnp.asarray(value, like.dtype)

    def log_densities(params: Params) -> Params:
        named = trees.named_leaves(params)
        rest = {
            name: (leaf - constant(mean[name], leaf)) / constant(scale[name], leaf)
            for name, leaf in named.items()
        }
        common: tuple[jax.Array, ...] = ()
        if rank:
            dtype = next(iter(named.values())).dtype
            projected = sum(
                jnp.tensordot(constant(relative[name], r), r, r.ndim) for name, r in rest.items()
            )
            found = jnp.asarray(inverse, dtype) @ projected
            rest = {
                name: r - jnp.tensordot(found, constant(relative[name], r), 1)
                for name, r in rest.items()
            }
            common = (-jnp.sum(jnp.square(found)) / 2 - half_log_det,)
        densities = {
            name: -jnp.square(r) / 2
            - constant(np.log(scale[name]), r)
            - 0.5 * math.log(2 * math.pi)
            for name, r in rest.items()
        }
        return densities, *common

    def sample(rng_key: jax.Array, params: Params) -> Params:
        shapes = trees.named_leaves(params)
        dtype = next(iter(shapes.values())).dtype
        common = jax.random.normal(jax.random.fold_in(rng_key, 0), (rank,), dtype)
        drawn = {}
        for index, (name, leaf) in enumerate(shapes.items()):
            noise = jax.random.normal(
                jax.random.fold_in(rng_key, index + 1), leaf.shape, leaf.dtype
            )
            drawn[name] = constant(mean[name], leaf) + constant(scale[name], leaf) * noise
            if rank:
                drawn[name] += jnp.tensordot(common, constant(factor[name], leaf), 1)
        return trees.from_named_leaves(params, drawn)

    def deviation(name: str) -> float:
        """The root mean square of a leaf's standard deviations."""
        variance = np.square(scale[name].astype(np.float64))
        if rank:
            variance = variance + np.square(factor[name].astype(np.float64)).sum(axis=0)
        return float(np.sqrt(np.mean(variance)))

    def precisions(params: Params) -> Params:
        return trees.map_with_name(lambda name, leaf: constant(diagonal[name], leaf), params)

    return Prior(
        log_density=lambda params: trees.total(log_densities(params)),
        log_densities=log_densities,
        sample=sample,
        scale=deviation,
        family=FAMILY,
        is_whole=True,
        precisions=precisions,
        is_correlated=rank > 0,
    )
