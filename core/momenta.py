"""Kinetic energies of HMC: the Gaussian one, and one whose momenta have heavy tails.

    K(v) = (1 + b D) / (2 b) log(1 + b q),        q = sum_i m_i v_i^2,        b >= 0,

for D random parameters with inverse masses m. exp(-K) is a multivariate t distribution of 1 / b
degrees of freedom; as b tends to 0, K tends to q / 2. A drift moves by dK/dv = s m v with the
speed s = (1 + b D) / (1 + b q), and leapfrog steps stay reversible and keep volumes (Livingstone,
Faulkner & Roberts 2019, arXiv 1706.02649).

Why: a trajectory keeps H, and only a new momentum changes it. Gaussian ones change it by sqrt(D),
however widely the log-joint varies: where a learned noise moves it by many times that, chains reach
other heights by a random walk, and E-BFMI is low. The variance of K is about D (1 + b D) / 2, so
that b can match it to the log-joint's. Where the log-joint is high, momenta are large and speeds
small, which is where a posterior of varying noise is stiff.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.trees import Params

# E-BFMI of Gaussian momenta is about D / (variance of the log-joint + D / 2). Below 1/2 tails are
# made heavier: a log-joint that varies as that of a Gaussian posterior, by D / 2, has 1.
LEAST_EXCESS = 2.0  # of b D, which is 2 / E-BFMI - 2


def matching_weight(variance: jax.Array, num_dimensions: int) -> jax.Array:
    """The b at which K varies as the log-joint does; negative where that varies less than q / 2."""
    return (2 * variance / num_dimensions - 1) / num_dimensions


def usable_weight(weight: jax.Array, num_dimensions: int) -> jax.Array:
    """b, or 0 where a Gaussian momentum does as well."""
    return jnp.where(weight * num_dimensions > LEAST_EXCESS, weight, 0.0)


class Momenta(NamedTuple):
    """The law of momenta, exp(-K).

    Attributes:
      inverse_mass: m, in the structure of the random parameters; leaves are broadcast to theirs.
      weight: b, a scalar; None for momenta that are always Gaussian.
    """

    inverse_mass: Params
    weight: jax.Array | None = None

    def draw(self, rng_key: jax.Array, random: Params) -> Params:
        """A momentum, in the structure of `random`; keys 0 and 2 of `rng_key` are used."""
        normal = trees.normal_like(jax.random.fold_in(rng_key, 0), random)
        gaussian = jax.tree.map(lambda n, m: n / jnp.sqrt(m), normal, self.inverse_mass)
        if self.weight is None:
            return gaussian
        is_heavy = self.weight > 0
        half = 1 / (2 * jnp.where(is_heavy, self.weight, 1.0))  # of the degrees of freedom
        chi_square = jax.random.gamma(jax.random.fold_in(rng_key, 2), half) / half
        scale = jnp.where(is_heavy, jax.lax.rsqrt(chi_square), 1.0)
        return jax.tree.map(lambda v: scale.astype(v.dtype) * v, gaussian)

    def speed(self, momentum: Params) -> jax.Array | float:
        """s: how much faster than a Gaussian momentum this one moves, a scalar."""
        if self.weight is None:
            return 1.0
        growth = 1 + self.weight * trees.size(momentum)
        return growth / (1 + self.weight * self._square(momentum))

    def energy(self, momentum: Params) -> jax.Array:
        """K, a scalar."""
        return self._energy(trees.size(momentum), self._square(momentum))

    def energy_change(self, new: Params, old: Params) -> jax.Array:
        """K(new) - K(old).

        Differences of single terms, then the sum, as in `LogJoint.difference`: at millions of
        parameters a kinetic energy is too large for float32 to resolve the change of it.
        """
        change = trees.total(
            jax.tree.map(lambda v, n, m: (n - v) * (n + v) * m, old, new, self.inverse_mass)
        )
        if self.weight is not None:
            change /= 1 + self.weight * self._square(old)
        return self._energy(trees.size(old), change)

    def _square(self, momentum: Params) -> jax.Array:
        return trees.total(jax.tree.map(lambda v, m: v**2 * m, momentum, self.inverse_mass))

    def _energy(self, num_dimensions: int, square: jax.Array) -> jax.Array:
        """(1 + b D) / (2 b) log(1 + b x), which is x / 2 at b = 0."""
        if self.weight is None:
            return square / 2
        safe = jnp.where(self.weight > 0, self.weight, 1.0)
        scaled = jnp.where(self.weight > 0, jnp.log1p(safe * square) / safe, square)
        return (1 + self.weight * num_dimensions) * scaled / 2
