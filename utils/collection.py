"""What a run draws and what its draws say: sampled, predicted with, kept and measured."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from haiku_posteriors.core.judging import loo, metrics
from haiku_posteriors.core.judging.predictions import Predictions, evenly, join
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import devices, ensemble_utils, hosts
from haiku_posteriors.utils.chains import Program, Purposes
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.draws import DrawStore

TRAIN_DRAWS_EVALUATED = 50  # maximum draws per chain in training metrics
# Predictions of training rows, at most, that they are of: on MNIST twenty draws of a small
# convolutional network would take as long as six epochs of its training.
MAX_TRAIN_PREDICTIONS = 300_000
# Training log-likelihoods that are kept, one a draw and row: 64 MB of float32.
MAX_TRAIN_LOG_LIKELIHOODS = 2**24
TABLE_COLUMNS = {
    "classification": ["accuracy", "nll", "ece"],
    "regression": ["rmse", "nll", "coverage_90"],
}


class Collection:
    """The draws of a run, those of its states and those it keeps.

    Attributes:
      store: the draws that are kept.
      train, test: the rows, on the devices.
      train_targets, test_targets: of these, in original units.
    """

    def __init__(
        self,
        log_joint: LogJoint,
        dataset: Dataset,
        in_minibatches: bool,
        program: Program,
        purposes: Purposes,
        mesh: Mesh,
        num_chains: int,
        num_draws: int,
        store: DrawStore,
    ) -> None:
        """Places the rows, and predicts again with the draws that the store holds already.

        Args:
          log_joint: the posterior.
          dataset: training and test rows.
          in_minibatches: whether the program draws minibatches of the training rows.
          program: that samples.
          purposes: of its keys.
          mesh: where it runs.
          num_chains: its chains.
          num_draws: draws of each chain that are taken at once.
          store: where draws go.
        """
        self._program, self._purposes, self._num_draws = program, purposes, num_draws
        self._task, self.store = dataset.task, store
        self._mesh, self._shapes, self._num_chains = mesh, log_joint.shapes, num_chains
        pieces = log_joint.num_microbatches
        self.train = devices.place_data(
            dataset.x_train, dataset.y_train, mesh, pieces, in_minibatches
        )
        self.test = devices.place_data(dataset.x_test, dataset.y_test, mesh)
        self.train_targets, self.test_targets = (
            ensemble_utils.targets_in_original_units(targets, dataset.form)
            for targets in (dataset.y_train, dataset.y_test)
        )
        self._predict = ensemble_utils.make_predictor(log_joint, dataset.form)
        self._draws_per_block = store.draws_per_block(num_chains)
        at_once = min(num_draws, self._draws_per_block)
        for part in hosts.share_draws(store.parts, self._shapes, num_chains):
            for predictions in ensemble_utils.predict_part(
                self._predict, part, self.test, at_once, devices.chain_sharding(mesh)
            ):
                self._append_predictions(predictions)

    def collect(self, state: State, step: int) -> None:
        """Takes draws of a state and keeps them."""
        for draws in self._sample(state, self._purposes.draw, step):
            self.keep(draws, step)

    def sample_again(self, state: State, step: int) -> Params:
        """The draws that `collect` takes of a state, all of them, as host arrays."""
        draws = self._program.sample(state, self._purposes.draw, step, self._num_draws)
        return devices.to_host(draws)

    def keep(self, draws: Params, step: int) -> None:
        """Predicts with draws, and puts both where they belong.

        Args:
          draws: (chains, draws, ...), on the devices, or host arrays that all processes have.
          step: at which they were taken.
        """
        if not isinstance(jax.tree.leaves(draws)[0], jax.Array):
            draws = devices.place_chains(draws, self._mesh)
        self._append_predictions(self._predict(draws, self.test))
        draws = devices.to_first_host(draws)
        if not hosts.is_first():
            return
        self.store.append(draws)
        block = jax.tree.leaves(draws)[0].shape[1] < self._num_draws
        if block and self.store.is_full():
            self.store.flush(step)

    def predictions(self) -> Predictions | None:
        """Of all draws that are kept, on the test rows; None if there are none."""
        return self.store.predictions(self.test_targets)

    def evaluate(
        self, state: State, step: int, just_collected: bool
    ) -> tuple[dict[str, float], list[str], int] | None:
        """Metrics of the current state's draws, and of all draws collected so far.

        Args:
          state: the current one.
          step: its step.
          just_collected: whether its draws are the last that were kept.

        Returns:
          The metrics by name; those of them that a table should show; of how many draws
          `disagreement` is. None on all processes but the first.
        """
        collected = self.predictions()
        train, test = [], []
        left = self._num_evaluated(self._num_draws)
        for draws in self._sample(state, self._purposes.evaluate, step):
            if left > 0:
                few = jax.tree.map(lambda leaf, most=left: leaf[:, :most], draws)
                train.append(self._predict(few, self.train))
                left -= train[-1].outputs.shape[1]
            if not just_collected:
                test.append(self._predict(draws, self.test))
        if not hosts.is_first():
            return None
        if collected and just_collected:  # predicted with draws of the same state
            latest = collected.latest(self._num_draws)
        else:
            latest = join(test, self.test_targets)
        columns = TABLE_COLUMNS[self._task]
        test_metrics = metrics.of_predictions(latest)
        train_metrics = metrics.of_predictions(join(train, self.train_targets))
        values = {f"train_{name}": value for name, value in train_metrics.items()}
        values |= {f"test_{name}": value for name, value in test_metrics.items()}
        shown = [f"train_{columns[1]}", *(f"test_{name}" for name in columns)]
        count, values["disagreement"] = latest.num_draws, test_metrics["disagreement"]
        if collected and collected.outputs.shape[1] > self._num_draws:
            ensemble = metrics.of_predictions(collected)
            values |= {f"ensemble_{name}": value for name, value in ensemble.items()}
            shown += [f"ensemble_{name}" for name in columns[:2]]
            count, values["disagreement"] = 2, ensemble["disagreement"]
        return values, shown, count

    def train_results(self) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """What kept draws say of the training rows.

        Returns:
          Metrics of some draws, none but on the first process; log-likelihoods (chains, some draws,
          training rows), in the units of y, float32; which draws these are.
        """
        chains, total = self._num_chains, self.store.num_draws
        few = evenly(total, self._num_evaluated(total))
        parts = self._predict_train(few)
        found = metrics.of_predictions(join(parts, self.train_targets)) if hosts.is_first() else {}
        # Whole blocks: a program for the last, shorter one would have to be compiled.
        most = MAX_TRAIN_LOG_LIKELIHOODS // (chains * self.train.num_rows)
        most -= most % TRAIN_DRAWS_EVALUATED if most > TRAIN_DRAWS_EVALUATED else 0
        kept = evenly(total, max(1, most))
        # Too few for leaving rows out: those that are predicted with anyway will do.
        if chains * len(kept) < loo.MIN_DRAWS:
            kept = few
        if len(kept) > len(few):
            parts = self._predict_train(kept)
        log_likelihoods = [part.log_likelihoods for part in parts]
        return (
            found,
            np.concatenate(
                [part.astype(np.float32) for part in log_likelihoods if part is not None], axis=1
            ),
            kept,
        )

    def _predict_train(self, draws: np.ndarray) -> list[Predictions]:
        """Of the training rows, by kept draws."""
        chosen = self._on_all(self.store.chosen(draws, TRAIN_DRAWS_EVALUATED))
        return [self._predict(part, self.train) for part in chosen]

    def _num_evaluated(self, num_draws: int) -> int:
        """Of so many draws of a chain, how many training metrics are of."""
        affordable = MAX_TRAIN_PREDICTIONS // (self._num_chains * self.train.num_rows)
        return max(1, min(num_draws, affordable, TRAIN_DRAWS_EVALUATED))

    def _on_all(self, parts: Iterator[Params]) -> Iterator[Params]:
        """Draws from the store, placed on the devices; it is process 0's."""
        for part in hosts.share_draws(lambda: parts, self._shapes, self._num_chains):
            yield devices.place_chains(part, self._mesh)

    def _append_predictions(self, predictions: Predictions) -> None:
        if hosts.is_first():
            self.store.append_predictions(predictions)

    def _sample(self, state: State, purpose: int, step: int) -> Iterator[Params]:
        """Draws of a state, in blocks that fit into memory; mostly there is one."""
        if self._num_draws <= self._draws_per_block:
            yield self._program.sample(state, purpose, step, self._num_draws)
            return
        for first in range(0, self._num_draws, self._draws_per_block):
            count = min(self._draws_per_block, self._num_draws - first)
            block = np.int32(first // self._draws_per_block)
            yield self._program.sample(state, purpose, step, count, block)
