"""The IMDB reviews as tokens, from a file or from plain text."""

import pathlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets import arrays, tfds
from haiku_posteriors.utils.datasets.raw import RawData

TRAIN_ROWS, VOCABULARY_SIZE, LENGTH = 20_000, 20_000, 100


def read_imdb(data_dir: pathlib.Path | None) -> RawData:
    """Reads the IMDB reviews as tokens (Maas et al. 2011; preparation of arXiv 2104.14421).

    Uses 20,000 token numbers, the last 100 tokens of a review padded in front with 0, the first
    20,000 training reviews and all test reviews. Taken from the first `imdb/*.npz` under
    `data_dir`, else from the plain text of tensorflow-datasets.
    """
    paths = sorted((data_dir / "imdb").glob("*.npz")) if data_dir is not None else []
    if not paths:
        train_texts, y_train = _read_texts("train", data_dir)
        test_texts, y_test = _read_texts("test", data_dir)
        train_texts, y_train = train_texts[:TRAIN_ROWS], y_train[:TRAIN_ROWS]
        x_train, x_test = tokenize(train_texts, test_texts, VOCABULARY_SIZE, LENGTH)
    else:
        found = arrays.read_plain(paths[0])
        inputs_train, y_train, inputs_test, y_test = arrays.split_arrays(paths[0], found)
        arrays.check_rows(f"File {paths[0]}", inputs_train, y_train, inputs_test, y_test)
        x_train, x_test = np.asarray(inputs_train), np.asarray(inputs_test)
        is_tokens = all(x.ndim == 2 and x.dtype.kind in "iu" for x in (x_train, x_test))
        if not is_tokens or not all(np.isin(y, (0, 1)).all() for y in (y_train, y_test)):
            raise UserError(f"File {paths[0]} must hold 2-d integer tokens and labels 0 and 1.")
        x_train, y_train = x_train[:TRAIN_ROWS], y_train[:TRAIN_ROWS]
        x_train, x_test = x_train.astype(np.int32), x_test.astype(np.int32)
    return RawData("classification", x_train, y_train, x_test, y_test, 2, "none")


def tokenize(
    train_texts: Sequence[str], test_texts: Sequence[str], vocabulary_size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the words of texts: 0 pads in front, 1 is any rare word, 2 the most frequent one.

    Only training texts decide which words have a number of their own; equally frequent words are
    ordered alphabetically. Of each text the last `length` words are kept.
    """

    def words(text: str) -> list[str]:
        return re.findall(r"[a-z0-9']+", re.sub(r"<br\s*/?>", " ", text.lower()))

    counts = Counter(word for text in train_texts for word in words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary_size - 2]
    number_of = {word: number for number, word in enumerate(ranked, start=2)}
    parts = []
    for texts in (train_texts, test_texts):
        tokens = np.zeros((len(texts), length), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            numbers = [number_of.get(word, 1) for word in words(text)[-length:]]
            row[length - len(numbers) :] = numbers
        parts.append(tokens)
    return parts[0], parts[1]


def _read_texts(split: str, data_dir: pathlib.Path | None) -> tuple[list[str], np.ndarray]:
    wanted = "an .npz file of tokens in <data_dir>/imdb/"
    examples = tfds.read_examples("imdb", "imdb_reviews", split, data_dir, wanted)
    texts = [example["text"].decode("utf-8", errors="replace") for example in examples]
    return texts, np.array([example["label"] for example in examples], np.int32)
