"""Image sets: from the files they were published in, or else from tensorflow-datasets.

No reader unpickles anything, so no file can run code.
"""

import gzip
import pathlib
import struct
import zlib
from typing import NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils.datasets import tfds
from haiku_posteriors.utils.datasets.raw import RawData

_PIXELS_MNIST = (np.array([0.1307]), np.array([0.3081]))
_PIXELS_COLOUR = (np.array([0.49, 0.48, 0.44]), np.array([0.2, 0.2, 0.2]))


class ImageSet(NamedTuple):
    """An image set: its file format, name in tensorflow-datasets, classes and pixel statistics."""

    file_format: str
    tfds_name: str | None
    num_classes: int
    pixels: tuple[np.ndarray, np.ndarray]


# Pixel statistics are those of "What Are Bayesian Neural Network Posteriors Really Like?"
# (Izmailov et al. 2021, arXiv 2104.14421), so that its published predictions are comparable.
IMAGE_SETS = {
    "mnist": ImageSet("idx", "mnist", 10, _PIXELS_MNIST),
    "fashion_mnist": ImageSet("idx", "fashion_mnist", 10, _PIXELS_MNIST),
    "notmnist": ImageSet("idx", None, 10, _PIXELS_MNIST),
    "cifar10": ImageSet("cifar", "cifar10", 10, _PIXELS_COLOUR),
    "cifar100": ImageSet("cifar", "cifar100", 100, _PIXELS_COLOUR),
    "svhn": ImageSet("svhn", "svhn_cropped", 10, _PIXELS_COLOUR),
}
_FILES_WANTED = {
    "idx": "{train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz",
    "cifar": "the binary version's .bin files",
    "svhn": "train_32x32.mat and test_32x32.mat",
}

Part = tuple[np.ndarray, np.ndarray]


def read_images(name: str, data_dir: pathlib.Path | None) -> RawData:
    """Reads an image set of `IMAGE_SETS`, from its own files or else tensorflow-datasets.

    Args:
      name: a key of `IMAGE_SETS`.
      data_dir: folder that holds `<name>/` with the set's files, the files themselves, or the
        folder of tensorflow-datasets.

    Returns:
      uint8 images (rows, height, width, channels). Where the training files of an idx set are
      absent but its test files are there, the training part has no rows, so that a set of which
      only a test part is published (notMNIST) can serve as out-of-distribution data.
    """
    image_set = IMAGE_SETS[name]
    folders = [] if data_dir is None else [data_dir / name, data_dir]
    found: tuple[Part, Part] | None
    if image_set.file_format == "idx":
        found = _read_idx_set(_folders_for_idx(name, folders))
    elif image_set.file_format == "cifar":
        found = _read_cifar(name, folders)
    else:
        found = _read_svhn(folders)
    if found is None:
        found = _read_images_from_tfds(name, data_dir)
    (x_train, y_train), (x_test, y_test) = found
    for labels in (y_train, y_test):
        if labels.size and labels.max() >= image_set.num_classes:
            raise UserError(
                f"The files of data set '{name}' hold label {labels.max()}, but its labels are "
                f"0 to {image_set.num_classes - 1}."
            )
    return RawData(
        "classification", x_train, y_train, x_test, y_test, image_set.num_classes, image_set.pixels
    )


def _folders_for_idx(name: str, folders: list[pathlib.Path]) -> list[pathlib.Path]:
    # Every idx set uses the same file names, so files lying in data_dir itself are taken only if
    # the folder bears the set's name; bare files in a folder of any other name are MNIST, which
    # the file names come from. Otherwise one set could silently be read as another.
    def is_for_us(folder: pathlib.Path) -> bool:
        spelled = folder.resolve().name.lower().replace("-", "_")
        return spelled == name or (name == "mnist" and spelled not in IMAGE_SETS)

    return [folder for folder in folders if is_for_us(folder)]


def _read_idx_set(folders: list[pathlib.Path]) -> tuple[Part, Part] | None:
    for folder in folders:
        parts = {part: _read_idx_part(folder, part) for part in ("train", "t10k")}
        train, test = parts["train"], parts["t10k"]
        if test is not None:
            empty = (test[0][:0], test[1][:0])
            return (empty if train is None else train), test
        if train is not None:
            raise UserError(f"Folder {folder} holds the train files but no t10k (test) files.")
    return None


