"""Commands of the HMC study's documentation (arXiv 2104.14421) run as written; longer runs."""

import functools
import json
import shlex

import numpy as np
import program
import pytest
from program import outcome, read_rows

import run_sgd
import run_sgmcmc
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils

pytestmark = pytest.mark.usefixtures("first_device_only")

succeed_sgmcmc = functools.partial(program.succeed, "run_sgmcmc.py")
succeed_vi = functools.partial(program.succeed, "run_vi.py")


def flags_in_force(directory):
    return json.loads((directory / "flags.json").read_text())


@pytest.mark.slow  # the flags are those of the other commands, the loop that of run_hmc.py
def test_hmc_on_mnist(shared_data, tmp_path):
    """Shortened by its own flags."""
    command = (
        "--seed=0 --weight_decay=1. --temperature=1. --dataset_name=mnist "
        "--model_name=mlp_classification --step_size=3.e-5 --trajectory_len=1.5 "
        "--num_iterations=100 --max_num_leapfrog_steps=50000 "
        "--num_burn_in_iterations=10 --subset_train_to=160"
    )
    shortened = ["--trajectory_len=3e-4", "--num_iterations=3", "--num_burn_in_iterations=1"]
    shortened += [f"--dir={tmp_path / 'run'}", f"--data_dir={shared_data}", "--num_chains=1"]
    out = program.succeed("run_hmc.py", *command.split(), *shortened)
    assert "269,322 parameters" in out and "160 training rows" in out


