"""Estimators of 1/2 logdet(I_d + B^T B), the expensive part of an implicit posterior's entropy.

A generator g maps z in R^d to a pytree of D weights, w = g(z) + s * e with e ~ N(0, I_D) and noise
scales s in R^D. With J = dg/dz at z, of shape D x d, and B = diag(1/s) J,

    1/2 logdet(J J^T + diag(s)^2) = 1/2 logdet(I_d + B^T B) + sum_i log s_i,

a determinant of size d instead of D (arXiv 2310.06643, there with one s for all). Every eigenvalue
of A = I + B^T B is at least 1, whatever s is. Three estimators and the products Bv and B^T u they
take:

    exact            the value to rounding                   2 d of each
    singular_value   d/2 log(1 + smin(B)^2), a lower bound   K of each
    lanczos          a lower and an upper estimate           K of each per probe

None holds more than a stated number of D-vectors. B is worked on, not A, wherever the two differ by
a square: with s = 1e-3 the eigenvalues of A go from 1 to 1e6 and beyond, and float32 resolves those
near 1 only through B.

Gradients: d 1/2 logdet A = tr(A^-1 B^T dB) is the differential of 1/2 sum_i |B w_i|^2 with w_i held
fixed and sum_i w_i w_i^T = A^-1. Each estimator states its w_i; no iteration is differentiated
through. Gradients reach z and whatever g and s close over, once: second derivatives are wrong.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import trees
from haiku_posteriors.core.implicit.bidiagonalisation import (
    Image,
    Pull,
    Push,
    bidiagonalise,
    singular_vectors,
    squared_norm,
)
from haiku_posteriors.core.trees import Params

LatentMap = Callable[[jax.Array], Params]  # z of shape (d,) -> a pytree of D weights
MAX_PASSES = 5  # of `exact`, with a shift
Scale = Any  # s > 0: a number, or a pytree of arrays like the weights or a prefix of their tree


class LogDet(NamedTuple):
    """An estimate of 1/2 logdet(I_d + B^T B). All scalars.

    Attributes:
      value: the estimate to put in an objective; the only differentiable field.
      lower: a lower bound, of the kind that the estimator's docstring states.
      upper: an upper bound likewise; infinite where none is known.
      smallest_singular_value: of B. Iterations find it from above: it is at least the true one.
      residual: how far the iteration is from its end, 0 when it is there, as the estimator states.
    """

    value: jax.Array
    lower: jax.Array
    upper: jax.Array
    smallest_singular_value: jax.Array
    residual: jax.Array


def exact(generator: LatentMap, z: jax.Array, scale: Scale, *, block_size: int = 128) -> LogDet:
    """The value itself, for small d: A is built, d x d, from products with blocks of vectors.

    Rounding errors of A, of size eps |B|^2, can exceed its smallest eigenvalues and make it
    indefinite. Shifted by that much, it has a Cholesky factor, which preconditions a second pass
    (shifted CholeskyQR, arXiv 1809.11085, of I stacked on B):

        A + shift = R_1^T R_1,    W_1 = R_1^-1,    W_1^T A W_1 = R_2^T R_2,    W = W_1 R_2^-1
        A^-1 = W W^T,             1/2 logdet A = -log det W,                   error O(eps |B|)

    Where singular values span five or more decades of float32, W_1^T A W_1 is still too ill for a
    factor without a shift, which its smallest pivot shows: the shifted pass is then repeated, each
    time with another set of products, until it is not. Where |B| exceeds 1 / eps, 8e6 in float32,
    small singular values are beyond its reach, and the value may be NaN.

    Gradient: exact, the w_i being the columns of W.

    Args:
      generator: g.
      z: where g is linearised, (d,). d may exceed D.
      scale: s.
      block_size: number of products at a time; the memory is that of `block_size` D-vectors and a
        few d x d matrices.

    Returns:
      value = lower = upper, and residual 0. Of the smallest singular value, 1 + smin^2 is good to
      one per cent.
    """
    whitened = _whitened(generator, scale)
    push, pull = _products(whitened, z)

    def gram(vectors: jax.Array) -> jax.Array:
        """The matrix of v_i^T A v_j for the rows v_i."""
        product = vectors @ _map(lambda v: v + pull(push(v)), vectors, block_size).T
        return (product + product.T) / 2

    def inverse_factor(matrix: jax.Array) -> jax.Array:
        """The lower triangle T with T matrix T^T = I."""
        return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(matrix), identity, lower=True)

    eps = float(jnp.finfo(z.dtype).eps)

    def shifted_pass(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Better rows W_i^T, and W_i^T A W_i, from those before."""
        rows = inverse_factor(matrix + 10 * eps * jnp.trace(matrix) * identity) @ rows
        return rows, gram(rows)

    def is_ill(passed: tuple[jax.Array, jax.Array]) -> jax.Array:
        pivots = jnp.diagonal(jnp.linalg.cholesky(passed[1]))
        return ~(jnp.min(jnp.square(pivots)) > 100 * eps)  # also where there is no factor: NaN

    identity = jnp.eye(z.size, dtype=z.dtype)
    _, (rows, matrix) = jax.lax.while_loop(
        lambda carry: (carry[0] < MAX_PASSES) & is_ill(carry[1]),
        lambda carry: (carry[0] + 1, shifted_pass(*carry[1])),
        (1, shifted_pass(identity, gram(identity))),
    )
    rows = inverse_factor(matrix) @ rows  # W^T
    fixed = -jnp.sum(jnp.log(jnp.diagonal(rows)))
    smallest = jnp.sqrt(jnp.maximum(1 / _largest_eigenvalue(rows @ rows.T) - 1, 0))  # 1 / min A
    value = _with_gradient(whitened, z, fixed, rows, block_size)
    return LogDet(value, fixed, fixed, smallest, jnp.zeros_like(fixed))


