"""run_sgmcmc.py as a user meets it: the anchor's commands, every sampler, a kill, nonsense."""

import functools
import json
import shlex

import numpy as np
import program
import pytest

from haiku_posteriors.utils import checkpoint_utils

SHORT = ["--num_epochs=200", "--num_burnin_epochs=100", "--eval_freq=100"]
# Draws and checkpoints often enough for a kill to fall between them.
LONG = [
    "--num_epochs=8000",
    "--num_burnin_epochs=1000",
    "--ensemble_freq=500",
    "--eval_freq=4000",
    "--save_freq=500",
    "--num_chains=2",
    "--preconditioner=RMSprop",
    "--init_step_size=1e-5",
]


run = functools.partial(program.run, "run_sgmcmc.py")


def flags_in_force(directory):
    return json.loads((directory / "flags.json").read_text())


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """Noise in the form of CIFAR-10: 40 training rows, every class present."""
    path = tmp_path_factory.mktemp("data") / "cifar10.npz"
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(60, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(60) % 10
    arrays = {"x_train": images[:40], "y_train": labels[:40]}
    np.savez(path, **arrays, x_test=images[40:], y_test=labels[40:])
    return path


# As the anchor's README has them.
ANCHOR_COMMANDS = {
    "SGLD": """--seed=1 --weight_decay=5. --dir=runs/sgmcmc/cifar10/
        --dataset_name=cifar10 --model_name=resnet20_frn_swish --init_step_size=1e-6
        --final_step_size=1e-6 --num_epochs=10000 --num_burnin_epochs=1000
        --eval_freq=10 --batch_size=80 --save_freq=10 --momentum=0.
        --subset_train_to=40960""",
    "SGHMC": """--seed=1 --weight_decay=5 --dir=runs/sgmcmc/cifar10/
        --dataset_name=cifar10 --model_name=resnet20_frn_swish --init_step_size=3e-7
        --final_step_size=3e-7 --num_epochs=10000 --num_burnin_epochs=1000
        --eval_freq=10 --batch_size=80 --save_freq=10 --subset_train_to=40960
        --momentum=0.9""",
    "SGHMC-CLR": """--seed=1 --weight_decay=5 --dir=runs/sgmcmc/cifar10/
        --dataset_name=cifar10 --model_name=resnet20_frn_swish --init_step_size=3e-7
        --num_epochs=10000 --num_burnin_epochs=1000 --step_size_schedule=cyclical
        --step_size_cycle_length_epochs=50 --ensemble_freq=50 --eval_freq=10
        --batch_size=80 --save_freq=1000 --subset_train_to=40960
        --preconditioner=None --momentum=0.95 --eval_freq=10 --save_all_ensembled""",
    "SGHMC-CLR-Prec": """--seed=1 --weight_decay=5 --dir=runs/sghmc/cifar10/
        --dataset_name=cifar10 --model_name=resnet20_frn_swish --init_step_size=3e-5
        --num_epochs=10000 --num_burnin_epochs=1000 --step_size_schedule=cyclical
        --step_size_cycle_length_epochs=50 --ensemble_freq=50 --eval_freq=10
        --batch_size=80 --save_freq=50 --subset_train_to=40960
        --preconditioner=RMSprop --momentum=0.95 --eval_freq=10 --save_all_ensembled""",
}
# A later flag overrides an earlier one of the same name.
SHORTENED = [
    "--subset_train_to=40",
    "--batch_size=20",
    "--num_epochs=4",
    "--num_burnin_epochs=2",
    "--ensemble_freq=1",
    "--num_chains=1",
]


def check_anchor_command(name, dataset, directory, *further):
    cyclical = "cyclical" in ANCHOR_COMMANDS[name]
    code, out, err = run(
        *shlex.split(ANCHOR_COMMANDS[name]),
        *SHORTENED,
        *(["--step_size_cycle_length_epochs=1"] if cyclical else []),
        f"--dataset_name={dataset}",
        f"--dir={directory}",
        *further,
    )
    assert code == 0, err
    assert "R-hat" in out and "Traceback" not in err
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["num_draws"] == 2 and summary["steps"] == 8 and summary["seed"] == 1
    in_force = flags_in_force(directory)
    assert in_force["weight_decay"] == 5 and in_force["save_all_ensembled"]
    assert in_force["momentum_decay"] == {"SGLD": 0.0, "SGHMC": 0.9}.get(name, 0.95)
    assert in_force["preconditioner"] == ("RMSprop" if "Prec" in name else "None")


@pytest.mark.parametrize(
    "name",
    # Between them, these two use every flag of the four.
    [
        name if name in ("SGLD", "SGHMC-CLR-Prec") else pytest.param(name, marks=pytest.mark.slow)
        for name in ANCHOR_COMMANDS
    ],
)
def test_the_anchors_commands_start_with_a_network_that_compiles_fast(name, cifar10, tmp_path):
    check_anchor_command(name, cifar10, tmp_path / "run", "--model_name=logistic_regression")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANCHOR_COMMANDS)
