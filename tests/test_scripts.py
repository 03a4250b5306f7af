"""The run_*.py scripts as a user meets them: whole, killed, interrupted, resumed, given nonsense.

What can be seen without a process of its own is tested in this one; a process costs seconds.
"""

import json
import shlex
import signal
import sys
import time
import warnings

import numpy as np
import program
import pytest
from program import assert_same_outcome, outcome, read_rows, run_here

import run_hmc
import run_implicit
import run_mclmc
import run_sgd
import run_sgmcmc
import run_smc
import run_vi
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.utils import checkpoint_utils, tasks
from haiku_posteriors.utils.train_utils import DivergedError
from haiku_posteriors.version import __version__

pytestmark = pytest.mark.usefixtures("first_device_only")

# Long enough for a kill to fall between two checkpoints, with all that each method has.
RUNS = {
    run_sgd: (
        "--num_epochs=4000 --until_converged --eval_freq=500 --save_freq=100 --num_members=2"
    ),
    run_hmc: (
        "--num_iterations=24 --num_burn_in_iterations=12 --eval_freq=8 --save_freq=4 "
        "--num_chains=2 --trajectory_len=0.05 --warm_start_epochs=300"
    ),
    run_mclmc: (
        "--num_iterations=24 --num_burn_in_iterations=12 --eval_freq=8 --save_freq=4 "
        "--num_chains=2 --trajectory_len=0.05 --warm_start_epochs=300 --bias_iterations=6 "
        "--learn_noise"
    ),
    run_sgmcmc: (
        "--num_epochs=8000 --num_burnin_epochs=1000 --ensemble_freq=500 --eval_freq=4000 "
        "--save_freq=500 --num_chains=2 --preconditioner=RMSprop --init_step_size=1e-5"
    ),
    run_smc: (
        "--num_particles=16 --num_chains=2 --max_num_leapfrog_steps=8 --num_moves=2 "
        "--num_final_moves=6 --target_ess=0.7 --eval_freq=16 --save_freq=4"
    ),
    run_vi: (
        "--num_epochs=3000 --kl_warmup_epochs=500 --eval_freq=1000 --save_freq=100 "
        "--num_members=2 --vi_ensemble_size=5 --learn_noise --learn_prior_scale=module "
        "--stochastic_params=/w$|likelihood"
    ),
    run_implicit: (
        "--num_epochs=60 --pretrain_epochs=50 --eval_freq=30 --save_freq=20 --num_members=2 "
        "--member_weights=evidence --num_draws=4 --num_evidence_draws=20 --num_inner_draws=5 "
        "--generator=configs/toy.yaml --entropy=lanczos --refine_steps=60 "
        "--annealing_epochs=10 --clip_gradient=1 --pretrain_starts=3"
    ),
}


def name_of(script):
    return f"{script.__name__}.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of each script as (folder, what it said), made when it is first asked for."""
    found = {}

    def finished(script):
        if script not in found:
            directory = tmp_path_factory.mktemp("runs") / script.__name__
            flags = [f"--dir={directory}", *RUNS[script].split()]
            found[script] = directory, program.succeed(name_of(script), *flags)
        return found[script]

    return finished


def test_run_sgd_leaves_what_the_design_says(whole):
    directory, out = whole(run_sgd)
    left = {path.name for path in directory.iterdir()}
    expected = {"flags.json", "metrics.jsonl", "summary.json", "checkpoints", "draws"}
    assert expected | {"predictions.npz", "predictive.png"} <= left
    assert any(name.startswith("events.out.tfevents") for name in left)
    assert not [path for path in directory.rglob("*") if path.name.startswith(".")]
    summary, draws, predictions = outcome(directory)
    assert summary["num_parameters"] == 105 and summary["seed"] == 0
    judged = json.loads((directory / "diagnostics.json").read_text())
    # Two rounds of 1,000 epochs at least.
    assert 2000 <= summary["steps"] <= 4000 and summary["steps"] % 1000 == 0
    assert judged["converged"] == all(judged["ended_by_itself"]) == (summary["steps"] < 4000)
    verdict = {name: judged[name] for name in ("converged", "problems", "notes")}
    assert summary["verdict"] == verdict
    assert "Verdict: " in out and "nats are left to gain" in out
    assert (
        summary["device"]["count"] == 1 and summary["versions"]["haiku-posteriors"] == __version__
    )
    assert {"rmse", "nll"} <= summary["test"].keys() & summary["train"].keys()
    assert draws["hidden_0/w"].shape == (2, 1, 1, 7)
    assert predictions["test_predictions"].shape == (2, 128, 2)
    assert predictions["test_targets"].shape == (128, 1)
    assert "runs" in out and "predictive.png" in out and "epoch" in out


