"""sweep_temperatures.py on runs that are there already, and what it refuses."""

import pytest
import synthetic_runs

import sweep_temperatures
from haiku_posteriors.utils import subruns


def sweep(*flags):
    with pytest.raises(SystemExit) as end:
        sweep_temperatures.main(flags)
    return end.value.code


def test_finished_runs_are_read_and_drawn(tmp_path, capsys, monkeypatch):
    for temperature in (0.1, 1.0):
        folder = tmp_path / f"temperature_{temperature:g}"
        synthetic_runs.write_toy_run(folder, chains=2, draws=20, temperature=temperature)
    monkeypatch.setattr(subruns, "run", lambda *_: pytest.fail("started"))
    assert sweep("--temperatures=1,0.1", f"--dir={tmp_path}") == 0
    table = capsys.readouterr().out
    assert table.index("T = 0.1") < table.index("T = 1") and "elpd / rows, PSIS-LOO" in table
    assert (tmp_path / "temperatures.png").stat().st_size > 10_000
    assert (tmp_path / "temperatures.csv").read_text().count("elpd_loo") == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--temperatures=0,1", "temperatures must be positive"),
        ("--temperatures=", "temperatures"),
        ("--temperatures=1,x", "separated by commas"),
        ("--flags=--temperature=3", "--temperature is set by the sweep"),
        ("--flags=--dir=3", "--dir is set by the sweep"),
        ("--script=run_sgd", "script"),
        ("--dir=/dev/null/x", "is a file"),
    ],
)
def test_mistakes(flags, sentence, capsys):
    assert sweep(flags) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_at_another_temperature_is_refused(tmp_path, capsys):
    synthetic_runs.write_toy_run(tmp_path / "temperature_2", chains=2, draws=20)
    assert sweep("--temperatures=2", f"--dir={tmp_path}") == 2
    assert "holds a run at temperature 1.0, not 2" in capsys.readouterr().err
