"""What scripts of Markov chains share: from a method to judged chains in their folder."""

import math
from collections.abc import Callable

from haiku_posteriors.core import trajectories
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.bias import BiasReport
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils import tasks
from haiku_posteriors.utils.logging_utils import Ticker
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.report.chain_diagnostics import ChainRules
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import warm_start
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

# Of a time limit, what is kept for the estimate of bias where there is one: draws whose bias is not
# known are not judged.
PART_FOR_BIAS = 0.2


def trajectory_length(task: Task) -> float:
    """The given one, or the default of HMC."""
    given = task.settings.trajectory_len
    return trajectories.default_length(task.log_joint) if given is None else given


def remedies(settings: Settings) -> tuple[str, ...]:
    """What a run with these settings does without, of what helps chains most."""
    found = []
    if not settings.warm_start_epochs and settings.init_checkpoint is None:
        found.append("Start from trained networks (warm_start_epochs)")
    is_given = settings.step_size is not None
    if is_given:
        found.append("Adapt the step (give no step_size, but num_burn_in_iterations)")
    jitter = settings.values.get("trajectory_jitter")
    if jitter == 0 or (jitter is None and is_given and "trajectory_jitter" in settings.values):
        found.append("Vary the lengths of trajectories (trajectory_jitter=0.5)")
    if settings.values.get("adapt_mass_matrix") is False:
        found.append("Adapt the masses (adapt_mass_matrix)")
    return tuple(found)


def seconds_left(task: Task, result: RunResult) -> float:
    """What the chains have left of a time limit; infinity without one."""
    limit = task.settings.time_limit
    return math.inf if limit is None else max(60 * limit - result.seconds, 0.0)


def run_chains(
    task: Task,
    method: Method,
    ticker: Ticker,
    adjusted: bool = True,
    estimate_bias: Callable[[RunResult], BiasReport] | None = None,
) -> None:
    """Runs the chains, judges them, and leaves the run in its folder.

    Args:
      task: what to work on, with the flags `cmd_args_utils.CHAINS`.
      method: of one chain.
      ticker: what it tells of its progress within a transition.
      adjusted: whether it has a Metropolis test.
      estimate_bias: of a method without one, from the result.
    """
    settings = task.settings
    given = warm_start.given_starts(task)
    burn_in, thinning = settings.num_burn_in_iterations, settings.thinning
    if settings.num_iterations - burn_in < thinning:  # said before anything is trained
        raise UserError(
            f"No draws would be collected in {settings.num_iterations} iterations, {burn_in} of "
            "them burn-in; run longer."
        )
    rules = ChainRules(burn_in, trajectory_length(task), adjusted, remedies(settings))
    directory = tasks.open_folder(task)
    starts = warm_start.train_starts(task, directory, given, settings.num_chains)
    tasks.execute(
        task,
        directory,
        method,
        part_of_time=1 - PART_FOR_BIAS if estimate_bias and settings.bias_iterations else 1.0,
        num_chains=settings.num_chains,
        num_steps=settings.num_iterations,
        initial_params=starts,
        collects=lambda done: done > burn_in and (done - burn_in) % thinning == 0,
        keep_history=True,
        enough=(
            rules.enough(settings.num_iterations - burn_in) if settings.until_converged else None
        ),
        ticker=ticker,
        unit="iteration",
        judge=lambda directory, result: chain_diagnostics.report_chains(
            directory,
            result,
            rules,
            estimate_bias(result) if estimate_bias else None,
            warm_start.notes(starts, settings.warm_start_epochs),
        ),
    )
