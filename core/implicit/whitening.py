"""The generator in units of the noise: z -> g(z) / s, and its products B = diag(1/s) dg/dz.

Reverse models and bounds ask for two of them at z and w,

    B^T B   and   B^T (w - g(z)) / s,

by which a Gauss-Newton step on |z|^2 / 2 + |(w - g(z)) / s|^2 / 2 is made. A map in general pays d
products with B for each z. Where g(z) = f(z) M + c (`generators.Readout`, F features), B^T is
J M / s with J = df^T/dz, (d, F), and

    B^T B = J Q J^T,        Q = (M / s) (M / s)^T,

with one Q (D F^2 operations) for all z of a step, and d F (d + F) operations for each: taken where
F < D.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.samplers import Sampler

Whitened = Callable[[jax.Array], jax.Array]  # z (d,) -> g(z) / s, (D,)


@dataclasses.dataclass(frozen=True)
class WhitenedReadout:
    """g / s of a generator that is linear in its features.

    Attributes:
      features: z (d,) -> (F,).
      matrix: M / s, (F, D).
      offset: c / s, (D,).
      products: Q, (F, F).
    """

    features: Callable[[jax.Array], jax.Array]
    matrix: jax.Array
    offset: jax.Array
    products: jax.Array

    def __call__(self, z: jax.Array) -> jax.Array:
        """g(z) / s."""
        return self.features(z) @ self.matrix + self.offset


class NormalEquations(NamedTuple):
    """At z and w: `gram`, B^T B (d, d), and `pulled`, B^T (w - g(z)) / s, (d,)."""

    gram: jax.Array
    pulled: jax.Array


def normal_equations(whitened: Whitened, z: jax.Array, target: jax.Array) -> NormalEquations:
    """Both products at z (d,), for target = w / s (D,)."""
    if isinstance(whitened, WhitenedReadout):
        features, rows = _value_and_rows(whitened.features, z)  # J
        residual = target - features @ whitened.matrix - whitened.offset
        pulled = rows @ (whitened.matrix @ residual)
        return NormalEquations(rows @ whitened.products @ rows.T, pulled)
    value, rows = _value_and_rows(whitened, z)  # B^T
    return NormalEquations(rows @ rows.T, rows @ (target - value))


def _value_and_rows(
    function: Callable[[jax.Array], jax.Array], z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f(z) and df^T/dz, (d, outputs)."""
    value, push = jax.linearize(function, z)
    return value, jax.vmap(push)(jnp.eye(z.size, dtype=z.dtype))


def whitened_map(generator: Generator, sampler: Sampler) -> tuple[Whitened, jax.Array]:
    """z -> g(z) / s as one array (D,), and log s in the same order."""
    shapes = jax.eval_shape(generator.apply, sampler.generator, jnp.zeros(generator.latent_size))
    logs = jax.tree.map(
        lambda log_s, leaf: jnp.broadcast_to(log_s, leaf.shape), sampler.log_scale, shapes
    )
    log_scales = ravel_pytree(logs)[0]
    scales = jnp.exp(log_scales)
    readout = generator.readout and generator.readout(sampler.generator)
    if readout and len(readout.matrix) < generator.num_weights:  # else B is the smaller one
        features, matrix, offset = readout
        matrix = matrix / scales
        return WhitenedReadout(features, matrix, offset / scales, matrix @ matrix.T), log_scales

    def whitened(z: jax.Array) -> jax.Array:
        return ravel_pytree(generator.apply(sampler.generator, z))[0] / scales

    return whitened, log_scales
