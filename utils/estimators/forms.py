"""What is asked of a method, how the loop runs it, and what plans of all kinds share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from haiku_posteriors.core import sgmcmc
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.diagnostics import Convergence
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.train_utils import Enough, RunResult

Diagnose = Callable[[RunResult], dict[str, Any]]

MAX_DRAW_BYTES = 10**9  # of chains that end by themselves: their draws are in memory
BATCH_SIZE = 80  # where a number of steps is given


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Wishes:
    """What is asked of a method; None leaves it to the plan. The estimators' own parameters.

    Attributes:
      num_steps: transitions of chains, or epochs.
      num_burn_in: steps before draws are kept, of samplers.
      num_chains: chains, or members.
      num_draws: draws of each chain or member to keep.
      warm_start_epochs: of Adam, before chains and generators start; 0 for chains from the prior.
      step_size: of leapfrog, of the optimizer, or of the stochastic gradient sampler.
      batch_size: maximum rows per minibatch.
      options: further arguments of the method's function in `core`.
    """

    num_steps: int | None = None
    num_burn_in: int | None = None
    num_chains: int | None = None
    num_draws: int | None = None
    warm_start_epochs: int | None = None
    step_size: float | None = None
    batch_size: int | None = None
    options: Mapping[str, Any] | None = None


class Plan(NamedTuple):
    """A method and how the loop runs it.

    Attributes:
      method: for one chain; None where `fit` makes it.
      num_chains, num_steps, num_draws, collects, keep_history, enough, is_finished: as in `Run`.
      warm_start_epochs: of Adam, before chains start.
      diagnose: what a result says of itself; None of optimisers with a given number of steps.
      fit: data, trained starts of the chains and the seed -> method and `diagnose`.
    """

    method: Method | None
    num_chains: int
    num_steps: int
    num_draws: int = 1
    collects: Callable[[int], bool] | None = None
    keep_history: bool = False
    enough: Enough | None = None
    is_finished: Callable[[State], jax.Array] | None = None
    warm_start_epochs: int = 0
    diagnose: Diagnose | None = None
    fit: Callable[[Dataset, Params, int], tuple[Method, Diagnose]] | None = None


def find_burn_in(wishes: Wishes, num_steps: int, default: int) -> int:
    """Steps before draws are kept."""
    burn_in = default if wishes.num_burn_in is None else wishes.num_burn_in
    if not 0 <= burn_in < num_steps:
        raise UserError(
            f"num_burn_in must be at least 0 and below num_steps ({num_steps}), not {burn_in}."
        )
    return burn_in


def make_collection(
    wishes: Wishes, num_steps: int, burn_in: int, default: int | None = None
) -> Callable[[int], bool]:
    """Which steps give draws: as many as are asked for, evenly, the last of them at the end."""
    after = num_steps - burn_in
    wanted = wishes.num_draws or min(default or after, after)
    if wanted > after:
        raise UserError(f"{after} steps after burn-in give no {wanted} draws of each chain.")
    period = after // wanted
    return lambda done: sgmcmc.collects(done, num_steps - wanted * period, period)


def refuse(wishes: Wishes, *names: str) -> None:
    """Refuses wishes that the method does not know."""
    for name in names:
        if getattr(wishes, name) is not None:
            raise UserError(f"{name} is for Markov chains, and this method has no use for it.")


def extremes(convergence: Convergence) -> dict[str, float]:
    """Over the quantities that changed at all."""
    return {
        "largest_rhat": float(np.nanmax(convergence.rhat, initial=-np.inf)),
        "smallest_bulk_ess": float(np.nanmin(convergence.bulk_ess, initial=np.inf)),
        "smallest_tail_ess": float(np.nanmin(convergence.tail_ess, initial=np.inf)),
    }
