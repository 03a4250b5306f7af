"""What every run_*.py shares: from flags to a problem, and from a finished run to its folder."""

import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import numpy as np
from absl import app, flags, logging
from tabulate import tabulate

from haiku_posteriors.core import likelihoods, priors, trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.likelihoods import Likelihood
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import (
    chains,
    checkpoint_utils,
    cmd_args_utils,
    data_utils,
    devices,
    models,
)
from haiku_posteriors.utils.data_utils import Dataset, fingerprint
from haiku_posteriors.utils.logging_utils import Ticker, write_json
from haiku_posteriors.utils.report import pictures
from haiku_posteriors.utils.signals import Interrupted
from haiku_posteriors.utils.train_utils import DivergedError, Run, RunResult

FLAGS = flags.FLAGS

# Flags that a resumed run may change: they do not touch the result.
HARMLESS_FLAGS = {"dir", "data_dir", "tabulate_freq"}
# The anchor's regression networks give a mean and a raw scale.
HETEROSCEDASTIC_NETWORKS = ("mlp_regression", "mlp_regression_small")


def run_script(main: Callable[[], None]) -> NoReturn:
    """Runs a script; a mistake of the user's is one sentence and exit code 2, never a traceback."""

    def parse(arguments: Sequence[str]) -> list[str]:
        try:
            rest = FLAGS(arguments)
        except flags.Error as error:
            _leave(str(error), 2)
        if rest[1:]:
            _leave(f"Not a flag: {' '.join(rest[1:])}. Flags are written --name=value.", 2)
        return rest

    def guarded(_: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # JAX tells of every accelerator it does not find
        jax.config.update("jax_enable_x64", "use_float64" in FLAGS and FLAGS.use_float64)
        _enable_compilation_cache()
        try:
            main()
        except UserError as error:
            _leave(str(error), 2)
        except DivergedError as error:
            _leave(str(error), 1)
        except Interrupted as request:
            # A computation may still be running; an ordinary exit would wait for it.
            print(f"Stopped by {request}; the same command goes on from here.", flush=True)
            os._exit(128 + request.signal_number)
        except KeyboardInterrupt:  # outside the loop, or asked twice
            _leave("Stopped; the last checkpoint, if there is one, stands.", 130)
        except OSError as error:
            _leave(f"The file system refused: {error}. The last checkpoint stands.", 1)

    app.run(guarded, flags_parser=parse)
    raise SystemExit(0)


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"{pathlib.Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _enable_compilation_cache() -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path.home() / ".cache" / "haiku-posteriors" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def load_problem(settings: cmd_args_utils.Settings | None = None) -> tuple[LogJoint, Dataset]:
    """The data set and the log-joint that the flags describe.

    Flags that were not given are filled in first: from `settings`, the method's own for this data
    set, and then from the data set's.
    """
    settings = {**cmd_args_utils.data_settings(FLAGS.dataset_name), **(settings or {})}
    noise_is_known = FLAGS.noise_std is not None or "noise_std" in settings
    batch_size_given = "batch_size" in FLAGS and FLAGS["batch_size"].value is not None
    dataset = data_utils.load(
        FLAGS.dataset_name,
        FLAGS.data_dir,
        FLAGS.subset_train_to,
        FLAGS.task,
        FLAGS.standardize,
        np.float64 if FLAGS.use_float64 else np.float32,
    )
    cmd_args_utils.fill_in(FLAGS, {"noise_std": 0.3, "learn_noise": not noise_is_known} | settings)
    if "batch_size" in FLAGS and not batch_size_given:
        FLAGS["batch_size"].value = min(FLAGS.batch_size, len(dataset.x_train))
    if FLAGS.model_name is None:
        FLAGS["model_name"].value = models.default_network_name(
            dataset.task,
            dataset.x_train.shape[1:],
            np.issubdtype(dataset.x_train.dtype, np.integer),
        )
    if FLAGS.model_name == "cnn_lstm" and dataset.x_train.max() >= models.VOCABULARY_SIZE:
        raise UserError(f"cnn_lstm knows tokens below {models.VOCABULARY_SIZE} only.")
    likelihood = _make_likelihood(dataset)
    log_joint = make_log_joint(
        models.get_network(FLAGS.model_name, likelihood.num_outputs),
        dataset.x_train,
        _make_prior(),
        likelihood,
        temperature=FLAGS.temperature,
        num_microbatches=FLAGS.num_microbatches,
        stochastic_params=FLAGS.stochastic_params,
    )
    return log_joint, dataset


def _make_likelihood(dataset: Dataset) -> Likelihood:
    if FLAGS.likelihood is None:
        one_noise_is_meant = FLAGS["noise_std"].present or FLAGS["learn_noise"].present
        regression = (
            "heteroscedastic_gaussian"
            if FLAGS.model_name in HETEROSCEDASTIC_NETWORKS and not one_noise_is_meant
            else "gaussian"
        )
        FLAGS["likelihood"].value = regression if dataset.task == "regression" else "categorical"
    name = FLAGS.likelihood
    if (dataset.task == "regression") != ("gaussian" in name):
        raise UserError(f"The likelihood '{name}' does not fit a task of {dataset.task}.")
    if name == "categorical":
        return likelihoods.categorical(dataset.num_classes)
    if name == "bernoulli":
        if dataset.num_classes != 2:
            raise UserError(f"A Bernoulli likelihood needs 2 classes, not {dataset.num_classes}.")
        return likelihoods.bernoulli()
    num_targets = dataset.y_train.shape[1]
    if name == "gaussian":
        return likelihoods.gaussian(FLAGS.noise_std, num_targets, FLAGS.learn_noise)
    return likelihoods.heteroscedastic_gaussian(num_targets)


def _make_prior() -> priors.Prior:
    arguments = {
        "scale_mixture": {
            "weight": FLAGS.prior_mixture_weight,
            "ratio": FLAGS.prior_mixture_ratio,
        },
        "student_t": {"degrees_of_freedom": FLAGS.prior_degrees_of_freedom},
    }.get(FLAGS.prior_family, {})
    groups = []
    for group in FLAGS.prior_group:
        pattern, _, precision = group.rpartition("=")
        try:
            groups.append((pattern, float(precision)))
        except ValueError:
            raise UserError(f"prior_group '{group}' is not of the form REGEX=NUMBER.") from None
    return priors.make_prior(FLAGS.weight_decay, FLAGS.prior_family, groups, **arguments)


def initial_params(log_joint: LogJoint, num_chains: int, path: str | None) -> Params | None:
    """The parameters of a run folder or a file, (num_chains, ...); None when there is no path.

    A file with one set of parameters starts every chain; otherwise there must be one a chain.
    """
    if path is None:
        return None
    template = jax.eval_shape(log_joint.init, jax.random.key(0))
    params = checkpoint_utils.load_params(pathlib.Path(path), template)
    found = jax.tree.leaves(params)[0].shape[0]
    if found not in (1, num_chains):
        raise UserError(f"{path} holds {found} sets of parameters, for {num_chains} chains.")
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_chains, *leaf.shape[1:])), params)


