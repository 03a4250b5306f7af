"""Files of class probabilities, ours and published ones."""

import gzip

import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import distances, floors
from haiku_posteriors.utils.report import prediction_files

TABLE = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.25, 0.5, 0.25]])
LABELS = np.array([0, 1, 1])


@pytest.mark.parametrize("separator", [",", " ", ", "])
@pytest.mark.parametrize("names", ["", "a,b,c\n"])
def test_text_tables_plain_and_packed(tmp_path, separator, names):
    text = names + "\n".join(separator.join(map(str, row)) for row in TABLE) + "\n"
    (tmp_path / "p.csv").write_text(text)
    (tmp_path / "q.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("p.csv", "q.csv.gz"):
        found = prediction_files.open_predictions(tmp_path / name)
        np.testing.assert_array_equal(found.predictions.outputs, TABLE[None, None])
        assert found.name == name[0] and found.predictions.targets is None


def test_npz_with_draws_and_labels(tmp_path):
    path = tmp_path / "draws.npz"
    np.savez(path, probabilities=np.stack([TABLE, TABLE]), y_test=LABELS)
    found = prediction_files.open_predictions(path)
    assert found.predictions.outputs.shape == (1, 2, 3, 3)
    np.testing.assert_array_equal(found.predictions.targets, LABELS)
    quality = floors.quality(found.predictions)
    # By hand: right, wrong (0.4 for another), right.
    assert quality["accuracy"].value == pytest.approx(2 / 3)
    assert quality["nll"].value == pytest.approx(-np.log(0.7 * 0.3 * 0.5) / 3)
    by_row = [0.3**2 + 0.2**2 + 0.1**2, 0.3**2 + 0.7**2 + 0.4**2, 2 * 0.25**2 + 0.5**2]
    assert quality["brier"].value == pytest.approx(np.mean(by_row))


def test_labels_from_files_and_data_sets(tmp_path):
    (tmp_path / "labels.csv").write_text("label\n0\n1\n1\n")
    np.savez(tmp_path / "labels.npz", labels=LABELS)
    for name in ("labels.csv", "labels.npz"):
        found = prediction_files.read_labels(str(tmp_path / name), None)
        np.testing.assert_array_equal(found, LABELS)
    assert len(prediction_files.read_labels("digits", None)) == 360
    with pytest.raises(UserError, match="has no class labels"):
        prediction_files.read_labels("toy_regression", None)
    np.savez(tmp_path / "none.npz", x=LABELS)
    with pytest.raises(UserError, match="none of the arrays"):
        prediction_files.read_labels(str(tmp_path / "none.npz"), None)
    (tmp_path / "half.csv").write_text("0.5\n1\n")
    with pytest.raises(UserError, match="no labels"):
        prediction_files.read_labels(str(tmp_path / "half.csv"), None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("1 2 3\n4 5\n", "table of numbers"),
        ("", "no rows"),
        ("a,b\n", "no rows"),
        ("0.5 0.6\n0.5 0.5\n", "row 0 has"),
        ("0.5 0.5\n1.5 -0.5\n", "no class probabilities"),
        ("0.5 nan\n", "no class probabilities"),
        ("1\n1\n", "class probabilities are"),
    ],
)
def test_what_is_no_table_of_probabilities_is_told(tmp_path, content, sentence):
    (tmp_path / "p.csv").write_text(content)
    with pytest.raises(UserError, match=sentence):
        prediction_files.open_predictions(tmp_path / "p.csv")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        prediction_files.open_predictions(tmp_path / "p.csv")
    (tmp_path / "p.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "p.npz").write_bytes(b"no zip")
    np.savez(tmp_path / "other.npz", x=TABLE)
    np.savez(tmp_path / "pickled.npz", probabilities=np.array([{}], dtype=object))
    for name in ("p.csv.gz", "p.npz", "other.npz", "pickled.npz"):
        with pytest.raises(UserError, match=name):
            prediction_files.open_predictions(tmp_path / name)


def test_labels_that_do_not_belong(tmp_path):
    np.savez(tmp_path / "p.npz", probabilities=TABLE)
    found = prediction_files.open_predictions(tmp_path / "p.npz")
    for labels, sentence in (
        (LABELS[:2], "3 rows"),
        (LABELS + 0.5, "whole numbers"),
        (LABELS + 2, "3 classes"),
    ):
        with pytest.raises(UserError, match=sentence):
            prediction_files.with_targets(found, labels)


PUBLISHED = {
    "imdb": ("imdb_cnnlstm_hmc_probs.csv.gz", 0.8756, 0.2950, 0.0308),
    "cifar10": ("cifar10_resnet20_hmc_probs.csv.gz", 0.9144, 0.2773, 0.0522),
}


# Reading CIFAR-10 takes longest; test_metrics.py has the same numbers from the labels alone.
@pytest.mark.parametrize("name", ["imdb", pytest.param("cifar10", marks=pytest.mark.slow)])
def test_published_hmc_predictions_have_their_published_quality(shared_data, name):
    file_name, accuracy, nll, ece = PUBLISHED[name]
    path = shared_data / "hmc_reference" / file_name
    if not path.is_file():
        pytest.skip(f"the published predictions {file_name} are absent")
    labels = prediction_files.read_labels(name, str(shared_data))
    opened = prediction_files.open_predictions(path)
    found = prediction_files.with_targets(opened, labels).predictions
    quality = floors.quality(found)
    # Half a unit of the last published digit.
    assert quality["accuracy"].value == pytest.approx(accuracy, abs=5e-5)
    assert quality["nll"].value == pytest.approx(nll, abs=5e-5)
    assert quality["ece"].value == pytest.approx(ece, abs=5e-5)
    blurred = found._replace(outputs=0.9 * found.outputs + 0.1 / found.outputs.shape[3])
    apart = floors.compare(blurred, found)
    assert apart["agreement"].value == 1.0
    # A tenth of the distance to the uniform distribution.
    (mean,) = found.flat_outputs
    uniform = np.full_like(mean, 1 / mean.shape[1])
    expected = 0.1 * distances.total_variation(mean, uniform)
    assert apart["total_variation"].value == pytest.approx(expected)
