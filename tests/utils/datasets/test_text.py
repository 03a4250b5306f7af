"""Reviews as tokens, from files and from texts."""

import numpy as np
from data_checks import refused

from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.datasets import text, tfds


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
    x_train, x_test = text.tokenize(train, ["unseen the cat end the", ""], 5, 4)
    assert x_train.tolist() == [[3, 4, 3, 2], [1, 2, 2, 4]]
    assert x_test.tolist() == [[3, 4, 2, 3], [0, 0, 0, 0]]
    assert text.tokenize(train, ["cat"], 5, 4)[1].tolist() == [[0, 0, 0, 4]]


def test_imdb_texts_from_tfds_are_tokenized(tmp_path, monkeypatch):
    def examples(name, tfds_name, split, data_dir, wanted):
        assert (name, tfds_name) == ("imdb", "imdb_reviews")
        rows = [(b"good film", 1), (b"bad bad film", 0)]
        step = 1 if split == "train" else -1
        return [{"text": review, "label": label} for review, label in rows[::step]]

    monkeypatch.setattr(tfds, "read_examples", examples)
    data = data_utils.load("imdb", tmp_path)
    assert data.x_train.shape == (2, 100)
    assert data.x_train[:, -3:].tolist() == [[0, 4, 3], [2, 2, 3]]
    assert list(data.y_train) == [1, 0] and list(data.y_test) == [0, 1]


def test_real_imdb(shared_data):
    data = data_utils.load("imdb", shared_data)
    assert data.x_train.shape == (20_000, 100) and data.x_test.shape == (25_000, 100)
    assert data.x_train.dtype == np.int32 and data.x_train.max() == 19_999
    assert set(data.y_train) == {0, 1} and np.mean(data.y_test) == 0.5
