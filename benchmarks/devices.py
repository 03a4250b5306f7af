"""What devices cost: sharding on one, collectives of a step, host memory, fixed sums, dispatch.

python benchmarks/devices.py collectives      of every method or those named, as compiled
python benchmarks/devices.py overhead         of the sharded program over a plain one, one device
python benchmarks/devices.py fixed_sums       cost of --deterministic_sums, one device
python benchmarks/devices.py dispatch         jax.pmap, shard_map and jit on sharded arrays
python benchmarks/devices.py memory           of each of 1, 2 and 4 processes that share the rows
python benchmarks/devices.py all_reduce       over loopback, against bytes, two processes
python benchmarks/devices.py model            bytes of a state that is cut along `model`
python benchmarks/devices.py scaling          of a leapfrog step, one process and two
"""

import os
import pathlib
import re
import resource
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from haiku_posteriors.core import METHODS, hmc, sgd
from haiku_posteriors.core.implicit import generators, implicit_vi
from haiku_posteriors.core.likelihoods import categorical, gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import chains, devices, hosts, models

REPEATS = 15
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
TYPES = {"f32": 4, "f64": 8, "s32": 4, "u32": 4, "pred": 1}


def make_problem(rows, width, learn_noise=False):
    """A log-joint, and inputs and targets."""
    inputs = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    log_joint = make_log_joint(
        lambda x: hk.nets.MLP([width, width, 1], activation=jnp.tanh)(x),
        inputs,
        make_prior(1.0),
        gaussian(0.3, learn_noise=learn_noise),
    )
    return log_joint, inputs, np.sin(inputs[:, :1])


def lower(method, inputs, targets, num_chains=1):
    """The compiled program of the loop, and its arguments."""
    mesh = devices.make_mesh(num_chains)
    program = chains.compile_method(method, 0, num_chains, mesh)
    data = devices.place_data(inputs, targets, mesh, 1, method.in_minibatches)
    arguments = (program.init(None), data, np.int32(0), np.int32(1))
    return program.run.lower(*arguments).compile(), arguments


def collectives(*names):
    """Collectives of methods, all by default, in the innermost loop that has some; their bytes."""
    log_joint, inputs, targets = make_problem(70, 16)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(log_joint.shapes))} parameters")
    for name in names or METHODS:
        compiled, _ = lower(METHODS[name](log_joint), inputs, targets)
        by_loop = {}
        for line in compiled.as_text().splitlines():
            found = re.search(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", line)
            if found:
                where = re.search(r'op_name="([^"]*)"', line)
                depth = where[1].count("while/body") if where else 0
                sizes = [
                    TYPES[kind] * int(np.prod([int(n) for n in shape.split(",") if n]))
                    for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1])
                ]
                by_loop.setdefault(depth, []).append((found[2], sum(sizes)))
        deepest = max(by_loop, default=0)
        told = "; ".join(f"{kind} of {size:,} bytes" for kind, size in by_loop.get(deepest, []))
        others = sum(len(found) for depth, found in by_loop.items() if depth < deepest)
        print(f"{name}: a step has {told or 'none'}; outside of it {others}")


def best(function, *others):
    """Least processor times of functions that are called in turns."""
    functions = (function, *others)
    least = [np.inf] * len(functions)
    for function in functions:
        jax.block_until_ready(function())
    for _ in range(REPEATS):
        for index, function in enumerate(functions):
            started = time.process_time()
            jax.block_until_ready(function())
            least[index] = min(least[index], time.process_time() - started)
    return least


def timed_methods(log_joint):
    """One of full batches and one of minibatches."""
    return {
        "hmc": hmc.hmc(log_joint, step_size=1e-4, trajectory_length=5e-3, num_burn_in=0),
        "sgd": sgd.sgd(log_joint, batch_size=100),
    }


