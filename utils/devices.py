"""Where arrays live: a mesh with axes `chain` and `data`. Nothing else knows the devices.

The log-joint is written once, as a plain sum over rows, and everything runs under `jax.jit` on
global arrays; the compiler adds the collectives. Random numbers depend on global indices, so that
results do not depend on the number of devices beyond the rounding of sums.
"""

import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from haiku_posteriors.core.data import Data, Inputs, make_data
from haiku_posteriors.core.errors import UserError

CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


def make_mesh(num_chains: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """As many devices as divide the chains go to `chain`; the rest of them share the rows."""
    devices = jax.devices() if devices is None else devices
    chain = math.gcd(num_chains, len(devices))
    return jax.make_mesh(
        (chain, len(devices) // chain),
        ("chain", "data"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )


def chains_take_turns(mesh: Mesh) -> bool:
    """Whether the chains of a device run one after another, and not as one batch.

    On a CPU they should: batched matrix products and convolutions take up to 3.3 times as long
    there as the same ones in turn, and less only where a step takes some 10 us
    (benchmarks/chains.py).
    """
    return batches_are_slow(mesh) and mesh.shape["chain"] == 1


def batches_are_slow(mesh: Mesh) -> bool:
    """Whether many networks had better take turns on a device: on a CPU, see above."""
    return mesh.devices.flat[0].platform == "cpu"


def chain_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays with a leading chain axis: spread over `chain`, replicated over `data`."""
    return NamedSharding(mesh, PartitionSpec("chain"))


def replicated(mesh: Mesh) -> NamedSharding:
    """For arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def draw_placement(mesh: Mesh, num_draws: int) -> Callable[[jax.Array], jax.Array]:
    """In a program, spreads arrays with a leading axis of draws over `data`, if it divides them.

    For work that does not involve the rows, which each device would otherwise repeat.
    """
    if num_draws % mesh.shape["data"]:
        return lambda array: array
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return lambda array: jax.lax.with_sharding_constraint(array, sharding)


def place_data(inputs: Inputs, targets: np.ndarray, mesh: Mesh, num_microbatches: int = 1) -> Data:
    """Puts rows on the devices, padded so that devices and microbatches divide them."""
    data = make_data(inputs, targets, multiple_of=mesh.shape["data"] * num_microbatches)
    return jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))


def refuse_too_large(num_bytes: float, what: str) -> None:
    """Refuses what no device here can hold; on a CPU, XLA would end the process without a word."""
    statistics = jax.devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit") or _main_memory()
    if num_bytes > limit:
        raise UserError(
            f"{what} needs {num_bytes / 1e9:.3g} GB of memory and there are {limit / 1e9:.3g} GB: "
            "fewer chains or members, a smaller batch_size, or more pieces by --num_microbatches "
            "need less."
        )


def _main_memory() -> float:
    """Bytes of the machine, or of the container that this process is in."""
    installed = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        return min(installed, float(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # there is none, or it says "max"
        return installed


def num_bytes(tree: Any) -> int:
    """Of all arrays, which may be shapes only."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def to_host(tree: Any) -> Any:
    """Global arrays as NumPy arrays."""
    return jax.tree.map(np.asarray, jax.device_get(tree))
