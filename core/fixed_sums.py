"""Sums over rows in an order that does not depend on the number of devices.

    s = (((b_1 + b_2) + (b_3 + b_4)) + ...) + ...,        b_j = sum over the rows of block j

The rows are cut into a fixed number of blocks, a power of two. A block is summed on one device, by
a program of one shape; partial sums are added in pairs, on a device as far as its blocks go, and
then over the devices, whose partial sums are gathered and not reduced. Any number of devices that
divides the blocks so makes the same additions. Value and gradient are summed in the same pass.

What is no such sum has the same bits if every device does all of it (`on_every_device`) and if the
compiler keeps to the operations as they are written (AS_WRITTEN): it optimises a program for one
device in another order than one for several, and where it fuses operations, rewrites them or
evaluates them itself, it rounds otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.trees import Params

# For `jax.jit`: without the passes that change what is rounded. (Within a fused kernel a product
# and a sum become one operation; so they do in a loop that is made one kernel.)
AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp,constant_folding,fusion,small-while-loop-hoisting"}


def sum_in_blocks(
    function: Callable[[Params, Data], jax.Array], params: Params, data: Data
) -> jax.Array:
    """function(params, data), a sum over rows, in the order above.

    Reverse-mode differentiation only, and once.

    Args:
      function: (params, rows) -> a scalar, the sum over these rows.
      params: by which it may be differentiated.
      data: with a placement that has `num_blocks`, in a multiple of as many rows; all of them are
        on every device.
    """
    mesh, axis = _mesh_and_axis(data)

    def over_devices(function: Callable[[Params, Data], Any]) -> Callable[[Params, Data], Any]:
        def sum_of_device(params: Params, data: Data) -> Any:
            parts = jax.lax.map(lambda block: function(params, block), _own_blocks(data))
            return add_in_pairs(jax.lax.all_gather(add_in_pairs(parts), axis))

        return on_every_device(sum_of_device, mesh)

    @jax.custom_vjp
    def total(params: Params, data: Data) -> jax.Array:
        return over_devices(function)(params, data)

    def forward(params: Params, data: Data) -> tuple[jax.Array, Params]:
        return over_devices(jax.value_and_grad(function))(params, data)

    def backward(gradient: Params, cotangent: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(lambda leaf: cotangent * leaf, gradient), None

    total.defvjp(forward, backward)
    return total(params, data)


def map_in_blocks(function: Callable[[Data], Any], data: Data) -> Any:
    """function(data), which gives arrays with a leading axis of rows, block by block.

    Args:
      function: rows -> arrays, of each row for itself.
      data: as for `sum_in_blocks`.
    """
    mesh, axis = _mesh_and_axis(data)

    def map_on_device(data: Data) -> Any:
        found = jax.lax.map(function, _own_blocks(data))
        gathered = jax.lax.all_gather(found, axis, tiled=True)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), gathered)

    return on_every_device(map_on_device, mesh)(data)


def _mesh_and_axis(data: Data) -> tuple[Mesh, str]:
    assert data.placement is not None
    mesh = data.placement.sharding.mesh
    assert isinstance(mesh, Mesh)
    (axis,) = data.placement.sharding.spec
    return mesh, axis


def _own_blocks(data: Data) -> Data:
    """Those of this device, (its blocks, rows of a block, ...)."""
    mesh, axis = _mesh_and_axis(data)
    assert data.placement is not None and data.placement.num_blocks is not None
    num_blocks = data.placement.num_blocks
    count = num_blocks // mesh.shape[axis]

    def cut(leaf: jax.Array) -> jax.Array:
        blocks = leaf.reshape(num_blocks, -1, *leaf.shape[1:])
        return jax.lax.dynamic_slice_in_dim(blocks, jax.lax.axis_index(axis) * count, count)

    return jax.tree.map(cut, data)


def on_every_device(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The same program on every device, from arrays and to arrays that all of them hold whole.

    What `sum_in_blocks` does not share within is repeated by each, and not partitioned by the
    compiler, which does that in its own way for every number of devices.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:  # within such a program already
        return function
    whole = PartitionSpec()
    # What is gathered is the same everywhere, and `check_vma` cannot tell.
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def add_in_pairs(parts: Any) -> Any:
    """The sum over the leading axis of every leaf, whose length is a power of two."""
    count = jax.tree.leaves(parts)[0].shape[0]
    while count > 1:
        count //= 2
        parts = jax.tree.map(lambda leaf: jnp.add(leaf[0::2], leaf[1::2]), parts)
    return jax.tree.map(lambda leaf: leaf[0], parts)
