"""Finished runs as others find them: opened, checked, and made to predict again."""

import contextlib
import json
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils, ensemble_utils, script_utils
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.ensemble_utils import Predictions

FLAGS = flags.FLAGS

# Flags that say which rows were trained and tested on.
DATA_FLAGS = ("dataset_name", "subset_train_to", "standardize", "task")
# Flags that say which posterior the rows gave.
POSTERIOR_FLAGS = (
    *("model_name", "likelihood", "noise_std", "learn_noise", "weight_decay", "prior_family"),
    *("prior_group", "prior_mixture_weight", "prior_mixture_ratio", "prior_degrees_of_freedom"),
    *("temperature", "stochastic_params"),
)


class Predictive(NamedTuple):
    """What a run, or a file of predictions, says about the test rows.

    Attributes:
      name: what it is called in tables.
      path: the run's folder, or the file.
      task: "classification" or "regression".
      outputs: (draws, rows, p), draws chain by chain; see `core.judging.metrics`.
      log_likelihoods: (draws, rows), of the observed targets; None where those are not known.
      targets: (rows,) labels or (rows, targets); None where they are not known.
      num_chains: into how many chains the draws divide.
      flags: flags.json; empty for a file of predictions, as are the following.
      summary: summary.json.
      diagnostics: diagnostics.json, empty for methods that are no Markov chains.
    """

    name: str
    path: pathlib.Path
    task: str
    outputs: np.ndarray
    log_likelihoods: np.ndarray | None
    targets: np.ndarray | None
    num_chains: int
    flags: Mapping[str, Any]
    summary: Mapping[str, Any]
    diagnostics: Mapping[str, Any]


def open_run(path: pathlib.Path) -> Predictive:
    """A finished run; refuses, in a sentence, a folder that holds none or a damaged one."""
    run_flags = read_flags(path)
    if not (path / "summary.json").is_file():
        raise UserError(
            f"The run in {path} is not finished: it has no summary.json. The command that started "
            f"it goes on with it, given --dir={path}."
        )
    summary = _read_json(path / "summary.json")
    arrays = read_arrays(path / "predictions.npz")
    names = ("test_predictions", "test_log_likelihoods", "test_targets", "num_chains")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise UserError(f"{path / 'predictions.npz'} lacks {', '.join(missing)}.")
    outputs, log_likelihoods, targets, num_chains = (arrays[name] for name in names)
    if len(outputs) != summary["num_draws"] or outputs.shape[:2] != log_likelihoods.shape:
        raise UserError(
            f"The run in {path} is damaged: summary.json tells of {summary['num_draws']} draws, "
            f"and predictions.npz holds predictions of shape {outputs.shape}."
        )
    if not np.isfinite(outputs).all():
        raise UserError(f"The predictions in {path} hold numbers that are not finite.")
    diagnostics = path / "diagnostics.json"
    return Predictive(
        name=path.resolve().name,
        path=path,
        task="classification" if "accuracy" in summary["test"] else "regression",
        outputs=outputs,
        log_likelihoods=log_likelihoods,
        targets=targets,
        num_chains=int(num_chains),
        flags=run_flags,
        summary=summary,
        diagnostics=_read_json(diagnostics) if diagnostics.is_file() else {},
    )


def read_flags(path: pathlib.Path) -> dict[str, Any]:
    """The flags of a run, finished or not."""
    if not path.is_dir():
        raise UserError(f"There is no run folder {path}.")
    if not (path / "flags.json").is_file():
        raise UserError(f"{path} holds no run: it has no flags.json.")
    return _read_json(path / "flags.json")


def refuse_other_data(predictive: Predictive, reference: Predictive) -> None:
    """Refuses to compare what was not trained and tested on the reference's rows.

    Runs in float32 and in float64 see the same rows up to rounding, and are let through.
    """
    pair = f"{predictive.path} and the reference {reference.path}"
    if predictive.flags and reference.flags:
        differing = flag_differences(predictive, reference, DATA_FLAGS)
        same = predictive.summary["data_sha256"] == reference.summary["data_sha256"]
        rounded = predictive.flags["use_float64"] != reference.flags["use_float64"]
        if not same and (differing or not rounded):
            detail = ", ".join(differing) or "the files behind the same name have changed"
            raise UserError(f"{pair} are runs on different data: {detail}.")
    if predictive.task != reference.task or (
        predictive.outputs.shape[1:] != reference.outputs.shape[1:]
    ):
        raise UserError(
            f"{pair} do not predict the same rows: {_describe(predictive)} against "
            f"{_describe(reference)}."
        )
    if predictive.targets is not None and reference.targets is not None:
        same_rows = np.isclose(predictive.targets, reference.targets, rtol=1e-4, atol=1e-6)
        if not same_rows.all():
            row = int(np.argwhere(~same_rows)[0, 0])
            raise UserError(
                f"{pair} have different test targets, first in row {row}: "
                f"{predictive.targets[row]} against {reference.targets[row]}."
            )


