"""Starts of chains by training: in the run's folder, resumed, and told."""

import signal
import types

import numpy as np
import pytest
from program import run_here

import run_hmc
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils, tasks
from haiku_posteriors.utils.files import read_json
from haiku_posteriors.utils.signals import Interrupted
from haiku_posteriors.utils.stages import warm_start

pytestmark = pytest.mark.usefixtures("first_device_only")
FLAGS = "--dataset_name=wine --model_name=logistic_regression --num_chains=3 --tabulate_freq=100"


def load(*further):
    task = tasks.load_task("hmc", cmd_args_utils.parse(run_hmc.GROUPS, [*FLAGS.split(), *further]))
    return task, task.settings


def test_members_are_trained_once_and_each_by_itself(tmp_path, capsys):
    task, settings = load()
    assert settings.warm_start_epochs == 5000
    starts = warm_start.train_starts(task, tmp_path, None, task.settings.num_chains)
    weights = np.asarray(starts["output"]["w"])
    assert weights.shape == (3, 13, 3)
    # One mode: members are within a prior standard deviation of each other, and no copies.
    assert 0 < np.ptp(weights, axis=0).max() < 1
    out = capsys.readouterr().out
    assert "Warm start:" in out and "epochs of Adam" in out
    again = warm_start.train_starts(task, tmp_path, None, task.settings.num_chains)
    np.testing.assert_array_equal(again["output"]["w"], weights)
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "warm_start" / "checkpoints").is_dir()
    other, _ = load("--seed=1")
    assert not np.array_equal(
        warm_start.train_starts(other, tmp_path / "1", None, 2)["output"]["w"], weights
    )


@pytest.mark.parametrize(
    ("flags", "epochs"),
    [("--step_size=1e-3", 0), ("--init_checkpoint=x", 0), ("--warm_start_epochs=7", 7)],
)
def test_when_there_is_none(flags, epochs):
    assert load(flags)[1].warm_start_epochs == epochs


def test_what_the_verdict_says_of_starts():
    apart = {"w": np.arange(3.0)}
    assert "warm_start_epochs" in warm_start.notes(apart, 5)[0]
    assert "one point" in warm_start.notes({"w": np.ones(3)}, 5)[0]
    assert warm_start.notes(None, 0) == warm_start.notes(apart, 0) == []


def test_a_run_starts_where_training_ended(tmp_path):
    """Steps too short to move: the only draws are the members."""
    flags = f"{FLAGS} --warm_start_epochs=30 --step_size=1e-7 --trajectory_len=1e-7"
    run_here(run_hmc, f"{flags} --num_iterations=8", tmp_path / "run")
    members = checkpoint_utils.load_draws(tmp_path / "run" / "warm_start" / "draws")
    draws = checkpoint_utils.load_draws(tmp_path / "run" / "draws")
    np.testing.assert_allclose(draws["output/w"][:, -1], members["output/w"][:, -1], atol=1e-4)
    assert read_json(tmp_path / "run" / "flags.json")["warm_start_epochs"] == 30
    spent = checkpoint_utils.seconds_spent(tmp_path / "run" / "warm_start")
    assert 0 < spent < read_json(tmp_path / "run" / "summary.json")["seconds"]
    for path in (tmp_path / "run" / "warm_start" / "checkpoints").iterdir():
        path.write_bytes(b"damaged")
    assert checkpoint_utils.seconds_spent(tmp_path / "run" / "warm_start") == 0


def test_a_run_that_has_left_its_start_keeps_it(tmp_path, capsys):
    """A larger time limit would train it longer, for nothing: chains have begun elsewhere."""
    task, _ = load("--time_limit=1e-6")
    members = warm_start.train_starts(task, tmp_path, None, 2)
    assert "e+30" not in capsys.readouterr().out  # of members whose first window is not over
    longer, _ = load("--time_limit=0.05")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch_00000001.safetensors").touch()
    kept = warm_start.train_starts(longer, tmp_path, None, 2)
    np.testing.assert_array_equal(kept["output"]["w"], members["output"]["w"])
    (tmp_path / "checkpoints" / "epoch_00000001.safetensors").unlink()
    trained = warm_start.train_starts(longer, tmp_path, None, 2)
    assert not np.array_equal(trained["output"]["w"], members["output"]["w"])


def test_a_stop_in_the_warm_start_names_the_folder_of_the_run(tmp_path, monkeypatch):
    """Its own folder is inside the run's, and cannot be gone on with alone."""

    def stopped(*arguments, directory, **settings):
        request = Interrupted(signal.SIGTERM)
        request.directory = directory
        raise request

    monkeypatch.setattr(warm_start, "train", stopped)
    settings = types.SimpleNamespace(warm_start_epochs=5, seed=0, time_limit=None)
    task = types.SimpleNamespace(settings=settings, log_joint=None, dataset=None)
    with pytest.raises(Interrupted) as caught:
        warm_start.train_starts(task, tmp_path, None, 2)
    assert caught.value.directory == tmp_path
