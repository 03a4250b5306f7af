"""What every method must keep, checked over the registry: a new method gets these for free."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core import METHODS, trees
from haiku_posteriors.core.implicit import generators, semi_implicit, unbiased
from haiku_posteriors.core.implicit.implicit_vi import implicit_vi
from haiku_posteriors.core.implicit.objectives import Objective
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import checkpoint_utils, devices
from haiku_posteriors.utils.chains import DRAW, compile_method

ROWS, CHAINS, DRAWS, SEED = 70, 2, 3, 5  # four devices do not divide 70 rows
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
TARGETS = np.sin(INPUTS[:, :1]) + 0.1 * INPUTS[:, 1:]


def network(inputs):
    return hk.nets.MLP([3, 1], activation=jnp.tanh)(inputs)


@pytest.fixture(scope="module")
def log_joint():
    return make_log_joint(
        network, INPUTS, make_prior(1.0), gaussian(noise_std=0.3, learn_noise=True)
    )


def semi_implicit_method(objective, estimator):
    """The other objectives of implicit VI, as small as they can be."""

    def make(log_joint):
        return implicit_vi(
            log_joint,
            generator=generators.make_generator(generators.MLP(2), log_joint.random_shapes),
            estimator=estimator,
            num_samples=2,
            objective=Objective(objective),
        )

    return make


SEMI_IMPLICIT = {
    "sivi": semi_implicit_method("sivi", semi_implicit.Mixture(3)),
    "uivi": semi_implicit_method("uivi", unbiased.Unbiased(1, 1, 2, 3)),
}
ALL_METHODS = METHODS | SEMI_IMPLICIT
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SEMI_IMPLICIT]


class Compiled:
    """A method over CHAINS chains on the first few devices, with its data and first states."""

    def __init__(self, name, log_joint, num_devices, start=None):
        mesh = devices.make_mesh(CHAINS, jax.devices()[:num_devices])
        self.traces, self.mesh = 0, mesh
        method = ALL_METHODS[name](log_joint)

        def counted_step(*arguments):
            self.traces += 1
            return method.step(*arguments)

        self.program = compile_method(method._replace(step=counted_step), SEED, CHAINS, mesh)
        self.data = devices.place_data(INPUTS, TARGETS, mesh)
        if start is None:
            self.states = [self.program.init(None)]
        else:
            self.states = [jax.device_put(start, devices.chain_sharding(mesh))]
        for epoch in range(3):
            state, self.info, finite, _ = self.program.run(
                self.states[-1], self.data, epoch, epoch + 1
            )
            assert finite
            self.states.append(state)

    def draws(self, state=None):
        return self.program.sample(self.states[-1] if state is None else state, DRAW, 3, DRAWS)


@pytest.fixture(scope="module", params=[*METHODS, *SLOW])
def one_device(request, log_joint):
    return request.param, Compiled(request.param, log_joint, 1)


def signature(tree):
    return {name: (leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(tree).items()}


def test_shapes_and_dtypes_are_stable(one_device):
    _, compiled = one_device
    first = signature(compiled.states[0])
    assert all(shape[0] == CHAINS for shape, _ in first.values())
    for state in compiled.states[1:]:
        assert signature(state) == first
    assert compiled.info["log_joint"].shape[0] == CHAINS


def test_draws_are_parameters_with_chain_and_draw_axes(one_device, log_joint):
    _, compiled = one_device
    params = log_joint.shapes
    expected = {
        name: ((CHAINS, DRAWS, *shape), dtype) for name, (shape, dtype) in signature(params).items()
    }
    draws = compiled.draws()
    assert signature(draws) == expected
    assert trees.all_finite(draws)


def test_chains_differ(one_device):
    _, compiled = one_device
    draws = compiled.draws()
    assert all(not np.allclose(leaf[0], leaf[1]) for leaf in jax.tree.leaves(draws))


def test_nothing_is_traced_or_compiled_again(one_device):
    _, compiled = one_device
    traces = compiled.traces
    compiled.program.run(compiled.states[-1], compiled.data, 3, 7)
    assert compiled.traces == traces
    assert compiled.program.run._cache_size() == 1


def test_same_key_same_bits(one_device):
    _, compiled = one_device
    again = compiled.program.run(compiled.states[0], compiled.data, 0, 3)[0]
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(compiled.states[3]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_survives_a_checkpoint(one_device, tmp_path):
    _, compiled = one_device
    state = devices.to_host(compiled.states[2])
    checkpoint_utils.save_checkpoint(tmp_path, 2, state, {})
    epoch, restored, _, damage = checkpoint_utils.load_newest_checkpoint(tmp_path, state)
    assert (epoch, damage) == (2, [])
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    # Placed as the loop places it: elsewhere, the same program would be compiled again.
    placed = jax.device_put(restored, devices.chain_sharding(compiled.mesh))
    after = compiled.program.run(placed, compiled.data, 2, 3)[0]
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(compiled.states[3]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_starts_at_given_parameters(one_device, log_joint):
    """Draws of the first state scatter around the parameters it was given.

    Not those of SMC, which starts at the prior by definition and takes point estimates alone.
    """
    name, compiled = one_device
    if name == "smc":
        pytest.skip("starts at the prior")
    given = jax.vmap(log_joint.init)(jax.random.split(jax.random.key(9), CHAINS))
    given = jax.tree.map(lambda leaf: leaf + 5.0, given)
    draws = compiled.program.sample(compiled.program.init(given), DRAW, 0, DRAWS)
    for draw, start in zip(jax.tree.leaves(draws), jax.tree.leaves(given), strict=True):
        assert np.abs(np.asarray(draw).mean() - np.asarray(start).mean()) < 3.0


@pytest.mark.slow  # tests/test_devices.py has a selection every time
def test_the_number_of_devices_does_not_matter(one_device, log_joint):
    """The same draws on 1 and on 4 devices, up to the rounding of sums.

    Only the steps are compiled for 4 devices: a start and draws do not involve the data.
    """
    name, compiled = one_device
    four = Compiled(name, log_joint, 4, start=devices.to_host(compiled.states[0]))
    assert len(four.data.inputs.sharding.device_set) == 4
    last = jax.device_put(devices.to_host(four.states[-1]), devices.chain_sharding(compiled.mesh))
    draws = (jax.tree.leaves(tree) for tree in (compiled.draws(), compiled.draws(last)))
    for a, b in zip(*draws, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
