"""How the loop runs each method where nobody sets its flags: the table behind the estimators.

A plan is a method with its numbers of chains, steps and draws. What is not asked for follows from
the data. Chains and optimisers end by themselves, as those of the scripts do, and say whether they
arrived; with a number of steps they make that many.
"""

from collections.abc import Callable, Mapping
from typing import Any

from haiku_posteriors.core import hmc, mclmc, trajectories, trees
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils import settings
from haiku_posteriors.utils.estimators import forms, optimisers, samplers
from haiku_posteriors.utils.estimators.forms import Plan, Wishes
from haiku_posteriors.utils.report import chain_diagnostics
from haiku_posteriors.utils.report.chain_diagnostics import ChainRules
from haiku_posteriors.utils.train_utils import RunResult

TRANSITIONS = settings.MAX_ITERATIONS  # of chains that end by themselves, at most


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
    most = min(TRANSITIONS, max(1000, forms.MAX_DRAW_BYTES // bytes_per_step))
    num_steps = wishes.num_steps or most
    burn_in = forms.find_burn_in(wishes, num_steps, min(200, num_steps // 2))
    collects = forms.make_collection(wishes, num_steps, burn_in)
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
        enough=rules.enough(num_steps - burn_in) if ends_by_itself else None,
        warm_start_epochs=warm_start_epochs,
        diagnose=lambda result: _diagnose_chains(result, rules),
    )


def _diagnose_chains(result: RunResult, rules: ChainRules) -> dict[str, Any]:
    history = rules.after_burn_in(result.history)
    predictions, parameters = chain_diagnostics.diagnose(result)
    verdict = rules.verdict(predictions, history, parameters)
    return {
        "predictions": forms.extremes(predictions),
        "parameters": forms.extremes(parameters),
        "converged": verdict.converged,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
        "acceptance": history["acceptance_probability"].mean(axis=1).tolist(),
        "divergent": int(history["divergent"].sum()),
        "num_transitions": history["divergent"].shape[1],
    }


# A method is one line here.
PLANS: dict[str, Callable[[LogJoint, int, Wishes], Plan]] = {
    "hmc": _hmc,
    "mclmc": _mclmc,
    "sghmc": samplers.sghmc,
    "sgld": samplers.sgld,
    "mean_field": optimisers.mean_field,
    "mc_dropout": optimisers.mc_dropout,
    "implicit": optimisers.implicit,
    "ensemble": optimisers.ensemble,
    "map": optimisers.map,
}
