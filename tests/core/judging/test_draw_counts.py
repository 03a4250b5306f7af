"""Scores by the number of draws, where their expectations are known."""

import numpy as np

from haiku_posteriors.core.judging import draw_counts
from haiku_posteriors.core.judging.predictions import Predictions


def test_all_draws_and_single_draws():
    """With all draws, the mixture's own scores; with one, the mean over draws in expectation."""
    rng = np.random.default_rng(0)
    outputs = rng.dirichlet(np.ones(3), size=(2, 6, 50))
    targets = rng.integers(0, 3, 50)
    log_likelihoods = np.log(np.take_along_axis(outputs, targets[None, None, :, None], -1)[..., 0])
    predictions = Predictions("classification", outputs, log_likelihoods, targets)
    found = draw_counts.scores_by_count(predictions)
    assert list(found["draws"]) == [1, 2, 5, 10, 12]
    flat = outputs.reshape(12, 50, 3).mean(axis=0)
    np.testing.assert_allclose(found["nll"][-1], -np.log(flat[np.arange(50), targets]).mean())
    assert found["accuracy"][-1] == np.mean(flat.argmax(axis=1) == targets)
    each = -log_likelihoods.reshape(12, 50).mean(axis=1)
    error = each.std() / np.sqrt(draw_counts.REPEATS)
    assert abs(found["nll"][0] - each.mean()) < 5 * error
    assert np.all(np.diff(found["nll"]) < 0)
