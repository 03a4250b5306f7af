"""run_vi.py as a user meets it: every method, old commands, a kill, and nonsense.

What all scripts share (signals, folders of other flags) is tested on run_sgd.py.
"""

import json

import numpy as np
import program
import pytest
from program import assert_same_outcome, outcome

from haiku_posteriors.utils import checkpoint_utils

LONG = [
    *("--num_epochs=3000", "--kl_warmup_epochs=500", "--eval_freq=1000", "--save_freq=100"),
    *("--num_members=2", "--vi_ensemble_size=5", "--learn_noise", "--learn_prior_scale=module"),
    "--stochastic_params=/w$|likelihood",
]
SHORT = ["--num_epochs=20", "--eval_freq=10", "--vi_ensemble_size=3"]


def run(*flags, script="run_vi.py"):
    return program.run(script, *flags)


def succeed(*flags, script="run_vi.py"):
    return program.succeed(script, *flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return directory, succeed(f"--dir={directory}", *LONG)


def test_a_run_says_what_it_covers_and_learned(whole):
    directory, out = whole
    assert "'local' covers 3 of 4 arrays; drawn as weights: likelihood/log_noise_std." in out
    for module in ("hidden_0", "hidden_1", "output"):
        assert f"Prior scale of {module}: " in out
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {"elbo", "kl", "prior_scale/output"} <= rows[-1].keys()
    summary, draws, predictions = outcome(directory)
    assert summary["method"] == "vi" and summary["num_draws"] == 10
    assert predictions["test_predictions"].shape == (10, 128, 2)
    assert (directory / "predictive.png").is_file()
    for name, values in draws.items():
        spread = np.ptp(values, axis=1).max()
        assert (spread == 0) == name.endswith("/b"), name
    assert summary["test"]["epistemic"] > 0.01


@pytest.mark.slow  # the loop is shared: test_run_sgd.py shows it every time
def test_killed_at_a_random_moment_and_resumed(whole, tmp_path):
    directory = tmp_path / "killed"
    program.kill_after_checkpoint(directory, "run_vi.py", f"--dir={directory}", *LONG)
    succeed(f"--dir={directory}", *LONG)
    assert_same_outcome(directory, whole[0])


@pytest.mark.parametrize(
    ("flags", "draws", "sentence"),
    [
        pytest.param(["--method=map"], 1, "", marks=pytest.mark.slow),
        pytest.param(
            ["--method=mc_dropout", "--dropout_rate=0.2"],
            3,
            "Dropped: inputs of hidden_1, output.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                *("--vi_estimator=flipout", "--kl=forward", "--kl_weight=tempered_blundell"),
                *("--vi_num_samples=2", "--prior_family=laplace", "--batch_size=10"),
            ],
            3,
            "'flipout' covers 6 of 6 arrays.",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_method_runs(flags, draws, sentence, tmp_path):
    out = succeed(f"--dir={tmp_path / 'run'}", *SHORT, *flags)
    assert sentence in out
    summary, _, predictions = outcome(tmp_path / "run")
    assert summary["num_draws"] == len(predictions["test_predictions"]) == draws
    assert np.isfinite(predictions["test_predictions"]).all()


@pytest.mark.slow  # what is shared with run_sgd.py is shown there every time
def test_the_mean_starts_at_a_solution_of_sgd(tmp_path):
    """With vanishing scales and steps, every draw is the solution that q started from."""
    succeed(f"--dir={tmp_path / 'sgd'}", "--num_epochs=20", script="run_sgd.py")
    solution = f"--mean_init_checkpoint={tmp_path / 'sgd'}"
    vanishing = ["--vi_sigma_init=1e-12", "--init_step_size=1e-30"]
    out = succeed(f"--dir={tmp_path / 'vi'}", *SHORT, *vanishing, solution)
    assert "'local' covers 6 of 6 arrays." in out
    flags = json.loads((tmp_path / "vi/flags.json").read_text())
    assert flags["optimizer"] == "Adam" and flags["weight_decay"] == 1 / 1.5**2
    assert flags["kl_warmup_epochs"] == 10  # half of a shortened run
    start, draws = (
        checkpoint_utils.load_draws(tmp_path / name / "draws") for name in ("sgd", "vi")
    )
    for name, values in draws.items():
        expected = np.broadcast_to(start[name], values.shape)
        np.testing.assert_allclose(values, expected, atol=1e-9, err_msg=name)


MISTAKES = {
    "--vi_sigma_init=0": "sigma_init must be positive",
    "--kl_weight=grave": "Did you mean 'graves'",
    "--vi_estimator=lokal": "vi_estimator",
    "--dropout_rate=0.5": "dropout_rate is for --method=mc_dropout, not vi",
    "--method=mc_dropout --dropout_rate=1": "dropout_rate must be at least 0 and below 1",
    "--mean_init_checkpoint=a --init_checkpoint=b": "not both",
    "--mean_init_checkpoint=nowhere": "There is no file nowhere",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, tmp_path):
    code, _, err = run(*flags.split(), f"--dir={tmp_path / 'run'}")
    assert code == 2
    assert MISTAKES[flags] in err and err.count("\n") == 1 and err.startswith("run_vi.py: ")


# The commands of the HMC study's documentation, but for the data set and --mean_init_checkpoint.
COMMANDS = {
    "resnet20_frn_swish": (
        "--seed=11 --weight_decay=5. --model_name=resnet20_frn_swish --init_step_size=1e-4 "
        "--num_epochs=300 --eval_freq=10 --batch_size=80 --save_freq=300 --subset_train_to=40960 "
        "--optimizer=Adam --vi_sigma_init=0.01 --temperature=1. --vi_ensemble_size=20"
    ),
    "cnn_lstm": (
        "--seed=11 --weight_decay=5. --model_name=cnn_lstm --init_step_size=1e-4 --num_epochs=500 "
        "--eval_freq=10 --batch_size=80 --save_freq=200 --optimizer=Adam --vi_sigma_init=0.01 "
        "--temperature=1. --vi_ensemble_size=20"
    ),
}
SHORTENED = ["--num_epochs=1", "--batch_size=4", "--subset_train_to=8"]


@pytest.mark.slow
@pytest.mark.parametrize("network", COMMANDS)
def test_the_commands_of_the_hmc_study_start(network, tmp_path):
    rng = np.random.default_rng(0)
    if network == "cnn_lstm":
        inputs, classes = rng.integers(0, 20_000, (16, 30)).astype(np.int32), 2
    else:
        inputs, classes = rng.integers(0, 256, (16, 16, 16, 3)).astype(np.uint8), 10
    labels = np.arange(16) % classes
    path = tmp_path / "tiny.npz"
    np.savez(path, x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    data = f"--dataset_name={path}"
    succeed(
        *(f"--dir={tmp_path / 'sgd'}", data, f"--model_name={network}", *SHORTENED),
        script="run_sgd.py",
    )
    start = f"--mean_init_checkpoint={tmp_path / 'sgd'}"
    shortened = [*SHORTENED, "--vi_ensemble_size=2"]
    succeed(f"--dir={tmp_path / 'vi'}", data, *COMMANDS[network].split(), *shortened, start)
    assert outcome(tmp_path / "vi")[0]["num_draws"] == 2


@pytest.mark.slow
def test_the_default_run_fits_the_toy_data(tmp_path):
    succeed(f"--dir={tmp_path / 'run'}")
    summary = outcome(tmp_path / "run")[0]
    assert summary["train"]["rmse"] < 0.45
    assert 0.1 < summary["test"]["epistemic"] < 1
