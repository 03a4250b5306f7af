"""Earlier posteriors as priors from the command line: parts as one batch, kept and resumed."""

import itertools
import pathlib
import shutil

import jax
import numpy as np
import pytest
import synthetic_runs
from program import assert_same_outcome, run_here

import run_hmc
import run_vi
import stream
from haiku_posteriors.core import trees
from haiku_posteriors.core.gaussian_priors import Gaussian
from haiku_posteriors.utils import cmd_args_utils, data_utils, files, run_priors, subruns, tasks
from haiku_posteriors.utils.problem import Problem, load_problem
from haiku_posteriors.utils.report import loaded_runs, run_folders, run_networks
from haiku_posteriors.utils.stages import variational

pytestmark = pytest.mark.usefixtures("first_device_only")
LINEAR = "--model_name=logistic_regression --likelihood=gaussian --noise_std=1 --standardize=false"


def started(*flags):
    with pytest.raises(SystemExit) as end:
        stream.main(flags)
    return end.value.code


def test_parts_are_dealt_out_and_join_to_the_whole():
    whole = data_utils.load("diabetes")
    parts = [data_utils.take_part(whole, f"{k}/3") for k in (1, 2, 3)]
    assert [len(part.y_train) for part in parts] == [118, 118, 117]
    np.testing.assert_array_equal(parts[1].x_train, whole.x_train[1::3])
    two = data_utils.take_part(whole, "1-2/3").y_train
    np.testing.assert_array_equal(two, whole.y_train[np.arange(353) % 3 < 2])
    for part in parts:
        np.testing.assert_array_equal(part.x_test, whole.x_test)


def test_moments_of_draws_are_a_prior(tmp_path):
    """Of a run that is no Gaussian: the means and deviations over all files of draws."""
    folder = synthetic_runs.write_toy_run(tmp_path / "hmc", chains=2, draws=20)
    problem = Problem.from_mapping(run_folders.read_flags(folder))
    _, _, log_joint = load_problem(problem)
    gaussian, sentence = run_priors.load(folder, log_joint)
    assert "40 draws" in sentence and "without the correlations" in sentence
    draws = run_networks.choose_draws(log_joint, run_folders.open_run(folder), 40)
    for name, leaf in trees.named_leaves(draws).items():
        np.testing.assert_allclose(gaussian.mean[name], leaf[0].mean(axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gaussian.scale[name], leaf[0].std(axis=0, ddof=1), rtol=1e-3)
    run_priors.save(tmp_path, gaussian, sentence)
    again, told = run_priors.load(tmp_path / run_priors.NAME, log_joint)
    assert told == sentence and again.mean.keys() == gaussian.mean.keys()


def test_finished_streams_are_read_and_drawn(tmp_path, capsys, monkeypatch):
    for name in ("online_1", "online_2", "batch_2", "naive_2"):
        synthetic_runs.write_toy_run(tmp_path / name, chains=2, draws=20)
    monkeypatch.setattr(subruns, "run", lambda *_: pytest.fail("started"))
    assert started("--num_parts=2", f"--dir={tmp_path}") == 0
    assert "NLL, naive" in capsys.readouterr().out
    assert (tmp_path / "stream.png").stat().st_size > 10_000


def test_the_prior_of_the_flags_is_that_of_the_first_part(tmp_path, capsys, monkeypatch):
    """Further parts have the earlier posterior; one that is a constant is told at once."""
    commands = {}

    def finish(command):
        folder = pathlib.Path(command[-1].removeprefix("--dir="))
        commands[folder.name] = command[2:-1]
        synthetic_runs.write_toy_run(folder, chains=1, draws=4)
        if folder.name == "online_1":
            arrays = dict(np.load(folder / "predictions.npz"))
            arrays["test_predictions"] = np.zeros_like(arrays["test_predictions"]) + 0.5
            arrays["test_log_likelihoods"] = arrays["test_log_likelihoods"] - 5
            files.write_arrays(folder / "predictions.npz", **arrays)
        return 0

    monkeypatch.setattr(subruns, "run", finish)
    flags = "--flags=--weight_decay 7 --seed=1 --prior_family=student_t"
    assert started("--num_parts=2", f"--dir={tmp_path}", flags) == 0
    first = ["--weight_decay", "7", "--seed=1", "--prior_family=student_t"]
    assert commands["online_1"] == [*first, "--train_part=1/2"]
    earlier = tmp_path / "online_1"
    assert commands["online_2"] == ["--seed=1", "--train_part=2/2", f"--prior_from={earlier}"]
    assert commands["batch_2"] == [*first, "--train_part=1-2/2"]
    assert commands["naive_2"] == [*first, "--train_part=2/2", f"--init_checkpoint={earlier}"]
    told = capsys.readouterr().out
    assert "WARNING: after part 1" in told and "after part 2" not in told
    assert "No better than one prediction for all rows: online, part 1." in told


def some_gaussian(log_joint, rank):
    """Of the random parameters, correlated by `rank` columns."""
    rng = np.random.default_rng(0)
    leaves = trees.named_leaves(log_joint.random_shapes)
    mean, scale = (
        {name: rng.uniform(1, 2, leaf.shape) for name, leaf in leaves.items()} for _ in "ms"
    )
    factor = {name: rng.normal(size=(rank, *leaf.shape)) for name, leaf in leaves.items()}
    return Gaussian(mean, scale, factor if rank else {}, {})


@pytest.mark.parametrize(("family", "rank"), [("mean_field", 2), ("low_rank", 2), ("low_rank", 0)])
def test_q_starts_as_the_earlier_posterior(family, rank, tmp_path):
    """As all of it where the family has it, or with the precisions' diagonal."""
    first = tasks.load_task("vi", cmd_args_utils.parse(run_vi.GROUPS, []))
    gaussian = some_gaussian(first.log_joint, rank)
    run_priors.save(tmp_path, gaussian, "Of a test.")
    flags = [f"--prior_from={tmp_path / run_priors.NAME}", f"--vi_family={family}"]
    settings = cmd_args_utils.parse(
        run_vi.GROUPS, [*flags, *(["--vi_rank=2"] if family == "low_rank" else [])]
    )
    task = run_vi.complete(tasks.load_task("vi", variational.begin(settings)))
    assert task.settings.warm_start_epochs == 0
    q = jax.tree.map(lambda leaf: leaf[0], variational.find_starts(task, tmp_path / "run", None))
    names = sorted(gaussian.mean)

    def flat(named, axes=0):
        return np.concatenate(
            [np.reshape(named[n], (*named[n].shape[:axes], -1)) for n in names], -1
        )

    scale = {n: np.logaddexp(leaf, 0) for n, leaf in trees.named_leaves(q.raw_scale).items()}
    np.testing.assert_allclose(flat(trees.named_leaves(q.mean)), flat(gaussian.mean), rtol=1e-6)
    covariance = np.diag(flat(gaussian.scale) ** 2)
    if rank:
        covariance += flat(gaussian.factor, 1).T @ flat(gaussian.factor, 1)
    if family == "low_rank" and rank:
        units = trees.named_leaves(q.unit)
        columns = flat({n: f * units[n] for n, f in trees.named_leaves(q.factor).items()}, 1)
        found = np.diag(flat(scale) ** 2) + columns.T @ columns
        np.testing.assert_allclose(found, covariance, rtol=1e-4, atol=1e-5)
    else:
        conditional = 1 / np.diag(np.linalg.inv(covariance))
        np.testing.assert_allclose(flat(scale) ** 2, conditional, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_parts=1", "num_parts must be at least 2"),
        ("--flags=--train_part=1/2", "--train_part is set by the stream"),
        ("--flags='", "cannot be read"),
        ("--script=run_sgd", "script"),
        ("--flags=--vi_family=layerwise", "takes no earlier posterior"),
        ("--dir=/dev/null/x", "is a file"),
    ],
)
def test_mistakes(flags, sentence, capsys):
    assert started(flags) == 2
    assert sentence in capsys.readouterr().err


