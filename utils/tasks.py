"""From settings to a task, and from a task to a finished folder."""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from haiku_posteriors.core import trees
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    devices,
    files,
    hosts,
    locks,
    models,
    problem,
    run_priors,
    signals,
)
from haiku_posteriors.utils import settings as settings_table
from haiku_posteriors.utils.data_utils import Dataset, fingerprint
from haiku_posteriors.utils.draws import draws_per_block
from haiku_posteriors.utils.problem import Problem
from haiku_posteriors.utils.report import (
    pictures,
    predictive_checks,
    prior_predictive,
    problem_files,
    run_folders,
    run_networks,
    run_page,
    summary,
)
from haiku_posteriors.utils.report.problem_files import StoredProblem
from haiku_posteriors.utils.report.run_folders import OpenedRun
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.train_utils import Run, RunResult

# Flags that a resumed run may change: they do not touch the result.
HARMLESS_FLAGS = {
    *("dir", "data_dir", "tabulate_freq", "prior_predictive", "time_limit"),
    *("mesh", "coordinator_address", "num_processes", "process_id"),
}
# Those that it may raise: transitions of chains do not depend on how many there will be.
GROWING_FLAGS = {"num_iterations"}

PRIOR_FLAGS = (
    *("weight_decay", "prior_family", "prior_group", "prior_mixture_weight"),
    *("prior_mixture_ratio", "prior_degrees_of_freedom"),
)


# Runs inside a run that find where it starts; half of a time limit is theirs at most.
WARM_START, MEAN_FIELD_START = "warm_start", "mean_field"


