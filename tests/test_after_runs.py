"""Scripts that begin with a finished run leave an ordinary folder: all that reads runs reads it."""

import json

import numpy as np
import pytest
from program import assert_same_outcome, run_here

import compare_posteriors
import distill
import run_laplace
import run_sgd
import run_swag
from haiku_posteriors.utils.report import loaded_runs, run_folders

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("module_on_first_device")]
TOY = "--model_name=program:small_network --likelihood=gaussian"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, module_on_first_device):
    """Two trained networks on the toy regression."""
    directory = tmp_path_factory.mktemp("after") / "sgd"
    run_here(run_sgd, f"{TOY} --num_epochs=400 --eval_freq=400 --num_members=2", directory)
    return directory


def check(directory, trained, num_draws):
    """It predicts what it stored, and is of the posterior that the networks are of."""
    opened, start = run_folders.open_run(directory), run_folders.open_run(trained)
    assert opened.predictions.outputs.shape[:2] == (2, num_draws)
    assert not run_folders.flag_differences(opened, start)
    run_folders.refuse_other_data(opened, start)
    run = loaded_runs.load_run(directory)
    x = np.linspace(-1, 1, 20)[:, None].astype(np.float32)
    assert run.predict(x).mean.shape == (20, 1)
    assert run.form.task == "regression"


def test_laplace_around_every_member(trained, tmp_path, capsys):
    directory = tmp_path / "laplace"
    run_here(run_laplace, f"--run={trained} --num_draws=12", directory)
    check(directory, trained, 12)
    evidence = json.loads((directory / "evidence.json").read_text())
    assert len(evidence["values"]) == 2 and "Laplace" in evidence["estimator"]
    assert "nats are left to gain" in capsys.readouterr().out


def test_swag_resumed_and_compared(trained, tmp_path):
    """A run that was stopped half way ends where a whole one does, and can be compared."""
    flags = f"--run={trained} --num_draws=8 --num_epochs=40 --rank=5 --batch_size=10"
    run_here(run_swag, flags, tmp_path / "whole")
    check(tmp_path / "whole", trained, 8)
    run_here(run_swag, f"{flags} --time_limit=1e-6", tmp_path / "halves")
    run_here(run_swag, flags, tmp_path / "halves")
    assert_same_outcome(tmp_path / "whole", tmp_path / "halves")
    run_here(run_laplace, f"--run={trained} --num_draws=8 --structure=full", tmp_path / "laplace")
    compare_posteriors.compare(
        str(tmp_path / "laplace"), [str(tmp_path / "whole")], None, None, tmp_path / "comparison"
    )
    assert (tmp_path / "comparison/comparison.html").is_file()


def test_students_are_ordinary_runs(trained, tmp_path, capsys):
    """Of a folder and on the fly: they say mean and deviation, predict, and can be compared."""
    short = "--num_epochs=300 --init_step_size=0.01"
    run_here(distill, f"--run={trained} {short} --model_name=mlp_toy", tmp_path / "folder")
    chain = f"--run={trained} --on_the_fly --model_name=mlp_toy {short} --input_noise=0"
    run_here(distill, chain, tmp_path / "chain")
    assert "inputs" in capsys.readouterr().out
    start = run_folders.open_run(trained)
    for name in ("folder", "chain"):
        student = run_folders.open_run(tmp_path / name)
        assert student.predictions.outputs.shape[:2] == (1, 1)
        run_folders.refuse_other_data(student, start)
    # What a chain's student learns is the posterior's predictive, not that of these networks.
    x = np.linspace(-1, 1, 20)[:, None].astype(np.float32)
    predicted = loaded_runs.load_run(tmp_path / "folder").predict(x)
    teacher = loaded_runs.load_run(trained).predict(x)
    assert np.abs(predicted.mean - teacher.mean).mean() < 0.1 * teacher.std.mean()
