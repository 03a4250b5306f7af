"""Data sets: known facts of the embedded ones, files written and read back, every refusal."""

import gzip
import pathlib
import re
import struct
import urllib.error

import numpy as np
import pytest
import scipy.io
import sklearn.datasets

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.datasets import readers

EMBEDDED = {
    "toy_regression": ((70, 1), (128, 1), 0),
    "sine_regression": ((92, 1), (92, 1), 0),
    "two_moons": ((200, 2), (1000, 2), 2),
    "digits": ((1437, 64), (360, 64), 10),
    "diabetes": ((353, 10), (89, 10), 0),
    "breast_cancer": ((455, 30), (114, 30), 2),
    "wine": ((142, 13), (36, 13), 3),
}


def refused(*fragments):
    """Expects one sentence (no line break) that holds every fragment in this order."""
    return pytest.raises(
        UserError, match="^" + ".*".join(map(re.escape, ("", *fragments, ""))) + "$"
    )


def assert_standardized(values, axis=0):
    np.testing.assert_allclose(values.mean(axis), 0, atol=1e-5)
    np.testing.assert_allclose(values.std(axis), 1, atol=1e-5)


# Embedded sets


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
    for one, other in zip(first[2:6], second[2:6], strict=True):
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


# Subsets, names, folders, tasks


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


# Image files


def write_idx(path, array, compress=True):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if compress:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)


def write_idx_part(folder, part, images, labels, compress=True):
    write_idx(folder / f"{part}-images-idx3-ubyte", images, compress)
    write_idx(folder / f"{part}-labels-idx1-ubyte", labels, compress)


