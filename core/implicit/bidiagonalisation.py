"""Golub-Kahan bidiagonalisation of a matrix B (D x d) that is known by its products only."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees

Image = list[jax.Array]  # a D-vector, in pieces as the weights are: joining them costs time
Push = Callable[[jax.Array], Image]  # v -> B v
Pull = Callable[[Image], jax.Array]  # u -> B^T u


def bidiagonalise(
    push: Push, pull: Pull, start: jax.Array, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """K steps of Golub-Kahan bidiagonalisation of B from v_1 = start / |start|.

    They give orthonormal v_k, columns of V, and u_k, columns of U, and L upper bidiagonal (alpha_k
    on its diagonal, beta_k beside it):

        B V = U L,     B^T U = V L^T + beta_K v_{K+1} e_K^T,

    the same as K steps of Lanczos on B^T B (Golub & Kahan 1965), without forming squares. V, which
    spans the Krylov space of B^T B and the start, is orthogonalised in full; U, which would take K
    D-vectors, is not.

    Returns:
      The rows v_1 .. v_{K+1}, zero from where the space ends, and M = [L, beta_K e_K].
    """

    def length(norm: jax.Array, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A norm and its inverse; both 0 where only rounding errors of `reference` are left."""
        left = norm > 10 * jnp.finfo(norm.dtype).eps * reference
        return jnp.where(left, norm, 0), jnp.where(left, 1 / jnp.where(left, norm, 1), 0)

    def step(k: jax.Array, state: tuple) -> tuple:
        # Passes over D-vectors count: u is kept as alpha u, and |B v_k| known from its parts.
        basis, matrix, scaled, inverse, beta = state
        factor = beta * inverse
        scaled = [new - factor * old for new, old in zip(push(basis[k]), scaled, strict=True)]
        alpha = jnp.sqrt(squared_norm(scaled))
        alpha, inverse = length(alpha, jnp.hypot(alpha, beta))
        image = inverse * pull(scaled)
        following = _orthogonalised(image, basis)
        beta, shrink = length(jnp.linalg.norm(following), jnp.linalg.norm(image))
        matrix = matrix.at[k, k].set(alpha).at[k, k + 1].set(beta)
        return basis.at[k + 1].set(shrink * following), matrix, scaled, inverse, beta

    first = start / jnp.linalg.norm(start)
    basis = jnp.zeros_like(first, shape=(num_steps + 1, first.size)).at[0].set(first)
    matrix = jnp.zeros_like(first, shape=(num_steps, num_steps + 1))
    zero = jnp.zeros_like(first, shape=())
    nothing = [jnp.zeros_like(piece) for piece in jax.eval_shape(push, first)]
    return jax.lax.fori_loop(0, num_steps, step, (basis, matrix, nothing, zero, zero))[:2]


def singular_vectors(matrix: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Singular values, the largest first, and right singular vectors, as rows, of a matrix (m, n).

    It is one of `bidiagonalise`, its columns images of the rows of `basis`. Rows that are zero
    stand for nothing: they get a value of their own above all others, and no part in the others'
    vectors.
    """
    absent = jnp.all(basis[: len(matrix)] == 0, axis=1)
    above = jnp.where(absent, 1 + 2 * jnp.linalg.norm(matrix), 0)
    index = jnp.arange(len(matrix))
    _, values, vectors = jnp.linalg.svd(matrix.at[index, index].add(above), full_matrices=False)
    return values, vectors


def squared_norm(image: Image) -> jax.Array:
    """|u|^2."""
    return trees.total([jnp.square(piece) for piece in image])


def _orthogonalised(vector: jax.Array, basis: jax.Array) -> jax.Array:
    """`vector` less its components along the orthonormal (or zero) rows; twice is enough."""
    for _ in range(2):
        vector = vector - (basis @ vector) @ basis
    return vector