SGMCMC = {
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
SHORTENED_SGMCMC = (
    "--subset_train_to=40 --batch_size=20 --num_epochs=4 --num_burnin_epochs=2 --ensemble_freq=1 "
    "--num_chains=1"
)


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


def sgmcmc_flags(name, dataset, directory):
    cycle = ["--step_size_cycle_length_epochs=1"] if "cyclical" in SGMCMC[name] else []
    return [
        *shlex.split(SGMCMC[name]),
        *SHORTENED_SGMCMC.split(),
        *cycle,
        f"--dataset_name={dataset}",
        f"--dir={directory}",
    ]


def check_sgmcmc_run(name, directory):
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["num_draws"] == 2 and summary["steps"] == 8 and summary["seed"] == 1
    in_force = flags_in_force(directory)
    assert in_force["weight_decay"] == 5 and in_force["save_all_ensembled"]
    assert in_force["momentum_decay"] == {"SGLD": 0.0, "SGHMC": 0.9}.get(name, 0.95)
    assert in_force["preconditioner"] == ("RMSprop" if "Prec" in name else "None")


# Between them, these two use every flag of the four.
@pytest.mark.parametrize("name", ["SGLD", "SGHMC-CLR-Prec"])
def test_sgmcmc_commands_with_a_network_that_compiles_fast(name, cifar10, tmp_path, capsys):
    flags = [*sgmcmc_flags(name, cifar10, tmp_path / "run"), "--model_name=logistic_regression"]
    run_sgmcmc.run(cmd_args_utils.parse(run_sgmcmc.GROUPS, flags))
    assert "Predictions: largest R-hat" in capsys.readouterr().out
    check_sgmcmc_run(name, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", SGMCMC)
def test_sgmcmc_commands_with_their_own_network(name, cifar10, tmp_path):
    assert "R-hat" in succeed_sgmcmc(*sgmcmc_flags(name, cifar10, tmp_path / "run"))
    check_sgmcmc_run(name, tmp_path / "run")
    assert flags_in_force(tmp_path / "run")["model_name"] == "resnet20_frn_swish"


# But for the data set and --mean_init_checkpoint.
VI = {
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
SHORTENED_VI = ["--num_epochs=1", "--batch_size=4", "--subset_train_to=8"]


@pytest.mark.slow
@pytest.mark.parametrize("network", VI)
def test_vi_commands(network, tmp_path):
    rng = np.random.default_rng(0)
    if network == "cnn_lstm":
        inputs, classes = rng.integers(0, 20_000, (16, 30)).astype(np.int32), 2
    else:
        inputs, classes = rng.integers(0, 256, (16, 16, 16, 3)).astype(np.uint8), 10
    labels = np.arange(16) % classes
    path = tmp_path / "tiny.npz"
    np.savez(path, x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    data = [f"--dataset_name={path}", *(["--inputs=tokens"] if network == "cnn_lstm" else [])]
    flags = [f"--dir={tmp_path / 'sgd'}", *data, f"--model_name={network}", *SHORTENED_VI]
    program.succeed("run_sgd.py", *flags)
    start = f"--mean_init_checkpoint={tmp_path / 'sgd'}"
    shortened = [*SHORTENED_VI, "--vi_ensemble_size=2"]
    succeed_vi(f"--dir={tmp_path / 'vi'}", *data, *VI[network].split(), *shortened, start)
    assert outcome(tmp_path / "vi")[0]["num_draws"] == 2


VARIANTS = {
    "SGLD": "--momentum=0 --ensemble_freq=10",
    "SGHMC": "--ensemble_freq=10 --final_step_size=1e-6",
    "cyclical": "--step_size_schedule=cyclical --step_size_cycle_length_epochs=10",
    "preconditioned": "--preconditioner=RMSprop --init_step_size=1e-5 --ensemble_freq=10",
    "cyclical, preconditioned": "--step_size_schedule=cyclical --preconditioner=RMSprop "
    "--step_size_cycle_length_epochs=10 --init_step_size=1e-5",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_sampler_draws_and_says_how_well_it_mixed(name, tmp_path):
    flags = ["--num_epochs=200", "--num_burnin_epochs=100", "--eval_freq=100"]
    out = succeed_sgmcmc(f"--dir={tmp_path / 'run'}", *flags, *VARIANTS[name].split())
    assert "Predictions: largest R-hat" in out and "effective sample size" in out
    diagnostics = json.loads((tmp_path / "run/diagnostics.json").read_text())
    assert diagnostics["predictions"]["largest_rhat"] > 0.9
    draws = checkpoint_utils.load_draws(tmp_path / "run/draws")
    assert draws["hidden_0/w"].shape == (4, 10, 1, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "draws", "sentence"),
    [
        ("--method=map", 1, ""),
        ("--method=mc_dropout --dropout_rate=0.2", 3, "Dropped: inputs of hidden_1, output."),
        (
            "--vi_estimator=flipout --kl=forward --kl_weight=tempered_blundell "
            "--vi_num_samples=2 --prior_family=laplace --batch_size=10",
            3,
            "'flipout' covers 6 of 6 arrays.",
        ),
    ],
)
def test_every_approximation_of_run_vi_runs(flags, draws, sentence, tmp_path):
    short = ["--num_epochs=20", "--eval_freq=10", "--vi_ensemble_size=3"]
    assert sentence in succeed_vi(f"--dir={tmp_path / 'run'}", *short, *flags.split())
    summary, _, predictions = outcome(tmp_path / "run")
    assert summary["num_draws"] == len(predictions["test_predictions"]) == draws
    assert np.isfinite(predictions["test_predictions"]).all()


@pytest.mark.slow
def test_the_mean_of_q_starts_at_a_solution_of_sgd(tmp_path):
    """With vanishing scales and steps, every draw is the solution that q started from."""
    program.succeed("run_sgd.py", f"--dir={tmp_path / 'sgd'}", "--num_epochs=20")
    succeed_vi(
        *(f"--dir={tmp_path / 'vi'}", f"--mean_init_checkpoint={tmp_path / 'sgd'}"),
        *("--num_epochs=20", "--vi_ensemble_size=3", "--vi_sigma_init=1e-12"),
        "--init_step_size=1e-30",
    )
    start, draws = (
        checkpoint_utils.load_draws(tmp_path / name / "draws") for name in ("sgd", "vi")
    )
    for name, values in draws.items():
        expected = np.broadcast_to(start[name], values.shape)
        np.testing.assert_allclose(values, expected, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_the_default_run_of_vi_fits_the_toy_data(tmp_path):
    succeed_vi(f"--dir={tmp_path / 'run'}")
    summary = outcome(tmp_path / "run")[0]
    assert summary["train"]["rmse"] < 0.45
    assert 0.1 < summary["test"]["epistemic"] < 1


@pytest.mark.slow
def test_implicit_vi_from_mean_field_does_not_end_below_it(tmp_path):
    """The ELBO of run_vi.py's last evaluation, and the bound on all data from its posterior on."""
    mean_field, ours = tmp_path / "vi", tmp_path / "implicit"
    problem = ["--dataset_name=toy_regression", "--model_name=logistic_regression"]
    problem += ["--num_epochs=2000", "--eval_freq=2000", "--save_freq=2000"]
    succeed_vi(
        *(f"--dir={mean_field}", *problem, "--vi_num_samples=50"),
        *("--vi_ensemble_size=2", "--kl_warmup_epochs=0"),
    )
    start = [f"--vi_checkpoint={mean_field}", "--num_samples=8"]
    program.succeed("run_implicit.py", f"--dir={ours}", *problem, *start)
    before = read_rows(mean_field / "metrics.jsonl")
    after = json.loads((ours / "evidence.json").read_text())
    assert after["values"][0] > before[-1]["elbo"] - 5 * after["errors"][0] - 0.5


@pytest.mark.slow
def test_digits_reaches_97_percent_and_an_ensemble_scores_better_than_its_members(tmp_path):
    flags = ["--dataset_name=digits", "--model_name=mlp_classification"]
    program.succeed("run_sgd.py", f"--dir={tmp_path / 'one'}", *flags)
    assert outcome(tmp_path / "one")[0]["test"]["accuracy"] >= 0.97
    program.succeed("run_sgd.py", f"--dir={tmp_path / 'five'}", *flags, "--num_members=5")
    summary = outcome(tmp_path / "five")[0]
    assert summary["test"]["nll"] < summary["test_mean_of_members"]["nll"]


def test_a_network_of_the_users_own(tmp_path):
    flags = ["--model_name=program:small_network", "--num_epochs=2", f"--dir={tmp_path / 'run'}"]
    run_sgd.run(cmd_args_utils.parse(run_sgd.GROUPS, flags))
    assert outcome(tmp_path / "run")[0]["num_parameters"] == 10
