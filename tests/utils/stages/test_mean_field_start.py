"""Samplers start at mean-field posteriors that the run has trained to their own end."""

import numpy as np
import pytest

import run_implicit
from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, tasks
from haiku_posteriors.utils.stages import implicit

pytestmark = pytest.mark.usefixtures("first_device_only")
ROWS, COLUMNS = 60, 3


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    mixing = np.array([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    inputs = rng.normal(size=(ROWS, COLUMNS)) @ mixing
    targets = inputs @ np.array([1.0, -2.0, 0.5]) + rng.normal(size=ROWS)
    np.savez(tmp_path / "d.npz", x_train=inputs, y_train=targets, x_test=inputs, y_test=targets)
    return tmp_path / "d.npz"


def load(path, *flags):
    linear = ["--model_name=logistic_regression", "--standardize=false", "--weight_decay=1"]
    noise = ["--likelihood=gaussian", "--noise_std=1", "--learn_noise=false"]
    words = [f"--dataset_name={path}", *linear, *noise, "--pretrain_starts=1", *flags]
    task = tasks.load_task("implicit", cmd_args_utils.parse(run_implicit.GROUPS, words))
    generator = implicit.make_generator(task)
    return task._replace(settings=implicit.complete(task, generator))


def test_of_a_linear_model_it_is_the_best_mean_field_q(path, tmp_path, capsys):
    """Its mean is the posterior's, its variances those of a weight given all others."""
    task = load(path, "--start=mean_field")
    q = implicit.find_starts(task, tmp_path)
    assert isinstance(q, vi.VariationalParams)
    assert "Mean-field start:" in capsys.readouterr().out
    with np.load(path) as data:
        design = np.column_stack([data["x_train"], np.ones(ROWS)])
        targets = data["y_train"]
    precision = design.T @ design + np.eye(COLUMNS + 1)
    expected = np.linalg.solve(precision, design.T @ targets)
    mean, scale = trees.named_leaves(q.mean), trees.named_leaves(q.raw_scale)
    joined = [np.concatenate([d["output/w"][0, :, 0], d["output/b"][0]]) for d in (mean, scale)]
    deviations = np.diag(precision) ** -0.5
    # A tenth of a deviation in each of four weights is 0.02 nats, a tenth of the tolerance.
    np.testing.assert_allclose(joined[0], expected, atol=0.1 * deviations.max())
    np.testing.assert_allclose(np.logaddexp(joined[1], 0), deviations, rtol=0.1)
    # What is there is gone on with: nothing is trained again.
    again = implicit.find_starts(task, tmp_path)
    np.testing.assert_array_equal(trees.named_leaves(again.mean)["output/w"], mean["output/w"])
    assert (tmp_path / "mean_field" / "checkpoints").is_dir()


def test_samplers_of_networks_start_there_and_those_of_regressions_do_not(path):
    assert load(path, "--model_name=mlp_20_20").settings.start == "mean_field"
    assert load(path).settings.start == "network"


@pytest.mark.parametrize(
    "flag",
    [
        "--init_checkpoint=x",
        "--vi_checkpoint=x",
        "--noise_scale=0.1",
        "--learn_noise_scale=false",
        "--pretrain_epochs=0",
        "--annealing_epochs=5",
    ],
)
def test_what_goes_in_place_of_mean_field_vi_is_said_so(path, flag):
    """No run claims a start that nothing trains, or shortens its steps for it."""
    settings = load(path, "--model_name=mlp_20_20", flag).settings
    assert settings.start == "network"
    is_posterior = flag.startswith("--vi")
    assert settings.init_step_size == pytest.approx(0.003 if is_posterior else 0.01)
    with pytest.raises(UserError, match="cannot with"):
        load(path, "--start=mean_field", flag)


def test_a_run_of_given_length_starts_around_the_network(path):
    assert load(path, "--num_epochs=5", "--model_name=mlp_20_20").settings.start == "network"
    assert load(path, "--num_epochs=5", "--start=mean_field").settings.start == "mean_field"
