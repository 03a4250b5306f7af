"""The part of the scikit-learn estimators that does not depend on the task: fit, save, restore."""

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.predictions import Predictions, evenly
from haiku_posteriors.core.judging.predictive import Predictive
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils, data_utils, files, models, problem
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.datasets.forms import Column, InputForm, SeveralInputs
from haiku_posteriors.utils.draws import DrawStore, draws_per_block
from haiku_posteriors.utils.estimators.forms import Plan, Wishes
from haiku_posteriors.utils.estimators.plans import make_plan
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report import arviz_export, problem_files
from haiku_posteriors.utils.report.loaded_runs import LoadedRun
from haiku_posteriors.utils.report.problem_files import StoredProblem
from haiku_posteriors.utils.stages import warm_start
from haiku_posteriors.utils.train_utils import Run, RunResult

Network = Callable[..., jax.Array]

DEFAULT_NETWORK = "mlp_50"
ROWS_WATCHED = 200  # training rows at which chains are diagnosed
FILE_NAME, RECORD_NAME = "estimator.json", "record.npz"
HISTORY = "history."  # before names of a record


@dataclasses.dataclass(eq=False, repr=False)
class PosteriorEstimator(Wishes, BaseEstimator):
    """What both estimators share; `PosteriorRegressor` tells of the parameters."""

    method: str = "hmc"
    network: str | Network | None = None
    _: dataclasses.KW_ONLY
    weight_decay: float | None = None
    temperature: float = 1.0
    input_groups: Mapping[str, Sequence[int | str]] | None = None
    standardize: bool = True
    random_state: int | np.random.RandomState | None = 0
    verbose: bool = False

    _task: ClassVar[str]
    _checks_of_y: ClassVar[Mapping[str, bool]] = {}

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fits to rows X (rows, features) and y: labels of any type, or numbers."""
        x, targets = validate_data(self, X, y, dtype=np.float64, **self._checks_of_y)
        dataset = self._dataset(x, *self._read_targets(targets))
        if self.network is None and self.input_groups:
            raise UserError("input_groups need a network of your own, which takes several inputs.")
        name = self.network or DEFAULT_NETWORK
        described = self._problem(getattr(name, "__name__", str(name)), dataset)
        log_joint = problem.build_log_joint(described, dataset.form, name)
        plan = self._plan(log_joint, len(x))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        starts = None
        if plan.warm_start_epochs:
            starts = warm_start.train(
                log_joint,
                dataset,
                num_chains=plan.num_chains,
                num_epochs=plan.warm_start_epochs,
                seed=seed,
                quiet=not self.verbose,
            )
        method, diagnose = (
            plan.fit(dataset, starts, seed) if plan.fit else (plan.method, plan.diagnose)
        )
        assert method is not None
        run = Run(
            log_joint,
            dataset,
            method,
            num_steps=plan.num_steps,
            num_chains=plan.num_chains,
            seed=seed,
            eval_freq=plan.num_steps,
            save_freq=plan.num_steps,
            collects=plan.collects,
            num_draws=plan.num_draws,
            keep_history=plan.keep_history,
            enough=plan.enough,
            is_finished=plan.is_finished,
            initial_params=starts,
            unit="step",
            quiet=not self.verbose,
        )
        result = run.finish()
        self.draws_ = result.draws
        self.train_metrics_ = result.train_metrics
        self.diagnostics_ = diagnose(result) if diagnose else {}
        if "notes" in self.diagnostics_ and plan.collects:  # of chains
            self.diagnostics_["notes"] += warm_start.notes(starts, plan.warm_start_epochs)
        self._record = _record(result, run.test_targets, plan)
        at_once = min(plan.num_draws, draws_per_block(log_joint.shapes, plan.num_chains))
        self._keep(
            StoredProblem(
                *(described, dataset.form, plan.num_chains, at_once),
                *(len(dataset.y_test), models.source_of(name)),
            ),
            log_joint,
        )
        if self.diagnostics_.get("converged") is False:
            problems = " ".join(self.diagnostics_["problems"])
            warnings.warn(f"Not converged. {problems}", ConvergenceWarning, stacklevel=3)
        return self

    def _read_targets(self, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """Checked targets as the likelihood has them, and the names of classes."""
        raise NotImplementedError

    def _dataset(self, x: np.ndarray, y: np.ndarray, classes: tuple[str, ...]) -> Dataset:
        few = evenly(len(x), ROWS_WATCHED)
        dataset = data_utils.from_arrays(
            *(self._in_groups(x), y, self._in_groups(x[few]), y[few]),
            task=self._task,
            standardize=self.standardize,
        )
        form = dataset.form._replace(classes=classes)
        if hasattr(self, "feature_names_in_"):
            columns = [Column(str(name)) for name in self.feature_names_in_]
            form = form._replace(inputs=self._with_columns(form.inputs, columns))
        return dataset._replace(form=form)

    def _with_columns(
        self, inputs: InputForm | SeveralInputs, columns: Sequence[Column]
    ) -> InputForm | SeveralInputs:
        if isinstance(inputs, InputForm):
            return inputs._replace(columns=tuple(columns))
        forms = [
            form._replace(columns=tuple(columns[index] for index in chosen))
            for form, chosen in zip(inputs.forms, self._groups().values(), strict=True)
        ]
        return inputs._replace(forms=tuple(forms))

    def _groups(self) -> dict[str, list[int]]:
        """The columns of X by their positions, for each input of the network."""
        known = getattr(self, "feature_names_in_", np.arange(self.n_features_in_))
        names: list[Any] = known.tolist()
        groups = {}
        for name, columns in (self.input_groups or {}).items():
            unknown = [column for column in columns if column not in names]
            if unknown or not columns:
                raise UserError(
                    f"input_groups: '{name}' needs columns of X, {', '.join(map(str, names))}; "
                    f"{', '.join(map(str, unknown)) or 'nothing'} is none of them."
                )
            groups[name] = [names.index(column) for column in columns]
        return groups

    def _in_groups(self, x: np.ndarray) -> Any:
        """X as the network takes it: whole, or its columns by group."""
        groups = self._groups()
        return {name: x[:, chosen] for name, chosen in groups.items()} if groups else x

    def _rows(self, X: ArrayLike) -> Any:
        """Checked rows as the run takes them."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False)
        if self.input_groups and hasattr(self, "feature_names_in_"):
            return {str(name): x[:, i] for i, name in enumerate(self.feature_names_in_)}
        return self._in_groups(x)

    def _problem(self, model_name: str, dataset: Dataset) -> Problem:
        described = Problem(
            dataset_name="arrays",
            task=self._task,
            model_name=model_name,
            standardize=self.standardize,
            weight_decay=self.weight_decay,
            temperature=self.temperature,
            **self._likelihood(),
        )
        return problem.complete(described, dataset.form)

    def _likelihood(self) -> dict[str, Any]:
        return {"likelihood": "categorical"}

    def _plan(self, log_joint: LogJoint, num_rows: int) -> Plan:
        names = [field.name for field in dataclasses.fields(Wishes)]
        wishes = Wishes(**{name: getattr(self, name) for name in names})
        return make_plan(self.method, log_joint, num_rows, wishes)

    def _keep(self, stored: StoredProblem, log_joint: LogJoint) -> None:
        store = DrawStore(None, log_joint.shapes, 0)
        store.append(self.draws_)
        draws_per_chain = jax.tree.leaves(self.draws_)[0].shape[1]
        self._run = LoadedRun(stored, log_joint, store, draws_per_chain)

    def predictive(self, X: ArrayLike) -> Predictive:
        """The whole predictive distribution of rows, see `core.judging.predictive.Predictive`."""
        rows = self._rows(X)
        return self._run.predict(rows)

    def sample_functions(self, X: ArrayLike, num_functions: int) -> np.ndarray:
        """The network's function in some draws, (functions, rows, targets or classes)."""
        rows = self._rows(X)
        return self._run.sample_functions(rows, num_functions)

    def to_arviz(self, seed: int = 0) -> Any:
        """The fit for ArviZ: `arviz.loo(model.to_arviz())`, `arviz.plot_trace`, and so on.

        The groups are those of `haiku_posteriors.to_arviz`, but for rows: posterior_predictive and
        observed_data are of at most ROWS_WATCHED training rows, evenly chosen.
        """
        check_is_fitted(self)
        record = self._record
        history = {
            name.removeprefix(HISTORY): values
            for name, values in record.items()
            if name.startswith(HISTORY)
        }
        predictions = Predictions(
            self._task, record["outputs"], record["watched"], record["targets"]
        )
        return arviz_export.from_fit(
            self.draws_, history, record["log_likelihoods"], predictions, seed
        )

    def _mean_log_density(self, x: ArrayLike, y: ArrayLike) -> float:
        rows = self._rows(x)
        return -self._run.evaluate(rows, y)["nll"]

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes all that `load` needs into a new or empty folder; nothing is pickled."""
        check_is_fitted(self)
        folder = pathlib.Path(directory).expanduser()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not an empty folder; save into another one.")
        params = self.get_params(deep=False)
        if callable(self.network):
            params["network"] = None  # `load` is given it
        if not isinstance(self.random_state, int | None):
            params["random_state"] = None
        content = {
            "estimator": type(self).__name__,
            "params": params,
            "fitted": self._fitted_values(),
        }
        try:
            json.dumps(content)
        except TypeError as error:
            raise UserError(
                f"Parameters that are no plain values cannot be saved: {error}."
            ) from error
        checkpoint_utils.save_draws(folder / "draws", 0, self.draws_)
        problem_files.write(folder, self._run.stored)
        files.write_arrays(folder / RECORD_NAME, **self._record)
        files.write_json(folder / FILE_NAME, content)

    def _fitted_values(self) -> dict[str, Any]:
        values = {
            "n_features_in_": self.n_features_in_,
            "diagnostics_": self.diagnostics_,
            "train_metrics_": self.train_metrics_,
        }
        if hasattr(self, "feature_names_in_"):
            values["feature_names_in_"] = self.feature_names_in_.tolist()
        return values

    def restore(
        self,
        values: Mapping[str, Any],
        record: dict[str, np.ndarray],
        run: LoadedRun,
        draws: Params,
    ) -> Self:
        """Takes what `fit` would have found: `values` and `record` as saved, the run, its draws."""
        for name, value in values.items():
            if name == "feature_names_in_":
                value = np.asarray(value, object)
            setattr(self, name, np.asarray(value) if name == "classes_" else value)
        self.draws_, self._record = draws, record
        self._keep(run.stored, run.log_joint)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without compiled programs, which `__setstate__` makes again."""
        state = {**super().__getstate__()}
        if "_run" in state:
            state["_run"] = state["_run"].stored
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        super().__setstate__({**state})
        if "_run" in state:
            stored, network = state["_run"], self.network or DEFAULT_NETWORK
            self._keep(stored, problem.build_log_joint(stored.problem, stored.form, network))


def _record(result: RunResult, targets: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
    """What `to_arviz` needs besides draws: of the transitions that were kept, and of rows."""
    history = {}
    if plan.collects is not None and result.history:
        num_steps = len(next(iter(result.history.values()))[0])
        kept = [step for step in range(num_steps) if plan.collects(step + 1)]
        history = {name: values[:, kept] for name, values in result.history.items()}
    watched = result.test_predictions
    assert watched.log_likelihoods is not None
    return {
        "log_likelihoods": result.train_log_likelihoods,
        "outputs": np.array(watched.outputs),
        "watched": np.array(watched.log_likelihoods),
        "targets": targets,
        **{f"{HISTORY}{name}": values for name, values in history.items()},
    }
