"""Finished runs: opened and checked, compared by their flags, and their draws read file by file."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils import checkpoint_utils
from haiku_posteriors.utils.files import read_arrays, read_json, readable

T = TypeVar("T")

# Flags that decide which rows were trained and tested on.
DATA_FLAGS = (
    *("dataset_name", "subset_train_to", "train_part", "standardize", "task", "inputs"),
    *("target", "split", "split_seed", "categorical", "ignore"),
)
# Flags that decide which posterior these rows give.
POSTERIOR_FLAGS = (
    *("model_name", "likelihood", "noise_std", "learn_noise", "weight_decay", "prior_family"),
    *("prior_group", "prior_mixture_weight", "prior_mixture_ratio", "prior_degrees_of_freedom"),
    *("prior_from", "temperature", "stochastic_params"),
)
# What the files of a run must have for these to be read.
FLAGS_NEEDED = dict.fromkeys(("method", "dataset_name", "model_name", "use_float64"), object)
SUMMARY_NEEDED = {"num_draws": int, "test": dict, "data_sha256": str, "dataset": str}
ARRAY_NAMES = ("test_predictions", "test_log_likelihoods", "test_targets", "num_chains")


class OpenedRun(NamedTuple):
    """A finished run, or a file of predictions, which has no flags, summary and diagnostics.

    Attributes:
      name: its name in tables and pictures.
      path: the run's folder, or the file.
      predictions: of the test rows.
      flags: flags.json.
      summary: summary.json.
      diagnostics: diagnostics.json; empty for methods that are not Markov chains.
    """

    name: str
    path: pathlib.Path
    predictions: Predictions
    flags: Mapping[str, Any]
    summary: Mapping[str, Any]
    diagnostics: Mapping[str, Any]


class ParameterSample(NamedTuple):
    """Some parameters of a run in all its draws.

    Attributes:
      shapes: the shape of every parameter array of the network by name; runs with the same shapes
        have the same parameters sampled.
      values: (draws, parameters), draws in the order of `Predictions.flat_outputs`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    values: np.ndarray


def open_run(path: pathlib.Path) -> OpenedRun:
    """Opens a finished run.

    Raises:
      UserError: there is no run in the folder, or it is not finished, or damaged.
    """
    run_flags = read_flags(path)
    if not (path / "summary.json").is_file():
        raise UserError(
            f"The run in {path} is not finished: it has no summary.json. The command that started "
            f"it goes on with it, given --dir={path}."
        )
    summary = read_json(path / "summary.json", SUMMARY_NEEDED)
    diagnostics_path = path / "diagnostics.json"
    return OpenedRun(
        name=readable(path.resolve().name),
        path=path,
        predictions=_read_predictions(path, summary),
        flags=run_flags,
        summary=summary,
        diagnostics=read_json(diagnostics_path) if diagnostics_path.is_file() else {},
    )


def read_flags(path: pathlib.Path) -> dict[str, Any]:
    """The flags of a run, finished or not."""
    if not path.is_dir():
        raise UserError(f"There is no run folder {path}.")
    if not (path / "flags.json").is_file():
        raise UserError(f"{path} holds no run: it has no flags.json.")
    return read_json(path / "flags.json", FLAGS_NEEDED)


def needs_float64(runs: Sequence[OpenedRun]) -> bool:
    """Whether one of the runs was computed in float64, for which JAX has to be configured."""
    return any(run.flags.get("use_float64", False) for run in runs)


def refuse_other_data(run: OpenedRun, reference: OpenedRun) -> None:
    """Raises a UserError if a run was not trained and tested on the rows of the reference.

    Runs in float32 and in float64 see the same rows up to rounding, and can be compared.
    """
    pair = f"{run.path} and the reference {reference.path}"
    if run.flags and reference.flags:
        differing = flag_differences(run, reference, DATA_FLAGS)
        same = run.summary["data_sha256"] == reference.summary["data_sha256"]
        rounded = run.flags["use_float64"] != reference.flags["use_float64"]
        if not same and (differing or not rounded):
            detail = ", ".join(differing) or "the files behind the same name have changed"
            raise UserError(f"{pair} are runs on different data: {detail}.")
    ours, theirs = run.predictions, reference.predictions
    if ours.task != theirs.task or ours.outputs.shape[2:] != theirs.outputs.shape[2:]:
        raise UserError(
            f"{pair} do not predict the same rows: {_describe_rows(ours)} against "
            f"{_describe_rows(theirs)}."
        )
    if ours.targets is not None and theirs.targets is not None:
        same_rows = np.isclose(ours.targets, theirs.targets, rtol=1e-4, atol=1e-6)
        if not same_rows.all():
            row = int(np.argwhere(~same_rows)[0, 0])
            raise UserError(
                f"{pair} have different test targets, first in row {row}: "
                f"{ours.targets[row]} against {theirs.targets[row]}."
            )


def flag_differences(
    run: OpenedRun, reference: OpenedRun, names: Sequence[str] = POSTERIOR_FLAGS
) -> list[str]:
    """The flags that differ, each as `weight_decay (10.0, reference 30.0)`."""
    return [
        f"{name} ({run.flags.get(name)}, reference {reference.flags.get(name)})"
        for name in names
        if run.flags.get(name) != reference.flags.get(name)
    ]


