"""Where arrays live: a mesh of devices. Nothing else knows the devices.

The log-joint is written once, as a plain sum over rows, and everything runs under `jax.jit` on
global arrays; the compiler adds the collectives. Random numbers depend on global indices, so that
results do not depend on the number of devices beyond the rounding of sums.

    chain   chains or members; they meet nowhere, so that this axis is the cheapest
    draw    draws that a method makes of itself: those of implicit VI, particles of SMC
    data    rows; one all-reduce of the gradient
    model   large leaves of the state, cut where a device is too small for them

The rule for a mesh that is not given: as many devices as divide the chains go to `chain`, the rest
to `data`. The devices of a mesh are in JAX's order, `chain` outermost: on several hosts it is the
chains that are apart.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from haiku_posteriors.core import fixed_sums as sums
from haiku_posteriors.core.data import (
    Data,
    Inputs,
    Placement,
    count_rows,
    make_data,
    padded_index,
    take_rows,
)
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import hosts

CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
AXES = ("chain", "draw", "data", "model")
# Rows of minibatches that fit into this are on every device: a minibatch then moves no row.
ROWS_ON_EVERY_DEVICE = 2**30
NUM_BLOCKS = 16  # of rows, where the order of sums is fixed: devices must divide it
LARGE_LEAF = 2**16  # values of a leaf of the state from which on `model` cuts it


@dataclasses.dataclass
class _Chosen:
    """What the user chose: one for a process, as JAX's own configuration is.

    Attributes:
      shape: of meshes, by axis; empty for that of the rule.
      fixed_sums: whether sums over rows are those of `core.fixed_sums`.
    """

    shape: dict[str, int]
    fixed_sums: bool


_chosen = _Chosen({}, False)


def parse_mesh(text: str) -> dict[str, int]:
    """`data:4,chain:2` by axis; axes that are not named have one device."""
    shape: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition(":")
        if axis not in AXES or axis in shape or not (size.isdecimal() and int(size)):
            raise UserError(
                f"mesh '{text}' is not of the form data:4,chain:2; its axes are {', '.join(AXES)}."
            )
        shape[axis] = int(size)
    return shape


def choose_mesh(text: str | None, num_chains: int, fixed_sums: bool = False) -> None:
    """Sets the shape of all meshes of this process, for a run of `num_chains` chains.

    With `fixed_sums`, sums over rows are those of `core.fixed_sums`. All devices then share the
    rows and chains take turns: a batch of chains is computed otherwise than one of them.

    Stages with another number of chains put as many devices as divide it of those of `chain` there,
    and the others to `data`.

    Raises:
      UserError: it does not fit the devices and the chains; with those that do.
    """
    _chosen.shape, _chosen.fixed_sums = {}, fixed_sums
    count = len(hosts.devices())
    if fixed_sums and NUM_BLOCKS % count:
        divisors = ", ".join(str(n) for n in range(1, NUM_BLOCKS + 1) if NUM_BLOCKS % n == 0)
        raise UserError(
            f"deterministic_sums cuts the rows into {NUM_BLOCKS} blocks, which {count} devices "
            f"cannot share: {divisors} can."
        )
    if text is None:
        return
    shape = parse_mesh(text)
    if fixed_sums and shape.get("data", 1) != count:
        raise UserError(f"deterministic_sums needs all devices on one axis: mesh data:{count}.")
    if math.prod(shape.values()) != count or num_chains % shape.get("chain", 1):
        fitting = [
            f"chain:{chain},data:{count // chain}"
            for chain in range(1, count + 1)
            if math.gcd(num_chains, count) % chain == 0
        ]
        raise UserError(
            f"mesh '{text}' does not fit {count} device(s) and {num_chains} chain(s): what does is "
            f"{' or '.join(fitting)}, where draw or model may take the place of a part of data."
        )
    _chosen.shape = shape


def make_mesh(
    num_chains: int, devices: Sequence[jax.Device] | None = None, fixed_sums: bool | None = None
) -> Mesh:
    """The given shape, or that of the rule.

    Args:
      num_chains: of what runs there.
      devices: all by default.
      fixed_sums: whether sums over rows are those of `core.fixed_sums`; as chosen by default.
    """
    devices = hosts.devices() if devices is None else devices
    shape = dict.fromkeys(AXES, 1)
    if _chosen.fixed_sums if fixed_sums is None else fixed_sums:
        shape["data"] = len(devices)
    elif math.prod(_chosen.shape.values()) == len(devices):
        shape |= _chosen.shape
        taken = math.gcd(num_chains, shape["chain"])
        shape["data"] *= shape["chain"] // taken
        shape["chain"] = taken
    else:
        shape["chain"] = math.gcd(num_chains, len(devices))
        shape["data"] = len(devices) // shape["chain"]
    return jax.make_mesh(
        tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def chains_take_turns(mesh: Mesh) -> bool:
    """Whether the chains of a device run one after another, and not as one batch.

    On a CPU they should: batched matrix products and convolutions take up to 3.3 times as long
    there as the same ones in turn, and less only where a step takes some 10 us
    (benchmarks/chains.py).
    """
    return _chosen.fixed_sums or (batches_are_slow(mesh) and mesh.shape["chain"] == 1)


def batches_are_slow(mesh: Mesh) -> bool:
    """Whether many networks had better take turns on a device: on a CPU, see above."""
    return mesh.devices.flat[0].platform == "cpu"


def compile_for(mesh: Mesh, function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit`; with fixed sums, of one program that every device runs, as it is written.

    Args:
      mesh: where it runs.
      function: of arrays and, in `static_argnums`, of others.
      **options: of `jax.jit`.
    """
    if not _chosen.fixed_sums:
        return jax.jit(function, **options)

    def on_every_device(*arguments: Any) -> Any:
        static = {index: arguments[index] for index in options.get("static_argnums", ())}

        def program(*arrays: Any) -> Any:
            left = iter(arrays)
            given = (static[i] if i in static else next(left) for i in range(len(arguments)))
            return function(*given)

        arrays = (value for index, value in enumerate(arguments) if index not in static)
        return sums.on_every_device(program, mesh)(*arrays)

    return jax.jit(on_every_device, compiler_options=sums.AS_WRITTEN, **options)