def pretrain(
    method: Method,
    log_joint: LogJoint,
    dataset: Dataset,
    *,
    num_chains: int,
    num_starts: int,
    num_epochs: int,
) -> Params:
    """Parameters to start from, (num_chains, ...): those a method has at the end of its epochs.

    Each chain gets the best of `num_starts`, by the log-joint that its last epoch has met.
    """
    total = num_chains * num_starts
    program, data = chains.compile_stage(
        log_joint, dataset, method, FLAGS.seed, total, chains.PRETRAIN
    )
    keys = jax.vmap(lambda chain: chains.chain_key(FLAGS.seed, chains.PRETRAIN_INIT, 0, chain))(
        np.arange(total)
    )
    state, info, finite = program.run(
        program.init(jax.vmap(log_joint.init)(keys)), data, 0, num_epochs
    )
    if not finite:
        raise DivergedError("Pretraining met a number that is not finite; lower init_step_size.")
    values = np.asarray(info["log_joint"]).reshape(num_chains, num_starts, -1).mean(axis=2)
    best = values.argmax(axis=1) + num_starts * np.arange(num_chains)
    return jax.tree.map(lambda leaf: leaf[best], devices.to_host(state.params))


def execute(
    name: str,
    method: Method,
    log_joint: LogJoint,
    dataset: Dataset,
    *,
    num_chains: int,
    initial_params: Params | None = None,
    num_epochs: int,
    eval_freq: int,
    save_freq: int,
    collects: Callable[[int], bool] | None = None,
    num_draws: int = 1,
    keep_history: bool = False,
    ticker: Ticker | None = None,
    unit: str = "epoch",
    change_draws: Callable[[State, Params], Params] | None = None,
) -> tuple[RunResult, pathlib.Path]:
    """Runs a method to its end in the folder that the flags name, and leaves everything there."""
    directory = _open_directory(name, dataset)
    num_parameters = trees.size(jax.eval_shape(log_joint.init, jax.random.key(0)))
    print(
        f"{name}: {FLAGS.model_name} ({num_parameters:,} parameters) on {dataset.name} "
        f"({len(dataset.x_train):,} training rows), {num_chains} chain(s), "
        f"{jax.device_count()} {jax.devices()[0].device_kind} device(s), in {directory}",
        flush=True,
    )
    run = Run(
        log_joint,
        dataset,
        method,
        num_epochs=num_epochs,
        num_chains=num_chains,
        seed=FLAGS.seed,
        eval_freq=eval_freq,
        save_freq=save_freq,
        collects=collects,
        num_draws=num_draws,
        keep_history=keep_history,
        initial_params=initial_params,
        directory=directory,
        tabulate_freq=FLAGS.tabulate_freq,
        unit=unit,
    )
    if ticker:
        ticker.listener = run.log.within
    result = run.finish()
    if change_draws:
        result = run.finish_with(change_draws)
    outputs, log_likelihoods = result.test_predictions.flat()
    checkpoint_utils.write_arrays(
        directory / "predictions.npz",
        test_predictions=outputs,
        test_log_likelihoods=log_likelihoods,
        test_targets=run.test_targets,
        num_chains=np.array(num_chains),
    )
    summary = {
        "method": name,
        "dataset": dataset.name,
        "model": FLAGS.model_name,
        "num_parameters": num_parameters,
        "num_chains": num_chains,
        "num_draws": len(outputs),
        "epochs": num_epochs,
        "steps": result.steps,
        "seed": FLAGS.seed,
        "test": result.test_metrics,
        "test_mean_of_members": result.member_metrics,
        "train": result.train_metrics,
        "seconds": result.seconds,
        "peak_memory_bytes": _peak_memory(),
        "data_sha256": fingerprint(dataset),
        "device": {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("jax", "jaxlib", "dm-haiku", "optax", "numpy")
        }
        | {"python": sys.version.split()[0]},
    }
    write_json(directory / "summary.json", summary)
    title = f"{name}, {FLAGS.model_name} on {pathlib.Path(dataset.name).stem}"
    drawn = pictures.draw_run(directory, title, log_joint, dataset, result)
    _report(directory, result, drawn)
    return result, directory


