"""Loading by name: subsets, the nearest known name, and what is refused."""

import numpy as np
import pytest
from data_checks import refused

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import data_utils


def test_subset_is_the_first_rows_of_the_prepared_set():
    whole, part = data_utils.load("wine"), data_utils.load("wine", subset_train_to=50)
    np.testing.assert_array_equal(part.x_train, whole.x_train[:50])
    np.testing.assert_array_equal(part.y_train, whole.y_train[:50])
    np.testing.assert_array_equal(part.x_test, whole.x_test)


@pytest.mark.parametrize("size", [0, -1, 143])
def test_impossible_subsets_are_refused_with_both_sizes(size):
    with refused(f" {size} ", "'wine'", "142"):
        data_utils.load("wine", subset_train_to=size)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("minst", "mnist"),
        ("cifar_10", "cifar10"),
        ("yatch_2", "yacht_<seed>"),
        ("conrete_11", "concrete_<seed>"),
        ("two_moon", "two_moons"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, suggestion):
    with refused(f"Unknown data set '{name}'", f"Did you mean '{suggestion}'", "yacht_<seed>"):
        data_utils.load(name)


def test_other_refusals_of_load(tmp_path):
    with refused("'yacht'", "'yacht_0'"):
        data_utils.load("yacht", tmp_path)
    with refused("absent", "does not exist"):
        data_utils.load("wine", tmp_path / "absent")
    with refused("'wine'", "classification", "not regression"):
        data_utils.load("wine", task="regression")
    with refused("Unknown task 'regresion'", "'regression'"):
        data_utils.load("wine", task="regresion")
    with refused("Unknown data set 'zzzz_1'"):
        data_utils.load("zzzz_1")


def test_own_arrays_are_taken_like_a_file_of_them():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(50, 2))
    dataset = data_utils.from_arrays(x[:40], x[:40, 0] * 5 + 1, x[40:], x[40:, 0] * 5 + 1)
    assert dataset.task == "regression" and dataset.y_train.shape == (40, 1)
    np.testing.assert_allclose(dataset.x_train.mean(axis=0), 0, atol=1e-6)
    restored = dataset.y_test * dataset.target_scale + dataset.target_mean
    np.testing.assert_allclose(restored[:, 0], x[40:, 0] * 5 + 1, rtol=1e-5)
    with pytest.raises(UserError, match="need the same number of rows"):
        data_utils.from_arrays(x[:40], x[:39, 0], x[40:], x[40:, 0])
