"""Predictions of posterior draws: the one record that the loop fills and the judges read."""

from typing import NamedTuple

import numpy as np


class Predictions(NamedTuple):
    """What draws say about rows, in the original units of the targets.

    Attributes:
      task: "classification" or "regression".
      outputs: (chains, draws, rows, p). Class probabilities, or means and then standard deviations.
      log_likelihoods: (chains, draws, rows), of the observed targets. Kept beside the
        probabilities, which round to 0 and 1. None where the targets are not known.
      targets: (rows,) labels or (rows, targets). None where they are not known.
    """

    task: str
    outputs: np.ndarray
    log_likelihoods: np.ndarray | None = None
    targets: np.ndarray | None = None

    @property
    def num_chains(self) -> int:
        """The number of chains."""
        return self.outputs.shape[0]

    @property
    def num_draws(self) -> int:
        """The number of draws of all chains."""
        return self.outputs.shape[0] * self.outputs.shape[1]

    @property
    def flat_outputs(self) -> np.ndarray:
        """(draws of all chains, rows, p), chain by chain."""
        return self.outputs.reshape(-1, *self.outputs.shape[2:])

    @property
    def flat_log_likelihoods(self) -> np.ndarray:
        """(draws of all chains, rows), chain by chain; the targets must be known."""
        assert self.log_likelihoods is not None
        return self.log_likelihoods.reshape(-1, *self.log_likelihoods.shape[2:])

    def latest(self, num_draws: int) -> "Predictions":
        """Of the last `num_draws` draws of each chain."""
        assert self.log_likelihoods is not None
        return self._replace(
            outputs=self.outputs[:, -num_draws:],
            log_likelihoods=self.log_likelihoods[:, -num_draws:],
        )


def join(parts: list[Predictions], targets: np.ndarray) -> Predictions:
    """Predictions of successive draws as one."""
    log_likelihoods = [part.log_likelihoods for part in parts if part.log_likelihoods is not None]
    return Predictions(
        parts[0].task,
        np.concatenate([part.outputs for part in parts], axis=1),
        np.concatenate(log_likelihoods, axis=1),
        targets,
    )


def evenly(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` of the indices 0 to count - 1, each in the middle of an equal part."""
    wanted = min(count, wanted)
    return ((np.arange(wanted) + 0.5) * count / wanted).astype(int)
