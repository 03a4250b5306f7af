"""Where neural samplers start: mean-field posteriors, trained to their own end in the same run.

The family of samplers contains mean-field VI (g constant), whose ELBO is known and cheap. Around a
trained network with widths by the curvature, samplers of networks end in simpler functions and
lower bounds than mean-field VI does (docs/implicit.md). Training is a loop of its own, in a folder
inside the run's: it is resumed like any other.
"""

import pathlib

import jax
import numpy as np

from haiku_posteriors.core import progress, trees, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.utils import chains, optim_utils, signals, tasks
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.settings import STEP_OVER_PRIOR_STD
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import Run


def train(
    task: Task, directory: pathlib.Path, starts: vi.VariationalParams
) -> vi.VariationalParams:
    """Mean-field posteriors (members, ...), from `starts` to where their ELBO no longer rises.

    Rows of a step are those of the sampler, its epochs the most.
    The step is Adam's as in run_vi.py.
    """
    settings, log_joint = task.settings, task.log_joint
    batches = num_minibatches(len(task.dataset.y_train), settings.batch_size)
    rules = optim_utils.rules_of_auto(batches, trees.size(log_joint.random_shapes))
    rules = rules._replace(num_evaluations=training.ELBO.evaluation_epochs(batches))
    scale = min(jax.tree.leaves(log_joint.prior_scales))
    optimizer = optim_utils.make_optimizer("Adam", STEP_OVER_PRIOR_STD * scale, None)
    method = vi.mean_field_vi(
        log_joint, optimizer, settings.batch_size, estimator=settings.vi_estimator
    )
    run = Run(
        log_joint,
        task.dataset,
        progress.watch(method, rules),
        num_steps=settings.num_epochs,
        num_chains=settings.num_members,
        seed=settings.seed,
        eval_freq=settings.num_epochs,
        save_freq=settings.num_epochs,
        is_finished=progress.all_reached,
        initial_params=starts,
        purposes=chains.MEAN_FIELD_START,
        time_limit=tasks.seconds_for_start(task),
        directory=directory / tasks.MEAN_FIELD_START,
        unit="epoch of the mean-field start",
    )
    with signals.part_of(directory):
        state = run.finish().state
    known = np.asarray(state.progress.num_rounds) > 0
    values = ", ".join(f"{value:.6g}" for value in np.asarray(state.progress.objective)[known])
    said = f"ELBO of the members {values}" if known.all() else "it was cut short"
    print(f"Mean-field start: {run.step} epochs; {said}.", flush=True)
    return state.state.variational
