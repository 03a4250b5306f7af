"""The one loop behind every method: step, evaluate, collect draws, checkpoint, resume.

A step is the method's own: a pass over the data (an epoch), or one transition of a Markov chain.
All chains run in one compiled program over many steps; the host is there for events only. Keys are
derived from (seed, purpose, step, chain), so that a resumed run needs the state alone and equals an
uninterrupted one bit for bit.
"""

import dataclasses
import math
import pathlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, devices, hosts, locks, signals
from haiku_posteriors.utils.collection import Collection
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.draws import DrawStore
from haiku_posteriors.utils.files import JsonLines
from haiku_posteriors.utils.logging_utils import RunLog, Ticker
from haiku_posteriors.utils.signals import Interrupted, Interruption
from haiku_posteriors.version import __version__

SAVE_SECONDS = 60.0  # maximum time between checkpoints, whatever `save_freq` says
SECONDS_PER_CALL = 0.5  # how long the host lets the device run between two looks at it


class DivergedError(ArithmeticError):
    """The run met a number that is not finite; the last good state is kept."""


class Answer(NamedTuple):
    """Whether a sampler has drawn enough, and a sentence on how far it has come."""

    is_enough: bool
    sentence: str = ""


class Enough(NamedTuple):
    """When a sampler has drawn enough.

    Attributes:
      is_asked: steps done -> whether to ask after that step.
      answer: (predictions of all draws so far, history so far (chains, steps)) -> the answer,
        which depends on what is on disk alone: a resumed run ends where an uninterrupted one does.
    """

    is_asked: Callable[[int], bool]
    answer: Callable[[Predictions, dict[str, np.ndarray]], Answer]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run ends with.

    Attributes:
      store: all draws, to be read in pieces.
      test_predictions: what the draws say about the test rows, in original units.
      test_metrics: metrics of the mixture of all draws.
      member_metrics: mean over draws of each draw's own metrics.
      train_metrics: as `test_metrics`, on the training rows; of some draws.
      train_log_likelihoods: (chains, some draws, training rows), in the units of y, float32.
      train_draws: which draws of each chain these are.
      state: the method's state at the end, with a leading chain axis.
      history: `info` of every step, (chains, steps), if it was asked for.
      num_updates: how many updates each chain has made.
      seconds: time spent, over all sessions of the run, its start included.
    """

    store: DrawStore
    test_predictions: Predictions
    test_metrics: dict[str, float]
    member_metrics: dict[str, float]
    train_metrics: dict[str, float]
    train_log_likelihoods: np.ndarray
    train_draws: np.ndarray
    state: State
    history: dict[str, np.ndarray]
    num_updates: int
    seconds: float

    @property
    def draws(self) -> Params:
        """All draws, in memory: host arrays with leading axes (chain, draw)."""
        return self.store.load()


class Run:
    """One run of one method on one problem: its arrays, its folder and its voice."""

    def __init__(
        self,
        log_joint: LogJoint,
        dataset: Dataset,
        method: Method,
        *,
        num_steps: int,
        num_chains: int = 1,
        seed: int = 0,
        eval_freq: int = 10,
        save_freq: int = 50,
        collects: Callable[[int], bool] | None = None,
        num_draws: int = 1,
        keep_history: bool = False,
        is_finished: Callable[[State], jax.Array] | None = None,
        enough: Enough | None = None,
        time_limit: float | None = None,
        seconds_before: float = 0.0,
        show: Sequence[str] = (),
        initial_params: Params | None = None,
        purposes: chains.Purposes = chains.MAIN,
        directory: pathlib.Path | None = None,
        tabulate_freq: int = 40,
        unit: str = "epoch",
        ticker: Ticker | None = None,
        expects_spread: bool = True,
        quiet: bool = False,
    ) -> None:
        """Places the data, compiles nothing yet, and picks up an earlier run in `directory`.

        Args:
          log_joint: the posterior to approximate.
          dataset: training and test rows.
          method: the method, for one chain.
          num_steps: how many steps of the method to make; at most, if there is `is_finished` or
            `enough`.
          num_chains: chains, or members of an ensemble, in one program.
          seed: from which every random number derives.
          eval_freq: steps between evaluations.
          save_freq: steps between checkpoints.
          collects: steps done -> whether draws are taken then; only at the end by default, and
            there in any case if a run that ends by itself has none yet.
          num_draws: draws per chain each time.
          keep_history: whether to keep `info` of every step, and not of evaluations alone. For
            methods with one value of each per step, and steps that dwarf a call from the host.
          is_finished: states of all chains -> a boolean scalar; the run ends with the first step
            after which it is true. It is a function of the state alone and compiled with the steps,
            so that the end depends neither on how many of them a call makes nor on interruptions.
          enough: when to end by what was drawn.
          time_limit: seconds after which the run ends with what it has; between calls of the
            program, so that the end is that of no other run. A larger one goes on from there.
          seconds_before: that finding the start took; they count as the run's.
          show: further names of `info` for the progress bar and the table.
          initial_params: where to start, (num_chains, ...); the method decides by default.
          purposes: of the keys, where a run has more than one loop.
          directory: where checkpoints, draws and metrics go, locked for this process until the
            end; nothing is written without it.
          tabulate_freq: rows between two headers of the table.
          unit: what a step is called.
          ticker: what the method tells of its progress within a step.
          expects_spread: whether draws that practically agree are worth a warning.
          quiet: says nothing at all.
        """
        self.log_joint, self.dataset, self.num_steps = log_joint, dataset, num_steps
        self._eval_freq, self._save_freq = eval_freq, save_freq
        self._show, self._enough, self._time_limit = list(show), enough, time_limit
        self._last_answer = (-1, False)  # of `enough`, and the step it is for
        self._collects = collects or (lambda step: step == num_steps)
        num_collections = sum(map(self._collects, range(1, num_steps + 1)))
        if not num_collections:
            raise UserError(f"No draws would be collected in {num_steps} {unit}s; run longer.")
        self._saves, self._unit = directory is not None, unit
        directory = directory if hosts.is_first() else None
        self._directory = directory
        self._release: Callable[[], object] = lambda: None
        is_new = hosts.on_first(lambda: directory is not None and locks.hold(directory))
        if directory and is_new:  # else who holds it already releases it
            self._release = weakref.finalize(self, locks.release, directory)
        mesh = devices.make_mesh(num_chains)
        self._program = chains.compile_method(method, seed, num_chains, mesh, purposes, is_finished)
        self._is_finished = jax.jit(is_finished) if is_finished else None
        self._seconds = seconds_before
        # At the end of the last steps: what the host does there is not to make a run late, which
        # has then been told whether to draw.
        self._seconds_of_steps = seconds_before
        self._draws_expected: int | None = None  # by the checkpoint, of an earlier session
        self._last_save = time.monotonic()
        self._warned = not expects_spread
        if hosts.are_several():  # arrays of this process alone are none of a program of all
            initial_params = devices.to_host(initial_params)
        state = jax.eval_shape(self._program.init, initial_params)
        devices.refuse_too_large(devices.num_bytes(state), f"The state of {num_chains} chain(s)")
        self.step, self.state = 0, self._program.init(initial_params)
        remarks = self._resume() if self._saves else []
        self._store = DrawStore(directory, log_joint.shapes, num_collections * num_draws)
        self._collection = Collection(
            log_joint,
            dataset,
            method.in_minibatches,
            self._program,
            purposes,
            mesh,
            num_chains,
            num_draws,
            self._store,
        )
        self._train, self.test_targets = self._collection.train, self._collection.test_targets
        hosts.on_first(self._refuse_missing_draws)
        self._first_step = self.step
        due = sum(map(self._collects, range(1, self.step + 1))) * num_draws
        if self.step and not self._makes_no_step() and self._store.num_draws > due:
            self._store.clear()  # taken at an earlier end, by a time limit, which is none now
        self.log = RunLog(
            directory,
            total=num_steps,
            unit=unit,
            start=self.step,
            tabulate_freq=tabulate_freq,
            quiet=quiet or not hosts.is_first(),
        )
        self._history = (
            JsonLines(directory / "history.jsonl" if directory else None, self.step)
            if keep_history
            else None
        )
        if ticker:
            ticker.listener = self.log.within
        for sentence in remarks:
            self.log.warn(sentence)
        if self.step:
            self.log.say(f"Going on from the checkpoint at {unit} {self.step}.")

    def finish(self, change: Callable[[State, Params], Params] | None = None) -> RunResult:
        """Runs to the end and returns the result.

        Args:
          change: (state, its draws (chains, draws, ...), host arrays) -> the draws to keep in
            their place, for stages after the last step; the draws are in memory there.

        Raises:
          Interrupted: on Ctrl-C, SIGTERM or SIGHUP, after a checkpoint.
          DivergedError: at a number that is not finite, after a checkpoint of the state before.
        """
        try:
            self._finish_steps()
            if change:
                self._change_draws(change)
            return self._result()
        finally:
            self._release()

    def _finish_steps(self) -> None:
        try:
            if not self._is_over():
                # Several processes can save what all of them have finished, and no less.
                grace = math.inf if hosts.are_several() else signals.GRACE_SECONDS
                with signals.part_of(self._directory), Interruption(grace) as interruption:
                    try:
                        self._run_steps(interruption)
                    except Interrupted:
                        self._save()
                        raise
        except BrokenPipeError:  # nobody reads what the run says
            if not hosts.are_several():  # the others know nothing of it and cannot take part
                self._save()
            raise
        finally:
            self.log.close()

    def _change_draws(self, change: Callable[[State, Params], Params]) -> None:
        started = time.monotonic()
        # Sampled again, not taken from the disk: there they may have been changed already.
        state = devices.to_host(self.state) if hosts.are_several() else self.state
        sampled = self._collection.sample_again(self.state, self.step)
        if hosts.are_several():  # a loop inside agrees with the others on when to stop
            draws = change(state, sampled)
        else:
            draws = signals.run_stage(self._directory, lambda: change(state, sampled))
        self._save(draws_are_there=False)
        self._store.clear()
        self._collection.keep(draws, self.step)
        self._seconds += time.monotonic() - started
        self._save()

    def _run_steps(self, interruption: Interruption) -> None:
        compiled = self._compile()
        steps_per_call = 1
        while not self._is_over():
            first, stop = self.step, self._next_event(steps_per_call)
            started = time.monotonic()
            info = self._advance(compiled, stop, interruption)
            elapsed = time.monotonic() - started
            self._seconds += elapsed
            self._seconds_of_steps = self._seconds
            if not self._history:
                pace = SECONDS_PER_CALL / max(elapsed, 1e-6)
                steps_per_call = max(1, int((self.step - first) * min(pace, 8.0)))
                steps_per_call = hosts.share(steps_per_call)
            self._events(info)
            signal_number = hosts.largest(interruption.received)
            if signal_number:
                raise Interrupted(signal_number)

    def _makes_no_step(self) -> bool:
        is_finished = self._is_finished is not None and bool(self._is_finished(self.state))
        return is_finished or self.step >= self.num_steps or self._is_late()

    def _is_late(self) -> bool:
        limit = self._time_limit
        if limit is None or not hosts.on_first(lambda: self._seconds_of_steps >= limit):
            return False
        # A session without a draw makes a step in any case, and draws there.
        return self.step > self._first_step or not hosts.share(self._store.is_empty())

    def _is_over(self) -> bool:
        return self._makes_no_step() or self._has_enough()

    def _has_enough(self) -> bool:
        """To be asked once the draws of the current step are in the store."""
        if self._enough is None or not self._enough.is_asked(self.step):
            return False
        if self._last_answer[0] != self.step:
            self._last_answer = (self.step, hosts.on_first(self._ask_whether_enough))
        return self._last_answer[1]

    def _ask_whether_enough(self) -> bool:
        predictions = self._collection.predictions()
        assert self._enough and predictions is not None
        history = {} if self._history is None else _stack(self._history.rows)
        answer = self._enough.answer(predictions, history)
        if answer.sentence:
            self.log.say(answer.sentence)
        return answer.is_enough

    def _compile(self) -> jax.stages.Compiled:
        """The program of the steps for these shapes and no others: it cannot compile again."""
        self.log.say("Compiling ...")
        started = time.monotonic()
        arguments = (self.state, self._train, np.int32(0), np.int32(1))
        compiled = self._program.run.lower(*arguments).compile()
        needed = compiled.memory_analysis()
        if needed is not None:
            total = needed.temp_size_in_bytes + needed.output_size_in_bytes
            devices.refuse_too_large(total, "A step")
        self._seconds += time.monotonic() - started
        return compiled

    def _advance(
        self, compiled: jax.stages.Compiled, stop: int, interruption: Interruption
    ) -> Info:
        """Runs to step `stop`, or less far if that meets a number that is not finite."""
        arguments = (self.state, self._train, np.int32(self.step), np.int32(stop))
        state, info, finite, reached = interruption.wait_for(
            lambda: jax.block_until_ready(compiled(*arguments))
        )
        if finite:
            self.step, self.state = int(reached), state
            return devices.to_host(info)
        if stop == self.step + 1:
            self._save()
            raise DivergedError(self._diverged(np.asarray(info["log_joint"])))
        # The state before this call is still here: halving the way finds the last good step.
        return self._advance(compiled, (self.step + stop) // 2, interruption)

    def _diverged(self, log_joint: np.ndarray) -> str:
        """Where in the step after the kept one the first non-finite number stands."""
        by_update = log_joint.reshape(len(log_joint), -1)  # (chains, updates)
        bad = np.argwhere(~np.isfinite(by_update.T))
        update, chain = bad[0] if len(bad) else (by_update.shape[1] - 1, 0)
        return (
            f"A number is not finite at {self._unit} {self.step + 1}, step {update + 1}, "
            f"chain {chain}; the state after {self._unit} {self.step} is kept. "
            "A smaller step size usually helps."
        )

    def _next_event(self, limit: int) -> int:
        """The next step at which the host has something to do, or `limit` steps from here."""
        end = min(self.step + limit, self.num_steps)
        steps = range(self.step + 1, end + 1)
        return next((s for s in steps if self._due(s) or self._collects(s)), end)

    def _due(self, step: int) -> bool:
        last = step == self.num_steps
        return last or step % self._eval_freq == 0 or step % self._save_freq == 0

    def _collects_now(self) -> bool:
        if self._collects(self.step):
            return True
        return self._makes_no_step() and hosts.share(self._store.is_empty())

    def _events(self, info: Mapping[str, Any]) -> None:
        shown = {name: float(np.mean(info[name])) for name in ("log_joint", *self._show)}
        self.log.advance(self.step, **shown)
        if self._history:
            self._history.append(self.step, {k: v.tolist() for k, v in info.items()})
        started = time.monotonic()
        collects = self._collects_now()
        if collects:
            self._collection.collect(self.state, self.step)
        last = self._is_over()
        if last or self.step % self._eval_freq == 0:
            self._evaluate(info, collects)
        overdue = started - self._last_save > SAVE_SECONDS
        due = last or self.step % self._save_freq == 0
        self._seconds += time.monotonic() - started  # what a checkpoint says is of all until it
        if due or hosts.share(overdue or self._store.is_full()):
            started = time.monotonic()
            self._save()
            self._seconds += time.monotonic() - started

    def _evaluate(self, info: Mapping[str, Any], just_collected: bool) -> None:
        evaluated = self._collection.evaluate(self.state, self.step, just_collected)
        if evaluated is None:
            return
        found, columns, num_draws = evaluated
        values = {name: float(np.mean(value)) for name, value in info.items()} | found
        values["seconds"] = self._seconds
        shown = ["log_joint", *self._show, *columns, "disagreement", "seconds"]
        self.log.row(self.step, values, shown)
        disagreement = values["disagreement"]
        # Relative to the noise in regression; in nats in classification.
        scale = values["test_aleatoric"] if self.dataset.task == "regression" else 1.0
        if num_draws > 1 and disagreement < 1e-3 * scale and not self._warned:
            self._warned = True
            self.log.warn(
                f"the draws practically agree (disagreement {disagreement:.2g}): these predictions "
                "carry no epistemic uncertainty."
            )

    def _save(self, draws_are_there: bool = True) -> None:
        """Draws first, then the checkpoint that says they are there."""
        self._last_save = time.monotonic()
        if not self._saves:
            return
        state = devices.to_first_host(self.state)
        if self._directory:
            self._store.flush(self.step)
            checkpoint_utils.save_checkpoint(
                self._directory / "checkpoints",
                self.step,
                state,
                {
                    "seconds": repr(self._seconds),
                    "draws": str(self._store.num_draws) if draws_are_there else "",
                },
            )
        self.log.flush()
        hosts.share(True)  # nobody goes on, or ends, before it is written

    def _resume(self) -> list[str]:
        """Takes up the newest checkpoint; sentences on what to know about it."""
        loaded: list[Any] = []

        def load() -> tuple[int, dict[str, str], list[str]] | None:
            assert self._directory is not None
            found = checkpoint_utils.load_newest_checkpoint(
                self._directory / "checkpoints", self.state
            )
            if found is None:
                return None
            step, state, metadata, damage = found
            loaded.append(state)
            checkpoint_utils.drop_draws_after(self._directory / "draws", step)
            return step, metadata, damage

        found = hosts.on_first(load)
        if found is None:
            return []
        self.step, metadata, damage = found
        self._seconds = self._seconds_of_steps = float(metadata["seconds"])
        state = hosts.share_arrays(loaded[0] if loaded else None, self.state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self.state = devices.put(state, shardings)
        self._draws_expected = int(metadata["draws"]) if metadata.get("draws") else None
        remarks = [f"{sentence} The checkpoint before it is used." for sentence in damage]
        if metadata.get("version", __version__) != __version__:
            remarks.append(
                f"version {metadata['version']} began this run and {__version__} goes on with it: "
                "random numbers may differ between versions, see CHANGELOG.md."
            )
        return remarks

    def _refuse_missing_draws(self) -> None:
        if self._draws_expected not in (None, self._store.num_draws):
            raise UserError(
                f"{self._directory} is damaged: its checkpoint at {self._unit} {self.step} tells "
                f"of {self._draws_expected} draws of each chain, and draws/ holds "
                f"{self._store.num_draws}. Put the missing files back, or use another --dir."
            )

    def _result(self) -> RunResult:
        """All of it on process 0; on others the state is, and the rest is empty."""
        info = jax.eval_shape(self._program.run, self.state, self._train, 0, 1)[1]
        predictions = self._collection.predictions()
        if predictions is None:
            assert not hosts.is_first()
            predictions = Predictions(self.dataset.task, np.empty((0, 0, 0)))
        return RunResult(
            self._store,
            predictions,
            metrics.of_predictions(predictions) if hosts.is_first() else {},
            metrics.mean_over_draws(predictions) if hosts.is_first() else {},
            *self._collection.train_results(),
            devices.to_host(self.state),
            {} if self._history is None or not hosts.is_first() else _stack(self._history.rows),
            self.step * int(np.prod(info["log_joint"].shape[1:])),
            self._seconds,
        )


def _stack(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Rows of lists by chain as arrays (chains, steps); null becomes NaN."""
    names = [name for name in rows[0] if name != "epoch"]
    return {name: np.array([row[name] for row in rows], dtype=float).T for name in names}
