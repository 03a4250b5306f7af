"""Bootstrap errors against standard errors that are known in closed form."""

import numpy as np
import pytest

from haiku_posteriors.core.judging import bootstrap, detection


def test_the_error_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    error = bootstrap.bootstrap_error(lambda rows: float(values[rows].mean()), 400)
    assert error == pytest.approx(values.std() / 20, rel=0.2)
    again = bootstrap.bootstrap_error(lambda rows: float(values[rows].mean()), 400)
    assert again == error


def test_the_error_of_a_difference_of_two_means():
    rng = np.random.default_rng(1)
    first, second = rng.normal(0, 1, 300), rng.normal(0, 3, 100)
    error = bootstrap.bootstrap_error_of_two(lambda a, b: float(a.mean() - b.mean()), first, second)
    # The errors of independent means add in quadrature.
    assert error == pytest.approx(np.hypot(first.std() / 300**0.5, second.std() / 10), rel=0.35)


def test_the_error_of_a_separation_that_is_certain_is_zero():
    assert bootstrap.bootstrap_error_of_two(detection.auroc, np.zeros(9), np.ones(5)) == 0
