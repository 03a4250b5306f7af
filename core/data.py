"""Rows of data with weights, so that one sum is the full log-likelihood or an estimate of it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.errors import UserError

# What a network takes: one array (rows, ...), or several of them, a dict or a tuple.
Inputs = Any


class Placement(NamedTuple):
    """Where rows that a sum goes over should be, so that devices share the work.

    Attributes:
      sharding: of an array with a leading axis of rows.
      multiple_of: what the number of rows has to be a multiple of.
      num_blocks: of rows that are summed apart and then in a fixed order (`core.fixed_sums`); None
        to leave the order to the compiler, for which it depends on the number of devices.
    """

    sharding: jax.sharding.NamedSharding
    multiple_of: int
    num_blocks: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """Rows and the weight with which each enters the log-likelihood.

    Attributes:
      inputs: (rows, ...), or several such arrays.
      targets: (rows, ...).
      weights: (rows,). 1 for a datum, 0 for padding; N / n for a datum in a minibatch of n of N.
      num_rows: N, the number of data. Rows from N on are padding. Static, because minibatches are
        drawn from the data alone, whatever padding the number of devices asks for.
      placement: of minibatches of these rows; None to leave it to the compiler.
    """

    inputs: Inputs
    targets: jax.Array
    weights: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})


def count_rows(inputs: Inputs) -> int:
    """The number of rows, of which several inputs must have equally many."""
    counts = {len(leaf) for leaf in jax.tree.leaves(inputs)}
    if len(counts) != 1:
        found = ", ".join(map(str, sorted(counts)))
        raise UserError(f"The inputs must have equally many rows, not {found or 'none'}.")
    return counts.pop()


def take_rows(inputs: Inputs, indices: jax.Array | np.ndarray | slice) -> Inputs:
    """Some rows of one input or of several."""
    return jax.tree.map(lambda leaf: leaf[indices], inputs)


def make_data(inputs: Inputs, targets: np.ndarray, multiple_of: int = 1) -> Data:
    """Host arrays as `Data`, padded with rows of weight 0 to a multiple of `multiple_of` rows."""
    num_rows = count_rows(inputs)
    if num_rows == 0:
        raise UserError("The data have no rows.")
    if len(targets) != num_rows:
        raise UserError(f"There are {num_rows} rows of inputs but {len(targets)} of targets.")
    index, real = padded_index(num_rows, multiple_of)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(inputs)]
    floats = [dtype for dtype in dtypes if np.issubdtype(dtype, np.floating)]
    weights = real.astype(floats[0] if floats else _default_float())
    return Data(take_rows(inputs, index), targets[index], weights, num_rows)  # type: ignore[arg-type]


def padded_index(num_rows: int, multiple_of: int) -> tuple[np.ndarray, np.ndarray]:
    """Row indices, padded to a multiple of `multiple_of`, and whether each is a row or padding.

    Padding repeats the first row instead of zeros, so that no network turns it into a NaN.
    """
    position = np.arange(-(-num_rows // multiple_of) * multiple_of)
    real = position < num_rows
    return np.where(real, position, 0), real


def pad(data: Data, multiple_of: int) -> Data:
    """The data with rows of weight 0 added until their number is a multiple of `multiple_of`."""
    rows = data.weights.shape[0]
    if rows % multiple_of == 0:
        return data
    index, real = padded_index(rows, multiple_of)
    weights = jnp.where(real, data.weights[index], 0.0)
    return dataclasses.replace(
        data, inputs=take_rows(data.inputs, index), targets=data.targets[index], weights=weights
    )


def num_minibatches(num_rows: int, batch_size: int) -> int:
    """How many minibatches an epoch has: the fewest of at most `batch_size` rows each."""
    if not 1 <= batch_size <= num_rows:
        raise UserError(
            f"batch_size must be between 1 and the number of training rows ({num_rows}), "
            f"not {batch_size}."
        )
    return -(-num_rows // batch_size)


def minibatch_indices(
    rng_key: jax.Array, num_rows: int, batch_size: int, float_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """A random partition of the rows into minibatches whose sizes differ by one at most.

    Each minibatch is a uniformly random subset of n rows weighted by N / n, so that each of them
    alone gives an unbiased estimate of the full sum, and together they visit every row once,
    whether or not the batch size divides N.

    Returns:
      Row indices and weights, both (minibatches, rows per minibatch); where N is not divisible,
      the last column is a repeated row of weight 0 in the minibatches that are one row short.
    """
    batches = num_minibatches(num_rows, batch_size)
    index, real = (array.reshape(-1, batches).T for array in padded_index(num_rows, batches))
    order = jax.random.permutation(rng_key, num_rows)
    sizes = real.sum(axis=1, keepdims=True).astype(float_dtype)
    return order[index], jnp.where(real, num_rows / sizes, jnp.zeros((), float_dtype))


def take(data: Data, indices: jax.Array | np.ndarray, weights: jax.Array) -> Data:
    """The minibatch of the given rows, spread over devices if the data say how."""
    if data.placement is not None:
        index, real = padded_index(len(indices), data.placement.multiple_of)
        indices, weights = indices[index], jnp.where(real, weights[index], 0.0)
    inputs = take_rows(data.inputs, indices)
    return spread(Data(inputs, data.targets[indices], weights, data.num_rows, data.placement))


def spread(data: Data) -> Data:
    """The same rows, shared by the devices if the data say how: a sum over them is then, too."""
    if data.placement is None or data.placement.num_blocks is not None:
        return data
    sharding = data.placement.sharding
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding), data)


def _default_float() -> np.dtype:
    return np.dtype(jnp.zeros(()).dtype)
