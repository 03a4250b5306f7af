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

from haiku_posteriors.core import sgd
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils
from haiku_posteriors.utils.settings import WARM_START_BATCH_SIZE, Settings
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import Run

STEP_OVER_PRIOR_STD = 0.01
WINDOWS = 10  # into which training is divided; in each the log-joint must rise, or it ends


def given_starts(task: Task) -> Params | None:
    """The parameters of init_checkpoint, (num_chains, ...); None where there is none.

    Chains keep the parameters that stochastic_params does not name where they start: refused if
    nothing has trained them.
    """
    settings = task.settings
    is_trained = settings.warm_start_epochs or settings.init_checkpoint is not None
    if settings.stochastic_params and not is_trained:
        raise UserError(
            "Chains keep the parameters that stochastic_params does not name where they start: "
            "give an init_checkpoint with trained ones, or warm_start_epochs."
        )
    return checkpoint_utils.load_starts(
        settings.init_checkpoint, task.log_joint.shapes, settings.num_chains
    )


def train_starts(task: Task, directory: pathlib.Path, starts: Params | None) -> Params | None:
    """Parameters for each chain to start from, (num_chains, ...).

    Adam's step is STEP_OVER_PRIOR_STD of the prior's standard deviation: the scale on which weights
    differ. A member that no longer gains stops (`core.plateau`), and training when all have.

    Args:
      task: what to work on; where its warm_start_epochs are 0, `starts` are returned.
      directory: of the run.
      starts: where training starts; by default at initialisations of the network's own.
    """
    settings = task.settings
    num_chains, num_epochs = settings.num_chains, settings.warm_start_epochs
    if num_epochs == 0:
        return starts
    log_joint, num_rows = task.log_joint, len(task.dataset.x_train)
    batch_size = min(WARM_START_BATCH_SIZE, num_rows)
    window = max(1, num_epochs // WINDOWS)
    scale = min(jax.tree.leaves(log_joint.prior_scales))
    run = Run(
        log_joint,
        task.dataset,
        sgd.sgd(log_joint, optax.adam(STEP_OVER_PRIOR_STD * scale), batch_size, window),
        num_steps=num_epochs,
        num_chains=num_chains,
        seed=settings.seed,
        eval_freq=num_epochs,
        save_freq=num_epochs,
        is_finished=lambda states: jnp.all(states.plateau.is_reached),
        initial_params=starts,
        purposes=chains.WARM_START,
        directory=directory / "warm_start",
        unit="epoch of the warm start",
        expects_spread=False,  # nothing but starts
    )
    state = run.finish().state
    values = ", ".join(f"{value:.6g}" for value in np.asarray(state.plateau.previous))
    print(f"Warm start: {run.step} epochs of Adam; log-joint of the members {values}.", flush=True)
    return state.params


def notes(settings: Settings, starts: Params | None) -> list[str]:
    """Sentences for the verdict on where the chains started, as far as R-hat depends on it."""
    if starts is None:
        return []
    if all(np.array_equal(leaf, leaf[:1].repeat(len(leaf), 0)) for leaf in jax.tree.leaves(starts)):
        return ["All chains started at one point: R-hat cannot see what none of them has left."]
    if settings.warm_start_epochs:
        return [
            "Chains started from networks trained by Adam (warm_start_epochs): R-hat tells whether "
            "they have forgotten them, and nothing of places where training never ends."
        ]
    return []
