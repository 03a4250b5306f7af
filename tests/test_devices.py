"""The mesh and what it must not touch: results on any number of devices, and resumed on another."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import program
import pytest

from haiku_posteriors.core import METHODS, fixed_sums, sgd
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import data_utils, devices, ensemble_utils, models
from haiku_posteriors.utils.chains import compile_method
from haiku_posteriors.utils.train_utils import Run


@pytest.fixture(autouse=True)
def rule_afterwards():
    yield
    devices.choose_mesh(None, 1)


@pytest.fixture(scope="module")
def problem():
    dataset = data_utils.load("toy_regression")
    network = models.get_network("mlp_toy", 1)
    return make_log_joint(network, dataset.x_train, make_prior(1.0), gaussian(0.3)), dataset


def test_the_rule_of_the_mesh():
    """As many of the four devices as divide the chains go to `chain`, the rest to `data`."""
    for num_chains, chain, data in ((1, 1, 4), (2, 2, 2), (3, 1, 4), (4, 4, 1), (6, 2, 2)):
        shape = devices.make_mesh(num_chains).shape
        assert (shape["chain"], shape["data"], shape["draw"], shape["model"]) == (chain, data, 1, 1)


def test_a_given_mesh_and_stages_with_another_number_of_chains():
    devices.choose_mesh("data:2,chain:2", 4)
    assert dict(devices.make_mesh(4).shape) == {"chain": 2, "draw": 1, "data": 2, "model": 1}
    assert dict(devices.make_mesh(3).shape) == {"chain": 1, "draw": 1, "data": 4, "model": 1}


@pytest.mark.parametrize(
    ("mesh", "num_chains", "sentence"),
    [
        ("data:3", 2, "what does is chain:1,data:4 or chain:2,data:2, where"),
        ("data:2,chain:2", 3, "4 device\\(s\\) and 3 chain\\(s\\): what does is chain:1,data:4,"),
        ("rows:4", 1, "is not of the form data:4,chain:2; its axes are chain, draw, data, model"),
        ("data:0", 1, "is not of the form"),
        ("data:2,data:2", 1, "is not of the form"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do(mesh, num_chains, sentence):
    with pytest.raises(UserError, match=sentence):
        devices.choose_mesh(mesh, num_chains)


def test_draws_that_the_mesh_does_not_divide_are_refused():
    devices.choose_mesh("draw:4", 1)
    with pytest.raises(UserError, match="draw:4 does not divide 6 draws; what does is draw:1, dr"):
        devices.draw_placement(devices.make_mesh(1), 6)


def test_a_fixed_sum_is_the_sum_and_its_gradient():
    """Against the plain sum, in float32, to its rounding."""
    inputs = np.random.default_rng(0).normal(size=(70, 2)).astype(np.float32)
    devices.choose_mesh(None, 1, fixed_sums=True)
    data = devices.place_data(inputs, inputs[:, :1], devices.make_mesh(1))
    assert data.weights.shape == (80,)

    def function(params, rows):
        return jnp.sum(rows.weights * jnp.tanh(rows.inputs @ params) * rows.targets[:, 0])

    def fixed(params, rows):
        return fixed_sums.sum_in_blocks(function, params, rows)

    params = jnp.array([0.3, -0.7])
    value, gradient = jax.jit(jax.value_and_grad(fixed))(params, data)
    expected, slope = jax.value_and_grad(function)(params, data)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(fixed)(params, data), expected, rtol=1e-5)


def test_fixed_sums_give_the_same_bits_on_one_device_and_on_four(problem, monkeypatch):
    """Adam in float32, and predictions of test rows.

    Where sums are the compiler's, the bits part in the first epoch.
    """
    log_joint, dataset = problem
    results = []
    for count in (1, 4):
        few = jax.devices()[:count]
        monkeypatch.setattr(devices.hosts, "devices", lambda few=few: few)
        devices.choose_mesh(None, 1, fixed_sums=True)
        mesh = devices.make_mesh(1)
        compiled = compile_method(sgd.sgd(log_joint, optax.adam(1e-2)), 0, 1, mesh)
        data = devices.place_data(dataset.x_train, dataset.y_train, mesh, 1, True)
        state = compiled.run(compiled.init(None), data, 0, 5)[0]
        predict = ensemble_utils.make_predictor(log_joint, dataset.form)
        draws = jax.tree.map(lambda leaf: leaf[:, None], state.params)
        test = devices.place_data(dataset.x_test, dataset.y_test, mesh)
        predictions = predict(draws, test)
        assert predictions.outputs.shape[:3] == (1, 1, len(dataset.y_test))
        results.append([*jax.tree.leaves(devices.to_host(state.params)), *predictions[1:3]])
    for one, four in zip(*results, strict=True):
        np.testing.assert_array_equal(one, four)


def test_a_run_saved_on_four_devices_goes_on_on_one(problem, tmp_path, monkeypatch):
    log_joint, dataset = problem

    def run(count, num_steps, name):
        few = jax.devices()[:count]
        monkeypatch.setattr(devices.hosts, "devices", lambda: few)
        method = sgd.sgd(log_joint, optax.adam(1e-2), batch_size=32)
        arguments = {"num_steps": num_steps, "save_freq": 2, "eval_freq": 100, "quiet": True}
        return Run(log_joint, dataset, method, directory=tmp_path / name, **arguments)

    whole = run(4, 6, "whole").finish()
    run(4, 3, "parts").finish()
    going_on = run(1, 6, "parts")
    assert going_on.step == 3
    again = going_on.finish()
    pairs = (jax.tree.leaves(result.state.params) for result in (again, whole))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def differences(name, *options):
    done = subprocess.run(
        [sys.executable, "tests/device_counts.py", name, *options],
        cwd=program.ROOT,
        env=program.ENVIRONMENT | {"PYTHONPATH": str(program.ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_1_2_4_and_8_devices_give_the_same_results(name):
    """In float64, to its rounding after three steps; 4 and 8 do not divide the 70 rows."""
    found = differences(name, "float64")
    assert max(by_count["difference"] for by_count in found.values()) < 1e-9, found


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_1_2_4_and_8_devices_give_the_same_bits_with_fixed_sums(name):
    """All bits of starts, states, infos and draws; minibatches and rows do not divide."""
    found = differences(name, "fixed_sums")
    assert not any(by_count["other_bits"] for by_count in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "hmc", "mean_field_vi", "implicit"])
def test_a_state_cut_along_the_model_axis_gives_the_same_results(name):
    found = differences(name, "float64", "model")
    assert max(by_count["difference"] for by_count in found.values()) < 1e-9, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["implicit", "smc"])
def test_draws_spread_over_devices_give_the_same_results(name):
    """16 draws of a step, or particles, on the `draw` axis of 1, 2, 4 and 8 devices."""
    found = differences(name, "float64", "draw")
    assert max(by_count["difference"] for by_count in found.values()) < 1e-9, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "mean_field_vi"])
def test_rows_too_many_for_every_device_give_the_same_results(name):
    """Rows of minibatches that stay spread, as those above 1 GB do."""
    found = differences(name, "float64", "spread")
    assert max(by_count["difference"] for by_count in found.values()) < 1e-9, found