def random_images(rows, *shape):
    return np.random.default_rng(rows).integers(0, 256, (rows, *shape), np.uint8)


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_are_read_back_exactly(tmp_path, compress):
    train, test = random_images(6, 28, 28), random_images(4, 28, 28)
    write_idx_part(tmp_path / "mnist", "train", train, np.arange(6), compress)
    write_idx_part(tmp_path / "mnist", "t10k", test, np.arange(4) + 6, compress)
    data = data_utils.load("mnist", tmp_path)
    expected = (train[..., np.newaxis] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(data.x_train, expected, atol=1e-6)
    assert data.x_train.dtype == np.float32 and data.x_test.shape == (4, 28, 28, 1)
    assert list(data.y_train) == [0, 1, 2, 3, 4, 5] and list(data.y_test) == [6, 7, 8, 9]
    assert data.num_classes == 10
    plain = data_utils.load("mnist", tmp_path, standardize=False, float_dtype=np.float64)
    np.testing.assert_array_equal(plain.x_test[..., 0], test / 255)


def test_a_test_part_alone_gives_no_training_rows(tmp_path):
    write_idx_part(tmp_path / "notmnist", "t10k", random_images(4, 28, 28), np.arange(4))
    data = data_utils.load("notmnist", tmp_path)
    assert data.x_train.shape == (0, 28, 28, 1) and data.y_train.shape == (0,)
    assert data.x_test.shape == (4, 28, 28, 1)
    with refused("1 training rows", "has 0"):
        data_utils.load("notmnist", tmp_path, subset_train_to=1)


def test_one_idx_set_is_never_taken_for_another(tmp_path):
    write_idx_part(tmp_path, "t10k", random_images(4, 28, 28), np.arange(4))
    assert len(data_utils.load("mnist", tmp_path).x_test) == 4
    with refused("'notmnist' was not found"):
        data_utils.load("notmnist", tmp_path)
    folder = tmp_path / "fashion-mnist"
    write_idx_part(folder, "t10k", random_images(3, 28, 28), np.arange(3))
    assert len(data_utils.load("fashion_mnist", folder).x_test) == 3


def test_damaged_idx_files_are_refused(tmp_path):
    folder = tmp_path / "mnist"
    write_idx_part(folder, "train", random_images(4, 28, 28), np.arange(4))
    with refused("mnist", "no t10k"):
        data_utils.load("mnist", tmp_path)
    write_idx_part(folder, "t10k", random_images(4, 28, 28), np.arange(3))
    with refused("mnist", "t10k images and labels"):
        data_utils.load("mnist", tmp_path)
    write_idx_part(folder, "t10k", random_images(4, 28, 28), np.arange(4) + 9)
    with refused("'mnist'", "label 12", "0 to 9"):
        data_utils.load("mnist", tmp_path)
    path = folder / "t10k-labels-idx1-ubyte.gz"
    for content in (path.read_bytes()[:-9], b"", gzip.compress(b"\0\0\x08\x03" + b"\0" * 12)):
        path.write_bytes(content)
        with refused(path.name, "not a whole idx file"):
            data_utils.load("mnist", tmp_path)


def write_cifar(path, images, *label_columns):
    labels = np.stack(label_columns, axis=1).astype(np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.concatenate([labels, planes], axis=1).tobytes())


def colour_scaled(images):
    return (images / 255 - [0.49, 0.48, 0.44]) / 0.2


@pytest.mark.parametrize("parent", [".", "cifar10"])
def test_cifar10_binary_is_read_back_exactly(tmp_path, parent):
    folder = tmp_path / parent / "cifar-10-batches-bin"
    images = random_images(12, 32, 32, 3)
    labels = np.arange(12) % 10
    for batch in range(5):
        rows = slice(2 * batch, 2 * batch + 2)
        write_cifar(folder / f"data_batch_{batch + 1}.bin", images[rows], labels[rows])
    write_cifar(folder / "test_batch.bin", images[10:], labels[10:])
    data = data_utils.load("cifar10", tmp_path)
    np.testing.assert_allclose(data.x_train, colour_scaled(images[:10]), atol=2e-6)
    np.testing.assert_allclose(data.x_test, colour_scaled(images[10:]), atol=2e-6)
    assert list(data.y_train) == list(range(10)) and list(data.y_test) == [0, 1]
    (folder / "data_batch_3.bin").write_bytes(b"123")
    with refused("data_batch_3.bin", "whole CIFAR records"):
        data_utils.load("cifar10", tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with refused("'cifar10' is incomplete", "data_batch_3.bin"):
        data_utils.load("cifar10", tmp_path)


def test_cifar100_uses_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    images = random_images(3, 32, 32, 3)
    write_cifar(folder / "train.bin", images, [1, 2, 3], [99, 40, 7])
    write_cifar(folder / "test.bin", images[:1], [19], [98])
    data = data_utils.load("cifar100", tmp_path)
    assert list(data.y_train) == [99, 40, 7] and list(data.y_test) == [98]
    assert data.num_classes == 100
    np.testing.assert_allclose(data.x_train, colour_scaled(images), atol=2e-6)


def test_pickled_cifar_is_named_but_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with refused("cifar-10-batches-py", "unpickling can run code", "download_and_prepare()"):
        data_utils.load("cifar10", tmp_path)


def test_svhn_is_read_back_with_zero_for_ten(tmp_path):
    images = random_images(4, 32, 32, 3)
    labels = np.array([[10], [1], [9], [10]], np.uint8)
    for part in ("train", "test"):
        stored = {"X": images.transpose(1, 2, 3, 0), "y": labels}
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", stored)
    data = data_utils.load("svhn", tmp_path)
    assert list(data.y_train) == list(data.y_test) == [0, 1, 9, 0]
    np.testing.assert_allclose(data.x_train, colour_scaled(images), atol=2e-6)
    (tmp_path / "train_32x32.mat").write_bytes(b"no matrix")
    with refused("train_32x32.mat", "cannot be read"):
        data_utils.load("svhn", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar100", "svhn", "imdb"])
def test_unprepared_sets_say_how_to_prepare_them(tmp_path, name):
    tfds_name = {"svhn": "svhn_cropped", "imdb": "imdb_reviews"}.get(name, name)
    with refused(
        f"'{name}' was not found",
        "without TensorFlow",
        "pip install tensorflow-cpu",
        f"tfds.builder('{tfds_name}', data_dir='{tmp_path}', file_format='array_record')",
    ):
        data_utils.load(name, tmp_path)


# Text


def test_imdb_tokens_from_npz(tmp_path):
    path = tmp_path / "imdb" / "reviews.npz"
    path.parent.mkdir()
    tokens = np.arange(20_010 * 3).reshape(-1, 3) % 20_000
    arrays = {"x_train": tokens.astype(np.uint16), "y_train": np.arange(20_010) % 2}
    arrays |= {"x_test": tokens[:7].astype(np.uint16), "y_test": np.zeros(7, np.uint8)}
    np.savez(path, **arrays)
    data = data_utils.load("imdb", tmp_path)
    np.testing.assert_array_equal(data.x_train, tokens[:20_000])
    np.testing.assert_array_equal(data.x_test, tokens[:7])
    assert data.x_train.dtype == data.y_train.dtype == np.int32
    assert data.y_train.shape == (20_000,) and data.num_classes == 2
    np.savez(path, **(arrays | {"x_test": tokens[:7] / 2}))
    with refused("reviews.npz", "2-d integer tokens"):
        data_utils.load("imdb", tmp_path)


def test_tokenize_ranks_training_words_and_pads_in_front():
    train = ["The cat<br />the END", "the cat's end end cat"]
    # the 3, end 3, cat 2, cat's 1: numbers by frequency, then alphabet; two words have no number.
    x_train, x_test = readers.tokenize(train, ["unseen the cat end the", ""], 5, 4)
    assert x_train.tolist() == [[3, 4, 3, 2], [1, 2, 2, 4]]
    assert x_test.tolist() == [[3, 4, 2, 3], [0, 0, 0, 0]]
    assert readers.tokenize(train, ["cat"], 5, 4)[1].tolist() == [[0, 0, 0, 4]]


def test_imdb_texts_from_tfds_are_tokenized(tmp_path, monkeypatch):
    def source(name, tfds_name, split, data_dir, wanted):
        assert (name, tfds_name) == ("imdb", "imdb_reviews")
        rows = [(b"good film", 1), (b"bad bad film", 0)]
        return [
            {"text": text, "label": label} for text, label in rows[:: 1 if split == "train" else -1]
        ]

    monkeypatch.setattr(readers, "_tfds_source", source)
    data = data_utils.load("imdb", tmp_path)
    assert data.x_train.shape == (2, 100)
    assert data.x_train[:, -3:].tolist() == [[0, 4, 3], [2, 2, 3]]
    assert list(data.y_train) == [1, 0] and list(data.y_test) == [0, 1]


# UCI


def write_uci(folder, rows=50, splits=()):
    rng = np.random.default_rng(rows)
    table = rng.normal(5, 3, (rows, 4))
    table[:, 1] = 0.1  # Constant, and not a binary fraction.
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", table, fmt="%.17g")
    np.savetxt(folder / "index_features.txt", [0, 1, 3], fmt="%d")
    np.savetxt(folder / "index_target.txt", [2], fmt="%d")
    for seed, train, test in splits:
        np.savetxt(folder / f"index_train_{seed}.txt", train, fmt="%d")
        np.savetxt(folder / f"index_test_{seed}.txt", test, fmt="%d")
    return table


def original(data):
    return [y * data.target_scale + data.target_mean for y in (data.y_train, data.y_test)]


@pytest.mark.parametrize("folder", ["uci/yacht", "yacht", "yacht/data"])
def test_uci_split_comes_from_its_index_files(tmp_path, folder):
    table = write_uci(tmp_path / folder, splits=[(3, range(5, 50), range(5))])
    data = data_utils.load("yacht_3", tmp_path, float_dtype=np.float64)
    y_train, y_test = original(data)
    np.testing.assert_allclose(y_train[:, 0], table[5:, 2])
    np.testing.assert_allclose(y_test[:, 0], table[:5, 2])
    assert_standardized(data.x_train[:, [0, 2]])
    assert_standardized(data.y_train)
    np.testing.assert_allclose(data.x_train[:, 1], 0, atol=1e-12)
    plain = data_utils.load("yacht_3", tmp_path, float_dtype=np.float64, standardize=False)
    np.testing.assert_array_equal(plain.x_train, table[5:][:, [0, 1, 3]])
    np.testing.assert_array_equal(plain.y_test, table[:5, [2]])


def test_uci_without_index_files_is_permuted_by_the_seed(tmp_path):
    table = write_uci(tmp_path / "wine-quality-red")
    parts = []
    for name in ("wine_quality_7", "wine_7", "wine_8"):
        train, test = original(data_utils.load(name, tmp_path, float_dtype=np.float64))
        assert train.shape == (45, 1) and test.shape == (5, 1)
        together = np.concatenate([train, test])[:, 0]
        np.testing.assert_allclose(np.sort(together), np.sort(table[:, 2]))
        parts.append(test)
    np.testing.assert_array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0], parts[2])
    order = np.random.default_rng(7).permutation(50)
    np.testing.assert_allclose(parts[0][:, 0], table[order[45:], 2])
    assert data_utils.load("wine", tmp_path).num_classes == 3


def test_damaged_uci_folders_are_refused(tmp_path):
    folder = tmp_path / "uci" / "yacht"
    write_uci(folder, splits=[(0, range(45), range(44, 50)), (1, range(45), [50])])
    with refused("Split 0", "both train and test"):
        data_utils.load("yacht_0", tmp_path)
    with refused("index_test_1.txt", "0 to 49"):
        data_utils.load("yacht_1", tmp_path)
    (folder / "index_test_1.txt").unlink()
    with refused("index_test_1.txt", "cannot be read"):
        data_utils.load("yacht_1", tmp_path)
    (folder / "data.txt").write_text("1 2 nan 4\n5 6 7 8\n")
    with refused("'yacht'", "finite"):
        data_utils.load("yacht_5", tmp_path)
    (folder / "data.txt").write_text("1 2\nx y\n")
    with refused("data.txt", "cannot be read"):
        data_utils.load("yacht_5", tmp_path)


def test_openml_nominal_columns_get_their_values_back(monkeypatch):
    def fetch(data_id, **options):
        assert data_id == 42370 and not options["as_frame"]
        codes = np.column_stack([np.arange(308.0), np.arange(308) % 3])
        return sklearn.utils.Bunch(
            data=codes,
            target=np.arange(308).astype(str).astype(object),
            categories={"b": ["1", "24", "5"]},
            feature_names=["a", "b"],
        )

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    data = data_utils.load("yacht_0", float_dtype=np.float64, standardize=False)
    assert data.x_train.shape == (277, 2) and data.x_test.shape == (31, 2)
    values = np.array([1, 24, 5])
    np.testing.assert_array_equal(data.x_train[:, 1], values[data.x_train[:, 0].astype(int) % 3])
    np.testing.assert_array_equal(data.y_train[:, 0], data.x_train[:, 0])


def test_uci_out_of_reach_names_the_layout(tmp_path, monkeypatch):
    def fetch(**options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    with refused("'energy'", "no network", "data.txt", "<data_dir>/uci/energy/"):
        data_utils.load("energy_0", tmp_path)
    with refused("'power'", "<data_dir>/uci/power/"):
        data_utils.load("power_0", tmp_path)

    def fetch_other(**options):
        return sklearn.utils.Bunch(
            data=np.ones((3, 2)), target=np.ones(3), categories={}, feature_names=["a", "b"]
        )

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch_other)
    with refused("3 rows", "'energy'", "768"):
        data_utils.load("energy_0", tmp_path)


# Files of one's own


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
    data = data_utils.load(own(x_train=tokens, x_test=tokens[:8]))
    assert data.x_train.dtype == np.int32
    np.testing.assert_array_equal(data.x_train, tokens)
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
        ({"y_train": np.eye(20, 4, dtype=int)}, "one class label a row"),
        ({"y_train": np.zeros((20, 2)), "y_test": np.zeros(8)}, "(rows, targets)"),
        ({"x_train": np.full((20, 3), "a")}, "real numbers"),
        ({"x_train": np.full((20, 3), -1), "x_test": np.zeros((8, 3), int)}, "cannot be tokens"),
    ],
)
def test_wrong_own_files_are_refused(own, changes, fragment):
    with refused("own.npz", fragment):
        data_utils.load(own(**changes))