def flag_differences(
    run: Predictive, reference: Predictive, names: tuple[str, ...] = POSTERIOR_FLAGS
) -> list[str]:
    """Which of the flags differ, as `weight_decay (10.0, reference 30.0)`."""
    return [
        f"{name} ({run.flags.get(name)}, reference {reference.flags.get(name)})"
        for name in names
        if run.flags.get(name) != reference.flags.get(name)
    ]


def _describe(predictive: Predictive) -> str:
    _, rows, outputs = predictive.outputs.shape
    kind = "classes" if predictive.task == "classification" else "means and deviations"
    return f"{rows} rows of {outputs} {kind}"


def distinct_names(predictives: Sequence[Predictive]) -> list[Predictive]:
    """Names as short as can be told apart: the folder's own, or with its parent's."""
    names = [predictive.name for predictive in predictives]
    longer = [f"{p.path.resolve().parent.name}/{p.name}" for p in predictives]
    chosen = [
        long if names.count(short) > 1 else short for short, long in zip(names, longer, strict=True)
    ]
    if len(set(chosen)) < len(chosen):
        twice = next(
            p.path for p, name in zip(predictives, chosen, strict=True) if chosen.count(name) > 1
        )
        raise UserError(f"{twice} was given twice.")
    return [p._replace(name=name) for p, name in zip(predictives, chosen, strict=True)]


def load_draws(run: Predictive) -> dict[str, np.ndarray]:
    """All draws of a run by parameter name, (chains, draws, ...)."""
    draws = checkpoint_utils.load_draws(run.path / "draws")
    if draws is None:
        raise UserError(f"The run in {run.path} has no draws: its folder draws/ is empty or gone.")
    chains, per_chain = next(iter(draws.values())).shape[:2]
    if chains != run.num_chains or chains * per_chain != len(run.outputs):
        raise UserError(
            f"The run in {run.path} is damaged: it has {chains * per_chain} draws in {chains} "
            f"chains, and predictions of {len(run.outputs)} draws in {run.num_chains}."
        )
    return draws


def load_problem(run: Predictive) -> tuple[LogJoint, Dataset]:
    """The log-joint and the data of a run, from the flags it was started with.

    The flags in force are changed to the run's own, except a data_dir that was given.
    """
    restore_flags(run.flags)
    jax.config.update("jax_enable_x64", FLAGS.use_float64)
    log_joint, dataset = script_utils.load_problem()
    if script_utils.fingerprint(dataset) != run.summary["data_sha256"]:
        raise UserError(
            f"The data set '{dataset.name}' found now is not the one that {run.path} was trained "
            "on; give the folder of the original files as --data_dir."
        )
    return log_joint, dataset


def refuse_flags_of_runs(allowed: tuple[str, ...]) -> None:
    """Refuses flags that every script knows but a script on finished runs would not read."""
    for flag in FLAGS.flags_by_module_dict()[cmd_args_utils.__name__]:
        if flag.present and flag.name not in allowed:
            raise UserError(f"{flag.name} has no meaning here: a run brings its own flags.")


def restore_flags(run_flags: Mapping[str, Any], keep_given: bool = False) -> None:
    """Gives the flags in force the values of a run's, where this script has the flag.

    A data_dir that was given stays; with `keep_given`, so does every other flag that was.
    """
    for name, value in run_flags.items():
        if name not in FLAGS or name == "dir":
            continue
        if not (FLAGS[name].present and (keep_given or name == "data_dir")):
            FLAGS[name].value = value


def evenly(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` of the indices 0 to count - 1, each in the middle of an equal part."""
    wanted = min(count, wanted)
    return ((np.arange(wanted) + 0.5) * count / wanted).astype(int)


def choose_draws(log_joint: LogJoint, run: Predictive, at_most: int) -> Params:
    """Evenly chosen draws in the network's own structure, (1, draws, ...)."""
    named, chosen = load_draws(run), evenly(len(run.outputs), at_most)
    few = {name: leaf.reshape(1, -1, *leaf.shape[2:])[:, chosen] for name, leaf in named.items()}
    template = log_joint.shapes
    if trees.named_leaves(template).keys() != few.keys():
        raise UserError(f"The draws in {run.path} are not of the network {FLAGS.model_name}.")
    return trees.from_named_leaves(template, few)


def make_predictor(
    log_joint: LogJoint, dataset: Dataset, draws: Params
) -> Callable[..., Predictions]:
    """A function (inputs, targets or None) -> what the draws say, compiled once a shape.

    Without targets the log-likelihoods are of nothing in particular.
    """
    predict = ensemble_utils.make_predictor(log_joint, dataset)

    def predictor(inputs: np.ndarray, targets: np.ndarray | None = None) -> Predictions:
        if targets is None:
            targets = np.zeros((len(inputs), *dataset.y_train.shape[1:]), dataset.y_train.dtype)
        data = make_data(inputs.astype(dataset.x_train.dtype), targets)
        return predict(draws, jax.device_put(data)).flat()

    return predictor


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file, without unpickling."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with _damage_told(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz archive")
        return {name: archive[name] for name in archive.files}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    with _damage_told(path):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content


@contextlib.contextmanager
def _damage_told(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or of another kind: {error}.") from error
