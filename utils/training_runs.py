"""What scripts of optimisers share: from a method to a judged run in its folder."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from haiku_posteriors.core import progress, trees
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.judging.training import Objective
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import optim_utils, tasks
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

Measure = Callable[[RunResult], dict[str, Any]]


def train(
    task: Task,
    directory: pathlib.Path,
    method: Method,
    objective: Objective,
    *,
    num_members: int,
    measure: Measure | None = None,
    change_draws: Callable[[State, Params], Params] | None = None,
    judge: Callable[[pathlib.Path, RunResult], None] | None = None,
    **loop: Any,
) -> None:
    """Trains the members, to the end by itself or of a schedule, judges them, and leaves the run.

    Args:
      task: what to work on, with the flags `cmd_args_utils.OPTIMIZER`.
      directory: from `tasks.open_folder`.
      method: of one member; its optimizer is that of `optim_utils.optimizer_of`.
      objective: what it maximises.
      num_members: of the ensemble.
      measure: result, whose state is a `progress.WatchedState` -> further arguments of
        `training.report_training`.
      change_draws, judge: as in `tasks.execute`; their states are the method's.
      **loop: further arguments of `Run`.
    """
    settings = task.settings
    num_random = trees.size(task.log_joint.random_shapes)
    rules = optim_utils.rules_of(settings, len(task.dataset.y_train), num_random)
    batches = num_minibatches(len(task.dataset.y_train), settings.batch_size)
    rules = rules._replace(num_evaluations=objective.evaluation_epochs(batches))

    def report(directory: pathlib.Path, result: RunResult) -> None:
        if judge:
            judge(directory, dataclasses.replace(result, state=result.state.state))
        measured = measure(result) if measure else {}
        training.report_training(directory, result.state.progress, rules, objective, **measured)

    tasks.execute(
        task,
        directory,
        progress.watch(method, rules),
        num_chains=num_members,
        num_steps=settings.num_epochs,
        is_finished=progress.all_reached if settings.until_converged else None,
        change_draws=(
            (lambda watched, draws: change_draws(watched.state, draws)) if change_draws else None
        ),
        judge=report,
        **loop,
    )