def test_files_that_are_no_archives_are_refused(own, tmp_path):
    with refused("no data file", "absent.npz"):
        data_utils.load("absent.npz", tmp_path)
    path = pathlib.Path(own())
    path.write_bytes(path.read_bytes()[:200])
    with refused("own.npz", "cannot be read as an .npz"):
        data_utils.load(str(path))
    path.write_bytes(b"some text")
    with refused("own.npz", "pickled"):
        data_utils.load(str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with refused("own.npz", "single array"):
        data_utils.load(str(path))


# Real data


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_mnist(shared_data, name):
    data = data_utils.load(name, shared_data)
    assert data.x_train.shape == (60_000, 28, 28, 1) and data.x_test.shape == (10_000, 28, 28, 1)
    first_labels = {"mnist": [5, 0, 4, 1, 9], "fashion_mnist": [9, 0, 0, 3, 0]}[name]
    assert list(data.y_train[:5]) == first_labels
    if name == "mnist":
        assert abs(data.x_train.mean()) < 1e-3 and abs(data.x_train.std() - 1) < 1e-3
        assert list(data.y_test[:5]) == [7, 2, 1, 0, 4]


def test_real_notmnist_has_a_test_part_only(shared_data):
    data = data_utils.load("notmnist", shared_data)
    assert len(data.x_train) == 0 and data.x_test.shape == (10_000, 28, 28, 1)
    assert set(data.y_test) == set(range(10))


def test_real_cifar10_through_tensorflow_datasets(shared_data, capfd):
    data = data_utils.load("cifar10", shared_data, subset_train_to=100)
    assert capfd.readouterr() == ("", "")
    assert data.x_train.shape == (100, 32, 32, 3) and data.x_test.shape == (10_000, 32, 32, 3)
    assert list(data.y_test[:10]) == [7, 0, 6, 9, 5, 1, 7, 0, 3, 2]
    assert list(np.bincount(data.y_test)) == [1000] * 10
    # The published HMC predictions are right on 91.44 % of the images only in the right order.
    reference = shared_data / "hmc_reference" / "cifar10_resnet20_hmc_probs.csv.gz"
    if reference.is_file():
        predicted = np.loadtxt(reference).argmax(axis=1)
        assert np.mean(predicted == data.y_test) == pytest.approx(0.9144, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "rows", "features"), [("boston", 506, 13), ("concrete", 1030, 8), ("yacht", 308, 6)]
)
def test_real_uci_rows_follow_the_published_splits(shared_data, name, rows, features):
    folder = shared_data / "uci" / name
    table = np.loadtxt(folder / "data.txt")
    for seed in (0, 19):
        data = data_utils.load(f"{name}_{seed}", shared_data, float_dtype=np.float64)
        assert len(data.x_train) + len(data.x_test) == rows
        assert data.x_train.shape[1] == features
        for part, y in zip(("train", "test"), original(data), strict=True):
            indices = np.loadtxt(folder / f"index_{part}_{seed}.txt", dtype=int)
            np.testing.assert_allclose(y[:, 0], table[indices, -1])
        assert_standardized(data.x_train)
        assert_standardized(data.y_train)


def test_real_imdb(shared_data):
    data = data_utils.load("imdb", shared_data)
    assert data.x_train.shape == (20_000, 100) and data.x_test.shape == (25_000, 100)
    assert data.x_train.dtype == np.int32 and data.x_train.max() == 19_999
    assert set(data.y_train) == {0, 1} and np.mean(data.y_test) == 0.5


def test_own_arrays_are_taken_like_a_file_of_them():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(50, 2))
    dataset = data_utils.from_arrays(x[:40], x[:40, 0] * 5 + 1, x[40:], x[40:, 0] * 5 + 1)
    assert dataset.task == "regression" and dataset.y_train.shape == (40, 1)
    np.testing.assert_allclose(dataset.x_train.mean(axis=0), 0, atol=1e-6)
    restored = dataset.y_test * dataset.target_scale + dataset.target_mean
    np.testing.assert_allclose(restored[:, 0], x[40:, 0] * 5 + 1, rtol=1e-5)
    with pytest.raises(UserError, match="need the same number of rows"):
        data_utils.from_arrays(x[:40], x[:39, 0], x[40:], x[40:, 0])
