"""Draws of a run and their predictions: written as they come, read back in pieces.

A network of 36 million weights with 1,000 draws has 146 GB of them; no more than PART_BYTES (or one
collection, if that is larger) are in memory at a time, unless a run has no folder to put them.
"""

import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils

PART_BYTES = 2**28


def num_bytes(tree: Params) -> int:
    """The size of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def num_draws(draws: Params) -> int:
    """How many draws a tree of leaves (chains, draws, ...) holds for each chain."""
    return jax.tree.leaves(draws)[0].shape[1]


class DrawStore:
    """All draws of a run, (chains, draws, ...), in the order they were taken.

    With a folder they are in its files, and in memory until the next `flush` only; without one
    they are in memory.
    """

    def __init__(self, directory: pathlib.Path | None, template: Params) -> None:
        """Opens the folder, whose files may hold draws already.

        Args:
          directory: of the draws' files; None for none.
          template: the network's parameters; shapes suffice.
        """
        self._directory, self._template = directory, template
        self._files = checkpoint_utils.draw_files(directory) if directory else []
        self._pending: list[Params] = []

    @property
    def pending_bytes(self) -> int:
        """How much `flush` would write."""
        return sum(map(num_bytes, self._pending)) if self._directory else 0

    def append(self, draws: Params) -> None:
        """Adds draws, host arrays."""
        self._pending.append(draws)

    def flush(self, epoch: int) -> None:
        """Writes what was added since the last time, all taken up to `epoch`."""
        if self._directory is None or not self._pending:
            return
        path = checkpoint_utils.save_draws(self._directory, epoch, concatenate(self._pending))
        self._files.append(path)
        self._pending = []

    def clear(self) -> None:
        """Forgets all draws; others are to follow."""
        for path in self._files:
            path.unlink()
        self._files, self._pending = [], []

    def parts(self) -> Iterator[Params]:
        """The draws in pieces, (chains, some draws, ...)."""
        for path in self._files:
            tensors, _ = checkpoint_utils.load_tensors(path)
            yield trees.from_named_leaves(self._template, tensors)
        yield from self._pending

    def take(self, indices: np.ndarray) -> Params:
        """The draws with these ascending indices, (chains, indices, ...)."""
        chosen, first = [], 0
        for part in self.parts():
            count = num_draws(part)
            inside = indices[(indices >= first) & (indices < first + count)] - first
            if len(inside):
                chosen.append(jax.tree.map(lambda leaf, own=inside: leaf[:, own], part))
            first += count
        return concatenate(chosen)

    def load(self) -> Params:
        """All draws, in memory."""
        return concatenate(list(self.parts()))


def concatenate(parts: list[Params]) -> Params:
    """Draws of successive pieces as one tree."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


class PredictionStore:
    """Predictions of a run's draws, in temporary files that are mapped into memory.

    The files have no name: they end with the run, which writes predictions.npz from them.
    """

    def __init__(self, directory: pathlib.Path | None, capacity: int) -> None:
        """Prepares for predictions of at most `capacity` draws per chain."""
        self._directory, self._capacity = directory, capacity
        self._task, self._num_draws = "", 0
        self._files: list[_ArrayFile] = []

    def append(self, predictions: Predictions) -> None:
        """Adds predictions of the next draws."""
        assert predictions.log_likelihoods is not None
        arrays = (predictions.outputs, predictions.log_likelihoods)
        if not self._files:
            self._task = predictions.task
            self._files = [_ArrayFile(self._directory, self._capacity, a) for a in arrays]
        for file, array in zip(self._files, arrays, strict=True):
            file.write(self._num_draws, array)
        self._num_draws += predictions.outputs.shape[1]

    def clear(self) -> None:
        """Forgets all predictions; others are to follow."""
        self._num_draws = 0

    def view(self, targets: np.ndarray) -> Predictions:
        """All predictions so far; their arrays read from the files as they are used."""
        outputs, log_likelihoods = (file.view()[:, : self._num_draws] for file in self._files)
        return Predictions(self._task, outputs, log_likelihoods, targets)


class _ArrayFile:
    """An array (chains, capacity, ...) of which the draws are written one after another."""

    def __init__(self, directory: pathlib.Path | None, capacity: int, like: np.ndarray) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._shape, self._dtype = (like.shape[0], capacity, *like.shape[2:]), like.dtype
        self._draw_bytes = like[0, 0].nbytes
        self._file.truncate(like.shape[0] * capacity * self._draw_bytes)

    def write(self, first: int, array: np.ndarray) -> None:
        # Written and not assigned through a map: a full disk is then an error and not a signal.
        for chain, draws in enumerate(np.ascontiguousarray(array)):
            offset = (chain * self._shape[1] + first) * self._draw_bytes
            content = memoryview(draws.tobytes())
            while content:
                written = os.pwrite(self._file.fileno(), content, offset)
                content, offset = content[written:], offset + written

    def view(self) -> np.ndarray:
        return np.memmap(self._file, self._dtype, "r", shape=self._shape)
