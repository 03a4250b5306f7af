"""Normal numbers for samplers that need one a parameter at every step.

`jax.random.normal` costs as much as a gradient of a small network: 9 to 18 ns a number on a CPU.
Stochastic samplers do not need that much of a number. A discretisation of Langevin dynamics whose
error is O(eps^p) keeps that order with any noise that has the first 2p + 1 moments of the normal
law (Milstein & Tretyakov 2004, chapter 2), and these samplers have p = 1, SGHMC 2 at full batches.
The numbers here have the first eleven:

    x = a_1 v + a_3 v^3 + ... + a_9 v^9,        v the sum of four random bytes, centred and scaled,

with coefficients that solve E[x^2] = 1, E[x^4] = 3, ..., E[x^10] = 945. A number is one of 1,021
values, 0.007 apart in the middle and 5.3 at most; its distribution function is within 0.002 of the
normal one, of which 0.0014 is the lattice. The bytes are JAX's hash of a counter, with 13 rounds:
the fewest that pass all known tests (Salmon et al. 2011). Two numbers come from each hash.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core.trees import Params

# a_1, a_3, ..., a_9: see `tests/core/test_noise.py`, which derives the moments from them.
COEFFICIENTS = (0.96593446, 2.3028019e-3, 5.1313851e-3, -9.1696402e-4, 6.7336468e-5)
NUM_ROUNDS = 13
_CENTER, _SCALE = 510, 147.80054  # mean and standard deviation of the sum of four bytes
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def approximate_normal_like(rng_key: jax.Array, tree: Params) -> Params:
    """Independent values, standard normal in the sense above, in the shape of `tree`.

    Other types than float32 and other generators than JAX's default fall back on
    `jax.random.normal`.
    """
    flat, unravel = ravel_pytree(tree)
    if flat.dtype != jnp.float32 or str(jax.random.key_impl(rng_key)) != "threefry2x32":
        return unravel(jax.random.normal(rng_key, flat.shape, flat.dtype))
    counts = jnp.arange((flat.size + 1) // 2, dtype=jnp.uint32)
    first, second = _threefry(jax.random.key_data(rng_key), jnp.zeros_like(counts), counts)
    # Both sums in one word, and that word in memory, or each half would hash for itself.
    both = jax.lax.optimization_barrier(_sum_of_bytes(first) | _sum_of_bytes(second) << 16)
    sums = jnp.concatenate([both & 0xFFFF, both >> 16])[: flat.size]
    return unravel(_near_normal(sums))


def _near_normal(sums: jax.Array) -> jax.Array:
    """x of sums of four bytes, unsigned integers."""
    scaled = (sums.astype(jnp.int32) - _CENTER).astype(jnp.float32) * (1 / _SCALE)
    return scaled * jnp.polyval(jnp.asarray(COEFFICIENTS[::-1], scaled.dtype), scaled**2)


def _sum_of_bytes(word: jax.Array) -> jax.Array:
    pairs = (word & 0x00FF00FF) + (word >> 8 & 0x00FF00FF)
    return pairs + (pairs >> 16) & 0xFFFF


def _threefry(key: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 (Salmon et al. 2011): two words of hash for two of a counter."""
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = first + words[0], second + words[1]
    for number in range(NUM_ROUNDS):
        rotation = _ROTATIONS[number % 8]
        first = first + second
        second = first ^ (second << rotation | second >> (32 - rotation))
        if number % 4 == 3:
            group = number // 4
            first = first + words[(group + 1) % 3]
            second = second + words[(group + 2) % 3] + np.uint32(group + 1)
    return first, second
