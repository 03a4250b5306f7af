"""run_sgd.py as a user meets it: started as a program, killed, interrupted, given nonsense."""

import signal

import numpy as np
import program
import pytest
from program import assert_same_outcome, outcome

from haiku_posteriors.utils import checkpoint_utils

LONG = ["--num_epochs=4000", "--eval_freq=500", "--save_freq=100", "--num_members=2"]


def run(*flags):
    return program.run("run_sgd.py", *flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = run(f"--dir={directory}", *LONG)
    assert code == 0, err
    return directory, out, err


def test_a_run_leaves_what_the_design_says(whole):
    directory, out, err = whole
    left = {path.name for path in directory.iterdir()}
    expected = {"flags.json", "metrics.jsonl", "summary.json", "checkpoints", "draws"}
    assert expected | {"predictions.npz", "predictive.png"} <= left
    assert any(name.startswith("events.out.tfevents") for name in left)
    summary, draws, predictions = outcome(directory)
    assert summary["num_parameters"] == 105 and summary["steps"] == 4000 and summary["seed"] == 0
    assert summary["device"]["count"] == 1 and "jax" in summary["versions"]
    assert {"rmse", "nll"} <= summary["test"].keys() & summary["train"].keys()
    assert draws["hidden_0/w"].shape == (2, 1, 1, 7)
    assert predictions["test_predictions"].shape == (2, 128, 2)
    assert predictions["test_targets"].shape == (128, 1)
    assert "runs" in out and "predictive.png" in out and "epoch" in out
    assert "Traceback" not in err
    assert not [path for path in directory.rglob("*") if path.name.startswith(".")]


def test_killed_at_a_random_moment_and_resumed(whole, tmp_path):
    directory = tmp_path / "killed"
    for _ in range(2):
        program.kill_after_checkpoint(directory, "run_sgd.py", f"--dir={directory}", *LONG)
    code, _, err = run(f"--dir={directory}", *LONG)
    assert code == 0, err
    assert_same_outcome(directory, whole[0])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_and_resumed(whole, tmp_path, number):
    directory = tmp_path / "interrupted"
    process = program.start_until_checkpoint(directory, "run_sgd.py", f"--dir={directory}", *LONG)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if process.returncode != 0:  # a fast machine may have finished first
        assert process.returncode == 128 + number, err
        assert "the same command goes on from here" in out and "Traceback" not in err
        assert not (directory / "summary.json").exists()
    code, _, err = run(f"--dir={directory}", *LONG)
    assert code == 0, err
    assert_same_outcome(directory, whole[0])


MISTAKES = {
    "--dataset_name=digist": "Did you mean 'digits'",
    "--model_name=mlp_toi": "Did you mean 'mlp_toy'",
    "--num_epoch=3": "Did you mean: num_epochs",
    "--batch_size=71": "batch_size must be between 1 and the number of training rows (70)",
    "--subset_train_to=1000": "subset of 1000 training rows",
    "--temperature=-1": "temperature must be positive",
    "--prior_group=oops": "not of the form REGEX=NUMBER",
    "--likelihood=categorical": "does not fit a task of regression",
    "--init_checkpoint=nowhere": "There is no file nowhere",
    "--model_name=nowhere:network": "nowhere",
    "--init_step_size=-1": "init_step_size must be positive",
    "digits": "Not a flag: digits",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(flag, tmp_path):
    code, _, err = run(flag, f"--dir={tmp_path / 'run'}")
    assert code == 2
    assert MISTAKES[flag] in err and err.count("\n") == 1 and err.startswith("run_sgd.py: ")


def test_a_folder_of_other_flags_is_refused(whole):
    code, _, err = run(f"--dir={whole[0]}", *LONG, "--weight_decay=7")
    assert code == 2
    assert "weight_decay (0.4444444444444444 there, 7.0 here)" in err
    code, _, err = run(f"--dir={whole[0]}", *LONG, "--tabulate_freq=3")
    assert code == 0, err


def test_a_step_size_too_large_ends_with_epoch_and_step(tmp_path):
    flags = ["--optimizer=SGD", "--init_step_size=1e3", f"--dir={tmp_path / 'run'}"]
    code, _, err = run(*flags)
    assert code == 1
    assert "not finite at epoch" in err and "Traceback" not in err


def test_members_start_from_a_checkpoint(whole, tmp_path):
    """With one epoch and a vanishing step size, the draws are those of the first run."""
    flags = ["--num_epochs=1", "--init_step_size=1e-30", "--num_members=2"]
    directory = tmp_path / "warm"
    code, _, err = run(f"--dir={directory}", *flags, f"--init_checkpoint={whole[0]}")
    assert code == 0, err
    first, second = (checkpoint_utils.load_draws(d / "draws") for d in (whole[0], directory))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.slow
def test_digits_reaches_97_percent_and_an_ensemble_scores_better_than_its_members(tmp_path):
    flags = ["--dataset_name=digits", "--model_name=mlp_classification"]
    code, _, err = run(f"--dir={tmp_path / 'one'}", *flags)
    assert code == 0, err
    assert outcome(tmp_path / "one")[0]["test"]["accuracy"] >= 0.97
    code, _, err = run(f"--dir={tmp_path / 'five'}", *flags, "--num_members=5")
    assert code == 0, err
    summary = outcome(tmp_path / "five")[0]
    assert summary["test"]["nll"] < summary["test_mean_of_members"]["nll"]
