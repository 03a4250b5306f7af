"""The inverse Cholesky factor of a positive definite matrix, from matrix products.

    P = L L',      G = L^-1,      G' G = P^-1,      log det P = -2 sum_i log G_ii

In blocks, with G_1 the factor of P_11,

    L_21 = P_21 G_1',      P_22 - L_21 L_21' = L_2 L_2',      G = [[G_1, 0], [-G_2 L_21 G_1, G_2]].

and with X = lower triangle of (dL/dG G'), its diagonal halved, the derivative of a loss is

    dloss / dP = -G' (X + X') G / 2.

So neither the value nor the gradient solves a triangular system, which XLA does badly on CPUs
(eight of size 51: 14 ms), and LAPACK sees blocks that are too small for its threads, which would
fight for the cores with XLA's.
"""

import jax
import jax.numpy as jnp

BLOCK = 32  # a power of two: size up to which LAPACK factors


@jax.custom_vjp
def inverse_factor(matrix: jax.Array) -> jax.Array:
    """G of symmetric positive definite matrices, (..., n, n), lower triangular.

    The gradient is that with respect to a symmetric matrix, and symmetric itself.
    """
    size = matrix.shape[-1]
    if size <= BLOCK:
        return _triangular_inverse(jax.lax.linalg.cholesky(matrix, symmetrize_input=False))
    half = BLOCK * -(-size // (2 * BLOCK))
    first = inverse_factor(matrix[..., :half, :half])
    below = matrix[..., half:, :half] @ first.mT
    second = inverse_factor(matrix[..., half:, half:] - below @ below.mT)
    return _lower(first, -second @ below @ first, second)


def _forward(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    factor = inverse_factor(matrix)
    return factor, factor


def _backward(factor: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    inner = jnp.tril(gradient @ factor.mT)
    diagonal = jnp.eye(factor.shape[-1], dtype=factor.dtype) * inner
    inner = inner - diagonal / 2
    return (-0.5 * factor.mT @ (inner + inner.mT) @ factor,)


inverse_factor.defvjp(_forward, _backward)


def _triangular_inverse(lower: jax.Array) -> jax.Array:
    """Of lower triangular matrices (..., n, n): blocks on the diagonal grow from 1 to n."""
    size = lower.shape[-1]
    padded = 1 << (size - 1).bit_length()
    batch = lower.shape[:-2]
    if padded > size:  # by an identity
        room = [(0, 0)] * len(batch) + [(0, padded - size)] * 2
        added = jnp.diag((jnp.arange(padded) >= size).astype(lower.dtype))
        lower = jnp.pad(lower, room) + added
    inverse = 1 / jnp.diagonal(lower, axis1=-2, axis2=-1)[..., None, None]
    width = 1
    while width < padded:
        count = padded // (2 * width)
        blocks = lower.reshape(*batch, count, 2 * width, count, 2 * width)
        on_diagonal = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _lower(first, -second @ on_diagonal[..., width:, :width] @ first, second)
        width *= 2
    return inverse[..., 0, :size, :size]


def _lower(first: jax.Array, below: jax.Array, second: jax.Array) -> jax.Array:
    """[[first, 0], [below, second]]."""
    above = jnp.zeros((*first.shape[:-1], second.shape[-1]), first.dtype)
    top = jnp.concatenate([first, above], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