def singular_value(
    generator: LatentMap, z: jax.Array, scale: Scale, start: jax.Array, *, num_steps: int = 20
) -> tuple[LogDet, jax.Array]:
    """The bound d/2 log(1 + smin(B)^2) of arXiv 2310.06643, by K steps of bidiagonalisation.

    x is the unit vector that minimises |B x| over the Krylov space of B^T B and the start, see
    `bidiagonalise`. The iterates of LOBPCG without a preconditioner, the paper's choice, lie in
    the same space after as many products, so that theirs is never the smaller |B x|.

    A bound only when converged: |B x| >= smin for every x, so an early stop *overstates* it, even
    beyond the exact value. The residual r = |B^T B x - |Bx|^2 x| tells: some eigenvalue of B^T B
    lies within r of |Bx|^2. There is no preconditioner, and where the small singular values lie
    close together compared with the largest, hundreds of steps are needed; hence `start`.

    Gradient: w_1 = x sqrt(d / (1 + |Bx|^2)), that of d/2 log(1 + |Bx|^2) with x held fixed.

    Args:
      generator: g.
      z: where g is linearised, (d,). Where d exceeds D, smin is 0 and so is the bound.
      scale: s.
      start: where to start, (d,), not zero: random at first, then the vector of an earlier call.
      num_steps: K, at most d of which are done; one product with B and one with B^T each.

    Returns:
      The estimate, and x. Its `lower` is the bound with |Bx|^2 - r in place of |Bx|^2, a true bound
      if the eigenvalue near |Bx|^2 is the smallest one; `upper` is infinite; `residual` is r.
    """
    whitened = _whitened(generator, scale)
    push, pull = _products(whitened, z)
    basis, matrix = bidiagonalise(push, pull, start, min(num_steps, z.size))
    values, vectors = singular_vectors(matrix[:, :-1], basis[:-1])
    smallest, coefficients = values[-1], vectors[-1]
    x = coefficients @ basis[:-1]
    x = x / jnp.linalg.norm(x)
    # B^T B V = V L^T L + alpha_K beta_K v_{K+1} e_K^T
    error = jnp.abs(matrix[-1, -2] * matrix[-1, -1] * coefficients[-1])

    def bound(square: jax.Array) -> jax.Array:
        return z.size / 2 * jnp.log1p(square)

    square = smallest**2
    vector = jnp.sqrt(z.size / (1 + square)) * x
    value = _with_gradient(whitened, z, bound(square), vector[None], 1)
    lower = bound(jnp.maximum(square - error, 0))
    return LogDet(value, lower, jnp.full_like(lower, jnp.inf), smallest, error), x