@pytest.mark.slow  # two runs more of run_sgd.py
def test_a_time_limit_ends_a_run_that_goes_on_without_it(whole, tmp_path):
    run_here(run_sgd, f"{RUNS[run_sgd]} --time_limit=1e-4", tmp_path / "run")
    summary, *_ = outcome(tmp_path / "run")
    judged = json.loads((tmp_path / "run" / "diagnostics.json").read_text())
    assert summary["epochs"] < 1000 and "cut short" in judged["problems"][0]
    assert set(judged["objectives"]) == {None}  # and not zeros
    run_here(run_sgd, RUNS[run_sgd], tmp_path / "run")
    _, draws, _ = outcome(tmp_path / "run")
    for name, expected in outcome(whole(run_sgd)[0])[1].items():
        np.testing.assert_array_equal(draws[name], expected)


def test_run_hmc_leaves_draws_history_and_a_verdict(whole):
    directory, out = whole(run_hmc)
    judged = json.loads((directory / "diagnostics.json").read_text())
    assert judged["converged"] is False and len(judged["step_size"]) == 2 and judged["problems"]
    assert judged["log_joint"]["largest_rhat"] > 0.9 and "per 1,000 gradients" in out
    assert out.index("Verdict: NOT converged.") < out.index("all of the run is in")
    assert (directory / "diagnostics.png").stat().st_size > 10_000
    history = read_rows(directory / "history.jsonl")
    assert [row["epoch"] for row in history] == list(range(1, 25))
    frozen = {tuple(row["step_size"]) for row in history[12:]}
    assert len(frozen) == 1, "the step size must not change after burn-in"
    draws = checkpoint_utils.load_draws(directory / "draws")
    assert draws["hidden_0/w"].shape == (2, 12, 1, 7)
    # A rejected state counts again: as many repeated draws as rejections.
    accepted = np.array([row["accepted"] for row in history[12:]])
    moved = np.any(np.diff(draws["hidden_0/w"], axis=1) != 0, axis=(2, 3))
    np.testing.assert_array_equal(moved, accepted[1:].T)


@pytest.mark.slow  # compiles SMC once more, as the next compiles MCLMC and its bias stage
def test_run_smc_leaves_draws_evidence_and_a_verdict(tmp_path, capsys):
    directory = tmp_path / "run"
    run_here(run_smc, RUNS[run_smc], directory)
    out = capsys.readouterr().out
    history = read_rows(directory / "history.jsonl")
    fractions = np.array([row["fraction"] for row in history])
    # It ended by itself, with three steps of two moves each after the last population's arrival.
    assert np.all(fractions[-1] == 1) and np.sum(np.all(fractions == 1, axis=1)) == 4
    evidence = json.loads((directory / "evidence.json").read_text())
    assert evidence["values"] == history[-1]["log_evidence"] and evidence["errors"] == [None, None]
    assert min(evidence["values"]) < evidence["value"] < max(evidence["values"])
    assert evidence["error"] > 0 and sum(evidence["weights"]) == pytest.approx(1)
    judged = json.loads((directory / "diagnostics.json").read_text())
    assert judged["converged"] is False and "Verdict: NOT converged." in out
    assert f"Log-evidence: {evidence['value']:.2f} (error {evidence['error']:.2f})" in out
    assert judged["num_gradients"] == sum(sum(row["num_gradients"]) for row in history)
    assert (directory / "diagnostics.png").stat().st_size > 10_000
    summary, draws, _ = outcome(directory)
    assert summary["epochs"] == len(history) and summary["num_draws"] == 32
    assert draws["hidden_0/w"].shape == (2, 16, 1, 7)
    assert {"fraction", "log_evidence"} <= read_rows(directory / "metrics.jsonl")[-1].keys()


