"""Where chains start: an ensemble, trained by Adam on the same log-joint, in the same run.

From the prior, chains on a posterior of little noise spend most of a run on their way. A trained
network is a short way from it, and networks trained from independent initialisations are as far
apart as anything cheap can be. Training is a loop of its own, in a folder inside the run's: it is
resumed like any other.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_posteriors.core import plateau, sgd
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, hosts, signals, tasks
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.settings import STEP_OVER_PRIOR_STD, WARM_START_BATCH_SIZE
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import Run

WINDOWS = 10  # into which training is divided; in each the log-joint must rise, or it ends


def given_starts(task: Task, keeps_point_estimates: bool = True) -> Params | None:
    """The parameters of init_checkpoint, (num_chains, ...); None where there is none.

    Args:
      task: what to work on.
      keeps_point_estimates: whether chains keep the parameters that stochastic_params does not name
        where they start: refused if nothing has trained them.
    """
    settings = task.settings
    is_trained = settings.warm_start_epochs or settings.init_checkpoint is not None
    if keeps_point_estimates and settings.stochastic_params and not is_trained:
        raise UserError(
            "Chains keep the parameters that stochastic_params does not name where they start: "
            "give an init_checkpoint with trained ones, or warm_start_epochs."
        )
    return checkpoint_utils.load_starts(
        settings.init_checkpoint, task.log_joint.shapes, settings.num_chains
    )


def train_starts(
    task: Task, directory: pathlib.Path, starts: Params | None, num_chains: int
) -> Params | None:
    """Parameters for each chain or member to start from, (num_chains, ...), as the flags ask for.

    Args:
      task: what to work on; where its warm_start_epochs are 0, `starts` are returned.
      directory: of the run.
      starts: where training starts; by default at initialisations of the network's own.
      num_chains: how many.
    """
    settings = task.settings
    if settings.warm_start_epochs == 0:
        return starts
    folders = (directory, directory / tasks.WARM_START)
    # A run that has left its start keeps it, also where a larger time limit would train it longer.
    has_begun = hosts.share(all(map(checkpoint_utils.has_checkpoint, folders)))
    with signals.part_of(directory):
        return train(
            task.log_joint,
            task.dataset,
            num_chains=num_chains,
            num_epochs=settings.warm_start_epochs,
            seed=settings.seed,
            time_limit=0.0 if has_begun else tasks.seconds_for_start(task),
            directory=directory / tasks.WARM_START,
            starts=starts,
        )


def train(
    log_joint: LogJoint,
    dataset: Dataset,
    *,
    num_chains: int,
    num_epochs: int,
    seed: int,
    directory: pathlib.Path | None = None,
    starts: Params | None = None,
    time_limit: float | None = None,
    quiet: bool = False,
) -> Params:
    """Members of an ensemble, (num_chains, ...), for chains to start from.

    Adam's step is STEP_OVER_PRIOR_STD of the prior's standard deviation: the scale on which weights
    differ. A member that no longer gains stops (`core.plateau`), and training when all have.

    Args:
      log_joint: of the chains.
      dataset: likewise.
      num_chains: how many members.
      num_epochs: passes over the data, at most.
      seed: of the run.
      directory: where training can be resumed; None for nowhere.
      starts: where training starts; by default at initialisations of the network's own.
      time_limit: seconds after which it ends.
      quiet: says nothing.
    """
    batch_size = min(WARM_START_BATCH_SIZE, len(dataset.y_train))
    window = max(1, num_epochs // WINDOWS)
    scale = min(jax.tree.leaves(log_joint.prior_scales))
    run = Run(
        log_joint,
        dataset,
        sgd.sgd(log_joint, optax.adam(STEP_OVER_PRIOR_STD * scale), batch_size, window),
        num_steps=num_epochs,
        num_chains=num_chains,
        seed=seed,
        eval_freq=num_epochs,
        save_freq=num_epochs,
        is_finished=lambda states: jnp.all(states.plateau.is_reached),
        initial_params=starts,
        purposes=chains.WARM_START,
        time_limit=time_limit,
        directory=directory,
        unit="epoch of the warm start",
        expects_spread=False,  # nothing but starts
        quiet=quiet,
    )
    state = run.finish().state
    if not quiet:
        last = state.plateau
        found = np.where(last.previous > plateau.LOWEST, last.previous, last.mean)
        values = ", ".join(f"{value:.6g}" for value in found)
        print(
            f"Warm start: {run.step} epochs of Adam; log-joint of the members {values}.", flush=True
        )
    return state.params


def notes(starts: Params | None, num_epochs: int) -> list[str]:
    """Sentences for the verdict on where the chains started, as far as R-hat depends on it."""
    if starts is None:
        return []
    if all(np.array_equal(leaf, leaf[:1].repeat(len(leaf), 0)) for leaf in jax.tree.leaves(starts)):
        return ["All chains started at one point: R-hat cannot see what none of them has left."]
    if num_epochs:
        return [
            "Chains started from networks trained by Adam (warm_start_epochs): R-hat tells whether "
            "they have forgotten them, and nothing of places where training never ends."
        ]
    return []
