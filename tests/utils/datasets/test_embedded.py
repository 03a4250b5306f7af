"""Embedded data sets: their formulas, sizes and scales."""

import numpy as np
import pytest
from data_checks import assert_standardized

from haiku_posteriors.utils import data_utils

EMBEDDED = {
    "toy_regression": ((70, 1), (128, 1), 0),
    "sine_regression": ((92, 1), (92, 1), 0),
    "two_moons": ((200, 2), (1000, 2), 2),
    "digits": ((1437, 64), (360, 64), 10),
    "diabetes": ((353, 10), (89, 10), 0),
    "breast_cancer": ((455, 30), (114, 30), 2),
    "wine": ((142, 13), (36, 13), 3),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_shapes_types_and_determinism(name):
    first, second = data_utils.load(name), data_utils.load(name)
    train_shape, test_shape, num_classes = EMBEDDED[name]
    assert first.name == name
    assert first.x_train.shape == train_shape and first.x_test.shape == test_shape
    assert first.x_train.dtype == first.x_test.dtype == np.float32
    assert first.num_classes == num_classes
    if num_classes:
        assert first.task == "classification"
        assert first.y_train.dtype == first.y_test.dtype == np.int32
        assert first.y_train.shape == train_shape[:1] and first.y_test.shape == test_shape[:1]
        assert set(first.y_train) == set(first.y_test) == set(range(num_classes))
        assert first.target_mean.shape == first.target_scale.shape == (0,)
    else:
        assert first.task == "regression"
        assert first.y_train.dtype == np.float32
        assert first.y_train.shape == (train_shape[0], 1) and first.y_test.shape[1] == 1
        assert first.target_mean.shape == first.target_scale.shape == (1,)
    for one, other in zip(first[1:5], second[1:5], strict=True):
        np.testing.assert_array_equal(one, other)


def test_toy_regression_follows_its_formula_and_leaves_the_gap():
    data = data_utils.load("toy_regression", float_dtype=np.float64)
    assert data.x_train.dtype == data.y_train.dtype == np.float64
    x = data.x_train
    assert np.sum((x >= -1.28) & (x <= -0.61)) == 38
    assert np.sum((x >= 0.61) & (x <= 1.28)) == 32
    assert np.any(np.abs(data.x_test) < 0.1)
    np.testing.assert_array_equal(data.target_scale, 1)
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        residual = y - (x + 0.8 * np.sin(2 * np.pi * x) + 0.8 * np.sin(4 * np.pi * x))
        assert abs(residual.std() - 0.3) < 0.06  # Two standard errors of 70 draws are 0.05.
        assert abs(residual.mean()) < 0.1


def test_sine_regression_in_original_units_has_noise_two():
    data = data_utils.load("sine_regression", float_dtype=np.float64)
    np.testing.assert_allclose(data.x_train[:, 0], np.linspace(-0.5, 0.5, 92))
    assert np.abs(data.x_test).max() <= 0.5
    assert not np.isin(data.x_test, data.x_train).any()
    assert_standardized(data.y_train)
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        residual = y * data.target_scale + data.target_mean - 10 * np.sin(2 * np.pi * x)
        assert abs(residual.std() - 2) < 0.4 and abs(residual.mean()) < 0.6


@pytest.mark.parametrize("name", ["two_moons", "diabetes", "breast_cancer", "wine"])
def test_features_are_standardized_by_training_rows(name):
    data = data_utils.load(name)
    assert_standardized(data.x_train)
    assert np.abs(data.x_test.mean(0)).max() > 1e-3  # Test rows have moments of their own.


def test_digits_keep_pixel_proportions_and_class_shares():
    data, plain = data_utils.load("digits"), data_utils.load("digits", standardize=False)
    assert_standardized(data.x_train, axis=None)
    assert set(np.unique(plain.x_train * 16)) == set(range(17))
    shares = np.bincount(data.y_train) / 1437 - np.bincount(data.y_test) / 360
    assert np.abs(shares).max() < 0.005
    counts = np.bincount(np.concatenate([data.y_train, data.y_test]))
    assert list(counts) == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_diabetes_targets_return_to_original_units():
    data = data_utils.load("diabetes", float_dtype=np.float64)
    y = np.concatenate([data.y_train, data.y_test]) * data.target_scale + data.target_mean
    assert y.min() == pytest.approx(25) and y.max() == pytest.approx(346)
    assert_standardized(data.y_train)