def write_factorial(path, num_parts):
    """Orthogonal inputs (1 and all signs of three) in each of the parts that rows are dealt to."""
    rng = np.random.default_rng(0)
    design = np.array(list(itertools.product([-1.0, 1.0], repeat=3))).repeat(num_parts, axis=0)
    y = design @ [1.0, -0.5, 0.2] + 0.3 + rng.normal(size=len(design))
    np.savez(path, x_train=design, y_train=y, x_test=design[:8], y_test=y[:8])
    columns = np.concatenate([np.ones((len(design), 1)), design], axis=1)
    precision = columns.T @ columns + np.eye(4)
    return np.linalg.solve(precision, columns.T @ y), precision


@pytest.mark.slow
def test_ten_parts_by_mean_field_vi_are_the_batch_posterior(tmp_path):
    """Of a linear-Gaussian model with orthogonal inputs, whose posterior is of this family.

    Means within a tenth of a standard deviation, deviations within 3 %: what is left of the noise
    of ten stochastic optimisations.
    """
    mean, precision = write_factorial(tmp_path / "data.npz", 10)
    before = None
    for part in range(1, 11):
        prior = f"--prior_from={before}" if before else "--weight_decay=1"
        flags = f"--dataset_name={tmp_path}/data.npz {LINEAR} --train_part={part}/10 {prior}"
        before = tmp_path / f"part_{part}"
        run_here(run_vi, f"{flags} --vi_num_samples=20", before)
    _, _, log_joint = load_problem(Problem.from_mapping(run_folders.read_flags(before)))
    gaussian, sentence = run_priors.load(before, log_joint)
    assert "mean-field, exactly" in sentence
    (module,) = {trees.module_name(name) for name in gaussian.mean}
    found = [
        np.concatenate([part[f"{module}/b"], part[f"{module}/w"][:, 0]])
        for part in (gaussian.mean, gaussian.scale)
    ]
    std = 1 / np.sqrt(np.diag(precision))
    np.testing.assert_allclose((found[0] - mean) / std, 0, atol=0.1)
    np.testing.assert_allclose(found[1] / std, 1, atol=0.03)


@pytest.mark.slow
def test_a_prior_stays_with_its_run(tmp_path):
    """The next run predicts, is compared and goes on without the folder its prior is from."""
    toy = "--model_name=program:small_network --likelihood=gaussian"
    first, whole, cut = (tmp_path / name for name in ("first", "whole", "cut"))
    chains = "--num_iterations=20 --num_burn_in_iterations=10 --trajectory_len=0.1 --num_chains=2"
    run_here(run_vi, f"{toy} --train_part=1/2 --num_epochs=200 --eval_freq=200", first)
    flags = f"{toy} --train_part=2/2 --prior_from={first} {chains} --warm_start_epochs=0"
    run_here(run_hmc, flags, whole)
    run_here(run_hmc, f"{flags} --time_limit=1e-6", cut)
    shutil.rmtree(first)
    run_here(run_hmc, flags, cut)
    assert_same_outcome(whole, cut)
    assert loaded_runs.load_run(whole).log_joint.prior.is_whole
    opened = run_folders.open_run(whole)
    log_joint, _ = run_networks.load_run_problem(opened, None)
    assert log_joint.prior.is_whole
