"""The normal numbers of the stochastic samplers: JAX's hash, a known law, nothing used twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import threefry_2x32

from haiku_posteriors.core import approximate_normals

# The law of the sum of four bytes: at 0, 1, ..., 1020.
BYTE = np.full(256, 1 / 256)
PROBABILITIES = np.convolve(np.convolve(BYTE, BYTE), np.convolve(BYTE, BYTE))


def test_the_hash_is_threefry(monkeypatch):
    """By its authors' published values for 13 rounds, and with 20 rounds that of JAX."""
    for key, counter, expected in (
        (2 * [0x00000000], 2 * [0x00000000], (0x9D1C5EC6, 0x8BD50731)),
        (2 * [0xFFFFFFFF], 2 * [0xFFFFFFFF], (0xFD36D048, 0x2D17272C)),
    ):
        words = approximate_normals._threefry(
            *jnp.asarray([key, *([c] * 2 for c in counter)], jnp.uint32)
        )
        assert tuple(int(word[0]) for word in words) == expected
    monkeypatch.setattr(approximate_normals, "NUM_ROUNDS", 20)
    key = jax.random.key_data(jax.random.key(3))
    counters = jnp.arange(200, dtype=jnp.uint32)
    np.testing.assert_array_equal(
        jnp.concatenate(approximate_normals._threefry(key, *jnp.split(counters, 2))),
        threefry_2x32(key, counters),
    )


def test_the_law_has_the_moments_of_the_normal_one():
    """By summation over all 1,021 values, no sampling: to the tenth, the odd ones by symmetry."""
    values = np.asarray(approximate_normals._near_normal(jnp.arange(1021, dtype=jnp.uint32)), float)
    np.testing.assert_allclose(values, -values[::-1], atol=1e-6)
    assert np.all(np.diff(values) > 0)
    for power, moment in ((2, 1), (4, 3), (6, 15), (8, 105), (10, 945)):
        np.testing.assert_allclose(PROBABILITIES @ values**power, moment, rtol=1e-5)
    assert 5.2 < values.max() < 5.3
    below = np.cumsum(PROBABILITIES)
    normal = scipy.stats.norm.cdf(values)
    distance = max(np.abs(below - normal).max(), np.abs(below - PROBABILITIES - normal).max())
    assert distance < 0.002


def test_numbers_have_this_law():
    """2 million numbers against the probabilities of all values: by Pearson's statistic, and tails.

    A correct generator would fail each of them once in about a million choices of the seed.
    """
    size = 2_000_000
    numbers = np.asarray(
        approximate_normals.approximate_normal_like(jax.random.key(0), jnp.zeros(size)), float
    )
    values = np.asarray(approximate_normals._near_normal(jnp.arange(1021, dtype=jnp.uint32)), float)
    counts = np.bincount(np.searchsorted(values, numbers - 1e-4), minlength=1021)
    often = size * PROBABILITIES > 20
    expected = size * PROBABILITIES[often]
    statistic = np.sum((counts[often] - expected) ** 2 / expected)
    assert abs(statistic - often.sum()) < 5 * np.sqrt(2 * often.sum())
    for limit in (1.0, 2.0, 3.0, 4.0):
        expected_tail = size * PROBABILITIES[values > limit].sum()
        for count in (np.sum(numbers > limit), np.sum(numbers < -limit)):
            assert abs(count - expected_tail) < 5 * np.sqrt(expected_tail), limit


def test_numbers_are_independent():
    """Between leaves, keys, the two words of a hash and neighbours: 5 / sqrt(n) from 0.

    Of the numbers, and of their squares, in which a reuse with another sign would show.
    """
    size = 50_000
    tree = {"a": jnp.zeros((size // 2, 2)), "b": jnp.zeros(size)}
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(4)]
    trees = [approximate_normals.approximate_normal_like(key, tree) for key in keys]
    rows = np.stack([np.ravel(leaf) for tree in trees for leaf in jax.tree.leaves(tree)])
    rows = np.concatenate([rows, np.roll(rows[:1], 1), np.roll(rows[:1], 2)])
    for values in (rows, rows**2):
        apart = np.corrcoef(values) - np.eye(len(rows))
        assert np.abs(apart).max() < 5 / np.sqrt(size)


def test_a_chain_has_the_same_numbers_alone_and_among_others():
    keys = jax.random.split(jax.random.key(0), 3)
    shape = jnp.zeros(5)
    together = jax.vmap(approximate_normals.approximate_normal_like, (0, None))(keys, shape)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_allclose(
            approximate_normals.approximate_normal_like(key, shape), row, rtol=1e-6
        )


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_type_and_shape_are_the_trees(implementation, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        tree = {"a": jnp.zeros((2, 3), dtype), "b": jnp.zeros((), dtype), "c": None}
        numbers = approximate_normals.approximate_normal_like(
            jax.random.key(0, impl=implementation), tree
        )
        assert jax.tree.structure(numbers) == jax.tree.structure(tree)
        for leaf, like in zip(jax.tree.leaves(numbers), jax.tree.leaves(tree), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.weak_type) == (like.shape, dtype, False)


def test_an_empty_tree_has_no_numbers():
    assert approximate_normals.approximate_normal_like(jax.random.key(0), {"a": None}) == {
        "a": None
    }
