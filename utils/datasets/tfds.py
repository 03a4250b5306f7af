"""Sets that tensorflow-datasets has prepared, read without TensorFlow."""

import contextlib
import logging
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

from haiku_posteriors.core.errors import UserError


def read_examples(
    name: str, tfds_name: str, split: str, data_dir: pathlib.Path | None, wanted: str
) -> list[dict[str, Any]]:
    """All examples of a split, in the order they were prepared in.

    Args:
      name: our name of the set, for messages.
      tfds_name: its name in tensorflow-datasets.
      split: "train" or "test".
      data_dir: the folder of tensorflow-datasets, or the one that holds it under its own name;
        None for its default.
      wanted: the files that would serve instead, for messages.

    Raises:
      UserError: the set is not prepared there, with the command that prepares it.
    """
    folder = data_dir
    if folder is not None and (folder / "tensorflow_datasets").is_dir():
        folder = folder / "tensorflow_datasets"
    with _quiet():
        try:
            import tensorflow_datasets as tfds

            source = tfds.data_source(
                tfds_name,
                split=split,
                data_dir=folder,
                download=False,
                builder_kwargs={"file_format": "array_record"},
            )
        except (ImportError, LookupError, ValueError, OSError, NotImplementedError) as error:
            place = "" if folder is None else f"data_dir='{folder}', "
            raise UserError(
                f"Data set '{name}' was not found: it needs {wanted}, or tensorflow-datasets, "
                "which reads without TensorFlow but needs it once to prepare the set: pip install "
                'tensorflow-cpu; python -c "import tensorflow_datasets as tfds; tfds.builder('
                f"'{tfds_name}', {place}file_format='array_record').download_and_prepare()\"."
            ) from error
        return [source[index] for index in range(len(source))]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Its decoder logs that an optional package is absent, and its import may use what Python
    # deprecates; neither is for our users to act on.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
