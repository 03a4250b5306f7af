"""Sums over rows in an order that does not depend on the number of devices.

    s = (((b_1 + b_2) + (b_3 + b_4)) + ...) + ...,        b_j = sum over the rows of block j

The rows are cut into a fixed number of blocks, a power of two. A block is summed on one device, by
a program of one shape; partial sums are added in pairs, on a device as far as its blocks go, and
then over the devices, whose partial sums are gathered and not reduced. Any number of devices that
divides the blocks so makes the same additions. Value and gradient are summed in the same pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.trees import Params


def sum_in_blocks(
    function: Callable[[Params, Data], jax.Array], params: Params, data: Data
) -> jax.Array:
    """function(params, data), a sum over rows, in the order above.

    Reverse-mode differentiation only, and once.

    Args:
      function: (params, rows) -> a scalar, the sum over these rows.
      params: by which it may be differentiated.
      data: with a placement that has `num_blocks`, in a multiple of as many rows.
    """
    placement = data.placement
    assert placement is not None and placement.num_blocks is not None
    (axis,) = placement.sharding.spec
    num_devices = placement.sharding.mesh.shape[axis]
    on_device = placement.num_blocks // num_devices

    def over_devices(function: Callable[[Params, Data], Any]) -> Callable[[Params, Data], Any]:
        def sum_of_device(params: Params, data: Data) -> Any:
            blocks = jax.tree.map(lambda leaf: leaf.reshape(on_device, -1, *leaf.shape[1:]), data)
            # 1, but the compiler does not know: loops of as many turns it cannot unroll.
            one = jnp.isfinite(data.weights[0]).astype(jnp.int32)
            own = add_in_pairs(_one_by_one(lambda block: function(params, block), blocks, one))
            gathered = jax.lax.all_gather(own, axis)
            # A loop of one turn: what follows is not compiled together with the additions, whose
            # number depends on the devices.
            zeros = jax.tree.map(jnp.zeros_like, own)
            return jax.lax.fori_loop(0, one, lambda *_: add_in_pairs(gathered), zeros)

        return jax.shard_map(
            sum_of_device,
            mesh=placement.sharding.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axis)),
            out_specs=PartitionSpec(),
            axis_names={axis},
            check_vma=False,  # what is gathered is the same everywhere, and this cannot tell
        )

    @jax.custom_vjp
    def total(params: Params, data: Data) -> jax.Array:
        return over_devices(function)(params, data)

    def forward(params: Params, data: Data) -> tuple[jax.Array, Params]:
        return over_devices(jax.value_and_grad(function))(params, data)

    def backward(gradient: Params, cotangent: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(lambda leaf: cotangent * leaf, gradient), None

    total.defvjp(forward, backward)
    return total(params, data)


def _one_by_one(function: Callable[[Any], Any], blocks: Any, one: jax.Array) -> Any:
    """`jax.lax.map`, by a loop of as many turns times `one`.

    A few turns that it knew of the compiler would unroll, and sum in another order what it then
    sees side by side.
    """
    count = jax.tree.leaves(blocks)[0].shape[0]

    def block(index: jax.Array | int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], blocks)

    def body(index: jax.Array, results: Any) -> Any:
        return jax.tree.map(
            lambda all_of_them, found: all_of_them.at[index].set(found),
            results,
            function(block(index)),
        )

    shapes = jax.eval_shape(function, jax.eval_shape(block, 0))
    empty = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)
    return jax.lax.fori_loop(0, count * one, body, empty)


def add_in_pairs(parts: Any) -> Any:
    """The sum over the leading axis of every leaf, whose length is a power of two."""
    count = jax.tree.leaves(parts)[0].shape[0]
    while count > 1:
        count //= 2
        parts = jax.tree.map(lambda leaf: jnp.add(leaf[0::2], leaf[1::2]), parts)
    return jax.tree.map(lambda leaf: leaf[0], parts)
