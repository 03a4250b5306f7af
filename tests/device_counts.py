"""A method on 1, 2, 4 and 8 forced devices, each from the same states: how far do results differ?

python tests/device_counts.py METHOD [float64] [fixed_sums] [model] [draw] [spread]

`model` and `draw` put devices on these axes; with `spread`, rows of minibatches are spread over
devices as those of large data are.

Prints a JSON object: by number of devices, the largest difference from one device, relative to the
largest value of the leaf, and the names of leaves of which not all bits agree. Starts, states after
three steps, what the last step tells, and draws are compared.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "64"  # else collectives wait for threads that there are not
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core import METHODS
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import devices
from haiku_posteriors.utils.chains import DRAW, compile_method

ROWS, CHAINS, STEPS = 70, 2, 3  # 4 and 8 devices do not divide 70 rows


def named_leaves(tree):
    """By path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def settings_of_draws(name, mesh, is_asked):
    """By which a method spreads its draws over `draw`."""
    if not is_asked:
        return {}
    number = {"implicit": "num_samples", "smc": "num_particles"}[name]
    return {number: 16, "place": devices.draw_placement(mesh, 16, ("draw",))}


def main(name, *options):
    """Runs it."""
    jax.config.update("jax_enable_x64", "float64" in options)
    dtype = np.float64 if "float64" in options else np.float32
    inputs = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(dtype)
    targets = np.sin(inputs[:, :1]) + dtype(0.1) * inputs[:, 1:]
    width = 4 if "model" in options else 3
    log_joint = make_log_joint(
        lambda x: hk.nets.MLP([width, 1], activation=jnp.tanh)(x),
        inputs,
        make_prior(1.0),
        gaussian(noise_std=0.3, learn_noise=True),
    )
    devices.LARGE_LEAF = 4
    if "spread" in options:
        devices.ROWS_ON_EVERY_DEVICE = 0
    start = first = None
    found = {}
    for count in (1, 2, 4, 8):
        shape = f"data:{count // 2},model:2" if "model" in options and count > 1 else None
        if "draw" in options:
            shape = f"draw:{count}"
        few = jax.devices()[:count]
        devices.hosts.devices = lambda few=few: few
        devices.choose_mesh(shape, CHAINS, "fixed_sums" in options)
        mesh = devices.make_mesh(CHAINS)
        method = METHODS[name](log_joint, **settings_of_draws(name, mesh, "draw" in options))
        program = compile_method(method, 5, CHAINS, mesh)
        data = devices.place_data(inputs, targets, mesh, 1, method.in_minibatches)
        state = program.init(None)
        began = devices.to_host(state)
        if start is None:
            start = began
        else:
            state = devices.put(start, jax.tree.map(lambda leaf: leaf.sharding, state))
        cut = [leaf for leaf in jax.tree.leaves(state) if "model" in str(leaf.sharding.spec)]
        assert bool(cut) == ("model" in options and count > 1)
        state, info, *_ = program.run(state, data, 0, STEPS)
        draws = program.sample(state, DRAW, STEPS, 5)
        result = {"start": began, "state": state, "info": info, "draws": draws}
        result = named_leaves(devices.to_host(result))
        first = first or result
        found[count] = {
            "difference": max(
                float(np.max(np.abs(leaf - first[name])) / max(np.max(np.abs(first[name])), 1e-3))
                for name, leaf in result.items()
                if np.issubdtype(leaf.dtype, np.floating) and leaf.size
            ),
            "other_bits": [
                name for name, leaf in result.items() if leaf.tobytes() != first[name].tobytes()
            ],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
