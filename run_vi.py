"""Variational inference, MC dropout, and the MAP estimate of the same problem.

python run_vi.py                                    embedded toy regression, a mean-field Gaussian q
python run_vi.py --vi_estimator=flipout             noise of other signs for every row
python run_vi.py --vi_family=low_rank --vi_rank=20  a Gaussian of low rank plus a diagonal
python run_vi.py --vi_family=mnf                    weights times latents of normalising flows
python run_vi.py --vi_family=layerwise              layers drawn given the layers before
python run_vi.py --vi_family=layerwise --anneal_steps=16   a tighter bound, better draws
python run_vi.py --method=mc_dropout --dropout_rate=0.1
python run_vi.py --method=gaussian_dropout          rates learned by weight; what can be removed
python run_vi.py --method=map
python run_vi.py --vi_ensemble_size=100 --refine=mclmc   each draw moved to the posterior
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from haiku_posteriors.core import dropout, gaussian_dropout, kl_weights, sgd, trees
from haiku_posteriors.core.densities import BoundedFamily, Family, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import loo
from haiku_posteriors.core.judging.training import Objective
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    optim_utils,
    script_utils,
    tasks,
    training_runs,
)
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import (
    anneal,
    bound,
    family_flags,
    layerwise,
    local_scales,
    pruning,
    refine,
    variational,
)
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    Flag("method", "enum", "vi", "What to fit.", choices=family_flags.METHODS),
    Flag("vi_ensemble_size", "integer", 20, "Draws to predict with.", lower_bound=1),
    Flag("num_members", "integer", 1, "Approximations from different starts.", lower_bound=1),
    Flag("mean_init_checkpoint", "path", None, "The same as init_checkpoint."),
)
OBJECTIVES = {
    # Its prior is not the log-joint's: no bound of that one's evidence.
    "gaussian_dropout": training.ELBO._replace(name="objective"),
    "vi": training.ELBO,
    "layerwise": training.ELBO,
    "mc_dropout": training.DROPOUT,
    "map": training.LOG_JOINT,
}
GROUPS = {
    **cmd_args_utils.PROBLEM,
    "Training": cmd_args_utils.OPTIMIZER,
    "Approximation": FLAGS,
    **family_flags.GROUPS,
    "Refinement": cmd_args_utils.REFINEMENT,
}
ELBO_WEIGHTS = ("graves", "blundell")  # of mean 1 over an epoch
SMALL = 3000  # parameters up to which the ELBO is evaluated at the end


def make_method(task: Task) -> tuple[Method, BoundedFamily | None]:
    """The method that the settings describe, and its family if that has a bound."""
    settings, log_joint = task.settings, task.log_joint
    if task.method == "layerwise":
        return layerwise.make_method(task)
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows)
    if task.method == "map":
        return sgd.sgd(log_joint, optimizer, settings.batch_size), None
    if task.method == "mc_dropout":
        method = dropout.mc_dropout(
            log_joint, settings.dropout_rate, optimizer, settings.batch_size
        )
        print(f"Dropped: inputs of {', '.join(dropout.dropped_modules(log_joint))}.")
        return method, None
    if task.method == "gaussian_dropout":
        method = gaussian_dropout.gaussian_dropout(
            log_joint,
            optimizer,
            settings.batch_size,
            prior=settings.dropout_prior,
            sigma_init=settings.vi_sigma_init,
            estimator=settings.vi_estimator,
            num_samples=settings.vi_num_samples,
            prune_above=settings.prune_above,
        )
        return method, None
    return variational.make_method(task)


def complete(task: Task) -> Task:
    """Fills in what depends on rows and network, and refuses what contradicts itself."""
    is_bounded = task.settings.vi_family != "mean_field"
    small = is_bounded and trees.size(task.log_joint.shapes) <= SMALL
    settings = task.settings.fill(
        {"num_evidence_draws": 200 if small else 0}, "by the family and the number of weights"
    )
    settings = variational.complete(settings, task.log_joint)
    num_rows = len(task.dataset.y_train)
    settings = settings.fill({"num_inducing": min(100, num_rows)}, "100, or all training rows")
    if 0 < settings.num_evidence_draws < 4:
        raise UserError("Fewer than 4 draws give no error of the ELBO; 0 is for no ELBO.")
    if settings.member_weights == "evidence" and not settings.num_evidence_draws:
        raise UserError("Weights by evidence need its bound: give num_evidence_draws.")
    if settings.member_weights == "stacking" and settings.vi_ensemble_size < loo.MIN_DRAWS:
        raise UserError(f"Stacking needs a vi_ensemble_size of at least {loo.MIN_DRAWS}.")
    return task._replace(settings=settings)


def report_prior_scales(directory: pathlib.Path, result: RunResult) -> None:
    """Prints the learned factors, a number per member."""
    learned = getattr(result.state.variational, "log_prior_scale", {})
    for group, logarithms in learned.items():
        factors = ", ".join(f"{factor:.3g}" for factor in np.exp(logarithms))
        print(f"Prior scale of {group}: {factors} times 1 / sqrt(weight_decay).")


def final_draws(
    task: Task, directory: pathlib.Path, method: Method, family: BoundedFamily | None
) -> Callable[[State, Params], Params] | None:
    """What happens to draws at the end: members bounded and weighed, draws annealed, refined."""
    stages = [
        bound.stage(task, directory, method, family),
        anneal.stage(task, directory, family if isinstance(family, Family) else None),
        refine.stage(task, directory),
    ]
    asked = [stage for stage in stages if stage]

    def change(state: State, draws: Params) -> Params:
        for stage in asked:
            draws = stage(state, draws)
        return draws

    return change if asked else None


def run(settings: Settings) -> None:
    """Fits the members and leaves the run in its folder."""
    family_flags.refuse(settings)
    anneal.check(settings)
    settings = variational.begin(settings)
    is_layerwise = settings.method == "vi" and settings.vi_family == "layerwise"
    task = complete(tasks.load_task("layerwise" if is_layerwise else settings.method, settings))
    settings = task.settings
    method, family = make_method(task)
    given = checkpoint_utils.load_starts(
        settings.mean_init_checkpoint or settings.init_checkpoint,
        task.log_joint.shapes,
        settings.num_members,
        "num_members",
    )
    directory = tasks.open_folder(task)
    judges: dict[str, Callable[[pathlib.Path, RunResult], None]] = {
        "vi": report_prior_scales,
        "gaussian_dropout": functools.partial(pruning.tell, task),
    }
    # Before the starts are trained: mistakes of later stages are told first.
    change_draws = final_draws(task, directory, method, family)
    training_runs.train(
        task,
        directory,
        method,
        objective_of(task),
        num_members=settings.num_members,
        measure=functools.partial(measure, task, family),
        initial_params=find_starts(task, directory, given),
        num_draws=1 if task.method == "map" else settings.vi_ensemble_size,
        change_draws=change_draws,
        judge=judges.get(task.method),
    )


def objective_of(task: Task) -> Objective:
    """What is maximised, which is an ELBO with the reverse KL in full alone."""
    found, settings = OBJECTIVES[task.method], task.settings
    if task.method != "vi":
        return found
    name = settings.kl_weight
    is_full = name in ELBO_WEIGHTS or (name not in kl_weights.KL_WEIGHTS and float(name) == 1)
    return found if is_full and settings.kl == "reverse" else found._replace(name="objective")


def find_starts(
    task: Task, directory: pathlib.Path, given: Params | None
) -> Params | Posterior | None:
    """Where the members start."""
    if task.method == "layerwise" and given is None:
        return layerwise.find_starts(task, directory)
    is_gaussian = task.method in ("vi", "gaussian_dropout")
    return variational.find_starts(task, directory, given) if is_gaussian else given


def measure(task: Task, family: BoundedFamily | None, result: RunResult) -> dict[str, Any]:
    """What else a verdict on the method needs to know."""
    if task.method == "map":
        return local_scales.of_point_estimates(task, result.state)
    # With a learned prior q is no approximation of the posterior; a draw of the layerwise family
    # costs a regression for every unit.
    is_posterior = task.method == "vi" and task.settings.learn_prior_scale == "None"
    is_small = task.method == "layerwise" and trees.size(task.log_joint.shapes) <= SMALL
    if not isinstance(family, Family) or not (is_posterior or is_small):
        return {}
    # States of all families begin with the posterior.
    return {"pareto_k": local_scales.pareto_k(task, family, result.state.state[0])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