def test_the_anchors_commands_start_with_their_own_network(name, cifar10, tmp_path):
    check_anchor_command(name, cifar10, tmp_path / "run")
    assert flags_in_force(tmp_path / "run")["model_name"] == "resnet20_frn_swish"


VARIANTS = {
    "SGLD": ["--momentum=0", "--ensemble_freq=10"],
    "SGHMC": ["--ensemble_freq=10", "--final_step_size=1e-6"],
    "cyclical": ["--step_size_schedule=cyclical", "--step_size_cycle_length_epochs=10"],
    "preconditioned": ["--preconditioner=RMSprop", "--init_step_size=1e-5", "--ensemble_freq=10"],
    "cyclical, preconditioned": [
        "--step_size_schedule=cyclical",
        "--step_size_cycle_length_epochs=10",
        "--preconditioner=RMSprop",
        "--init_step_size=1e-5",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_draws_and_says_how_well_it_mixed(name, tmp_path):
    code, out, err = run(f"--dir={tmp_path / 'run'}", *SHORT, *VARIANTS[name])
    assert code == 0, err
    assert "Predictions: largest R-hat" in out and "effective sample size" in out
    diagnostics = json.loads((tmp_path / "run" / "diagnostics.json").read_text())
    assert diagnostics["predictions"]["largest_rhat"] > 0.9
    draws = checkpoint_utils.load_draws(tmp_path / "run" / "draws")
    assert draws["hidden_0/w"].shape == (4, 10, 1, 7)


@pytest.mark.slow  # the loop is shared: test_run_sgd.py shows it every time
def test_killed_at_a_random_moment_and_resumed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, _, err = run(f"--dir={whole}", *LONG)
    assert code == 0, err
    program.kill_after_checkpoint(killed, "run_sgmcmc.py", f"--dir={killed}", *LONG)
    code, out, err = run(f"--dir={killed}", *LONG)
    assert code == 0, err
    assert "Going on from the checkpoint" in out
    program.assert_same_outcome(whole, killed)


MISTAKES = {
    "--num_burnin_epochs=300000": "There would be no draws: the first comes num_burnin_epochs + "
    "ensemble_freq = 300000 + 2000 epochs from the start, and num_epochs is 300000.",
    "--num_epochs=1500 --step_size_schedule=cyclical": "num_burnin_epochs + "
    "step_size_cycle_length_epochs = 750 + 2000",
    "--init_step_size=-1": "init_step_size must be positive and finite, not -1.0",
    "--final_step_size=0": "final_step_size must be positive and finite, not 0.0",
    "--optimizer=Adam": "Unknown command line flag 'optimizer'",
    "--momentum=1": "momentum_decay must be at least 0 and below 1, not 1.0",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(flags, tmp_path):
    code, _, err = run(*flags.split(), f"--dir={tmp_path / 'run'}")
    assert code == 2
    assert MISTAKES[flags] in err and err.count("\n") == 1 and err.startswith("run_sgmcmc.py: ")


@pytest.mark.slow  # what is shared with run_sgd.py is shown there every time
def test_a_run_shortened_by_its_epochs_alone_has_draws(tmp_path):
    """On the anchor's own data sets its defaults, 300 epochs of burn-in in 300, would have none."""
    flags = ["--dataset_name=wine", "--num_epochs=20", "--ensemble_freq=5"]
    code, _, err = run(*flags, f"--dir={tmp_path / 'run'}")
    assert code == 0, err
    assert flags_in_force(tmp_path / "run")["num_burnin_epochs"] == 10
