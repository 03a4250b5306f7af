"""The examples of docs/predict.md run as they stand there, with fewer steps."""

import csv
import pathlib
import re
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from synthetic_runs import write_loadable_run

from haiku_posteriors.utils import settings
from haiku_posteriors.utils.estimators import plans
from haiku_posteriors.utils.problem import Problem

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "predict.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

pytestmark = pytest.mark.usefixtures("first_device_only")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the table that the page speaks of, and short runs."""
    rng = np.random.default_rng(0)
    rows = zip(
        rng.uniform(20, 70, 50).round(1),
        rng.integers(1, 5, 50),
        np.resize(["red", "green", "blue"], 50),
        rng.normal(100, 10, 50).round(2),
        strict=True,
    )
    with (tmp_path / "houses.csv").open("w") as file:
        csv.writer(file).writerows([["age", "rooms", "colour", "price"], *rows])
    monkeypatch.setattr(plans, "TRANSITIONS", 12)
    monkeypatch.setattr(settings, "MAX_UPDATES", 12)
    monkeypatch.setattr(settings, "MAX_CHAIN_UPDATES", settings.BURN_IN_UPDATES + 12)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(example):
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of so few steps
        exec(example, scope)
    return scope


def test_a_folder_predicts(folder):
    described = Problem("houses.csv", target=("price",), model_name="mlp_toy", noise_std=0.3)
    write_loadable_run(folder / "runs" / "houses", described, draws=5)
    scope = run(EXAMPLES[0])
    prediction = scope["prediction"]
    assert prediction.mean.shape == prediction.std.shape == (2, 1)
    assert prediction.quantile([0.05, 0.95]).shape == (2, 2, 1)
    assert scope["functions"].shape == (10, 1, 1)


def test_there_are_five_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.slow  # hmc takes long to compile
def test_a_table(folder):
    scope = run(EXAMPLES[1])
    assert scope["mean"].shape == scope["std"].shape == (5,)
    assert scope["houses"].x_train.shape == (45, 5)


@pytest.mark.slow
def test_breast_cancer(folder):
    scope = run(EXAMPLES[2])
    assert scope["probabilities"].shape == (169, 2) and scope["nats"] < 0


@pytest.mark.slow  # so does VI
def test_diabetes(folder):
    scope = run(EXAMPLES[3])
    assert scope["mean"].shape == (92,) and scope["interval"].shape == (2, 92)


@pytest.mark.slow  # the burn-in of a chain of SGMCMC
def test_a_uci_set(folder, shared_data):
    scope = run(EXAMPLES[4].replace("path/to/data", str(shared_data)))
    assert scope["samples"].shape == (len(scope["boston"].x_test), 100)