def sign_probes(rng_key: jax.Array, num_probes: int, z: jax.Array) -> jax.Array:
    """Random signs (num_probes, d) for `lanczos`: of independent entries, the least noisy."""
    return jax.random.rademacher(rng_key, (num_probes, z.size), z.dtype)


def lanczos(
    generator: LatentMap,
    z: jax.Array,
    scale: Scale,
    probes: jax.Array,
    *,
    num_steps: int = 20,
    probes_at_once: int | None = None,
) -> LogDet:
    """Stochastic Lanczos quadrature between bounds: E[v^T log(A) v] = logdet A if E[v v^T] = I.

    K steps of `bidiagonalise` from v give V^T A V = I + L^T L. Then

        |v|^2 e_1^T log(I + L^T L) e_1     is the K-point Gauss rule for v^T log(A) v:  >= it
        |v|^2 e_1^T log(I + M^T M) e_1     is the Gauss-Radau rule with a node at 1:    <= it,

    where M = [L, beta_K e_K], K x (K + 1), has the node for its null space (Golub & Meurant 2010,
    chapter 6). This holds for each v. Both rules tighten with K and are exact once K reaches the
    number of distinct eigenvalues of A, at most d. Over v they are bounds in expectation, with the
    noise of the probes.

    Gradient: w = A^-1/2 v / sqrt(num_probes), with A^-1/2 v ~ |v| V (I + L^T L)^-1/2 e_1 from the
    same K steps. In expectation it is that of logdet A but for the bias of the K-step root, which
    vanishes as `residual` does. It is not the derivative of the K-step value; along a common factor
    of B it is that of the upper estimate. (1/2 <Bx, Bv> with x = A^-1 v fixed would have the same
    expectation; on MLP generators it was 1.3 to 300 times as noisy, most over wide spectra.)

    Args:
      generator: g.
      z: where g is linearised, (d,). d may exceed D.
      scale: s.
      probes: v, (num_probes, d), see `sign_probes`.
      num_steps: K, at most d of which are done; one product with B and one with B^T each.
      probes_at_once: how many to process side by side, each with a few D-vectors; all by default.

    Returns:
      value = lower = the Radau rule, upper = the Gauss rule, averaged over probes. `residual` is
      the mean of |A x - v| / |v|, x the K-step (conjugate gradient) solution of A x = v. The
      smallest singular value is that of L, the smallest over probes.
    """
    num_steps = min(num_steps, z.size)
    at_once = len(probes) if probes_at_once is None else probes_at_once
    whitened = _whitened(generator, scale)
    push, pull = _products(whitened, z)

    def quadrature(v: jax.Array) -> tuple:
        square = jnp.sum(v**2)
        basis, matrix = bidiagonalise(push, pull, v, num_steps)
        values, vectors = singular_vectors(matrix, basis)
        lower = square / 2 * jnp.sum(vectors[:, 0] ** 2 * jnp.log1p(values**2))
        values, vectors = singular_vectors(matrix[:, :-1], basis[:-1])
        upper = square / 2 * jnp.sum(vectors[:, 0] ** 2 * jnp.log1p(values**2))
        solution = (vectors[:, 0] / (1 + values**2)) @ vectors
        residual = jnp.abs(matrix[-1, -2] * matrix[-1, -1] * solution[-1])
        root = jnp.sqrt(square) * (vectors[:, 0] / jnp.hypot(1, values)) @ vectors
        return lower, upper, values[-1], residual, root @ basis[:-1]

    lowers, uppers, smallest, residuals, roots = _map(quadrature, probes, at_once)
    lower, upper = jnp.mean(lowers), jnp.mean(uppers)
    value = _with_gradient(whitened, z, lower, roots / math.sqrt(len(probes)), at_once)
    return LogDet(value, lower, upper, jnp.min(smallest), jnp.mean(residuals))


