"""A layer's weights given its inputs: Bayesian linear regression on pseudo-outputs.

With x = w / s the weights in units of the prior's standard deviations, F (rows, D) the features
times s, and for a unit its pseudo-outputs v and precisions l, both (rows,),

    q(x) ~ N(x; 0, I) prod_r N(v_r; F_r x, 1 / l_r) = N(x; m, P^-1),     P = I + F' diag(l) F
    m = P^-1 F' (l v)
    log q(x) = log det P / 2 - (|x - m|^2 + |sqrt(l) F (x - m)|^2) / 2 - D / 2 log 2 pi
    E_q[|x|^2] = |m|^2 + tr P^-1

independently for every unit. P is D x D. Where there are fewer rows than weights, everything comes
from C = I + sqrt(l) F F' sqrt(l), rows x rows: log det C = log det P, tr P^-1 = D - rows + tr C^-1,

    m = F' sqrt(l) C^-1 sqrt(l) v,      x = m + e + F' sqrt(l) C^-1 (e' - sqrt(l) F e),

with e and e' standard normal (Matheron's rule). So a layer costs min(rows, D)^3, for each unit, or
once if all units have the same precisions.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core.factors import inverse_factor


class Regression(NamedTuple):
    """q of all units of a layer, given F.

    Attributes:
      features: F, (rows, D).
      root: sqrt(l), (rows, units), or (rows, 1) if units share them.
      factor: the inverse Cholesky factor of P or of C, (units or 1, n, n), n = min(rows, D).
      mean: m, (D, units).
    """

    features: jax.Array
    root: jax.Array
    factor: jax.Array
    mean: jax.Array

    @property
    def log_det(self) -> jax.Array:
        """log det P, summed over units."""
        logs = jnp.log(jnp.diagonal(self.factor, axis1=-2, axis2=-1))
        return -2 * jnp.sum(logs) * self._repeats

    @property
    def second_moment(self) -> jax.Array:
        """E_q[|x|^2], summed over units."""
        rows, size = self.features.shape
        trace = jnp.sum(jnp.square(self.factor)) * self._repeats
        return jnp.sum(jnp.square(self.mean)) + trace + max(size - rows, 0) * self.mean.shape[1]

    @property
    def _repeats(self) -> int:
        """How many units use one factor."""
        return self.mean.shape[1] // self.factor.shape[0]

    def draw(self, noise: dict[str, jax.Array]) -> jax.Array:
        """x, (D, units), from standard normal noise in the shapes of `noise_shapes`."""
        e = noise["weights"]
        if _uses_weights(self.features):
            return self.mean + _times(self.factor.mT, e)
        inner = noise["rows"] - self.root * (self.features @ e)
        solved = _times(self.factor.mT, _times(self.factor, inner))
        return self.mean + e + self.features.T @ (self.root * solved)

    def log_volume(self, noise: dict[str, jax.Array], weights: jax.Array) -> jax.Array:
        """log N(noise; 0, I) - log q(x) where x is what the noise draws."""
        if _uses_weights(self.features):  # a bijection: its log-determinant
            return -self.log_det / 2
        squares = sum(jnp.sum(jnp.square(e)) for e in noise.values())
        size = sum(e.size for e in noise.values())
        return -(squares + size * math.log(2 * math.pi)) / 2 - self.log_density(weights)

    def log_density(self, weights: jax.Array) -> jax.Array:
        """log q(x), a scalar, at weights (D, units)."""
        off = weights - self.mean
        squares = jnp.sum(jnp.square(off))
        squares += jnp.sum(jnp.square(self.root * (self.features @ off)))
        return (self.log_det - squares - off.size * math.log(2 * math.pi)) / 2


def noise_shapes(num_rows: int, num_weights: int, num_units: int) -> dict[str, tuple[int, int]]:
    """What `Regression.draw` needs."""
    shapes = {"weights": (num_weights, num_units)}
    return shapes if num_weights <= num_rows else shapes | {"rows": (num_rows, num_units)}


def regress(
    features: jax.Array, pseudo_outputs: jax.Array, log_precisions: jax.Array
) -> Regression:
    """q of all units.

    Args:
      features: F, (rows, D).
      pseudo_outputs: v, (rows, units).
      log_precisions: log l, (rows, units), or (rows, 1) if units share them.
    """
    root = jnp.exp(log_precisions / 2)
    weighted = root.T[:, :, None]  # (units or 1, rows, 1)
    identity = jnp.eye(min(features.shape), dtype=features.dtype)
    if _uses_weights(features):
        scaled = weighted * features
        factor = inverse_factor(identity + scaled.mT @ scaled)
        right = features.T @ (jnp.square(root) * pseudo_outputs)
        mean = _times(factor.mT, _times(factor, right))
    else:
        factor = inverse_factor(identity + weighted * (features @ features.T) * weighted.mT)
        solved = _times(factor.mT, _times(factor, root * pseudo_outputs))
        mean = features.T @ (root * solved)
    return Regression(features, root, factor, mean)


def _uses_weights(features: jax.Array) -> bool:
    rows, size = features.shape
    return size <= rows


def _times(factors: jax.Array, columns: jax.Array) -> jax.Array:
    """Each unit's matrix, or the one of all, (units or 1, n, n), times its column of (n, units)."""
    if factors.shape[0] == 1:
        return factors[0] @ columns
    return jnp.einsum("uij,ju->iu", factors, columns)
