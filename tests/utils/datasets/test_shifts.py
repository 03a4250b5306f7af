"""Corruptions stay images, grow with severity, and reach the network in its own units."""

import itertools

import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.datasets import corruptions, shifts


@pytest.fixture(scope="module")
def images():
    dataset = data_utils.load("digits", standardize=False)
    return dataset.x_test[:40].reshape(-1, 8, 8, 1)


@pytest.mark.parametrize("kind", corruptions.CORRUPTIONS)
def test_corruptions_stay_images_and_grow_with_severity(images, kind):
    changes = []
    for severity in corruptions.SEVERITIES:
        found = corruptions.corrupt(images, kind, severity)
        assert found.shape == images.shape and found.dtype == images.dtype
        assert found.min() >= 0 and found.max() <= 1
        np.testing.assert_array_equal(found, corruptions.corrupt(images, kind, severity))
        changes.append(np.abs(found - images).mean())
    assert changes[0] > 0
    # Eight pixels pixelate to the same blocks at neighbouring severities.
    assert all(later >= earlier for earlier, later in itertools.pairwise(changes))


def test_corruptions_by_hand():
    image = np.zeros((1, 4, 4, 1), np.float32)
    image[0, 0, 0, 0] = 0.5
    assert corruptions.corrupt(image, "brightness", 5)[0, 0, 0, 0] == 1.0
    assert corruptions.corrupt(image, "brightness", 1)[0, 1, 1, 0] == pytest.approx(0.1)
    mean = 0.5 / 16
    contrast = corruptions.corrupt(image, "contrast", 2)
    assert contrast[0, 0, 0, 0] == pytest.approx(mean + 0.5 * (0.5 - mean))
    covered = corruptions.corrupt(np.ones((3, 28, 28, 2), np.float32), "occlusion", 5)
    assert (covered == 0).sum(axis=(1, 2)).tolist() == [[225, 225]] * 3  # 15 by 15
    # A mark on the right is on top after a quarter turn counter-clockwise.
    mark = np.zeros((1, 5, 5, 1), np.float32)
    mark[0, 2, 4, 0] = 1.0
    assert corruptions.rotate(mark, 90)[0, 0, 2, 0] == pytest.approx(1.0, abs=1e-6)


def test_corruptions_refuse_nonsense(images):
    with pytest.raises(UserError, match="Did you mean 'contrast'"):
        corruptions.corrupt(images, "contrst", 1)
    with pytest.raises(UserError, match="6 is not one"):
        corruptions.corrupt(images, "contrast", 6)
    with pytest.raises(UserError, match="Images must be floats"):
        corruptions.corrupt(images[..., 0], "contrast", 1)


@pytest.mark.parametrize("name", ["digits", "wine", "two_moons"])
def test_values_come_back_as_the_networks_inputs(name):
    dataset = data_utils.load(name)
    space, values = shifts.input_space(dataset, None, None)
    np.testing.assert_allclose(space.to_inputs(values, dataset.x_test), dataset.x_test, atol=1e-5)
    assert space.is_image == (name == "digits")
    kinds = {shift.kind for shift in shifts.corruptions(space, values, dataset.x_test)}
    assert kinds == (set(corruptions.CORRUPTIONS) if space.is_image else {"feature_noise"})
    turned = list(shifts.rotations(space, values[:3], dataset.x_test))
    if space.is_image:
        np.testing.assert_allclose(turned[0].inputs, dataset.x_test[:3], atol=1e-5)
    else:
        assert not turned


def test_feature_noise_has_its_strength():
    noisy = corruptions.add_feature_noise(np.zeros((4000, 3), np.float32), 4)
    assert noisy.std() == pytest.approx(0.8, rel=0.03)


def test_foreign_rows_are_scaled_as_the_runs_own(tmp_path):
    dataset = data_utils.load("digits")
    space, _ = shifts.input_space(dataset, None, None)
    found = shifts.foreign_rows("digits", None, space, dataset.x_test, 1000)
    np.testing.assert_allclose(found, dataset.x_test, atol=1e-5)
    with pytest.raises(UserError, match=r"shape \(13,\), but this network takes \(64,\)"):
        shifts.foreign_rows("wine", None, space, dataset.x_test, 10)
    with pytest.raises(UserError, match="notmnist"):
        shifts.foreign_rows("notmnist", str(tmp_path), space, dataset.x_test, 10)
