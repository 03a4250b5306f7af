"""The one loop behind every method: run, evaluate, collect draws, checkpoint, resume.

An epoch is one `step` of the method: a pass over the data, or one transition of a Markov chain.
All chains run in one compiled program over many epochs; the host is there for events only. Keys
are derived from (seed, purpose, epoch, chain), so that a resumed run needs the state alone and
equals an uninterrupted one bit for bit.
"""

import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, devices, ensemble_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.ensemble_utils import Predictions
from haiku_posteriors.utils.logging_utils import JsonLines, RunLog
from haiku_posteriors.utils.signals import Interrupted, Interruption

SAVE_SECONDS = 60.0  # a checkpoint at least so often, whatever `save_freq` says
SECONDS_PER_CALL = 0.5  # how long the host lets the device run between two looks at it
TRAIN_DRAWS_EVALUATED = 50  # at most so many draws enter the training metrics of the summary
TABLE_COLUMNS = {
    "classification": ["accuracy", "nll", "ece"],
    "regression": ["rmse", "nll", "coverage_90"],
}


class DivergedError(ArithmeticError):
    """The run met a number that is not finite; the last good state is kept."""


class RunResult(NamedTuple):
    """What a run ends with.

    Attributes:
      draws: parameters, host arrays with leading axes (chain, draw).
      test_predictions: what the draws say about the test rows, in original units.
      test_metrics: metrics of the mixture of all draws.
      member_metrics: mean over draws of each draw's own metrics.
      train_metrics: as `test_metrics`, on the training rows; of TRAIN_DRAWS_EVALUATED draws.
      state: the method's state at the end, with a leading chain axis.
      history: `info` of every epoch, (chains, epochs), if it was asked for.
      steps: updates a chain has made.
      seconds: time spent, over all sessions of the run.
    """

    draws: Params
    test_predictions: Predictions
    test_metrics: dict[str, float]
    member_metrics: dict[str, float]
    train_metrics: dict[str, float]
    state: State
    history: dict[str, np.ndarray]
    steps: int
    seconds: float


