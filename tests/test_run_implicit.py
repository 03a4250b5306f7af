"""run_implicit.py as a user meets it: starts, members, refinement, a kill, and nonsense.

What all scripts share (signals, folders of other flags) is tested on run_sgd.py.
"""

import json

import numpy as np
import program
import pytest
from program import assert_same_outcome, outcome

MANY = [
    *("--num_epochs=60", "--pretrain_epochs=50", "--eval_freq=30", "--save_freq=20"),
    *("--num_members=2", "--member_weights=elbo", "--num_draws=4", "--num_elbo_draws=20"),
    *("--generator=configs/toy.yaml", "--entropy=lanczos", "--refine_iterations=2"),
    *("--refine_step_size=1e-3", "--refine_trajectory_len=0.02", "--annealing_epochs=10"),
    *("--clip_gradient=1", "--pretrain_starts=3"),
]


def run(*flags, script="run_implicit.py"):
    return program.run(script, *flags)


def succeed(*flags, script="run_implicit.py"):
    return program.succeed(script, *flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return directory, succeed(f"--dir={directory}", *MANY)


def test_a_run_says_what_it_does(whole):
    directory, out = whole
    assert "17,535 parameters for 105 weights" in out
    assert "Pretraining: 6 MAP solution(s), 50 epochs." in out
    assert "The mixture's is between" in out
    assert "Refinement 2/2" in out
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {"elbo", "entropy", "entropy_lower", "entropy_upper", "smallest_singular_value"}
    assert logged <= rows[-1].keys()
    assert rows[-1]["entropy_lower"] < rows[-1]["entropy_upper"]
    summary, draws, predictions = outcome(directory)
    assert summary["method"] == "implicit" and summary["num_draws"] == 8
    assert predictions["test_predictions"].shape == (8, 128, 2)
    assert all(np.ptp(values, axis=1).min() > 0 for values in draws.values())
    evidence = json.loads((directory / "evidence.json").read_text())
    assert sum(evidence["weights"]) == pytest.approx(1)


@pytest.mark.slow  # the loop is shared: test_run_sgd.py shows it every time
def test_killed_at_a_random_moment_and_resumed(whole, tmp_path):
    directory = tmp_path / "killed"
    program.kill_after_checkpoint(directory, "run_implicit.py", f"--dir={directory}", *MANY)
    succeed(f"--dir={directory}", *MANY)
    assert_same_outcome(directory, whole[0])


@pytest.mark.slow  # core/test_implicit.py shows it every time, without the scripts
def test_a_start_from_mean_field_does_not_end_below_it(tmp_path):
    """The ELBO of run_vi.py's last evaluation, and the one on all data from its posterior on."""
    mean_field, ours = tmp_path / "vi", tmp_path / "implicit"
    problem = ["--dataset_name=toy_regression", "--model_name=logistic_regression"]
    length = ["--num_epochs=2000", "--eval_freq=2000", "--save_freq=2000"]
    succeed(
        *(f"--dir={mean_field}", *problem, *length, "--vi_num_samples=50"),
        *("--vi_ensemble_size=2", "--kl_warmup_epochs=0"),
        script="run_vi.py",
    )
    succeed(f"--dir={ours}", *problem, *length, f"--vi_checkpoint={mean_field}", "--num_samples=8")
    before = [json.loads(line) for line in (mean_field / "metrics.jsonl").read_text().splitlines()]
    after = json.loads((ours / "evidence.json").read_text())
    assert after["elbos"][0] > before[-1]["elbo"] - 5 * after["errors"][0] - 0.5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--generator=nowhere.yaml"], "there is no file nowhere.yaml"),
        (["--vi_checkpoint=x", "--start=prior"], "vi_checkpoint is a start of its own"),
        (["--vi_checkpoint=nowhere"], "nowhere holds no checkpoints"),
        (["--max_generator_parameters=50"], "No generator of at most 50 parameters"),
        (["--member_weights=elbo", "--num_elbo_draws=0"], "give num_elbo_draws"),
    ],
)
def test_nonsense_is_one_sentence(flags, sentence, tmp_path):
    code, _, err = run(f"--dir={tmp_path / 'run'}", "--num_epochs=10", *flags)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