def _peak_memory() -> int:
    """Of the first device if it keeps count, as accelerators do, else of this process."""
    statistics = jax.devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(statistics.get("peak_bytes_in_use", process))


def _report(directory: pathlib.Path, result: RunResult, pictures: list[pathlib.Path]) -> None:
    rows = [
        [metric, result.train_metrics[metric], value, result.member_metrics[metric]]
        for metric, value in result.test_metrics.items()
    ]
    print(tabulate(rows, ["", "train", "test", "test, mean of draws"], floatfmt=".4g"))
    print(f"The table is in {directory / 'summary.json'}; all of the run is in {directory}.")
    if pictures:
        print(f"Pictures: {', '.join(str(picture) for picture in pictures)}")


def _open_directory(name: str, dataset: Dataset) -> pathlib.Path:
    """The run's folder, with flags.json; one made by other flags or data is refused."""
    if FLAGS.dir is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        stem = pathlib.Path(dataset.name).stem
        FLAGS["dir"].value = f"runs/{name}/{stem}_{FLAGS.model_name}_{stamp}_{os.getpid()}"
    directory = pathlib.Path(FLAGS.dir)
    path = directory / "flags.json"
    content = {"method": name, **cmd_args_utils.own_flags(FLAGS), "data": fingerprint(dataset)}
    content = json.loads(json.dumps(content))  # as it will be read: tuples become lists
    if path.is_file():
        try:
            before = json.loads(path.read_text())
        except json.JSONDecodeError:
            raise UserError(f"{path} is damaged; use another --dir.") from None
        differing = [
            f"{flag} ({before.get(flag)} there, {content.get(flag)} here)"
            for flag in sorted(before.keys() | content.keys())
            if flag not in HARMLESS_FLAGS and before.get(flag) != content.get(flag)
        ]
        if differing:
            raise UserError(
                f"{directory} holds a run with other flags: {', '.join(differing)}. "
                "Use another --dir, or the same flags to go on with it."
            )
    elif directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty and holds no run; use another --dir.")
    else:
        write_json(path, content)
    return directory