def _read_idx_part(folder: pathlib.Path, part: str) -> Part | None:
    arrays = []
    for content, rank in (("images", 3), ("labels", 1)):
        path = folder / f"{part}-{content}-idx{rank}-ubyte"
        path = path if path.is_file() else path.with_name(path.name + ".gz")
        arrays.append(_read_idx(path, rank) if path.is_file() else None)
    images, labels = arrays
    if images is None and labels is None:
        return None
    if images is None or labels is None or len(images) != len(labels):
        raise UserError(f"Folder {folder} needs {part} images and labels of equal number.")
    return images[..., np.newaxis], labels


def _read_idx(path: pathlib.Path, rank: int) -> np.ndarray:
    """Reads unsigned bytes in LeCun's idx format: magic number, big-endian sizes, values."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        zeros, type_code, stored_rank = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{rank}I", content, 4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
        if (zeros, type_code, stored_rank) != (0, 8, rank):
            raise ValueError("wrong magic number")
        return values.reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise UserError(
            f"File {path} is not a whole idx file of unsigned bytes: {error}."
        ) from error


def _read_cifar(name: str, folders: list[pathlib.Path]) -> tuple[Part, Part] | None:
    # One record: a label byte (CIFAR-100: a coarse, then a fine one), then 3 x 32 x 32 bytes.
    if name == "cifar10":
        subfolder, label_bytes, test_name = "cifar-10-batches-bin", 1, "test_batch.bin"
        train_names = [f"data_batch_{batch}.bin" for batch in range(1, 6)]
    else:
        subfolder, label_bytes, test_name = "cifar-100-binary", 2, "test.bin"
        train_names = ["train.bin"]
    places = [place for folder in folders for place in (folder / subfolder, folder)]
    place = next((place for place in places if (place / test_name).is_file()), None)
    if place is None:
        return None
    parts = []
    for names in (train_names, [test_name]):
        records = []
        for path in (place / file_name for file_name in names):
            if not path.is_file():
                raise UserError(f"Data set '{name}' is incomplete: there is no file {path}.")
            content = np.fromfile(path, np.uint8)
            if content.size == 0 or content.size % (label_bytes + 3072):
                raise UserError(f"File {path} does not hold whole CIFAR records.")
            records.append(content.reshape(-1, label_bytes + 3072))
        rows = np.concatenate(records)
        images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts.append((images, rows[:, label_bytes - 1]))
    return parts[0], parts[1]


def _read_svhn(folders: list[pathlib.Path]) -> tuple[Part, Part] | None:
    """Reads SVHN's cropped digits (Netzer et al. 2011), where the digit 0 carries the label 10."""
    folder = next((place for place in folders if (place / "test_32x32.mat").is_file()), None)
    if folder is None:
        return None
    import scipy.io
    from scipy.io.matlab import MatReadError

    failures = (OSError, ValueError, KeyError, TypeError, NotImplementedError, MatReadError)
    parts = []
    for path in (folder / "train_32x32.mat", folder / "test_32x32.mat"):
        try:
            content = scipy.io.loadmat(path)
            images, labels = content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1)
        except failures as error:
            raise UserError(f"File {path} cannot be read as SVHN images: {error}.") from error
        parts.append((images, np.where(labels == 10, 0, labels)))
    return parts[0], parts[1]


def _read_images_from_tfds(name: str, data_dir: pathlib.Path | None) -> tuple[Part, Part]:
    image_set = IMAGE_SETS[name]
    wanted = f"{_FILES_WANTED[image_set.file_format]}, in <data_dir>/{name}/"
    if data_dir is not None and image_set.file_format == "cifar":
        pickled = "cifar-10-batches-py" if name == "cifar10" else "cifar-100-python"
        if any((folder / pickled).is_dir() for folder in (data_dir / name, data_dir)):
            wanted += f" ({pickled} is there but not read, because unpickling can run code)"
    if image_set.tfds_name is None:
        raise UserError(f"Data set '{name}' was not found: it needs {wanted}.")
    parts = []
    for split in ("train", "test"):
        examples = tfds.read_examples(name, image_set.tfds_name, split, data_dir, wanted)
        parts.append(
            (
                np.stack([example["image"] for example in examples]),
                np.array([example["label"] for example in examples], np.int32),
            )
        )
    return parts[0], parts[1]