class Task(NamedTuple):
    """What a script works on.

    Attributes:
      method: the name of its method.
      settings: every flag's value.
      dataset: the data.
      log_joint: the posterior to approximate.
      started: by `time.monotonic`, from which on seconds count; None where nobody counts.
    """

    method: str
    settings: Settings
    dataset: Dataset
    log_joint: LogJoint
    started: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of this session."""
        return 0.0 if self.started is None else time.monotonic() - self.started


def load_task(method: str, settings: Settings) -> Task:
    """Reads the data, fills in every flag that depends on them, and builds the log-joint."""
    started = time.monotonic()
    if settings.dir:
        files.refuse_unusable(pathlib.Path(settings.dir))
    _refuse_two_priors(settings)
    settings = settings_table.resolve(method, settings)
    known_noise = settings_table.KNOWN_NOISE_STD.get(settings.dataset_name)
    described = Problem.from_mapping(settings.values)
    if settings.dir:  # a run that goes on has its prior with it
        described = described.in_folder(pathlib.Path(settings.dir))
    chosen, dataset, log_joint = problem.load_problem(described, known_noise)
    is_estimated = method in ("vi", "gaussian_dropout", "implicit")
    estimator = noisy_layers.default_estimator(log_joint) if is_estimated else None
    settings = settings_table.complete(
        settings,
        {**vars(chosen), "vi_estimator": estimator},
        len(dataset.y_train),
        trees.size(log_joint.shapes),
        min(jax.tree.leaves(log_joint.prior_scales)),
    )
    values = settings.values
    num_chains = values.get("num_chains", values.get("num_members", 1))
    devices.choose_mesh(values.get("mesh"), num_chains, values.get("deterministic_sums", False))
    return Task(method, settings, dataset, log_joint, started)


def _refuse_two_priors(settings: Settings) -> None:
    given = [name for name in PRIOR_FLAGS if settings.was_given(name)]
    if settings.prior_from is not None and given:
        raise UserError(f"Give {given[0]} or prior_from, which is a prior of its own, not both.")


def load_task_of_run(
    method: str, settings: Settings, changes: Mapping[str, Any] | None = None
) -> tuple[Task, OpenedRun]:
    """The task of a finished run for another method, and that run.

    Args:
      method: the name of the method.
      settings: with the flags `cmd_args_utils.OF_A_RUN`.
      changes: of the run's problem, by field.

    Raises:
      UserError: there is no such run, it is not finished, or its data are others now.
    """
    started = time.monotonic()
    if settings.dir:
        files.refuse_unusable(pathlib.Path(settings.dir))
    if not settings.run:
        raise UserError("Give the folder of the finished run to begin with as --run.")
    run = run_folders.open_run(pathlib.Path(settings.run))
    jax.config.update("jax_enable_x64", run_folders.needs_float64([run]))
    _, dataset = run_networks.load_run_problem(run, settings.data_dir)
    described = run_networks.problem_of_run(run, settings.data_dir)
    changed = dataclasses.replace(described, **(changes or {}))
    always = {"prior_predictive": False, "eval_freq": 1, "save_freq": 1}
    values = {**always, **settings.values, **vars(changed)}
    sources = {**dict.fromkeys(values, f"as in {settings.run}"), **settings.sources}
    num_chains = values.get("num_chains", values.get("num_members", 1))
    devices.choose_mesh(values.get("mesh"), num_chains, values.get("deterministic_sums", False))
    log_joint = problem.build_log_joint(changed, dataset.form)
    return Task(method, Settings(values, sources), dataset, log_joint, started), run


def open_folder(task: Task) -> pathlib.Path:
    """The run's folder, with flags.json, locked; one made by other flags or data is refused.

    `execute` unlocks it at its end, or the end of the process. Where there are several processes it
    is process 0's, and the others get one that goes with them.
    """
    show_if_asked(task.settings)
    directory = pathlib.Path(hosts.on_first(lambda: str(_open_folder(task))))
    return hosts.own_folder(directory)


def _open_folder(task: Task) -> pathlib.Path:
    settings = task.settings
    directory = pathlib.Path(settings.dir or _new_name(task))
    path = directory / "flags.json"
    content = cmd_args_utils.about_the_run(settings) | {
        "method": task.method,
        "dir": str(directory),
        "data": fingerprint(task.dataset),
        "network_source": models.source_of(settings.model_name)["sha256"],
    }
    content = json.loads(json.dumps(content))  # as it will be read: tuples become lists
    # A lock or a half-written file is what a run leaves that was killed as it began.
    foreign = directory.is_dir() and any(
        entry.name != locks.NAME and entry.suffix != ".tmp" for entry in directory.iterdir()
    )
    if foreign and not path.is_file():
        raise UserError(f"{directory} is not empty and holds no run; use another --dir.")
    try:
        locks.hold(directory)
        files.drop_leftovers(directory)
        if not path.is_file():
            files.write_json(path, content)
        else:
            before = files.read_json(path)
            _refuse_other_flags(directory, before, content)
            raised = {flag: content[flag] for flag in GROWING_FLAGS & content.keys()}
            if before | raised != before:
                files.write_json(path, before | raised)
    except OSError as error:
        raise UserError(f"{directory} cannot be written to: {error.strerror}.") from error
    except UserError:
        locks.release(directory)
        raise
    return directory


def show_if_asked(settings: Settings) -> None:
    """With --show_settings, shows them and leaves."""
    if settings.show_settings:
        print(cmd_args_utils.describe_settings(settings))
        raise SystemExit(0)


def _new_name(task: Task) -> str:
    stem = pathlib.Path(task.dataset.name).stem.replace(":", "_")
    model = pathlib.Path(task.settings.model_name).name.replace(":", "_")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"runs/{task.method}/{stem}_{model}_{stamp}_{os.getpid()}"


def _refuse_other_flags(directory: pathlib.Path, before: dict, now: dict) -> None:
    same_network = before.get("model_name") == now["model_name"]
    known = "network_source" in before  # runs of version 0.2.0 do not tell
    if same_network and known and before["network_source"] != now["network_source"]:
        raise UserError(
            f"The file of the network {now['model_name']} has changed since the run in {directory} "
            "began: put it back as it was, or use another --dir."
        )
    differing = [
        f"{flag} ({before.get(flag)} there, {now.get(flag)} here)"
        for flag in sorted((before.keys() | now.keys()) - {*HARMLESS_FLAGS, "network_source"})
        if before.get(flag) != now.get(flag)
        and not (flag in GROWING_FLAGS and before.get(flag, math.inf) < now.get(flag, 0))
    ]
    if differing:
        raise UserError(
            f"{directory} holds a run with other flags: {', '.join(differing)}. "
            "Use another --dir, or the same flags to go on with it."
        )


def seconds_for_start(task: Task) -> float | None:
    """What finding a start may still take; None without a time limit."""
    limit = task.settings.time_limit
    return None if limit is None else max(60 * limit / 2 - task.elapsed, 0.0)


def describe(task: Task, num_chains: int, num_draws: int) -> StoredProblem:
    """What the folder stores, so that its draws predict without the data.

    Args:
      task: what is worked on.
      num_chains: chains of the run.
      num_draws: draws of each chain that are collected at once.
    """
    model_name = task.settings.model_name
    return StoredProblem(
        Problem.from_mapping(task.settings.values),
        task.dataset.form,
        num_chains,
        min(num_draws, draws_per_block(task.log_joint.shapes, num_chains)),
        len(task.dataset.y_test),
        models.source_of(model_name),
        task.settings.values.get("deterministic_sums", False),
    )


def execute(
    task: Task,
    directory: pathlib.Path,
    method: Method,
    *,
    num_chains: int,
    num_steps: int,
    change_draws: Callable[..., Any] | None = None,
    judge: Callable[[pathlib.Path, RunResult], None] | None = None,
    taught: Dataset | None = None,
    part_of_time: float = 1.0,
    **loop: Any,
) -> None:
    """Runs a method to its end in an open folder, and leaves everything there.

    Args:
      task: what to work on.
      directory: from `open_folder`.
      method: what to run.
      num_chains, num_steps: as in `Run`.
      change_draws: see `Run.finish`.
      judge: says of the result what is to be said of this method's.
      taught: what the method is given in place of the task's data, with the same test rows; the
        folder is of the task's data all the same.
      part_of_time: of a time limit, what the loop may take.
      **loop: further arguments of `Run`.
    """
    settings, dataset = task.settings, task.dataset
    print(
        f"{task.method}: {settings.model_name} ({trees.size(task.log_joint.shapes):,} parameters) "
        f"on {dataset.name} ({len(dataset.y_train):,} training rows), {num_chains} chain(s), "
        f"{jax.device_count()} {jax.devices()[0].device_kind} device(s)"
        f"{f' of {jax.process_count()} processes' if hosts.are_several() else ''}, in {directory}",
        flush=True,
    )
    problem_files.write(directory, describe(task, num_chains, loop.get("num_draws", 1)))
    if settings.prior_from is not None:
        _keep_prior(directory, settings.prior_from, task.log_joint)
    if settings.prior_predictive:
        path = directory / "prior_predictive.png"
        prior_predictive.draw(path, task.log_joint, dataset, settings.seed)
        print(f"What the prior says of the data: {path}", flush=True)
    starts = (directory / name for name in (WARM_START, MEAN_FIELD_START))
    run = Run(
        task.log_joint,
        taught or dataset,
        method,
        num_steps=num_steps,
        num_chains=num_chains,
        seed=settings.seed,
        eval_freq=settings.eval_freq,
        save_freq=settings.save_freq,
        directory=directory,
        tabulate_freq=settings.tabulate_freq,
        time_limit=None if settings.time_limit is None else 60 * part_of_time * settings.time_limit,
        seconds_before=max(task.elapsed, sum(map(checkpoint_utils.seconds_spent, starts))),
        **loop,
    )
    result = run.finish(change_draws)
    if not hosts.is_first():
        return
    hosts.go_on_alone()
    files.write_arrays(
        directory / "predictions.npz",
        test_predictions=result.test_predictions.flat_outputs,
        test_log_likelihoods=result.test_predictions.flat_log_likelihoods,
        test_targets=run.test_targets,
        num_chains=np.array(num_chains),
    )
    files.write_arrays(
        directory / "train_log_likelihoods.npz",
        log_likelihoods=result.train_log_likelihoods,
        draws=result.train_draws,
    )
    facts = {
        "method": task.method,
        "dataset": dataset.name,
        "data_sha256": fingerprint(dataset),
        "model": settings.model_name,
        "num_parameters": trees.size(task.log_joint.shapes),
        "seed": settings.seed,
        "epochs": run.step,
    }
    refinement = directory / "refinement.json"
    if refinement.is_file():
        facts["refinement"] = files.read_json(refinement)
    by_target = summary.metrics_by_target(result, dataset.form.target_names)
    if by_target:
        facts["test_by_target"] = by_target
    judged = predictive_checks.judge(result, settings.temperature)
    summary.write(directory, result, facts | judged.numbers)
    print(summary.table(result))
    if by_target:
        print(summary.table_by_target(by_target))
    for sentence in judged.sentences:
        print(sentence)
    if judge:
        _judge(judge, directory, result)
        summary.add_verdict(directory)
    data_name = files.readable(pathlib.Path(dataset.name).stem)
    title = f"{task.method}, {settings.model_name} on {data_name}"
    unit = loop.get("unit", "epoch")
    drawn = pictures.draw_run(directory, title, task.log_joint, dataset, result, unit)
    report = run_page.write(directory)
    print(f"The table is in {directory / 'summary.json'}; all of the run is in {directory}.")
    if drawn:
        print(f"Pictures: {', '.join(map(str, drawn))}")
    print(f"The report is {report}.")
    locks.release(directory)


def _keep_prior(directory: pathlib.Path, path: str, log_joint: LogJoint) -> None:
    """Copies the prior to where the draws are, unless it is there, and says what it is."""
    gaussian, sentence = run_priors.load(run_priors.path_of(directory, path), log_joint)
    run_priors.save(directory, gaussian, sentence)
    print(sentence, flush=True)


def _judge(
    judge: Callable[[pathlib.Path, RunResult], None], directory: pathlib.Path, result: RunResult
) -> None:
    """Judges, which may take chains of its own; a signal ends it as it ends the loop.

    Nothing of it is kept: the same command judges again what is on disk.
    """
    signals.run_stage(directory, lambda: judge(directory, result))
