"""Draws of a run and their predictions: written as they come, read back in pieces.

A network of 36 million weights with 1,000 draws has 146 GB of them; no more than PART_BYTES (or one
collection, if that is larger) are in memory at a time, unless a run has no folder to put them.
"""

import mmap
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterator

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils

PART_BYTES = 2**26


def draws_per_block(template: Params, num_chains: int) -> int:
    """How many draws of each chain, with parameters like `template`, make PART_BYTES."""
    leaves = jax.tree.leaves(template)
    draw_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return max(1, PART_BYTES // (draw_bytes * num_chains))


class DrawStore:
    """All draws of a run, (chains, draws, ...), in the order they were taken, and predictions.

    With a folder, draws are in its files (in memory until the next `flush` only), and predictions
    in temporary files without a name, from which the run writes predictions.npz at its end.
    Without one, both are in memory.
    """

    def __init__(self, directory: pathlib.Path | None, template: Params, capacity: int) -> None:
        """Opens the folder, whose files may hold draws already.

        Args:
          directory: the run's folder; None for none.
          template: the network's parameters; shapes suffice.
          capacity: how many draws of each chain there will be in all.
        """
        self._directory, self._template, self._capacity = directory, template, capacity
        self._files = checkpoint_utils.draw_files(directory / "draws") if directory else []
        self._pending: list[Params] = []
        self._task, self._num_predicted = "", 0
        self._predicted: list[_ArrayFile | _ArrayInMemory] = []

    def draws_per_block(self, num_chains: int) -> int:
        """How many draws of each chain should be in memory at a time."""
        return draws_per_block(self._template, num_chains)

    def append(self, draws: Params) -> None:
        """Adds draws, host arrays."""
        self._pending.append(draws)

    def append_predictions(self, predictions: Predictions) -> None:
        """Adds predictions of the next draws on the test rows."""
        assert predictions.log_likelihoods is not None
        arrays = (predictions.outputs, predictions.log_likelihoods)
        if not self._predicted:
            self._task = predictions.task
            self._predicted = [
                _ArrayFile(self._directory, self._capacity, array)
                if self._directory
                else _ArrayInMemory(self._capacity, array)
                for array in arrays
            ]
        for stored, array in zip(self._predicted, arrays, strict=True):
            stored.write(self._num_predicted, array)
        self._num_predicted += predictions.outputs.shape[1]

    def is_empty(self) -> bool:
        """Whether there are no draws yet."""
        return not self._files and not self._pending

    def is_full(self) -> bool:
        """Whether there is enough to write for a file."""
        pending = [leaf.nbytes for part in self._pending for leaf in jax.tree.leaves(part)]
        return self._directory is not None and sum(pending) >= PART_BYTES

    def flush(self, step: int) -> None:
        """Writes the draws added since the last time, all taken up to `step`."""
        if self._directory is None or not self._pending:
            return
        joined = _concatenate(self._pending)
        self._files.append(checkpoint_utils.save_draws(self._directory / "draws", step, joined))
        self._pending = []

    def clear(self) -> None:
        """Forgets everything; other draws are to follow."""
        for path in self._files:
            path.unlink()
        self._files, self._pending, self._num_predicted = [], [], 0

    def parts(self) -> Iterator[Params]:
        """The draws in pieces, (chains, some draws, ...)."""
        for path in self._files:
            # Without a name here, so that one part can go before the next is read.
            yield trees.from_named_leaves(self._template, checkpoint_utils.load_tensors(path)[0])
        yield from self._pending

    def chosen(self, indices: np.ndarray, at_once: int | None = None) -> Iterator[Params]:
        """The draws with these ascending indices, in blocks of equal size but for the last.

        No more than `at_once` of each chain are in a block, and no more than fit into memory.
        """
        found: list[Params] = []  # single draws, (chains, 1, ...)
        first = 0
        for part in self.parts():
            chains, count = jax.tree.leaves(part)[0].shape[:2]
            for index in indices[(indices >= first) & (indices < first + count)] - first:
                # Copied, so that the part it comes from can go.
                found.append(jax.tree.map(lambda leaf, i=index: leaf[:, i : i + 1].copy(), part))
                most = self.draws_per_block(chains)
                if len(found) == min(most, at_once or most):
                    yield _concatenate(found)
                    found = []
            first += count
        if found:
            yield _concatenate(found)

    @property
    def num_draws(self) -> int:
        """Of each chain, so far."""
        return self._num_predicted

    def load(self) -> Params:
        """All draws, in memory."""
        return _concatenate(list(self.parts()))

    def predictions(self, targets: np.ndarray) -> Predictions | None:
        """All predictions so far, their arrays read from the files as they are used."""
        if not self._num_predicted:
            return None
        outputs, log_likelihoods = (
            stored.view()[:, : self._num_predicted] for stored in self._predicted
        )
        return Predictions(self._task, outputs, log_likelihoods, targets)


def _concatenate(parts: list[Params]) -> Params:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


class _ArrayFile:
    """An array (chains, capacity, ...) of which the draws are written one after another."""

    def __init__(self, directory: pathlib.Path, capacity: int, like: np.ndarray) -> None:
        self._shape, self._dtype = (like.shape[0], capacity, *like.shape[2:]), like.dtype
        self._draw_bytes = like[0, 0].nbytes
        self._file, name = tempfile.mkstemp(dir=directory)
        weakref.finalize(self, os.close, self._file)
        os.unlink(name)
        os.truncate(self._file, like.shape[0] * capacity * self._draw_bytes)

    def write(self, first: int, array: np.ndarray) -> None:
        # Written and not assigned through a map: a full disk is then an error and not a signal.
        for chain, draws in enumerate(np.ascontiguousarray(array)):
            offset = (chain * self._shape[1] + first) * self._draw_bytes
            content = memoryview(draws.tobytes())
            while content:
                written = os.pwrite(self._file, content, offset)
                content, offset = content[written:], offset + written

    def view(self) -> np.ndarray:
        mapped = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        return np.ndarray(self._shape, self._dtype, buffer=mapped)


class _ArrayInMemory:
    """The same without a folder."""

    def __init__(self, capacity: int, like: np.ndarray) -> None:
        self._array = np.empty((like.shape[0], capacity, *like.shape[2:]), like.dtype)

    def write(self, first: int, array: np.ndarray) -> None:
        self._array[:, first : first + array.shape[1]] = array

    def view(self) -> np.ndarray:
        return self._array