class Run:
    """One run of one method on one problem: its arrays, its folder and its voice."""

    def __init__(
        self,
        log_joint: LogJoint,
        dataset: Dataset,
        method: Method,
        *,
        num_epochs: int,
        num_chains: int = 1,
        seed: int = 0,
        eval_freq: int = 10,
        save_freq: int = 50,
        collects: Callable[[int], bool] | None = None,
        num_draws: int = 1,
        keep_history: bool = False,
        initial_params: Params | None = None,
        directory: pathlib.Path | None = None,
        tabulate_freq: int = 40,
        unit: str = "epoch",
        quiet: bool = False,
    ) -> None:
        """Places the data, compiles nothing yet, and picks up an earlier run in `directory`.

        Args:
          log_joint: the posterior to approximate.
          dataset: training and test rows.
          method: the method, for one chain.
          num_epochs: how many steps of the method to make.
          num_chains: chains, or members of an ensemble, run side by side.
          seed: from which every random number derives.
          eval_freq: epochs between evaluations.
          save_freq: epochs between checkpoints.
          collects: epochs done -> whether draws are taken then; only at the end by default.
          num_draws: how many draws a chain each time.
          keep_history: whether to keep `info` of every epoch, and not of evaluations alone. For
            methods with one value of each a step, and steps that dwarf a call from the host.
          initial_params: where to start, (num_chains, ...); the method decides by default.
          directory: where checkpoints, draws and metrics go; nothing is written without it.
          tabulate_freq: rows between two headers of the table.
          unit: what an epoch is called.
          quiet: says nothing at all.
        """
        self.log_joint, self.dataset, self.num_epochs = log_joint, dataset, num_epochs
        self._eval_freq, self._save_freq, self._num_draws = eval_freq, save_freq, num_draws
        self._collects = collects or (lambda epoch: epoch == num_epochs)
        if num_epochs < 1 or not any(map(self._collects, range(num_epochs, 0, -1))):
            raise UserError(f"No draws would be collected in {num_epochs} {unit}s; run longer.")
        self._directory, self._unit = directory, unit
        mesh = devices.make_mesh(num_chains)
        pieces = log_joint.num_microbatches
        self._train = devices.place_data(dataset.x_train, dataset.y_train, mesh, pieces)
        self._test = devices.place_data(dataset.x_test, dataset.y_test, mesh)
        self._train_targets, self.test_targets = (
            ensemble_utils.targets_in_original_units(targets, dataset)
            for targets in (dataset.y_train, dataset.y_test)
        )
        self._program = chains.compile_method(method, seed, num_chains, mesh)
        self._predict = ensemble_utils.make_predictor(log_joint, dataset)
        self._draws: list[Params] = []  # not yet on disk
        self._kept_draws: list[Params] = []  # all of them, host arrays
        self._predictions: list[Predictions] = []
        self._seconds = 0.0
        self._last_save = time.monotonic()
        self._warned = False
        self.epoch, self.state = 0, self._program.init(initial_params)
        damage = self._resume(mesh) if directory else []
        self.log = RunLog(
            directory,
            total=num_epochs,
            unit=unit,
            start=self.epoch,
            tabulate_freq=tabulate_freq,
            quiet=quiet,
        )
        self._history = (
            JsonLines(directory / "history.jsonl" if directory else None, self.epoch)
            if keep_history
            else None
        )
        for sentence in damage:
            self.log.warn(f"{sentence} The checkpoint before it is used.")
        if self.epoch:
            self.log.say(f"Going on from the checkpoint at {unit} {self.epoch}.")

    def finish(self) -> RunResult:
        """Runs to the end and returns the result.

        Raises:
          Interrupted: on Ctrl-C or SIGTERM, after a checkpoint.
          DivergedError: at a number that is not finite, after a checkpoint of the state before.
        """
        try:
            if self.epoch < self.num_epochs:
                with Interruption() as interruption:
                    self._run_epochs(interruption)
        except Interrupted:
            self._save()
            raise
        finally:
            self.log.close()
        return self._result()

    def finish_with(self, change: Callable[[State, Params], Params]) -> RunResult:
        """The result with other draws than those of the last state, for a run that is finished.

        Args:
          change: (state, its draws (chains, draws, ...), host arrays) -> the draws to keep.
        """
        started = time.monotonic()
        # Drawn again, not taken from the disk: there they may have been changed already.
        draws = self._program.sample(self.state, chains.DRAW, self.epoch, self._num_draws)
        draws = change(self.state, devices.to_host(draws))
        self._draws, self._kept_draws = [draws], [draws]
        self._predictions = [self._predict(draws, self._test)]
        self._seconds += time.monotonic() - started
        self._save()
        return self._result()

    def _run_epochs(self, interruption: Interruption) -> None:
        compiled = self._compile()
        epochs_per_call = 1
        while self.epoch < self.num_epochs:
            first, stop = self.epoch, self._next_event(epochs_per_call)
            started = time.monotonic()
            info = self._advance(compiled, stop, interruption)
            elapsed = time.monotonic() - started
            self._seconds += elapsed
            if not self._history:
                pace = SECONDS_PER_CALL / max(elapsed, 1e-6)
                epochs_per_call = max(1, int((stop - first) * min(pace, 8.0)))
            self._events(info)
            interruption.check()

    def _compile(self) -> jax.stages.Compiled:
        """The program of the epochs for these shapes and no others: it cannot compile again."""
        started = time.monotonic()
        arguments = (self.state, self._train, np.int32(0), np.int32(1))
        compiled = self._program.run.lower(*arguments).compile()
        self._seconds += time.monotonic() - started
        return compiled

    def _advance(
        self, compiled: jax.stages.Compiled, stop: int, interruption: Interruption
    ) -> Info:
        """Runs to epoch `stop`, or less far if that meets a number that is not finite."""
        arguments = (self.state, self._train, np.int32(self.epoch), np.int32(stop))
        state, info, finite = interruption.wait_for(
            lambda: jax.block_until_ready(compiled(*arguments))
        )
        if finite:
            self.epoch, self.state = stop, state
            return devices.to_host(info)
        if stop == self.epoch + 1:
            self._save()
            raise DivergedError(self._diverged(np.asarray(info["log_joint"])))
        # The state before this call is still here: halving the way finds the last good epoch.
        return self._advance(compiled, (self.epoch + stop) // 2, interruption)

    def _diverged(self, log_joint: np.ndarray) -> str:
        """Where in the epoch after the kept one the first non-finite number stands."""
        by_step = log_joint.reshape(len(log_joint), -1)  # (chains, steps)
        bad = np.argwhere(~np.isfinite(by_step.T))
        step, chain = bad[0] if len(bad) else (by_step.shape[1] - 1, 0)
        return (
            f"A number is not finite at {self._unit} {self.epoch + 1}, step {step + 1}, "
            f"chain {chain}; the state after {self._unit} {self.epoch} is kept. "
            "A smaller step size usually helps."
        )

    def _next_event(self, at_most: int) -> int:
        """The next epoch at which the host has something to do, or `at_most` epochs from here."""
        end = min(self.epoch + at_most, self.num_epochs)
        epochs = range(self.epoch + 1, end + 1)
        return next((e for e in epochs if self._due(e) or self._collects(e)), end)

    def _due(self, epoch: int) -> bool:
        last = epoch == self.num_epochs
        return last or epoch % self._eval_freq == 0 or epoch % self._save_freq == 0

    def _events(self, info: Mapping[str, Any]) -> None:
        self.log.advance(self.epoch, log_joint=float(np.mean(info["log_joint"])))
        if self._history:
            self._history.append(self.epoch, {k: v.tolist() for k, v in info.items()})
        started = time.monotonic()
        last = self.epoch == self.num_epochs
        if self._collects(self.epoch):
            self._collect()
        if last or self.epoch % self._eval_freq == 0:
            self._evaluate(info)
        overdue = started - self._last_save > SAVE_SECONDS
        if last or overdue or self.epoch % self._save_freq == 0:
            self._save()
        self._seconds += time.monotonic() - started

    def _collect(self) -> None:
        draws = self._program.sample(self.state, chains.DRAW, self.epoch, self._num_draws)
        self._predictions.append(self._predict(draws, self._test))
        draws = devices.to_host(draws)
        self._draws.append(draws)
        self._kept_draws.append(draws)

    def _evaluate(self, info: Mapping[str, Any]) -> None:
        """Metrics of the current state's draws, and of all draws collected so far."""
        draws = self._program.sample(self.state, chains.EVALUATE, self.epoch, self._num_draws)
        train = self._metrics(self._predict(draws, self._train), self._train_targets)
        if self._collects(self.epoch):  # just predicted with draws of the same state
            test_predictions = self._predictions[-1]
        else:
            test_predictions = self._predict(draws, self._test)
        test = self._metrics(test_predictions, self.test_targets)
        columns = TABLE_COLUMNS[self.dataset.task]
        values = {name: float(np.mean(value)) for name, value in info.items()}
        values |= {f"train_{name}": value for name, value in train.items()}
        values |= {f"test_{name}": value for name, value in test.items()}
        num_draws = int(np.prod(test_predictions.outputs.shape[:2]))
        disagreement = test["disagreement"]
        shown = ["log_joint", f"train_{columns[1]}", *(f"test_{name}" for name in columns)]
        if len(self._predictions) > 1:
            ensemble = self._metrics(ensemble_utils.join(self._predictions), self.test_targets)
            values |= {f"ensemble_{name}": value for name, value in ensemble.items()}
            shown += [f"ensemble_{name}" for name in columns[:2]]
            num_draws, disagreement = 2, ensemble["disagreement"]
        values["disagreement"], values["seconds"] = disagreement, self._seconds
        self.log.row(self.epoch, values, [*shown, "disagreement", "seconds"])
        self._warn_if_draws_agree(num_draws, disagreement, test)

    def _warn_if_draws_agree(self, num_draws: int, disagreement: float, test: dict) -> None:
        # Relative to the noise in regression; in nats in classification.
        scale = test["aleatoric"] if self.dataset.task == "regression" else 1.0
        if num_draws > 1 and disagreement < 1e-3 * scale and not self._warned:
            self._warned = True
            self.log.warn(
                f"the draws practically agree (disagreement {disagreement:.2g}): these predictions "
                "carry no epistemic uncertainty."
            )

    def _metrics(self, predictions: Predictions, targets: np.ndarray) -> dict[str, float]:
        return metrics.evaluate(self.dataset.task, *predictions.flat(), targets)

    def _save(self) -> None:
        """Draws first, then the checkpoint that says they are there."""
        self._last_save = time.monotonic()
        if self._directory is None:
            return
        if self._draws:
            joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *self._draws)
            checkpoint_utils.save_draws(self._directory / "draws", self.epoch, joined)
            self._draws = []
        checkpoint_utils.save_checkpoint(
            self._directory / "checkpoints",
            self.epoch,
            devices.to_host(self.state),
            {"seconds": repr(self._seconds)},
        )
        self.log.flush()

    def _resume(self, mesh: Mesh) -> list[str]:
        assert self._directory is not None
        found = checkpoint_utils.load_newest_checkpoint(self._directory / "checkpoints", self.state)
        if found is None:
            return []
        self.epoch, state, metadata, damage = found
        self._seconds = float(metadata["seconds"])
        sharding = devices.chain_sharding(mesh)
        self.state = jax.device_put(state, sharding)
        checkpoint_utils.drop_draws_after(self._directory / "draws", self.epoch)
        template = self.log_joint.shapes
        draws = checkpoint_utils.load_draws(self._directory / "draws", template)
        if draws is not None:
            # One collection at a time, as they were predicted the first time: the same program,
            # the same bits.
            total = jax.tree.leaves(draws)[0].shape[1]
            for start in range(0, total, self._num_draws):
                part = jax.tree.map(lambda leaf: leaf[:, start : start + self._num_draws], draws)  # noqa: B023
                self._kept_draws.append(part)
                self._predictions.append(self._predict(jax.device_put(part, sharding), self._test))
        return damage

    def _result(self) -> RunResult:
        info = jax.eval_shape(self._program.run, self.state, self._train, 0, 1)[1]
        draws = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *self._kept_draws)
        predictions = ensemble_utils.join(self._predictions)
        total = predictions.outputs.shape[1]
        few = np.unique(np.linspace(0, total - 1, min(total, TRAIN_DRAWS_EVALUATED)).astype(int))
        train = self._predict(jax.tree.map(lambda leaf: leaf[:, few], draws), self._train)
        members = [
            metrics.evaluate(self.dataset.task, outputs[None], row[None], self.test_targets)
            for outputs, row in zip(*predictions.flat(), strict=True)
        ]
        return RunResult(
            draws,
            predictions,
            self._metrics(predictions, self.test_targets),
            {name: float(np.mean([m[name] for m in members])) for name in members[0]},
            self._metrics(train, self._train_targets),
            devices.to_host(self.state),
            {} if self._history is None else _stack(self._history.rows),
            self.num_epochs * int(np.prod(info["log_joint"].shape[1:])),
            self._seconds,
        )


def _stack(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Rows of lists by chain as arrays (chains, epochs); null becomes NaN."""
    names = [name for name in rows[0] if name != "epoch"]
    return {name: np.array([row[name] for row in rows], dtype=float).T for name in names}
