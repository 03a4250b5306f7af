"""Networks of runs: their draws, their data, and the precision they predict in."""

import jax
import numpy as np
import pytest
import synthetic_runs

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import checkpoint_utils
from haiku_posteriors.utils.report import run_networks
from haiku_posteriors.utils.report.run_folders import open_run


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two chains of seven draws, in files of three, three and one."""
    path = tmp_path_factory.mktemp("runs") / "toy"
    return open_run(synthetic_runs.write_toy_run(path, draws=7, draws_per_file=3))


@pytest.mark.parametrize("max_draws", [1, 5, 14, 100])
def test_draws_are_chosen_evenly_chain_by_chain(toy, max_draws):
    log_joint, _ = run_networks.load_run_problem(toy, None)
    chosen = trees.named_leaves(run_networks.choose_draws(log_joint, toy, max_draws))
    expected = {1: [7], 5: [1, 4, 7, 9, 12]}.get(max_draws, list(range(14)))
    for name, leaf in checkpoint_utils.load_draws(toy.path / "draws").items():
        flat = leaf.reshape(1, 14, *leaf.shape[2:])
        np.testing.assert_array_equal(chosen[name], flat[:, expected])


def test_one_file_is_read_at_a_time(toy, monkeypatch):
    alive, most = [], 0
    load = checkpoint_utils.load_tensors

    class Watched(dict):
        """Counts itself while anything refers to it."""

        def __del__(self):
            alive.remove(id(self))

    def spy(path):
        nonlocal most
        tensors, metadata = load(path)
        watched = Watched(tensors)
        alive.append(id(watched))
        most = max(most, len(alive))
        return watched, metadata

    monkeypatch.setattr(checkpoint_utils, "load_tensors", spy)
    log_joint, _ = run_networks.load_run_problem(toy, None)
    run_networks.choose_draws(log_joint, toy, 5)
    assert most == 1 and not alive


def test_draws_of_another_network_are_refused(toy, tmp_path):
    log_joint, _ = run_networks.load_run_problem(toy, None)
    other = synthetic_runs.write_toy_run(tmp_path / "other", model_name="mlp_regression_small")
    with pytest.raises(UserError, match="not of the network mlp_regression_small"):
        run_networks.choose_draws(log_joint, open_run(other), 5)


def test_data_that_have_changed_are_refused(toy):
    changed = toy._replace(summary={**toy.summary, "data_sha256": "0"})
    with pytest.raises(UserError, match=r"found now is not the one that .* was trained on"):
        run_networks.load_run_problem(changed, None)


def test_a_data_dir_that_is_given_replaces_the_runs_own(toy):
    run = toy._replace(flags={**toy.flags, "data_dir": "there"})
    assert run_networks.problem_of_run(run, None).data_dir == "there"
    assert run_networks.problem_of_run(run, "here").data_dir == "here"


def predict(run):
    log_joint, dataset = run_networks.load_run_problem(run, None)
    draws = run_networks.choose_draws(log_joint, run, 2)
    return run_networks.predictor_of_run(log_joint, dataset, draws)(dataset.x_test, dataset.y_test)


def test_predictions_carry_targets_only_where_they_are_known(toy):
    log_joint, dataset = run_networks.load_run_problem(toy, None)
    draws = run_networks.choose_draws(log_joint, toy, 2)
    predictor = run_networks.predictor_of_run(log_joint, dataset, draws)
    known, unknown = predictor(dataset.x_test, dataset.y_test), predictor(dataset.x_test, None)
    np.testing.assert_array_equal(known.outputs, unknown.outputs)
    assert known.outputs.shape == (1, 2, 128, 2) and known.log_likelihoods.shape == (1, 2, 128)
    np.testing.assert_array_equal(known.targets, toy.predictions.targets)
    assert unknown.targets is None and unknown.log_likelihoods is None


def test_a_run_in_float32_is_predicted_in_float32_beside_one_in_float64(toy, tmp_path):
    alone = predict(toy)
    with jax.enable_x64(True):
        path = synthetic_runs.write_toy_run(tmp_path / "precise", use_float64=True)
        beside, precise = predict(toy), predict(open_run(path))
    assert beside.outputs.dtype == beside.log_likelihoods.dtype == np.float32
    assert precise.outputs.dtype == np.float64
    np.testing.assert_array_equal(beside.outputs, alone.outputs)
    with pytest.raises(UserError, match="use_float64"):
        predict(open_run(path))
