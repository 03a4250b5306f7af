"""The record of predictions: the order of its draws, and indices chosen evenly."""

import numpy as np
import pytest

from haiku_posteriors.core.judging.predictions import Predictions, evenly


def test_draws_are_flattened_chain_by_chain():
    outputs = np.arange(2 * 3 * 4 * 2).reshape(2, 3, 4, 2)
    predictions = Predictions("classification", outputs, outputs[..., 0])
    assert (predictions.num_chains, predictions.num_draws) == (2, 6)
    np.testing.assert_array_equal(predictions.flat_outputs[4], outputs[1, 1])
    np.testing.assert_array_equal(predictions.flat_log_likelihoods[4], outputs[1, 1, :, 0])


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [(10, 1, [5]), (10, 3, [1, 5, 8]), (4, 4, [0, 1, 2, 3]), (3, 100, [0, 1, 2])],
)
def test_indices_are_in_the_middle_of_equal_parts(count, wanted, expected):
    assert evenly(count, wanted).tolist() == expected
