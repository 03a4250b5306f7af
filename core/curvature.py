"""Scales of a posterior at a point: diagonal curvature, its largest eigenvalue, gradient noise.

With U = -log p_T(w, D), H its Hessian at w and P the prior's precision over T:

    diagonal     max(H_ii, P_ii), from products with H: exact by unit vectors, or the mean of
                 v * H v over random signs v (Bekas, Kokiopoulou & Saad 2007), whose variance is
                 sum_{j != i} H_ij^2 over the number of probes
    largest      eigenvalue of M^-1/2 H M^-1/2 for a diagonal M, by power iteration
    noise        variance of the gradient of U over the minibatches of an epoch, by coordinate

At a mode of a Gaussian posterior 1 / sqrt(H_ii) is the standard deviation of the best mean-field
approximation. Elsewhere H_ii may be negative or smaller than the prior's part: hence the maximum.
"""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data, minibatch_indices, num_minibatches, take
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

NUM_PROBES = 200
NUM_POWER_STEPS = 30


def hessian_product(log_joint: LogJoint, params: Params, data: Data, vector: Params) -> Params:
    """H v, by forward over reverse differentiation."""
    gradient = jax.grad(lambda params: -log_joint(params, data))
    return jax.jvp(gradient, (params,), (vector,))[1]


def diagonal(
    rng_key: jax.Array,
    log_joint: LogJoint,
    params: Params,
    data: Data,
    num_probes: int = NUM_PROBES,
) -> Params:
    """max(H_ii, P_ii), a tree like `params`; P of parameters without a prior is a millionth of 1.

    Exact, up to rounding, for at most `num_probes` parameters.
    """
    flat, unravel = ravel_pytree(params)
    is_exact = flat.size <= num_probes

    def product(number: jax.Array) -> jax.Array:
        if is_exact:
            probe = jnp.zeros_like(flat).at[number].set(1)
        else:
            signs = jax.random.rademacher(jax.random.fold_in(rng_key, number), flat.shape)
            probe = signs.astype(flat.dtype)
        found = hessian_product(log_joint, params, data, unravel(probe))
        return probe * ravel_pytree(found)[0]

    count = flat.size if is_exact else num_probes
    total = jax.lax.fori_loop(
        0, count, lambda number, total: total + product(number), jnp.zeros_like(flat)
    )
    estimate = unravel(total if is_exact else total / count)
    random, point = log_joint.partition(estimate)
    scales = log_joint.prior_scales
    floors = trees.merge(
        jax.tree.map(lambda leaf, std: jnp.full_like(leaf, std**-2), random, scales),
        jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-6), point),
    )
    return jax.tree.map(
        lambda leaf, floor: jnp.maximum(leaf, floor / log_joint.temperature), estimate, floors
    )


def largest_eigenvalue(
    rng_key: jax.Array,
    log_joint: LogJoint,
    params: Params,
    data: Data,
    mass: Params,
    num_steps: int = NUM_POWER_STEPS,
) -> jax.Array:
    """Of M^-1/2 H M^-1/2 in absolute value; a lower bound that rises with `num_steps`."""
    scale = jax.tree.map(jax.lax.rsqrt, mass)

    def body(_: int, carry: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
        scaled = jax.tree.map(jnp.multiply, scale, carry[0])
        image = jax.tree.map(jnp.multiply, scale, hessian_product(log_joint, params, data, scaled))
        norm = jnp.sqrt(trees.total(jax.tree.map(jnp.square, image)))
        return jax.tree.map(lambda leaf: leaf / norm, image), norm

    start = trees.normal_like(rng_key, params)
    norm = jnp.sqrt(trees.total(jax.tree.map(jnp.square, start)))
    start = jax.tree.map(lambda leaf: leaf / norm, start)
    return jax.lax.fori_loop(0, num_steps, body, (start, jnp.zeros_like(norm)))[1]


def gradient_noise(
    rng_key: jax.Array, log_joint: LogJoint, params: Params, data: Data, batch_size: int
) -> Params:
    """Variance of a minibatch's gradient by coordinate; 0 where all rows are one minibatch."""
    if num_minibatches(data.num_rows, batch_size) == 1:
        return jax.tree.map(jnp.zeros_like, params)
    indices, weights = minibatch_indices(rng_key, data.num_rows, batch_size, data.weights.dtype)
    full = jax.grad(log_joint)(params, data)

    def add(total: Params, batch: tuple[jax.Array, jax.Array]) -> tuple[Params, None]:
        gradient = jax.grad(log_joint)(params, take(data, *batch))
        return jax.tree.map(lambda t, g, f: t + jnp.square(g - f), total, gradient, full), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(add, zeros, (indices, weights))
    return jax.tree.map(lambda leaf: leaf / len(indices), total)
