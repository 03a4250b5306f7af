"""Normal numbers for samplers that need one a parameter at every step.

`jax.random.normal` costs as much as a gradient of a small network. Half of that goes into hashing
twice for what one hash gives and, on CPUs, into a loop around the hash's rounds that the compiler
cannot fuse with what follows. Here each hash of JAX's own generator gives two numbers, in one pass.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from core.trees import Params

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def normal_like(rng_key: jax.Array, tree: Params) -> Params:
    """Independent standard normal values in the shape of `tree`.

    The law is that of `jax.random.normal`, by the same hash, but the numbers are others. In float32
    each is sqrt(2) erfinv(u), u uniform on the middles of 2^23 equal parts of (-1, 1), so that
    the largest has modulus 5.3. Other types and other generators than JAX's default fall back on
    `jax.random.normal`.
    """
    flat, unravel = ravel_pytree(tree)
    if flat.dtype != jnp.float32 or str(jax.random.key_impl(rng_key)) != "threefry2x32":
        return unravel(jax.random.normal(rng_key, flat.shape, flat.dtype))
    return unravel(_normal(rng_key, flat.size))


@functools.partial(jax.jit, static_argnums=1)
def _normal(rng_key: jax.Array, size: int) -> jax.Array:
    counts = jnp.arange((size + 1) // 2, dtype=jnp.uint32)
    bits = jnp.concatenate(_threefry(jax.random.key_data(rng_key), jnp.zeros_like(counts), counts))
    # 24 bits with their sign, the lowest of them 1: odd integers, which float32 holds exactly.
    odd = jax.lax.bitcast_convert_type(bits[:size], jnp.int32) >> 8 | 1
    return math.sqrt(2) * jax.lax.erf_inv(odd.astype(jnp.float32) * 2**-23)


def _threefry(key: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011): two words of hash for two of a counter."""
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = first + words[0], second + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ (second << rotation | second >> (32 - rotation))
        first = first + words[(group + 1) % 3]
        second = second + words[(group + 2) % 3] + np.uint32(group + 1)
    return first, second
