"""run_hmc.py as a user meets it: verdict, resume, Ctrl-C in a trajectory, the anchor's command."""

import json
import signal
import time
import warnings

import numpy as np
import program
import pytest

from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.utils import checkpoint_utils

SHORT = [
    "--num_iterations=24",
    "--num_burn_in_iterations=12",
    "--eval_freq=8",
    "--save_freq=4",
    "--num_chains=2",
    "--trajectory_len=0.05",
]


def run(*flags):
    return program.run("run_hmc.py", *flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = run(f"--dir={directory}", *SHORT)
    assert code == 0, err
    return directory, out


def test_a_run_leaves_draws_history_and_a_verdict(whole):
    directory, out = whole
    judged = json.loads((directory / "diagnostics.json").read_text())
    assert judged["converged"] is False and "Verdict: NOT converged." in out
    assert len(judged["step_size"]) == 2 and judged["problems"]
    assert (directory / "diagnostics.png").stat().st_size > 10_000
    history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in history] == list(range(1, 25))
    frozen = {tuple(row["step_size"]) for row in history[12:]}
    assert len(frozen) == 1, "the step size must not change after burn-in"
    draws = checkpoint_utils.load_draws(directory / "draws")
    assert draws["hidden_0/w"].shape == (2, 12, 1, 7)
    # A rejected state counts again: as many repeated draws as rejections.
    accepted = np.array([row["accepted"] for row in history[12:]])
    moved = np.any(np.diff(draws["hidden_0/w"], axis=1) != 0, axis=(2, 3))
    np.testing.assert_array_equal(moved, accepted[1:].T)


def test_draws_open_in_arviz_as_documented(whole):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its next version when it is imported
        arviz = pytest.importorskip("arviz", "0.17", exc_type=ImportError)
    if int(arviz.__version__.split(".")[0]) > 0:
        pytest.skip("from_dict takes other arguments since ArviZ 1.0")
    draws = checkpoint_utils.load_draws(whole[0] / "draws")
    named = {name.replace("/", "."): values for name, values in draws.items()}
    posterior = arviz.from_dict(posterior=named)
    theirs = arviz.rhat(posterior)["output.b"].values
    np.testing.assert_allclose(diagnostics.rhat(draws["output/b"]), theirs, rtol=1e-6)


@pytest.mark.slow  # what is shared with run_sgd.py is shown there every time
def test_killed_and_resumed(whole, tmp_path):
    directory = tmp_path / "killed"
    program.kill_after_checkpoint(directory, "run_hmc.py", f"--dir={directory}", *SHORT)
    code, _, err = run(f"--dir={directory}", *SHORT)
    assert code == 0, err
    program.assert_same_outcome(directory, whole[0])
    first, second = ((d / "history.jsonl").read_text() for d in (directory, whole[0]))
    assert first == second
    assert (directory / "diagnostics.json").read_text() == (
        whole[0] / "diagnostics.json"
    ).read_text()


@pytest.mark.slow
def test_ctrl_c_in_a_long_trajectory_stops_within_seconds(tmp_path):
    """A transition of ten million leapfrog steps would take minutes."""
    directory = tmp_path / "long"
    flags = [
        f"--dir={directory}",
        "--step_size=1e-7",
        "--trajectory_len=1",
        "--max_num_leapfrog_steps=10000000",
        "--num_iterations=3",
        "--num_chains=1",
    ]
    process = program.start("run_hmc.py", *flags)
    while not (directory / "history.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(8)  # compiled and under way
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 15
    assert process.returncode == 130, err
    assert "the same command goes on from here" in out
    assert list(directory.glob("checkpoints/*.safetensors"))


@pytest.mark.slow  # starts from a checkpoint are shown on run_sgd.py every time
def test_chains_start_from_the_members_of_an_ensemble_and_fixed_parameters_stay(tmp_path):
    ensemble = tmp_path / "ensemble"
    code, _, err = program.run(
        "run_sgd.py", f"--dir={ensemble}", "--num_epochs=50", "--eval_freq=50", "--num_members=2"
    )
    assert code == 0, err
    directory = tmp_path / "chains"
    flags = ["--step_size=1e-3", "--num_iterations=4", "--num_chains=2", "--trajectory_len=0.01"]
    flags += [f"--dir={directory}", "--stochastic_params=output"]
    code, _, err = run(*flags)
    assert code == 2 and "give an init_checkpoint" in err
    code, _, err = run(*flags, f"--init_checkpoint={ensemble}")
    assert code == 0, err
    start, draws = (checkpoint_utils.load_draws(d / "draws") for d in (ensemble, directory))
    for name, leaf in draws.items():
        same = np.array_equal(leaf, np.broadcast_to(start[name], leaf.shape))
        assert same != name.startswith("output"), name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--step_size=1e-6"], "more than max_num_leapfrog_steps = 10000"),
        (["--num_burn_in_iterations=0"], "Without burn-in the step size cannot be adapted"),
        (["--step_size=1e-3", "--trajectory_jitter=2"], "trajectory_jitter must lie in [0, 1)"),
        (["--num_iterations=10", "--num_burn_in_iterations=10"], "No draws would be collected"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, sentence, tmp_path):
    code, _, err = run(*flags, f"--dir={tmp_path / 'run'}")
    assert code == 2
    assert sentence in err and err.count("\n") == 1


def test_the_anchors_mnist_command_runs_as_written(shared_data, tmp_path):
    """As in the anchor's README, shortened by its own flags."""
    command = (
        "--seed=0 --weight_decay=1. --temperature=1. --dataset_name=mnist "
        "--model_name=mlp_classification --step_size=3.e-5 --trajectory_len=1.5 "
        "--num_iterations=100 --max_num_leapfrog_steps=50000 "
        "--num_burn_in_iterations=10 --subset_train_to=160"
    )
    shortened = ["--trajectory_len=3e-4", "--num_iterations=3", "--num_burn_in_iterations=1"]
    shortened += [f"--dir={tmp_path / 'run'}", f"--data_dir={shared_data}", "--num_chains=1"]
    code, out, err = run(*command.split(), *shortened)
    assert code == 0, err
    assert "269,322 parameters" in out and "160 training rows" in out