def distinct_names(runs: Sequence[OpenedRun]) -> list[OpenedRun]:
    """The same runs under distinct names: the folder's own, or with its parent's in front."""
    names = [run.name for run in runs]
    chosen = [
        f"{readable(run.path.resolve().parent.name)}/{run.name}"
        if names.count(run.name) > 1
        else run.name
        for run in runs
    ]
    for run, name in zip(runs, chosen, strict=True):
        if chosen.count(name) > 1:
            raise UserError(f"{run.path} was given twice.")
    return [run._replace(name=name) for run, name in zip(runs, chosen, strict=True)]


def map_draw_files(run: OpenedRun, function: Callable[[dict[str, np.ndarray], int], T]) -> list[T]:
    """Applies a function to the draws of a run, one file at a time.

    Only what the function returns stays in memory: the draws of a long run of a large network need
    not fit.

    Args:
      run: a run with its folder.
      function: gets the parameters of one file by name, (chains, draws, ...), and how many draws
        of each chain the files before it hold.

    Raises:
      UserError: there are no draws, or not those of the run's predictions.
    """
    paths = sorted((run.path / "draws").glob("*.safetensors"))
    if not paths:
        raise UserError(f"The run in {run.path} has no draws: its folder draws/ is empty or gone.")
    chains, per_chain = run.predictions.outputs.shape[:2]
    results, start = [], 0
    for path in paths:
        result, found = _apply_to_file(path, function, start)
        if found[0] != chains:
            raise _other_draws(run, f"{path.name} has draws of {found[0]} chains")
        results.append(result)
        start += found[1]
    if start != per_chain:
        raise _other_draws(run, f"its folder draws/ has {start} draws of each chain")
    return results


def read_parameters(run: OpenedRun, max_parameters: int) -> ParameterSample:
    """A random subset of the parameters in all draws, the same for all runs of a network."""

    def sample(
        named: dict[str, np.ndarray], start: int
    ) -> tuple[dict[str, tuple[int, ...]], np.ndarray]:
        shapes = {name: leaf.shape[2:] for name, leaf in named.items()}
        return shapes, diagnostics.subsample_parameters(named, max_parameters, num_batch_axes=2)

    parts = map_draw_files(run, sample)
    values = np.concatenate([values for _, values in parts], axis=1)
    return ParameterSample(parts[0][0], values.reshape(run.predictions.num_draws, -1))


def read_train_log_likelihoods(run: OpenedRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Log-likelihoods of the training rows, (chains, draws, rows), and which draws these are.

    None for files of predictions, and for runs of version 0.2.0, which did not keep them.
    """
    path = run.path / "train_log_likelihoods.npz"
    if not run.flags or not path.is_file():
        return None
    arrays = read_arrays(path)
    values, draws = (arrays.get(name, np.zeros(0)) for name in ("log_likelihoods", "draws"))
    chains, per_chain = run.predictions.outputs.shape[:2]
    fits = values.ndim == 3 and values.shape[:2] == (chains, len(draws))
    if not (fits and np.all((draws >= 0) & (draws < per_chain))):
        raise UserError(
            f"{path} is damaged: it holds log-likelihoods of shape {values.shape} for "
            f"{len(draws)} of {per_chain} draws of each of {chains} chains."
        )
    return values, draws


def _apply_to_file(
    path: pathlib.Path, function: Callable[[dict[str, np.ndarray], int], T], start: int
) -> tuple[T, tuple[int, int]]:
    """The result, and (chains, draws) of the file.

    A function of its own, so that nothing refers to one file any more when the next is read.
    """
    named = checkpoint_utils.load_tensors(path)[0]
    chains, draws = next(iter(named.values())).shape[:2]
    return function(named, start), (chains, draws)


def _other_draws(run: OpenedRun, found: str) -> UserError:
    chains, per_chain = run.predictions.outputs.shape[:2]
    return UserError(
        f"The run in {run.path} is damaged: {found}, and predictions.npz has predictions of "
        f"{per_chain} draws of each of {chains} chains."
    )


def _read_predictions(path: pathlib.Path, summary: Mapping[str, Any]) -> Predictions:
    arrays = read_arrays(path / "predictions.npz")
    missing = [name for name in ARRAY_NAMES if name not in arrays]
    if missing:
        raise UserError(f"{path / 'predictions.npz'} lacks {', '.join(missing)}.")
    outputs, log_likelihoods, targets, stored_chains = (arrays[name] for name in ARRAY_NAMES)
    num_draws, chains = summary["num_draws"], int(stored_chains)
    if (
        len(outputs) != num_draws
        or chains < 1
        or num_draws % chains
        or outputs.shape[:2] != log_likelihoods.shape
    ):
        raise UserError(
            f"The run in {path} is damaged: summary.json tells of {num_draws} draws, and "
            f"predictions.npz holds predictions of shape {outputs.shape} from {chains} chain(s)."
        )
    if not np.isfinite(outputs).all():
        raise UserError(f"The predictions in {path} hold numbers that are not finite.")
    return Predictions(
        "classification" if "accuracy" in summary["test"] else "regression",
        outputs.reshape(chains, -1, *outputs.shape[1:]),
        log_likelihoods.reshape(chains, -1, *log_likelihoods.shape[1:]),
        targets,
    )


def _describe_rows(predictions: Predictions) -> str:
    rows, outputs = predictions.outputs.shape[2:]
    kind = "classes" if predictions.task == "classification" else "means and deviations"
    return f"{rows} rows of {outputs} {kind}"
