"""The normal numbers of the stochastic samplers: JAX's hash, an exact law, nothing used twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.extend.random import threefry_2x32

from core import noise


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_bits_are_those_of_jax(size):
    """Number by number, the quantile of a 23-bit uniform made of JAX's own hash."""
    key = jax.random.fold_in(jax.random.key(3), 5)
    half = (size + 1) // 2
    counts = np.concatenate([np.zeros(half), np.arange(half)]).astype(np.uint32)
    words = np.asarray(threefry_2x32(jax.random.key_data(key), jnp.asarray(counts)))
    parts = (words.astype(np.int64) + 2**31) % 2**32 >> 9  # a part's number, 0 to 2^23 - 1
    expected = scipy.special.ndtri((parts + 0.5) / 2**23)[:size]
    actual = noise.normal_like(key, jnp.zeros(size))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_law_and_its_tails():
    """2 million numbers: Kolmogorov's test for the whole, counts for the tails, and moments.

    Each of them a correct generator would fail once in about a million choices of the seed.
    """
    size = 2_000_000
    numbers = np.asarray(noise.normal_like(jax.random.key(0), jnp.zeros(size)), float)
    assert scipy.stats.kstest(numbers, "norm").pvalue > 6e-7
    for limit in (1.0, 2.0, 3.0, 4.0):
        expected = size * scipy.stats.norm.sf(limit)
        for count in (np.sum(numbers > limit), np.sum(numbers < -limit)):
            assert abs(count - expected) < 5 * np.sqrt(expected), (limit, count, expected)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(numbers**power) - moment) < 5 * np.sqrt(variance / size), power
    assert 4.5 < np.abs(numbers).max() < 5.3


def test_numbers_are_independent():
    """Between leaves, keys, the two words of a hash and neighbours: 5 / sqrt(n) from 0.

    Of the numbers, and of their squares, in which a reuse with another sign would show.
    """
    size = 50_000
    tree = {"a": jnp.zeros((size // 2, 2)), "b": jnp.zeros(size)}
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(4)]
    trees = [noise.normal_like(key, tree) for key in keys]
    rows = np.stack([np.ravel(leaf) for tree in trees for leaf in jax.tree.leaves(tree)])
    rows = np.concatenate([rows, np.roll(rows[:1], 1), np.roll(rows[:1], 2)])
    for values in (rows, rows**2):
        apart = np.corrcoef(values) - np.eye(len(rows))
        assert np.abs(apart).max() < 5 / np.sqrt(size)


def test_a_chain_has_the_same_numbers_alone_and_among_others():
    keys = jax.random.split(jax.random.key(0), 3)
    shape = jnp.zeros(5)
    together = jax.vmap(noise.normal_like, (0, None))(keys, shape)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_allclose(noise.normal_like(key, shape), row, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_type_and_shape_are_the_trees(implementation, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        tree = {"a": jnp.zeros((2, 3), dtype), "b": jnp.zeros((), dtype), "c": None}
        numbers = noise.normal_like(jax.random.key(0, impl=implementation), tree)
        assert jax.tree.structure(numbers) == jax.tree.structure(tree)
        for leaf, like in zip(jax.tree.leaves(numbers), jax.tree.leaves(tree), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.weak_type) == (like.shape, dtype, False)
            assert np.all(leaf != 0)


def test_an_empty_tree_has_no_numbers():
    assert noise.normal_like(jax.random.key(0), {"a": None}) == {"a": None}
