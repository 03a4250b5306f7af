"""report.html of a run, and the list of runs: from files alone, damaged ones included."""

import sys

import pytest

import list_runs
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, files
from haiku_posteriors.utils.report import run_page

METRICS = {"rmse": 0.51, "nll": 1.25, "coverage_90": 0.9, "aleatoric": None}
SUMMARY = {
    "method": "hmc",
    "model": "mlp_toy",
    "dataset": "data/my <table>.csv",
    "test": METRICS,
    "train": METRICS,
    "test_mean_of_members": METRICS,
    "num_chains": 2,
    "num_draws": 10,
    "epochs": 20,
    "seed": 3,
    "num_parameters": 1234,
    "seconds": 1.5,
    "peak_memory_bytes": 2e6,
    "device": {"kind": "cpu", "count": 1},
    "versions": {"jax": "0.10"},
    "data_sha256": "abc",
    "test_by_target": {"price": METRICS, "size": METRICS},
}
FLAGS = {"method": "hmc", "dataset_name": "data/my <table>.csv", "model_name": "mlp_toy"}
FLAGS |= {"num_iterations": 20, "weight_decay": 2.5, "task": None}
CONVERGENCE = {"largest_rhat": 1.5, "median_rhat": 1.1, "smallest_bulk_ess": 7.0}
DIAGNOSTICS = {"converged": False, "problems": ["Too few <draws>."], "notes": ["One chain."]}
DIAGNOSTICS |= {"num_gradients": 5000, "ess_per_1000_gradients": 1.25}


@pytest.fixture
def runs(tmp_path):
    """A finished run, one under way, one just begun, a damaged one, and a folder of no run."""
    for name in ("a/finished", "b/going", "c", "d"):
        files.write_json(tmp_path / name / "flags.json", FLAGS)
    files.write_json(tmp_path / "a/finished/summary.json", SUMMARY)
    files.write_json(
        tmp_path / "a/finished/diagnostics.json", DIAGNOSTICS | {"predictions": CONVERGENCE}
    )
    for step in (5, 12):
        path = tmp_path / f"b/going/checkpoints/epoch_{step:08d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "d/flags.json").write_text("[1, 2]")
    (tmp_path / "e").mkdir()
    return tmp_path


def test_a_page_says_what_was_run_and_how_it_went(runs):
    content = run_page.write(runs / "a/finished").read_text()
    for fragment in (
        *("hmc: mlp_toy on my &lt;table&gt;.csv", "Verdict: NOT converged.", "0.51"),
        *("Too few &lt;draws&gt;.", "One chain.", "<th>price</th>", "largest R-hat", "1.5"),
        *("5,000 gradients after burn-in", "1.25 per 1,000 of them, 4.167 per second"),
        *("1,234 parameters", "seed 3", "--weight_decay=2.5", "jax 0.10"),
    ):
        assert fragment in content, fragment
    assert "--task" not in content and "<table>.csv" not in content
    # A folder of a method without chains has no verdict, and the page says none.
    (runs / "a/finished/diagnostics.json").unlink()
    assert "Verdict" not in run_page.write(runs / "a/finished").read_text()


def test_runs_are_listed_with_their_state(runs, capsys, monkeypatch):
    list_runs.run(cmd_args_utils.parse(list_runs.GROUPS, [f"--dir={runs}"]))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4
    assert "finished" in lines[0] and "rmse 0.51, nll 1.25" in lines[0]
    assert lines[0].endswith("NOT converged") and "my <table>.csv" in lines[0]
    assert "at 12 of 20" in lines[1] and "begun" in lines[2] and "damaged" in lines[3]
    monkeypatch.setattr(sys, "argv", ["list_runs.py", str(runs / "e")])
    with pytest.raises(SystemExit) as end:  # the folder without a flag, as one would type it
        list_runs.main()
    assert end.value.code == 2 and "There are no runs below" in capsys.readouterr().err
    with pytest.raises(UserError, match="There is no folder"):
        run_page.find_runs(runs / "nowhere")
