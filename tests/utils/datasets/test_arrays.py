"""Files of a user's own: what they are taken for, and every refusal."""

import pathlib

import numpy as np
import pytest
from data_checks import assert_standardized, original, random_images, refused

from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.datasets.own_tables import TableOptions


@pytest.fixture
def own(tmp_path):
    """Writes own.npz with some arrays replaced (None leaves one out); returns its path."""

    def write(**changes):
        rng = np.random.default_rng(0)
        arrays = {"x_train": rng.normal(3, 2, (20, 3)), "y_train": np.arange(20) % 4}
        arrays |= {"x_test": rng.normal(3, 2, (8, 3)), "y_test": np.arange(8) % 2}
        arrays = {key: value for key, value in (arrays | changes).items() if value is not None}
        np.savez(tmp_path / "own.npz", **arrays)
        return str(tmp_path / "own.npz")

    return write


def test_own_classification(own, tmp_path):
    path = own()
    data = data_utils.load(path)
    assert data.task == "classification" and data.num_classes == 4 and data.name == path
    assert data.y_train.dtype == np.int32
    assert_standardized(data.x_train)
    with np.load(path) as stored:
        plain = data_utils.load("own.npz", tmp_path, standardize=False, float_dtype=np.float64)
        np.testing.assert_array_equal(plain.x_test, stored["x_test"])


def test_own_regression(own):
    y = np.random.default_rng(1).normal(7, 3, (28, 2))
    data = data_utils.load(own(y_train=y[:20], y_test=y[20:]), float_dtype=np.float64)
    assert data.task == "regression" and data.num_classes == 0
    assert_standardized(data.y_train)
    np.testing.assert_allclose(original(data)[1], y[20:])
    data = data_utils.load(own(y_train=y[:20, 0], y_test=y[20:, 0]))
    assert data.y_train.shape == (20, 1)


def test_task_overrides_the_type_of_targets(own):
    data = data_utils.load(own(), task="regression")
    assert data.task == "regression" and data.y_train.shape == (20, 1)
    as_floats = own(y_train=np.arange(20) % 4.0, y_test=np.arange(8.0)[:, np.newaxis] % 2)
    data = data_utils.load(as_floats, task="classification")
    assert data.num_classes == 4 and data.y_test.shape == (8,) and data.y_test.dtype == np.int32


def test_own_input_types(own):
    images, tests = random_images(20, 5, 4), random_images(8, 5, 4)
    data = data_utils.load(own(x_train=images, x_test=tests))
    assert data.x_train.shape == (20, 5, 4, 1)
    expected = (tests - images.mean()) / images.std()
    np.testing.assert_allclose(data.x_test[..., 0], expected, atol=1e-5)
    plain = data_utils.load(own(x_train=images, x_test=tests), standardize=False)
    np.testing.assert_allclose(plain.x_train[..., 0], images / 255, rtol=1e-6)
    tokens = np.arange(60).reshape(20, 3)
    as_tokens = TableOptions(inputs="tokens")
    data = data_utils.load(own(x_train=tokens, x_test=tokens[:8]), table=as_tokens)
    assert data.x_train.dtype == np.int32
    np.testing.assert_array_equal(data.x_train, tokens)
    # Integers are features like any other numbers unless they are said to be tokens.
    data = data_utils.load(own(x_train=tokens - 30, x_test=tokens[:8]))
    assert data.x_train.dtype == np.float32
    assert_standardized(data.x_train)
    floats = np.random.default_rng(2).normal(4, 2, (20, 6, 6, 2))
    assert_standardized(data_utils.load(own(x_train=floats, x_test=floats[:8])).x_train, axis=None)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"y_test": None, "x_test": None}, "lacks the arrays x_test, y_test"),
        ({"x_train": np.array([1, "a"], object)}, "pickled objects"),
        ({"y_train": np.arange(19)}, "x_train and y_train of shapes (20, 3) and (19,)"),
        ({"x_test": np.zeros((0, 3)), "y_test": np.zeros(0, int)}, "at least one"),
        ({"x_test": np.full((8, 3), np.nan)}, "not finite"),
        ({"y_test": np.array([np.inf] * 8)}, "not finite"),
        ({"x_test": np.zeros((8, 4))}, "different row shapes"),
        ({"x_test": np.zeros((8, 3), np.uint8)}, "different row shapes or types"),
        ({"y_train": np.arange(20) + 1, "y_test": np.arange(8) + 1}, "0 to K - 1"),
        ({"y_train": np.arange(20) % 2 * 2, "y_test": np.zeros(8, int)}, "0 to K - 1"),
        ({"y_train": -(np.arange(20) % 2)}, "0 to K - 1"),
        ({"y_train": np.eye(20, 4, dtype=int)}, "one class label per row"),
        ({"y_train": np.zeros((20, 2)), "y_test": np.zeros(8)}, "(rows, targets)"),
        ({"x_train": np.full((20, 3), "a")}, "real numbers"),
        ({"y_train": np.arange(20) % 4.0}, "4 different whole numbers as targets, in floats"),
    ],
)
def test_wrong_own_files_are_refused(own, changes, fragment):
    with refused("own.npz", fragment):
        data_utils.load(own(**changes))


@pytest.mark.parametrize(
    ("inputs", "changes", "fragment"),
    [
        ("tokens", {"x_train": np.full((20, 3), -1)}, "cannot be tokens"),
        ("tokens", {}, "cannot be tokens"),
        ("images", {}, "no images: these are bytes"),
        ("token", {}, "Did you mean 'tokens'"),
    ],
)
def test_inputs_that_are_not_what_they_are_said_to_be(own, inputs, changes, fragment):
    path = own(x_test=np.zeros((8, 3), int), **changes)
    with refused(fragment):
        data_utils.load(path, table=TableOptions(inputs=inputs))


def test_files_that_are_no_archives_are_refused(own, tmp_path):
    with refused("no file", "absent.npz"):
        data_utils.load("absent.npz", tmp_path)
    path = pathlib.Path(own())
    path.write_bytes(path.read_bytes()[:200])
    with refused("own.npz", "damaged or of another kind"):
        data_utils.load(str(path))
    path.write_bytes(b"some text")
    with refused("own.npz", "no .npz archive"):
        data_utils.load(str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with refused("own.npz", "no .npz archive"):
        data_utils.load(str(path))