def linearised_entropy(half_log_det: jax.Array, log_scale: Scale, weights: Params) -> jax.Array:
    """The entropy of w = g(z) + s * e when g is replaced by its linearisation at z.

        H = 1/2 logdet(I_d + B^T B) + sum_i log s_i + D/2 log(2 pi e)

    With J = 0 this is the entropy of a mean-field Gaussian, and with g linear that of a Gaussian
    of covariance J J^T + diag(s)^2. Otherwise it is an approximation, to be averaged over z, which
    overstates the entropy where several z give the same w. Of the averaged linearised density's
    E[-log q(w)], the term 1/2 (z^T M z - tr M), M = B^T B (I + B^T B)^-1, is left out, as in
    arXiv 2310.06643: it has mean zero if B does not depend on z, and would cost a solve.

    Args:
      half_log_det: 1/2 logdet(I_d + B^T B), e.g. `LogDet.value`.
      log_scale: log s.
      weights: arrays or shapes like g(z).

    Returns:
      H, a scalar.
    """
    logs = jax.tree.broadcast(log_scale, weights)
    sums = jax.tree.map(lambda s, w: jnp.sum(s) * (w.size // jnp.size(s)), logs, weights)
    constant = trees.size(weights) / 2 * math.log(2 * math.pi * math.e)
    return half_log_det + trees.total(sums).astype(half_log_det.dtype) + constant


def _whitened(generator: LatentMap, scale: Scale) -> Push:
    """z -> g(z) / s: B is its Jacobian."""

    def function(z: jax.Array) -> Image:
        weights = generator(z)
        scaled = jax.tree.map(jnp.divide, weights, jax.tree.broadcast(scale, weights))
        return [leaf.astype(z.dtype) for leaf in jax.tree.leaves(scaled)]

    return function


def _products(whitened: Push, z: jax.Array) -> tuple[Push, Pull]:
    """v -> B v and u -> B^T u, around one evaluation of g, through which no gradient flows."""
    _, push = jax.linearize(whitened, z)
    push = jax.lax.stop_gradient(push)  # a pytree: what it keeps of the evaluation are its leaves
    transpose = jax.linear_transpose(push, z)
    return push, lambda u: transpose(u)[0]


def _largest_eigenvalue(matrix: jax.Array) -> jax.Array:
    """Of a positive matrix, from below, by 2^8 power iterations: ten times faster than an SVD.

    All columns are iterated, and the one that has grown most is taken.
    """
    power = matrix
    for _ in range(8):
        power = power / jnp.trace(power)
        power = power @ power
    vector = power[jnp.argmax(jnp.diagonal(power))]
    return vector @ matrix @ vector / (vector @ vector)


def _with_gradient(
    whitened: Push, z: jax.Array, value: jax.Array, vectors: jax.Array, at_once: int
) -> jax.Array:
    """`value` with the gradient of 1/2 sum_i |B w_i|^2, the rows w_i of `vectors` held fixed."""
    _, push = jax.linearize(whitened, z)

    def half_square(vector: jax.Array) -> jax.Array:
        return squared_norm(push(vector)) / 2

    if at_once < len(vectors):  # else differentiation would keep what it needs of all of them
        half_square = jax.checkpoint(half_square)
    surrogate = jnp.sum(_map(half_square, vectors, at_once))
    return value + (surrogate - jax.lax.stop_gradient(surrogate))


def _map(function: Callable, rows: jax.Array, at_once: int) -> Any:
    """`jax.vmap` over rows, `at_once` of them at a time."""
    if at_once >= len(rows):
        return jax.vmap(function)(rows)
    return jax.lax.map(function, rows, batch_size=at_once)