def overhead():
    """The loop's program against the same steps under a plain jit, without mesh or placement."""
    for rows, width in ((500, 20), (2000, 100)):
        log_joint, inputs, targets = make_problem(rows, width)
        for name, method in timed_methods(log_joint).items():
            compiled, (state, data, *_) = lower(method, inputs, targets)
            plain_data = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), data)

            @jax.jit
            def plain(state, data, count, method=method):
                def body(epoch, carry):
                    key = chains.chain_key(0, chains.STEP, epoch, jnp.array(0))
                    state, info = method.step(key, carry[0], data)
                    return state, carry[1] + jnp.sum(info["log_joint"])

                return jax.lax.fori_loop(0, count, body, (state, jnp.zeros(())))

            one = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), state)
            count = np.int32(4 if name == "hmc" else 40)  # a call is worth some milliseconds
            # Compiled beforehand as well: such a call costs more than one that jax.jit caches.
            plain_compiled = plain.lower(one, plain_data, count).compile()
            ours, bare = best(
                lambda: compiled(state, data, np.int32(0), count),  # noqa: B023
                lambda: plain_compiled(one, plain_data, count),  # noqa: B023
            )
            print(
                f"{name}, {rows} rows, width {width}: {ours * 1e3:.2f} ms sharded, "
                f"{bare * 1e3:.2f} ms plain, ratio {ours / bare:.3f}"
            )


def fixed_sums():
    """Processor time of a step with --deterministic_sums over that without."""
    for rows, width in ((500, 20), (2000, 100)):
        log_joint, inputs, targets = make_problem(rows, width)
        for name, method in timed_methods(log_joint).items():
            runs = []
            for fixed in (False, True):
                devices.choose_mesh(None, 1, fixed)
                compiled, (state, data, first, _) = lower(method, inputs, targets)
                runs.append(
                    lambda compiled=compiled, state=state, data=data, first=first: compiled(
                        state, data, first, np.int32(2)
                    )
                )
            usual, fixed_time = best(*runs)
            print(f"{name}, {rows} rows, width {width}: {fixed_time / usual:.2f} times")


def model():
    """Bytes of state and optimizer on a device: of a large generator, and of one that is run."""
    network = models.get_network("wide_resnet_28_10", 100)
    images = np.zeros((1, 32, 32, 3), np.float32)
    large = make_log_joint(network, images, make_prior(1.0), categorical(100))
    description = generators.Matrix((45, 45), ((45, 45), (45, 45)))
    generator = generators.make_generator(description, large.random_shapes)
    shapes = jax.eval_shape(
        implicit_vi.implicit_vi(large, generator=generator).init, jax.random.key(0), None
    )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), shapes)
    small, inputs, targets = make_problem(200, 256)
    results = []
    for count in (1, 2, 4, 8):
        devices.choose_mesh(f"data:{8 // count},model:{count}", 1)
        mesh = devices.make_mesh(1)
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                sharding.shard_shape(leaf.shape), leaf.dtype
            ),
            shapes,
            devices.state_shardings(mesh, shapes),
        )
        print(
            f"model:{count}: WRN-28-10's generator {devices.num_bytes(shapes) / 1e6:,.0f} MB, "
            f"on a device {devices.num_bytes(placed) / 1e6:,.0f} MB",
            flush=True,
        )
        method = implicit_vi.implicit_vi(
            small,
            generator=generators.make_generator(generators.MLP(2, (16,)), small.random_shapes),
            batch_size=100,
        )
        compiled, arguments = lower(method, inputs, targets)
        state = compiled(*arguments)[0]
        whole = devices.num_bytes(state)
        on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        results.append(jax.tree.leaves(devices.to_host(state)))
        apart = max(
            float(np.max(np.abs(a - b))) for a, b in zip(results[-1], results[0], strict=True)
        )
        print(
            f"    after an epoch of one of {whole / 1e6:.1f} MB: {on_device / 1e6:.1f} MB on a "
            f"device, {apart:.1e} from the first",
            flush=True,
        )