@pytest.mark.slow  # two runs more of run_hmc.py
def test_a_run_of_more_transitions_goes_on_with_one_of_fewer(whole, tmp_path):
    fewer = RUNS[run_hmc].replace("--num_iterations=24", "--num_iterations=17")
    run_here(run_hmc, fewer, tmp_path / "run")
    run_here(run_hmc, RUNS[run_hmc], tmp_path / "run")
    _, draws, _ = outcome(tmp_path / "run")
    for name, expected in outcome(whole(run_hmc)[0])[1].items():
        np.testing.assert_array_equal(draws[name], expected)
    with pytest.raises(UserError, match="num_iterations"):  # not with fewer
        run_here(run_hmc, fewer, tmp_path / "run")


@pytest.mark.slow
def test_run_mclmc_leaves_draws_history_and_an_estimate_of_its_bias(whole):
    directory, out = whole(run_mclmc)
    judged = json.loads((directory / "diagnostics.json").read_text())
    assert judged["converged"] is False and judged["lost_chains"] == []
    shifts = judged["bias"]["shifts"]
    assert {"predictions, mean", "log-joint, mean", "noise, spread"} <= shifts.keys()
    assert judged["bias"]["num_gradients"] > 32 * 6 and len(judged["energy_variance"]) == 2
    assert "Shifts under exact transitions" in out and "energy variance" in out
    history = read_rows(directory / "history.jsonl")
    sizes = np.array([row["step_size"] for row in history[12:]])  # shorter where made again
    assert set(np.log2(sizes.max() / sizes).ravel()) <= {0.0, 1.0, 2.0, 3.0}
    draws = checkpoint_utils.load_draws(directory / "draws")
    assert draws["hidden_0/w"].shape == (2, 12, 1, 7)


@pytest.mark.slow
def test_adjusted_mclmc_has_no_bias_to_estimate(tmp_path, capsys):
    flags = (
        "--adjusted --num_iterations=8 --num_chains=1 --trajectory_len=0.05 --warm_start_epochs=0"
    )
    run_here(run_mclmc, flags, tmp_path / "run")
    judged = json.loads((tmp_path / "run" / "diagnostics.json").read_text())
    assert "bias" not in judged and "acceptance" in capsys.readouterr().out


def test_run_vi_says_what_it_covers_and_learned(tmp_path, capsys):
    run_here(run_vi, RUNS[run_vi] + " --num_epochs=300 --kl_warmup_epochs=100", tmp_path / "run")
    out = capsys.readouterr().out
    assert out.index("Compiling ...") < out.index("log_joint")  # a wait of some seconds
    assert "'local' covers 3 of 4 arrays; drawn as weights: likelihood/log_noise_std." in out
    for module in ("hidden_0", "hidden_1", "output"):
        assert f"Prior scale of {module}: " in out
    last = read_rows(tmp_path / "run/metrics.jsonl")[-1]
    assert {"elbo", "kl", "prior_scale/output"} <= last.keys()
    summary, draws, predictions = outcome(tmp_path / "run")
    assert summary["method"] == "vi" and summary["num_draws"] == 10
    assert predictions["test_predictions"].shape == (10, 128, 2)
    for name, values in draws.items():
        spread = np.ptp(values, axis=1).max()
        assert (spread == 0) == name.endswith("/b"), name


@pytest.mark.slow  # compiles a program for each of its stages
def test_layerwise_members_are_weighed_and_bounded(tmp_path, capsys):
    flags = (
        "--vi_family=layerwise --num_epochs=6 --pretrain_epochs=4 --pretrain_starts=2 "
        "--num_members=2 --member_weights=stacking --vi_ensemble_size=25 --num_evidence_draws=8 "
        "--num_inducing=6 --learn_noise"
    )
    run_here(run_vi, flags, tmp_path / "run")
    out = capsys.readouterr().out
    assert "6 inducing inputs: hidden_0, hidden_1, output; independent weights: likelihood" in out
    assert "Pretraining: 4 MAP solution(s), 4 epochs." in out
    assert "ELBO of the mixture, a lower bound of the log-evidence" in out
    summary, draws, _ = outcome(tmp_path / "run")
    assert summary["method"] == "layerwise" and summary["num_draws"] == 50
    assert all(np.ptp(values, axis=1).min() > 0 for values in draws.values())
    evidence = json.loads((tmp_path / "run/evidence.json").read_text())
    assert "lower bound" in evidence["estimator"] and sum(evidence["weights"]) == pytest.approx(1)
    # The mixture's ELBO is above the weighted mean of the members', by log 2 at most.
    gain = evidence["value"] - np.dot(evidence["weights"], evidence["values"])
    assert -1e-3 < gain < np.log(2) + 1e-3


