"""What tests of data sets share."""

import re

import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError


def refused(*fragments):
    """Expects one sentence (no line break) that holds every fragment in this order."""
    return pytest.raises(
        UserError, match="^" + ".*".join(map(re.escape, ("", *fragments, ""))) + "$"
    )


def assert_standardized(values, axis=0):
    np.testing.assert_allclose(values.mean(axis), 0, atol=1e-5)
    np.testing.assert_allclose(values.std(axis), 1, atol=1e-5)


def original(data):
    return [y * data.target_scale + data.target_mean for y in (data.y_train, data.y_test)]


def random_images(rows, *shape):
    return np.random.default_rng(rows).integers(0, 256, (rows, *shape), np.uint8)
