"""Pictures of a run over its epochs, and files that are whole or not there."""

import os

import numpy as np
import pytest
from picture_checks import SIGNATURE, check_picture

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.plots import curves


def test_training_curves(tmp_path):
    path = tmp_path / "curves.png"
    rows = [{"epoch": epoch, "log_joint": -1e6 / (1 + epoch)} for epoch in range(40)]
    for row in rows[::10]:
        row["test_nll"] = float("nan") if row["epoch"] == 10 else 1 / (1 + row["epoch"])
    rows[30]["test_nll"] = None
    curves.training_curves(path, rows, ["log_joint", "test_nll", "r_hat", "log_joint"])
    check_picture(path)


def test_training_curves_of_nothing(tmp_path):
    path = tmp_path / "curves.png"
    curves.training_curves(path, [], ["test_nll"])
    assert path.read_bytes().startswith(SIGNATURE)
    with pytest.raises(UserError, match="nothing to draw"):
        curves.training_curves(path, [], [])


def test_a_failed_picture_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    curves.training_curves(path, [{"epoch": 1, "nll": 2.0}], ["nll"])
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        curves.training_curves(path, [{"epoch": 1, "nll": 3.0}], ["nll"])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("num_chains", [0, 3])
def test_chain_diagnostics_with_and_without_traces(tmp_path, num_chains):
    path = tmp_path / "diagnostics.png"
    rng = np.random.default_rng(0)
    traces = rng.normal(size=(num_chains, 50)) if num_chains else None
    curves.chain_diagnostics(path, traces, [1.001, np.nan, 1.2], rng.uniform(1, 1.1, 40))
    assert (check_picture(path).shape[1] > 1000) == bool(num_chains)