def dispatch():
    """Wall time of a call that does next to nothing, on two devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    array = np.ones((2, 8), np.float32)
    by_shard = jax.shard_map(
        lambda x: x + 1, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    calls = {
        "jax.pmap": (jax.pmap(lambda x: x + 1), jax.pmap(lambda x: x)(array)),
        "shard_map": (jax.jit(by_shard), jax.device_put(array, sharding)),
        "jit on sharded arrays": (jax.jit(lambda x: x + 1), jax.device_put(array, sharding)),
    }
    for name, (function, argument) in calls.items():
        jax.block_until_ready(function(argument))
        times = []
        for _ in range(300):
            started = time.perf_counter()
            jax.block_until_ready(function(argument))
            times.append(time.perf_counter() - started)
        print(
            f"{name}: {np.median(times) * 1e6:.0f} us in the median, {min(times) * 1e6:.0f} least"
        )


def start_again(*arguments):
    """This file as further processes."""
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)])


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def join(port, count, index):
    hosts.start(f"127.0.0.1:{port}", int(count), int(index)) if int(count) > 1 else None


def memory(*arguments):
    """Rows of 100,000 images of 32 x 32 x 3, for a full-batch method."""
    if not arguments:
        for count in (1, 2, 4):
            port = free_port()
            for process in [start_again("memory", port, count, i) for i in range(count)]:
                process.wait()
        return
    join(*arguments)
    from haiku_posteriors.utils import data_utils
    from haiku_posteriors.utils.datasets.raw import RawData

    images = np.random.default_rng(0).integers(0, 256, (100_000, 32, 32, 3), np.uint8)
    labels = np.zeros(len(images), np.int32)
    few = slice(16)
    raw = RawData("classification", images, labels, images[few], labels[few], 10, "none")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = data_utils._prepare("images", raw, True, np.dtype(np.float32))
    data = devices.place_data(dataset.x_train, dataset.y_train, devices.make_mesh(1))
    jax.block_until_ready(data)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[1]) * resource.getpagesize() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{arguments[1]} process(es), number {arguments[2]}: {before / 2**10:.0f} MB before the "
        f"rows are placed, {now:.0f} MB after, {peak:.0f} MB at the peak",
        flush=True,
    )


def all_reduce(*arguments):
    """Time of an all-reduce over loopback between two processes, against bytes."""
    if not arguments:
        port = free_port()
        for process in [start_again("all_reduce", port, 2, index) for index in range(2)]:
            process.wait()
        return
    join(*arguments)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    add = jax.jit(lambda x: x.sum(axis=0), out_shardings=devices.replicated(mesh))
    for size in (2**8, 2**14, 2**18, 2**20, 2**22):
        array = jax.make_array_from_callback(
            (2, size),
            spread,
            lambda block: np.ones((1, size), np.float32),  # noqa: B023
        )
        jax.block_until_ready(add(array))
        times = []
        for _ in range(20):
            started = time.perf_counter()
            jax.block_until_ready(add(array))
            times.append(time.perf_counter() - started)
        if hosts.is_first():
            least, median = min(times) * 1e6, np.median(times) * 1e6
            print(f"{4 * size:,} bytes: {median:,.0f} us in the median, {least:,.0f} at least")


def scaling(*arguments):
    """Processor time of a leapfrog step in one process and in each of two."""
    if not arguments:
        for count in (1, 2):
            port = free_port()
            for process in [start_again("scaling", port, count, i) for i in range(count)]:
                process.wait()
        return
    join(*arguments)
    for rows in (1000, 8000):
        log_joint, inputs, targets = make_problem(rows, 100)
        method = hmc.hmc(log_joint, step_size=1e-4, trajectory_length=2e-3, num_burn_in=0)
        compiled, (state, data, first, last) = lower(method, inputs, targets)
        jax.block_until_ready(compiled(state, data, first, last))
        times = []
        for _ in range(REPEATS):
            started = time.process_time()
            jax.block_until_ready(compiled(state, data, first, last))
            times.append((time.process_time() - started) / 24)  # 21 gradients and three values
        if hosts.is_first():
            print(f"{arguments[1]} process(es), {rows} rows: {min(times) * 1e6:,.0f} us at least")


if __name__ == "__main__":
    # Before JAX starts: forced devices, and threads enough for their collectives.
    forced = {"collectives": 4, "dispatch": 2, "model": 8}.get(sys.argv[1], 1)
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={forced}"
    os.environ.setdefault("NPROC", "16")
    globals()[sys.argv[1]](*sys.argv[2:])