def chain_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays with a leading chain axis: spread over `chain`, replicated over `data`."""
    return NamedSharding(mesh, PartitionSpec("chain"))


def state_shardings(mesh: Mesh, shapes: Any) -> Any:
    """For the state of all chains: large leaves are cut along `model` as well.

    Args:
      mesh: where it lives.
      shapes: of its leaves, with a leading chain axis.

    Returns:
      A tree of shardings.
    """
    size = mesh.shape["model"]

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = [axis for axis in range(1, len(leaf.shape)) if leaf.shape[axis] % size == 0]
        if math.prod(leaf.shape[1:]) < LARGE_LEAF or not axes:
            return chain_sharding(mesh)
        cut = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec("chain", *[None] * (cut - 1), "model"))

    return jax.tree.map(sharding, shapes)


def replicated(mesh: Mesh) -> NamedSharding:
    """For arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def draw_placement(
    mesh: Mesh, num_draws: int, axes: tuple[str, ...] = ("draw", "data")
) -> Callable[[jax.Array], jax.Array]:
    """In a program, spreads arrays with a leading axis of draws over `axes`, if these divide it.

    By default over those of the rows as well: for work that does not involve the rows, which each
    device of `data` would otherwise repeat.

    Raises:
      UserError: `draw` does not divide the draws.
    """
    if num_draws % mesh.shape["draw"]:
        raise UserError(
            f"mesh: draw:{mesh.shape['draw']} does not divide {num_draws} draws; what does is "
            f"{', '.join(f'draw:{n}' for n in range(1, num_draws + 1) if num_draws % n == 0)}."
        )
    if num_draws % math.prod(mesh.shape[axis] for axis in axes) or _chosen.fixed_sums:
        axes = ("draw",)
    if math.prod(mesh.shape[axis] for axis in axes) == 1:
        return lambda array: array
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    return lambda array: jax.lax.with_sharding_constraint(array, sharding)


