"""UCI regression sets: their splits, OpenML's copies, and every refusal."""

import urllib.error

import numpy as np
import pytest
import sklearn.datasets
from data_checks import assert_standardized, original, refused

from haiku_posteriors.utils import data_utils


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