@pytest.mark.slow  # compiles a program for each of its stages
@pytest.mark.parametrize("family", ["low_rank", "mnf"])
def test_families_with_latents_are_bounded_and_resumed(family, tmp_path):
    flags = (
        f"--vi_family={family} --num_epochs=40 --warm_start_epochs=20 --num_members=2 "
        "--vi_ensemble_size=10 --num_evidence_draws=8 --save_freq=10 --learn_noise"
    )
    # In a process of its own, as the resumed one is: the number of devices is then the same.
    out = program.succeed("run_vi.py", f"--dir={tmp_path / 'run'}", *flags.split())
    assert "ELBO of the mixture, a lower bound of the log-evidence" in out
    assert ("Pareto k" in out) == (family == "low_rank")
    evidence = json.loads((tmp_path / "run/evidence.json").read_text())
    gain = evidence["value"] - np.mean(evidence["values"])
    assert -1e-3 < gain < np.log(2) + 1e-3  # 0 where there is no density
    summary, draws, _ = outcome(tmp_path / "run")
    assert summary["num_draws"] == 20
    assert all(np.ptp(values, axis=1).min() > 0 for values in draws.values())
    # Killed after its second checkpoint: the same bits.
    (tmp_path / "killed").mkdir()
    directory = tmp_path / "killed/run"
    whole_flags = [f"--dir={directory}", *flags.split()]
    program.kill_after_checkpoint(directory, "run_vi.py", *whole_flags)
    program.succeed("run_vi.py", *whole_flags)
    assert_same_outcome(directory, tmp_path / "run")


@pytest.mark.slow  # compiles a program for each of its stages
@pytest.mark.parametrize("objective", ["sivi", "uivi"])
def test_semi_implicit_runs_have_bounds_from_both_sides(objective, tmp_path, capsys):
    flags = (
        f"--objective={objective} --num_epochs=30 --pretrain_epochs=20 --pretrain_starts=1 "
        "--num_mixture_draws=5 --num_draws=8 --num_evidence_draws=20 --sandwich_draws=30"
    )
    run_here(run_implicit, flags, tmp_path / "run")
    assert "Semi-implicit bounds of the ELBO, K = 30" in capsys.readouterr().out
    found = json.loads((tmp_path / "run/evidence.json").read_text())["sandwich"]
    assert found["num_mixture_draws"] == [1, 3, 10, 30]
    lower, upper = (np.array(found[f"elbo_{name}"])[0] for name in ("lower", "upper"))
    assert np.all(np.diff(lower) > 0) and np.all(lower < upper)
    assert (tmp_path / "run/sandwich.png").exists()
    last = read_rows(tmp_path / "run/metrics.jsonl")[-1]
    is_unbiased = objective == "uivi"
    assert ("hierarchical_bound" if is_unbiased else "semi_implicit_bound") in last
    assert ("reverse_acceptance" in last) == ("bound_gap" in last) == is_unbiased


@pytest.mark.slow  # compiles a program for each of its stages
def test_run_implicit_says_what_it_does(tmp_path, capsys):
    one = " --num_members=1 --member_weights=even --num_evidence_draws=0 --num_draws=8"
    run_here(run_implicit, RUNS[run_implicit] + one, tmp_path / "run")
    out = capsys.readouterr().out
    assert "17,535 parameters for 105 weights" in out
    assert "Pretraining: 3 MAP solution(s), 50 epochs." in out
    assert "Refinement: 60 gradients for each of 8 draws by mclmc" in out
    last = read_rows(tmp_path / "run/metrics.jsonl")[-1]
    logged = {"linearised_estimate", "entropy", "log_det_lower", "log_det_upper", "residual"}
    assert logged <= last.keys() and last["log_det_lower"] < last["log_det_upper"]
    summary, draws, predictions = outcome(tmp_path / "run")
    assert summary["method"] == "implicit" and summary["num_draws"] == 8
    refinement = summary["refinement"]
    moved = refinement["gradients_per_draw"]  # the first piece is short, to find a step size
    assert 30 < moved <= 60 and refinement["gradients"] > 8 * moved
    assert {name.split(",")[0] for name in refinement["bias"]} == {"predictions", "log-joint"}
    assert f"moved by {moved} gradients" in (tmp_path / "run/report.html").read_text()
    assert predictions["test_predictions"].shape == (8, 128, 2)
    assert all(np.ptp(values, axis=1).min() > 0 for values in draws.values())


