"""Refinement: from draws of a wrong law to those of a known posterior, interrupted or not."""

import haiku as hk
import jax
import numpy as np
import pytest

from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import data_utils, files, train_utils
from haiku_posteriors.utils.stages import refine
from haiku_posteriors.utils.stages.refine import Refinement

NOISE, PRIOR_STD, ROWS = 0.7, 1.3, 20
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(ROWS, 2)) @ [[1, 0.8], [0, 0.6]]
TARGETS = INPUTS @ [[1.0], [-2.0]] + NOISE * RANDOM.normal(size=(ROWS, 1))
DATASET = data_utils.from_arrays(INPUTS, TARGETS, INPUTS, TARGETS, standardize=False)
LOG_JOINT = make_log_joint(
    lambda inputs: hk.Linear(1, with_bias=False)(inputs),
    DATASET.x_train,
    make_prior(PRIOR_STD**-2),
    gaussian(NOISE),
)
WRONG = {"linear": {"w": (4 + 0.1 * RANDOM.normal(size=(4, 100, 2, 1))).astype(np.float32)}}


def moved(refinement, directory=None, draws=WRONG):
    said = []
    found = refine.refine(
        LOG_JOINT, DATASET, draws, refinement, seed=0, directory=directory, say=said.append
    )
    return found["linear"]["w"], said


@pytest.mark.parametrize(
    "refinement",
    [Refinement("mclmc", 400), pytest.param(Refinement("hmc", 600), marks=pytest.mark.slow)],
    ids=lambda refinement: refinement.kind,
)
def test_wrong_draws_become_right_ones(refinement):
    """400 draws around (4, 4), too narrow: z-tests at 5 standard errors.

    A false failure once in some 400,000 seeds (four tests each); the seed is fixed. Exact
    transitions find nothing more to move in draws that have arrived.
    """
    found, said = moved(refinement)
    assert found.shape == WRONG["linear"]["w"].shape
    x, y = DATASET.x_train.astype(float), DATASET.y_train[:, 0].astype(float)
    covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(2) / PRIOR_STD**2)
    mean = covariance @ x.T @ y / NOISE**2
    values = found.reshape(400, 2).astype(float)
    deviation = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(values.mean(axis=0) - mean) < 5 * deviation / 20)
    ratio = values.var(axis=0, ddof=1) / deviation**2
    assert np.all(np.abs(ratio - 1) < 5 * np.sqrt(2 / 399))
    assert not any("biased" in sentence for sentence in said)
    assert ("What exact transitions change" in said[-1]) == (refinement.kind == "mclmc")


@pytest.mark.slow  # compiles a program for every stage
def test_draws_that_have_not_arrived_are_told(tmp_path):
    some = jax.tree.map(lambda leaf: leaf[:, :10], WRONG)
    _, said = moved(Refinement("mclmc", 50, step_size=0.02), tmp_path, some)
    assert "Raise refine_steps" in said[-1]
    facts = files.read_json(tmp_path / refine.FILE)
    assert facts["gradients_per_draw"] == 50 and facts["gradients"] > 40 * 50
    assert facts["kind"] == "mclmc" and facts["problems"] == said[-1:]
    assert facts["bias"]["predictions, mean"]["value"] > 0.1


@pytest.mark.slow
def test_an_interrupted_refinement_goes_on_where_it_was(tmp_path, monkeypatch):
    """Checkpoints at every piece; the process ends in the middle of the third."""
    few = jax.tree.map(lambda leaf: leaf[:, :3], WRONG)
    refinement = Refinement("mclmc", 150)
    whole, _ = moved(refinement, tmp_path / "whole", few)
    monkeypatch.setattr(train_utils, "SAVE_SECONDS", 0.0)
    advance, steps = train_utils.Run._advance, []

    def advance_and_end(self, *arguments):
        steps.append(self.step)
        if self.step == 3:
            raise KeyboardInterrupt
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train_utils.Run, "_advance", advance_and_end)
        with pytest.raises(KeyboardInterrupt):
            moved(refinement, tmp_path / "killed", few)
    assert steps == [0, 1, 2, 3]
    begun = []

    def advance_and_note(self, *arguments):
        begun.append(self.step)
        return advance(self, *arguments)

    monkeypatch.setattr(train_utils.Run, "_advance", advance_and_note)
    again, _ = moved(refinement, tmp_path / "killed", few)
    assert begun == [3, 4, 5]
    np.testing.assert_array_equal(again, whole)
    facts = [files.read_json(tmp_path / name / refine.FILE) for name in ("whole", "killed")]
    assert facts[0] == facts[1]
