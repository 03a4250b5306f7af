"""How the loop runs each method where nobody sets its flags: the table behind the estimators.

A plan is a method with its numbers of chains, steps and draws. What is not asked for follows from
the data. Chains and optimisers end by themselves, as those of the scripts do, and say whether they
arrived; with a number of steps they make that many. Stochastic gradient samplers make a number of
updates.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from haiku_posteriors.core import (
    dropout,
    hmc,
    mclmc,
    progress,
    sgd,
    sgmcmc,
    trajectories,
    trees,
    vi,
)
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.implicit import implicit_vi
from haiku_posteriors.core.judging.diagnostics import Convergence
from haiku_posteriors.core.judging.training import Objective
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.utils import optim_utils, settings
from haiku_posteriors.utils.report import chain_diagnostics, verdicts
from haiku_posteriors.utils.report import training as training_report
from haiku_posteriors.utils.report.chain_diagnostics import ChainRules
from haiku_posteriors.utils.train_utils import Enough, RunResult

TRANSITIONS = settings.MAX_ITERATIONS  # of chains that end by themselves, at most
MAX_DRAW_BYTES = 10**9  # of these chains: their draws are in memory
BATCH_SIZE = 80
SAMPLER_UPDATES = 20_000  # of a stochastic gradient sampler, burn-in included


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Wishes:
    """What is asked of a method; None leaves it to the plan. The estimators' own parameters.

    Attributes:
      num_steps: transitions of chains, or epochs.
      num_burn_in: steps before draws are kept, of samplers.
      num_chains: chains, or members.
      num_draws: draws of each chain or member to keep.
      warm_start_epochs: of Adam, before chains start; 0 starts them from the prior.
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
      method: for one chain.
      num_chains, num_steps, num_draws, collects, keep_history, enough, is_finished: as in `Run`.
      warm_start_epochs: of Adam, before chains start.
      diagnose: what a result says of itself; None of optimisers with a given number of steps.
    """

    method: Method
    num_chains: int
    num_steps: int
    num_draws: int = 1
    collects: Callable[[int], bool] | None = None
    keep_history: bool = False
    enough: Enough | None = None
    is_finished: Callable[[State], jax.Array] | None = None
    warm_start_epochs: int = 0
    diagnose: Callable[[RunResult], dict[str, Any]] | None = None


def make_plan(name: str, log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    """The plan of a method of PLANS for data of so many rows."""
    if name not in PLANS:
        raise unknown_name("method", name, PLANS)
    for field in ("num_steps", "num_chains", "num_draws", "batch_size"):
        value = getattr(wishes, field)
        if value is not None and value < 1:
            raise UserError(f"{field} must be at least 1, not {value}.")
    return PLANS[name](log_joint, num_rows, wishes)


def _hmc(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    return _chains(hmc.hmc, log_joint, num_rows, wishes, {"target_accept": 0.9}, is_adjusted=True)


def _mclmc(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    # Adjusted, since nobody is there to read an estimate of the bias.
    options = {"adjusted": True, "target_accept": 0.9, **(wishes.options or {})}
    return _chains(mclmc.mclmc, log_joint, num_rows, wishes, options, bool(options["adjusted"]))


def _chains(
    make: Callable[..., Method],
    log_joint: LogJoint,
    num_rows: int,
    wishes: Wishes,
    defaults: Mapping[str, Any],
    is_adjusted: bool,
) -> Plan:
    """Chains that end when their verdict is converged, unless a number of steps is asked for."""
    num_chains = wishes.num_chains or 4
    bytes_per_step = 4 * trees.size(log_joint.shapes) * num_chains
    most = min(TRANSITIONS, max(1000, MAX_DRAW_BYTES // bytes_per_step))
    num_steps = wishes.num_steps or most
    burn_in = _burn_in(wishes, num_steps, min(200, num_steps // 2))
    collects = _collection(wishes, num_steps, burn_in)
    options = {"trajectory_length": trajectories.default_length(log_joint), **defaults}
    options |= wishes.options or {}
    rules = chain_diagnostics.ChainRules(burn_in, options["trajectory_length"], is_adjusted)
    ends_by_itself = wishes.num_steps is None and wishes.num_draws is None
    warm_start_epochs = wishes.warm_start_epochs
    if warm_start_epochs is None:  # as the scripts have it
        warm_start_epochs = 0 if wishes.step_size else settings.warm_start_epochs(num_rows)
    return Plan(
        make(log_joint, step_size=wishes.step_size, num_burn_in=burn_in, **options),
        num_chains,
        num_steps,
        collects=collects,
        keep_history=True,
        enough=rules.enough() if ends_by_itself else None,
        warm_start_epochs=warm_start_epochs,
        diagnose=lambda result: _diagnose_chains(result, rules),
    )


def _sghmc(log_joint: LogJoint, num_rows: int, wishes: Wishes, momentum_decay: float = 0.9) -> Plan:
    _refuse(wishes, "warm_start_epochs")
    batch_size = min(wishes.batch_size or BATCH_SIZE, num_rows)
    batches = num_minibatches(num_rows, batch_size)
    num_steps = wishes.num_steps or -(-SAMPLER_UPDATES // batches)
    burn_in = _burn_in(wishes, num_steps, num_steps // 3)
    collects = _collection(wishes, num_steps, burn_in, default=100)
    preconditioner = sgmcmc.rmsprop(adaptation_steps=max(burn_in * batches, 1))
    step_size = wishes.step_size or 1e-4
    options = {"momentum_decay": momentum_decay, **(wishes.options or {})}
    decay = options.pop("momentum_decay")
    if decay:
        sampler = sgmcmc.sghmc(step_size, decay, preconditioner)
    else:
        sampler = sgmcmc.sgld(step_size, preconditioner)
    return Plan(
        sgmcmc.sgmcmc(log_joint, sampler, batch_size, **options),
        wishes.num_chains or 4,
        num_steps,
        collects=collects,
        diagnose=_diagnose_sampler,
    )


def _sgld(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    return _sghmc(log_joint, num_rows, wishes, momentum_decay=0.0)


def _ensemble(log_joint: LogJoint, num_rows: int, wishes: Wishes, num_members: int = 10) -> Plan:
    if wishes.num_draws not in (None, 1):
        raise UserError("A member of an ensemble is one draw: give num_chains, not num_draws.")
    training = _Training(log_joint, num_rows, wishes, training_report.LOG_JOINT)
    method = sgd.sgd(log_joint, training.optimizer(), training.batch_size, **training.options)
    return training.plan(method, num_members, num_draws=1)


def _map(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    return _ensemble(log_joint, num_rows, wishes, num_members=1)


def _mean_field(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    training = _Training(log_joint, num_rows, wishes, training_report.ELBO)
    options = {"sigma_init": 1e-2, **training.options}
    optimizer, batch_size = training.optimizer(), training.batch_size
    return training.plan(vi.mean_field_vi(log_joint, optimizer, batch_size, **options))


def _mc_dropout(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    training = _Training(log_joint, num_rows, wishes, training_report.DROPOUT)
    defaults = {"optimizer": training.optimizer(), "batch_size": training.batch_size}
    return training.plan(dropout.mc_dropout(log_joint, **{**defaults, **training.options}))


def _implicit(log_joint: LogJoint, num_rows: int, wishes: Wishes) -> Plan:
    options = {"num_samples": 8, **(wishes.options or {})}
    training = _Training(
        log_joint,
        num_rows,
        wishes,
        training_report.ELBO,
        step_size=1e-3,
        draws_per_step=options["num_samples"],
        largest_step=settings.MAX_GENERATOR_STEP,
    )
    # Clipped as in run_implicit.py.
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), training.optimizer())
    method = implicit_vi.implicit_vi(log_joint, optimizer, training.batch_size, **options)
    return training.plan(method)


# A method is one line here.
PLANS: dict[str, Callable[[LogJoint, int, Wishes], Plan]] = {
    "hmc": _hmc,
    "mclmc": _mclmc,
    "sghmc": _sghmc,
    "sgld": _sgld,
    "mean_field": _mean_field,
    "mc_dropout": _mc_dropout,
    "implicit": _implicit,
    "ensemble": _ensemble,
    "map": _map,
}


class _Training:
    """How an optimiser is run: to the end by itself, or, if asked for, a number of epochs."""

    def __init__(
        self,
        log_joint: LogJoint,
        num_rows: int,
        wishes: Wishes,
        objective: Objective,
        step_size: float = 1e-2,
        draws_per_step: int = 1,
        largest_step: float = math.inf,
    ):
        """`step_size` is that of a schedule; without one it is the scripts', to `largest_step`."""
        _refuse(wishes, "num_burn_in", "warm_start_epochs")
        self.options = wishes.options or {}
        self._log_joint, self._wishes, self._objective = log_joint, wishes, objective
        self._by_itself = wishes.num_steps is None
        rows = BATCH_SIZE
        if self._by_itself:
            rows = settings.affordable_rows(trees.size(log_joint.shapes), draws_per_step)
            step = settings.STEP_OVER_PRIOR_STD * min(jax.tree.leaves(log_joint.prior_scales))
            step_size = min(step, largest_step)
        self._step_size = step_size if wishes.step_size is None else wishes.step_size
        self.batch_size = min(wishes.batch_size or rows, num_rows)
        self._batches = num_minibatches(num_rows, self.batch_size)
        self._num_steps = wishes.num_steps or -(-settings.MAX_UPDATES // self._batches)

    def optimizer(self) -> optax.GradientTransformation:
        """Adam, whose step `core.progress` decreases or a schedule."""
        length = None if self._by_itself else self._num_steps * self._batches
        return optim_utils.make_optimizer("Adam", self._step_size, length)

    def plan(self, method: Method, num_members: int = 1, num_draws: int = 100) -> Plan:
        """The plan; one that ends by itself ends with a verdict as well."""
        members = self._wishes.num_chains or num_members
        draws = self._wishes.num_draws or num_draws
        if not self._by_itself:
            return Plan(method, members, self._num_steps, draws)
        objective, num_random = self._objective, trees.size(self._log_joint.random_shapes)
        rules = optim_utils.rules_of_auto(self._batches, num_random)
        rules = rules._replace(num_evaluations=objective.evaluation_epochs(self._batches))

        def diagnose(result: RunResult) -> dict[str, Any]:
            verdict, content = training_report.judge_training(
                result.state.progress, rules, objective
            )
            return {**content, **verdicts.as_content(verdict)}

        return Plan(
            progress.watch(method, rules),
            members,
            self._num_steps,
            draws,
            is_finished=progress.all_reached,
            diagnose=diagnose,
        )


def _burn_in(wishes: Wishes, num_steps: int, default: int) -> int:
    burn_in = default if wishes.num_burn_in is None else wishes.num_burn_in
    if not 0 <= burn_in < num_steps:
        raise UserError(
            f"num_burn_in must be at least 0 and below num_steps ({num_steps}), not {burn_in}."
        )
    return burn_in


def _collection(
    wishes: Wishes, num_steps: int, burn_in: int, default: int | None = None
) -> Callable[[int], bool]:
    """Which steps give draws: as many as are asked for, evenly, the last of them at the end."""
    after = num_steps - burn_in
    wanted = wishes.num_draws or min(default or after, after)
    if wanted > after:
        raise UserError(f"{after} steps after burn-in give no {wanted} draws of each chain.")
    period = after // wanted
    return lambda done: sgmcmc.collects(done, num_steps - wanted * period, period)


def _refuse(wishes: Wishes, *names: str) -> None:
    for name in names:
        if getattr(wishes, name) is not None:
            raise UserError(f"{name} is for Markov chains, and this method has no use for it.")


def _diagnose_sampler(result: RunResult) -> dict[str, Any]:
    predictions, parameters = chain_diagnostics.diagnose(result)
    return {"predictions": _extremes(predictions), "parameters": _extremes(parameters)}


def _diagnose_chains(result: RunResult, rules: ChainRules) -> dict[str, Any]:
    history = rules.after_burn_in(result.history)
    predictions, parameters = chain_diagnostics.diagnose(result)
    verdict = rules.verdict(predictions, history, parameters)
    return {
        "predictions": _extremes(predictions),
        "parameters": _extremes(parameters),
        "converged": verdict.converged,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
        "acceptance": history["acceptance_probability"].mean(axis=1).tolist(),
        "divergent": int(history["divergent"].sum()),
        "num_transitions": history["divergent"].shape[1],
    }


def _extremes(convergence: Convergence) -> dict[str, float]:
    """Over the quantities that changed at all."""
    return {
        "largest_rhat": float(np.nanmax(convergence.rhat, initial=-np.inf)),
        "smallest_bulk_ess": float(np.nanmin(convergence.bulk_ess, initial=np.inf)),
        "smallest_tail_ess": float(np.nanmin(convergence.tail_ess, initial=np.inf)),
    }