@pytest.mark.slow  # compiles a program for each of its stages
def test_members_of_implicit_vi_are_weighed(whole):
    directory, out = whole(run_implicit)
    assert "Pretraining: 6 MAP solution(s), 50 epochs." in out
    assert "Of the mixture of the members:" in out
    evidence = json.loads((directory / "evidence.json").read_text())
    assert sum(evidence["weights"]) == pytest.approx(1)
    assert evidence["estimator"] == "hierarchical lower bound, K = 5"
    assert len(evidence["errors"]) == 2
    assert evidence["value"] == pytest.approx(np.dot(evidence["weights"], evidence["values"]))


@pytest.mark.slow  # tests/utils/test_train_utils.py resumes exactly every time
@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_killed_at_a_random_moment_and_resumed(script, whole, tmp_path):
    directory = tmp_path / "killed"
    flags = [f"--dir={directory}", *RUNS[script].split()]
    program.kill_after_checkpoint(directory, name_of(script), *flags)
    assert "Going on from the checkpoint" in program.succeed(name_of(script), *flags)
    assert_same_outcome(directory, whole(script)[0])
    for name in ("history.jsonl", "diagnostics.json", "evidence.json"):
        first, second = directory / name, whole(script)[0] / name
        assert first.exists() == second.exists()
        assert not first.exists() or first.read_text() == second.read_text()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_interrupted_and_resumed(whole, tmp_path, number):
    directory = tmp_path / "interrupted"
    flags = [f"--dir={directory}", *RUNS[run_sgd].split()]
    process = program.start_until_checkpoint(directory, "run_sgd.py", *flags)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if process.returncode != 0:  # a fast machine may have finished first
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err and not (directory / "summary.json").exists()
        python, *command = shlex.split(out.split("to go on: ")[1])
        assert python == sys.executable and command == ["run_sgd.py", *flags]
    program.succeed("run_sgd.py", *flags)
    assert_same_outcome(directory, whole(run_sgd)[0])