def place_data(
    inputs: Inputs,
    targets: np.ndarray,
    mesh: Mesh,
    num_microbatches: int = 1,
    in_minibatches: bool = False,
    fixed_sums: bool | None = None,
) -> Data:
    """Puts rows on the devices, padded so that devices and microbatches divide them.

    Args:
      inputs, targets: all rows; of these a process touches those of its own devices alone.
      mesh: where they go: spread over `data`.
      num_microbatches: pieces in which they are summed over.
      in_minibatches: whether minibatches are drawn of them. Rows of up to ROWS_ON_EVERY_DEVICE
        bytes are then copied to every device; of more, a step carries its minibatch's rows.
      fixed_sums: whether sums over them are those of `core.fixed_sums`, for which every device has
        all rows; as chosen by default.
    """
    is_fixed = _chosen.fixed_sums if fixed_sums is None else fixed_sums
    multiple = (NUM_BLOCKS if is_fixed else mesh.shape["data"]) * num_microbatches
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    if not hosts.are_several():
        data = jax.device_put(make_data(inputs, targets, multiple), sharding)
    else:
        data = _of_own_rows(inputs, targets, multiple, sharding)
    if is_fixed:
        data = dataclasses.replace(data, placement=Placement(sharding, multiple, NUM_BLOCKS))
    elif mesh.shape["data"] > 1:
        data = dataclasses.replace(data, placement=Placement(sharding, multiple))
    if is_fixed or (in_minibatches and num_bytes(data) <= ROWS_ON_EVERY_DEVICE):
        return _copy_to(replicated(mesh))(data)
    return data


def _of_own_rows(
    inputs: Inputs, targets: np.ndarray, multiple_of: int, sharding: NamedSharding
) -> Data:
    """`make_data` of which this process makes the rows of its own devices alone."""
    first = make_data(take_rows(inputs, slice(1)), targets[:1])
    num_rows = count_rows(inputs)
    index, real = padded_index(num_rows, multiple_of)

    def spread(rows: np.ndarray, chosen: np.ndarray) -> jax.Array:
        def make(block: tuple[slice, ...] | None) -> np.ndarray:
            assert block is not None
            return rows[chosen[block[0]]]

        return jax.make_array_from_callback((len(chosen), *rows.shape[1:]), sharding, make)

    return Data(
        jax.tree.map(lambda leaf: spread(leaf, index), inputs),
        spread(targets, index),
        spread(real.astype(first.weights.dtype), np.arange(len(real))),
        num_rows,
    )


def place_chains(tree: Any, mesh: Mesh) -> Any:
    """Host arrays with a leading chain axis, the same on every process, on the devices."""
    return put(tree, chain_sharding(mesh))


def put(tree: Any, shardings: Any) -> Any:
    """Host arrays that are the same on every process on the devices, as `shardings` say."""
    if not hosts.are_several():
        return jax.device_put(tree, shardings)
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def place(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda block: leaf[block])

    return jax.tree.map(place, tree, shardings)


def to_host(tree: Any) -> Any:
    """Global arrays as NumPy arrays, on every process."""
    if not hosts.are_several():
        return jax.tree.map(np.asarray, jax.device_get(tree))
    return jax.tree.map(lambda leaf: np.asarray(_whole(leaf)), tree)


def to_first_host(tree: Any) -> Any:
    """As `to_host`, on process 0; others take part, a leaf at a time, and keep None."""
    if not hosts.are_several():
        return to_host(tree)

    def gather(leaf: Any) -> np.ndarray | None:
        leaf = _whole(leaf)
        return np.asarray(leaf) if hosts.is_first() else None

    return jax.tree.map(gather, tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_replicated or leaf.is_fully_addressable:
        return leaf
    assert isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh)
    return _copy_to(replicated(leaf.sharding.mesh))(leaf)


@functools.cache
def _copy_to(sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=sharding)


def refuse_too_large(num_bytes: float, what: str) -> None:
    """Refuses what no device here can hold; on a CPU, XLA would end the process without a word."""
    statistics = jax.local_devices()[0].memory_stats() or {}
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
