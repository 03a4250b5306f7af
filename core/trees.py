"""Parameters by name: a pytree is walked with the path of each leaf, such as `linear/w`."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

Params = Any  # a pytree of arrays; Haiku's is a dict of dicts


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf: the keys on the way to it, joined by `/`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def module_name(name: str) -> str:
    """The module of a leaf: its name up to the last slash."""
    return name.rpartition("/")[0]


def map_with_name(function: Callable[..., Any], tree: Params, *rest: Params) -> Params:
    """`jax.tree.map` whose function gets the leaf's name first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(leaf_name(path), *leaves), tree, *rest
    )


def named_leaves(tree: Params) -> dict[str, jax.Array]:
    """All leaves by name, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def from_named_leaves(template: Params, leaves: dict[str, Any]) -> Params:
    """The inverse of `named_leaves`, with the structure of `template`."""
    return map_with_name(lambda name, _: leaves[name], template)


def partition(tree: Params, pattern: str) -> tuple[Params, Params]:
    """Splits a tree by whether `pattern` is found in a leaf's name.

    Both parts keep the whole structure, with `None` (an empty subtree) where a leaf went to the
    other part, so that `jax.tree.map` over one part touches its own leaves only.
    """
    matches = re.compile(pattern).search
    return (
        map_with_name(lambda name, leaf: leaf if matches(name) else None, tree),
        map_with_name(lambda name, leaf: None if matches(name) else leaf, tree),
    )


def merge(first: Params, second: Params) -> Params:
    """The inverse of `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None
    )


def size(tree: Params) -> int:
    """The number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def total(tree: Params) -> jax.Array:
    """The sum of all values in a tree; 0 for an empty one."""
    sums = [jnp.sum(leaf) for leaf in jax.tree.leaves(tree)]
    return sum(sums[1:], start=sums[0]) if sums else jnp.zeros(())


def normal_like(rng_key: jax.Array, tree: Params) -> Params:
    """Independent standard normal values in the shape of `tree`."""
    # One draw for all leaves, because each draw adds half a second to compiling.
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.random.normal(rng_key, flat.shape, flat.dtype))


def all_finite(tree: Params) -> jax.Array:
    """Whether every floating-point value in the tree is finite; a boolean scalar."""
    checks = [
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack(checks)) if checks else jnp.array(True)


def select(condition: jax.Array, if_true: Params, if_false: Params) -> Params:
    """One tree or the other, by a boolean scalar."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