@pytest.mark.slow
def test_ctrl_c_in_a_long_trajectory_stops_within_seconds(tmp_path):
    """A transition of ten million leapfrog steps would take minutes."""
    directory = tmp_path / "long"
    flags = [
        *(f"--dir={directory}", "--step_size=1e-7", "--trajectory_len=1", "--num_chains=1"),
        *("--max_num_leapfrog_steps=10000000", "--num_iterations=3"),
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
    assert "to go on: " in out
    assert list(directory.glob("checkpoints/*.safetensors"))


@pytest.mark.slow
def test_a_signal_while_the_run_is_judged_ends_with_the_command_that_goes_on(tmp_path):
    """The estimate of MCLMC's bias has chains of its own, after the last checkpoint."""
    directory = tmp_path / "judged"
    flags = [
        *(f"--dir={directory}", "--num_chains=2", "--warm_start_epochs=0"),
        *("--num_iterations=90", "--max_num_leapfrog_steps=20", "--bias_iterations=400"),
    ]
    process = program.start("run_mclmc.py", *flags)
    while not (directory / "summary.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    python, *command = shlex.split(out.split("to go on: ")[1])
    assert python == sys.executable and command == ["run_mclmc.py", *flags]
    assert not (directory / "diagnostics.json").exists()
    program.succeed("run_mclmc.py", *flags)
    assert "bias" in json.loads((directory / "diagnostics.json").read_text())


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path):
    code, _, err = program.run("run_sgd.py", "--batch_size=71", f"--dir={tmp_path / 'run'}")
    assert code == 2
    assert err.startswith("run_sgd.py: batch_size must be between 1 and")
    assert err.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_every_script_ends_by_its_exit_code(script, capsys, monkeypatch):
    """In this process: a wrong flag, help, the version."""
    monkeypatch.setattr(sys, "argv", [name_of(script)])
    for flag, code, sentence in (
        ("--num_epoch=3", 2, f"{name_of(script)}: Unknown command line flag 'num_epoch'"),
        ("--help", 0, "--dataset_name"),
        ("-h", 0, "(by default: "),
        ("--version", 0, f"haiku-posteriors {__version__}"),
    ):
        with pytest.raises(SystemExit) as end:
            script.main([flag])
        printed = capsys.readouterr()
        assert end.value.code == code
        assert sentence in printed.out + printed.err
        assert code == 0 or printed.err.count("\n") == 1


MISTAKES = {
    run_sgd: {
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
    },
    run_hmc: {
        "--step_size=1e-6": "more than max_num_leapfrog_steps = 10000",
        "--num_burn_in_iterations=0": "Without burn-in the step size cannot be adapted",
        "--step_size=1e-3 --trajectory_jitter=2": "trajectory_jitter must be at least 0",
        "--num_iterations=10 --num_burn_in_iterations=10": "No draws would be collected",
        "--stochastic_params=output --warm_start_epochs=0": "give an init_checkpoint",
        "--collapse_output --dataset_name=digits": "Gaussian likelihood of one noise",
    },
    run_mclmc: {
        "--energy_variance=0": "energy_variance must be positive",
        "--step_size=1e-6": "more than max_num_leapfrog_steps = 10000",
        "--num_burn_in_iterations=0": "Without burn-in the step size cannot be adapted",
        "--stochastic_params=output --warm_start_epochs=0": "give an init_checkpoint",
        "--init_checkpoint=nowhere": "There is no file nowhere",
    },
    run_sgmcmc: {
        "--num_burnin_epochs=300000 --num_epochs=300000": "There would be no draws: the first "
        "comes num_burnin_epochs + ensemble_freq = 300000 + 1 epochs from the start, and "
        "num_epochs is 300000.",
        "--num_epochs=90 --step_size_schedule=cyclical": "num_burnin_epochs + "
        "step_size_cycle_length_epochs = 45 + 50",
        "--warm_start_epochs=0": "The curvature is that of trained starts",
        "--init_step_size=-1": "init_step_size must be positive and finite, not -1.0",
        "--final_step_size=0": "final_step_size must be positive and finite, not 0.0",
        "--optimizer=Adam": "Unknown command line flag 'optimizer'",
        "--momentum=1": "momentum_decay must be at least 0 and below 1, not 1.0",
    },
    run_smc: {
        "--target_ess=1": "target_ess must be above 0 and below 1, not 1.0",
        "--stochastic_params=output": "give an init_checkpoint",
        "--num_particles=1": "num_particles",
    },
    run_vi: {
        "--vi_sigma_init=0": "sigma_init must be positive",
        "--kl_weight=grave": "Did you mean 'graves'",
        "--vi_estimator=lokal": "vi_estimator",
        "--dropout_rate=0.5": "dropout_rate is for --method=mc_dropout, not vi",
        "--method=mc_dropout --dropout_rate=1": "dropout_rate must be at least 0 and below 1",
        "--mean_init_checkpoint=a --init_checkpoint=b": "not both",
        "--mean_init_checkpoint=nowhere": "There is no file nowhere",
    },
    run_implicit: {
        "--generator=nowhere.yaml": "there is no file nowhere.yaml",
        "--vi_checkpoint=x --start=prior": "vi_checkpoint is a start of its own",
        "--vi_checkpoint=nowhere --num_epochs=10": "nowhere holds no checkpoints",
        "--max_generator_parameters=50": "No generator of at most 50 parameters",
        "--member_weights=evidence --num_evidence_draws=0": "give num_evidence_draws",
    },
}


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    [(script, *mistake) for script, mistakes in MISTAKES.items() for mistake in mistakes.items()],
)
def test_what_cannot_be_is_refused_in_one_sentence(script, flags, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        run_here(script, flags, tmp_path / "run")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_other_flags_is_refused_before_any_work(whole, monkeypatch):
    directory, _ = whole(run_sgd)
    monkeypatch.setattr(tasks, "execute", lambda *_, **__: pytest.fail("work has begun"))
    with pytest.raises(UserError, match=r"weight_decay \(0.4444444444444444 there, 7.0 here\)"):
        run_here(run_sgd, RUNS[run_sgd] + " --weight_decay=7", directory)
    monkeypatch.setattr(tasks, "execute", lambda *_, **__: None)
    run_here(run_sgd, RUNS[run_sgd] + " --tabulate_freq=3", directory)


def test_a_wrong_folder_is_refused_before_pretraining(tmp_path, capsys):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        run_here(run_implicit, "", tmp_path)
    assert "Pretraining" not in capsys.readouterr().out


def test_settings_are_shown_with_their_sources_and_nothing_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_here(run_sgmcmc, "--show_settings --num_epochs=9000", tmp_path / "run")
    assert end.value.code == 0 and not (tmp_path / "run").exists()
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["num_epochs"].split() == ["9000", "given"]
    assert shown["num_burnin_epochs"].split(maxsplit=1) == ["4500", "half of num_epochs"]
    assert shown["preconditioner"].split(maxsplit=1) == ["curvature", "SGMCMC outside the study"]


def test_a_step_size_too_large_ends_with_epoch_and_step(tmp_path):
    with pytest.raises(DivergedError, match="not finite at epoch"):
        run_here(run_sgd, "--optimizer=SGD --init_step_size=1e3", tmp_path / "run")


def test_members_start_from_a_checkpoint(whole, tmp_path):
    """With one epoch and a vanishing step size, the draws are those of the first run."""
    first = whole(run_sgd)[0]
    flags = f"--num_epochs=1 --init_step_size=1e-30 --num_members=2 --init_checkpoint={first}"
    run_here(run_sgd, flags, tmp_path / "warm")
    start, draws = (checkpoint_utils.load_draws(d / "draws") for d in (first, tmp_path / "warm"))
    for name in start:
        np.testing.assert_array_equal(start[name], draws[name])


def test_chains_start_from_the_members_of_an_ensemble_and_fixed_parameters_stay(whole, tmp_path):
    ensemble = whole(run_sgd)[0]
    flags = (
        "--step_size=1e-3 --num_iterations=4 --num_chains=2 --trajectory_len=0.01 "
        f"--stochastic_params=output --init_checkpoint={ensemble}"
    )
    run_here(run_hmc, flags, tmp_path / "chains")
    start, draws = (
        checkpoint_utils.load_draws(d / "draws") for d in (ensemble, tmp_path / "chains")
    )
    for name, leaf in draws.items():
        same = np.array_equal(leaf, np.broadcast_to(start[name], leaf.shape))
        assert same != name.startswith("output"), name


def test_draws_open_in_arviz_as_documented(whole):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its next version when it is imported
        arviz = pytest.importorskip("arviz", "0.17", exc_type=ImportError)
    if int(arviz.__version__.split(".")[0]) > 0:
        pytest.skip("from_dict takes other arguments since ArviZ 1.0")
    draws = checkpoint_utils.load_draws(whole(run_hmc)[0] / "draws")
    named = {name.replace("/", "."): values for name, values in draws.items()}
    posterior = arviz.from_dict(posterior=named)
    theirs = arviz.rhat(posterior)["output.b"].values
    np.testing.assert_allclose(diagnostics.rhat(draws["output/b"]), theirs, rtol=1e-6)


@pytest.mark.slow  # tests/utils/test_draws.py shows what it can in this process
def test_draws_are_not_held_in_memory(tmp_path):
    """800 MB of draws cost 350 MB at most over what a run with a twentieth of them needs."""
    peaks = []
    for num_epochs in (25, 120):
        directory = tmp_path / str(num_epochs)
        flags = [
            *(f"--dir={directory}", "--model_name=program:wide_network", "--num_chains=2"),
            *(f"--num_epochs={num_epochs}", "--num_burnin_epochs=20", "--ensemble_freq=1"),
            *("--eval_freq=120", "--save_freq=1000", "--init_step_size=1e-9"),
        ]
        program.succeed("run_sgmcmc.py", *flags)
        summary = json.loads((directory / "summary.json").read_text())
        peaks.append(summary["peak_memory_bytes"])
    files = list((directory / "draws").iterdir())
    assert len(files) > 10 and sum(path.stat().st_size for path in files) > 800e6
    assert peaks[1] - peaks[0] < 350e6
