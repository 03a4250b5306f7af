"""A run's folder that predicts: draws read in pieces, rows in blocks, on all devices.

    run = load_run("runs/hmc/x")
    prediction = run.predict(x)                # rows in their own units
    prediction.mean, prediction.std, prediction.quantile(0.95)

Predictions come from the loop's own program: rows that the run was tested on give the bits that
the run has stored, on the same number of devices.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Inputs, count_rows, take_rows
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import metrics
from haiku_posteriors.core.judging.predictions import Predictions, evenly, join
from haiku_posteriors.core.judging.predictive import Predictive
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils, devices, ensemble_utils, models, problem
from haiku_posteriors.utils.datasets import tables
from haiku_posteriors.utils.datasets.forms import Column, InputForm, SeveralInputs
from haiku_posteriors.utils.datasets.tables import Table
from haiku_posteriors.utils.draws import DrawStore
from haiku_posteriors.utils.report import problem_files
from haiku_posteriors.utils.report.problem_files import StoredProblem

BLOCK_BYTES = 2**28  # of predictions of all draws that are in memory at a time
DRAW_BYTES_KEPT = 2**28  # draws of at most this size are read once
SMALLEST_BLOCK = 16

Progress = Callable[[int], object]
Rows = ArrayLike | Mapping[str, Any] | tuple[Any, ...] | Table  # in their own units


class LoadedRun:
    """A run whose draws predict.

    Attributes:
      stored: what it was made of.
      form: of its data.
      log_joint: its posterior.
      num_draws: draws of all chains.
      is_finished: whether the run has come to its end.
    """

    def __init__(
        self,
        stored: StoredProblem,
        log_joint: LogJoint,
        store: DrawStore,
        draws_per_chain: int,
        is_finished: bool = True,
    ) -> None:
        """Compiles nothing yet; `load_run` is the way here from a folder.

        Args:
          stored: what the run was made of.
          log_joint: its posterior.
          store: its draws.
          draws_per_chain: how many of each chain these are.
          is_finished: whether there will be no more.
        """
        self.stored, self.log_joint, self.form = stored, log_joint, stored.form
        self.is_finished = is_finished
        self._store, self._draws_per_chain = store, draws_per_chain
        self._kept: list[Params] | None = None
        self.num_draws = stored.num_chains * draws_per_chain
        self._mesh = devices.make_mesh(stored.num_chains, fixed_sums=stored.fixed_sums)
        self._predict = ensemble_utils.make_predictor(log_joint, self.form)

    def predict(self, x: Rows, progress: Progress | None = None) -> Predictive:
        """The predictive distribution of rows, with every draw's predictions in memory.

        Args:
          x: rows in their own units: an array (rows, ...), or columns by name (a dict of arrays,
            a data frame); of a run on several inputs that were no columns, a dict or tuple of them.
          progress: gets the number of draws done, of all rows together, see `num_passes`.
        """
        blocks = [block for _, block in self.predict_blocks(x, progress)]
        outputs = np.concatenate([block.outputs for block in blocks], axis=1)
        return dataclasses.replace(blocks[0], outputs=outputs)

    def predict_blocks(
        self, x: Rows, progress: Progress | None = None
    ) -> Iterator[tuple[slice, Predictive]]:
        """The same for more rows than memory holds: block by block, with the rows of each."""
        inputs = self.to_inputs(x)
        for rows, found in self._blocks(inputs, None, progress):
            yield rows, self._predictive(found.flat_outputs)

    def sample_functions(self, x: Rows, num_functions: int) -> np.ndarray:
        """The network's function in evenly chosen draws, without noise, in the units of y.

        Returns:
          (num_functions, rows, targets), or (num_functions, rows, classes) probabilities.
        """
        if not 1 <= num_functions <= self.num_draws:
            raise UserError(
                f"The run has {self.num_draws} draws: between 1 and that many functions can be "
                f"sampled, not {num_functions}."
            )
        per_chain = -(-num_functions // self.stored.num_chains)
        chosen = evenly(self._draws_per_chain, per_chain)
        parts = list(self._store.chosen(chosen))
        inputs = self.to_inputs(x)
        found = [block.flat_outputs for _, block in self._blocks(inputs, None, None, parts)]
        outputs = np.concatenate(found, axis=1)
        return self._predictive(outputs[evenly(len(outputs), num_functions)]).functions

    def evaluate(self, x: Rows, y: ArrayLike) -> dict[str, float]:
        """Metrics on rows whose targets are known.

        Args:
          x: as in `predict`.
          y: targets in their own units, (rows,) or (rows, targets), or names of classes.
        """
        inputs = self.to_inputs(x)
        targets = self.to_targets(y)
        if len(targets) != count_rows(inputs):
            raise UserError(
                f"There are {count_rows(inputs)} rows of inputs but {len(targets)} of targets."
            )
        blocks = [block for _, block in self._blocks(inputs, targets, None)]
        outputs, log_likelihoods = (
            np.concatenate([getattr(block, name) for block in blocks], axis=2)
            for name in ("outputs", "log_likelihoods")
        )
        in_units = ensemble_utils.targets_in_original_units(targets, self.form)
        return metrics.of_predictions(
            Predictions(self.form.task, outputs, log_likelihoods, in_units)
        )

    def to_inputs(self, x: Rows) -> Inputs:
        """Rows in their own units as the network sees them, or a sentence on why not."""
        form = self.form.inputs
        if not isinstance(x, Table) and hasattr(x, "columns"):  # a data frame
            x = {name: np.asarray(x[name]) for name in x.columns}  # type: ignore[index]
        has_columns = isinstance(form, InputForm) or form.columns is not None
        if isinstance(x, Mapping) and has_columns:
            x = tables.from_columns(x, "The inputs")
        source = "The inputs"
        if isinstance(x, Table):
            values, source = self._from_table(x), x.source
        elif isinstance(form, SeveralInputs):
            values = x
        else:
            values = np.asarray(x)
            if form.columns is not None and any(column.categories for column in form.columns):
                raise UserError(
                    "The run was trained on a table with categories: give columns by name, a dict "
                    "of arrays or a data frame."
                )
        inputs = form.to_inputs(form.check_values(values, source))
        assert self.stored.problem.model_name is not None
        models.check_tokens(self.stored.problem.model_name, inputs)
        return inputs

    def to_targets(self, y: ArrayLike) -> np.ndarray:
        """Targets in their own units, or names of classes, as the likelihood sees them."""
        form, values = self.form, np.asarray(y)
        if form.task == "classification":
            known = values.astype(np.float64) if values.dtype.kind in "biuf" else values
            texts = tables.as_texts(known).astype(str)
            matches = texts[:, np.newaxis] == np.array(form.class_names)
            if not matches.any(axis=1).all():
                text = texts[int(np.argmin(matches.any(axis=1)))]
                names = ", ".join(form.class_names)
                raise UserError(f"'{text}' is none of the run's classes: {names}.")
            return matches.argmax(axis=1).astype(np.int32)
        values = values.astype(np.float64).reshape(len(values), -1)
        if values.shape[1] != len(form.target_mean):
            raise UserError(
                f"The run has {len(form.target_mean)} target(s) a row, and {values.shape[1]} were "
                "given."
            )
        return ((values - form.target_mean) / form.target_scale).astype(form.target_mean.dtype)

    @property
    def rows_at_once(self) -> int:
        """Rows in a block: as many as the run was tested on, at least."""
        width = self.form.num_classes or 2 * len(self.form.target_mean)
        return max(self.stored.num_test_rows, BLOCK_BYTES // (4 * width * self.num_draws), 1)

    def num_passes(self, num_rows: int) -> int:
        """How often `progress` will be told of a draw."""
        return -(-num_rows // self.rows_at_once) * self.num_draws

    def _from_table(self, table: Table) -> Any:
        form = self.form.inputs
        if isinstance(form, SeveralInputs):
            if form.columns is None:
                raise UserError(
                    f"The run was trained on several arrays, {', '.join(form.names)}, which no "
                    "table holds: give an .npz file with x_<name> for each."
                )
            return form.join(tables.encode(one.columns or (), table) for one in form.forms)
        columns, shape = form.columns, form.shape
        if columns is not None:
            return tables.encode(columns, table)
        if len(shape) != 1 or len(table.columns) != shape[0]:
            raise UserError(
                f"{table.source} has {len(table.columns)} columns, but the run was trained on rows "
                f"of shape {shape} without names of columns."
            )
        return tables.encode([Column(name) for name in table.columns], table)

    def _blocks(
        self,
        inputs: Inputs,
        targets: np.ndarray | None,
        progress: Progress | None,
        parts: list[Params] | None = None,
    ) -> Iterator[tuple[slice, Predictions]]:
        """Predictions of all draws, or of `parts`, for blocks of rows of one size."""
        total, most = count_rows(inputs), self.rows_at_once
        size = most
        if total <= most and total != self.stored.num_test_rows:
            # Few sizes, so that few programs are compiled; the test rows have their own.
            size = max(SMALLEST_BLOCK, 2 ** (total - 1).bit_length())
        elif total <= most:
            size = total
        targets = self.form.empty_targets(total) if targets is None else targets
        for first in range(0, total, size):
            count = min(size, total - first)
            # Padded here and not as padding of `Data`, whose number of rows a program is for.
            index = np.where(np.arange(size) < count, first + np.arange(size), first)
            data = devices.place_data(
                take_rows(inputs, index),
                targets[index],
                self._mesh,
                fixed_sums=self.stored.fixed_sums,
            )
            found = []
            for part in self._parts() if parts is None else parts:
                for predictions in ensemble_utils.predict_part(
                    self._predict,
                    part,
                    data,
                    self.stored.draws_at_once,
                    devices.chain_sharding(self._mesh),
                ):
                    assert predictions.log_likelihoods is not None
                    cut = predictions._replace(
                        outputs=predictions.outputs[:, :, :count],
                        log_likelihoods=predictions.log_likelihoods[:, :, :count],
                    )
                    found.append(cut)
                    if progress:
                        progress(cut.num_draws)
            yield slice(first, first + count), join(found, np.zeros(0))

    def _predictive(self, outputs: np.ndarray) -> Predictive:
        classes = self.form.class_names if self.form.task == "classification" else ()
        return Predictive(self.form.task, outputs, classes, self.form.target_names)

    def _parts(self) -> Iterator[Params]:
        draw_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.log_joint.shapes)
        )
        if self._kept is None and draw_bytes * self.num_draws <= DRAW_BYTES_KEPT:
            self._kept = list(self._store.parts())
        return iter(self._kept) if self._kept is not None else self._store.parts()


def _count_draws(directory: pathlib.Path, stored: StoredProblem, shapes: Params) -> int:
    """Draws of each chain; refuses files that are of another network or number of chains."""
    paths = checkpoint_utils.draw_files(directory / "draws")
    if not paths:
        raise UserError(f"The run in {directory} has no draws yet, or its draws/ is gone.")
    chains, draws = zip(*map(checkpoint_utils.draw_shape, paths), strict=True)
    expected = trees.named_leaves(shapes)
    found = checkpoint_utils.load_tensors(paths[0])[0]
    fits = expected.keys() == found.keys() and all(
        found[name].shape[2:] == leaf.shape for name, leaf in expected.items()
    )
    if not fits or {*chains} != {stored.num_chains}:
        raise UserError(
            f"The draws in {directory} are not of the network {stored.problem.model_name} in "
            f"{stored.num_chains} chain(s)."
        )
    return sum(draws)


def load_run(
    directory: str | pathlib.Path,
    *,
    network: Callable[..., jax.Array] | None = None,
    allow_changed_network: bool = False,
) -> LoadedRun:
    """Opens a run's folder for predictions; the data that it was trained on are not needed.

    Args:
      directory: the folder.
      network: the Haiku function of a run that was given one without a name.
      allow_changed_network: take the network as its file is now, even if that has changed.

    Raises:
      UserError: the folder holds no such run, or the network is not found or has changed.
    """
    folder = pathlib.Path(directory).expanduser()
    stored = problem_files.read(folder)
    problem.check_precision(stored.problem)
    found = problem_files.find_network(stored) if network is None else network
    if not allow_changed_network:
        problem_files.refuse_changed_network(folder, stored, found)
    log_joint = problem.build_log_joint(stored.problem.in_folder(folder), stored.form, found)
    return LoadedRun(
        stored,
        log_joint,
        DrawStore(folder, log_joint.shapes, 0),
        _count_draws(folder, stored, log_joint.shapes),
        (folder / "summary.json").is_file(),
    )
