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

from haiku_posteriors.core import dropout, gaussian_dropout, kl_weights, sgd, trees, vi
from haiku_posteriors.core.densities import BoundedFamily, Family, Posterior
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import loo
from haiku_posteriors.core.layerwise import posteriors
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
from haiku_posteriors.utils.cmd_args_utils import BY_DATA, Flag
from haiku_posteriors.utils.report import training
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import (
    anneal,
    bound,
    layerwise,
    local_scales,
    pruning,
    refine,
    variational,
)
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

METHODS = ("vi", "mc_dropout", "gaussian_dropout", "map")
VI_FAMILIES = ("mean_field", "low_rank", "mnf", "layerwise")
FLAGS = (
    Flag("method", "enum", "vi", "What to fit.", choices=METHODS),
    Flag("vi_ensemble_size", "integer", 20, "Draws to predict with.", lower_bound=1),
    Flag("num_members", "integer", 1, "Approximations from different starts.", lower_bound=1),
    Flag("mean_init_checkpoint", "path", None, "The same as init_checkpoint."),
)
# Flags that one method or family alone reads: given to another, they would do nothing without a
# word.
VI_FLAGS = (
    Flag(
        "vi_family",
        "enum",
        "mean_field",
        "Independent weights, a Gaussian of low rank plus a diagonal, weights times latents of a "
        "normalising flow, or layers that are drawn given the layers before.",
        choices=VI_FAMILIES,
    ),
    Flag("vi_sigma_init", "float", None, "Standard deviation of q at the start.", BY_DATA, above=0),
    Flag("vi_num_samples", "integer", None, "Draws of q per minibatch.", BY_DATA, lower_bound=1),
    Flag(
        "num_evidence_draws",
        "integer",
        None,
        "Draws for the final ELBO on all data; 0 for none.",
        "200 for small networks, 0 for mean-field VI and large ones",
        lower_bound=0,
    ),
    Flag(
        "anneal_steps",
        "integer",
        0,
        "Annealed Hamiltonian steps of every draw, with learned sizes; they tighten the bound.",
        lower_bound=0,
    ),
    Flag(
        "member_weights",
        "enum",
        "even",
        "How the members are mixed in the draws.",
        choices=bound.WEIGHTS,
    ),
)
GAUSSIAN_FLAGS = (
    Flag(
        "vi_estimator",
        "enum",
        None,
        "How draws of q enter the gradient.",
        BY_DATA,
        choices=vi.ESTIMATORS,
    ),
    Flag(
        "warm_start_epochs",
        "integer",
        None,
        "Epochs of Adam, at most, that train a network to begin at; its curvature gives the first "
        "standard deviations. 0 for none.",
        "some 5,000 updates; none where num_epochs is given",
        lower_bound=0,
    ),
)
MEAN_FIELD_FLAGS = (
    Flag("kl", "enum", "reverse", "KL(q || prior), or KL(prior || q).", choices=vi.KL_DIRECTIONS),
    Flag(
        "kl_weight",
        "string",
        "1",
        f"Factor of the KL: a number, or one of {', '.join(kl_weights.KL_WEIGHTS)}.",
    ),
    Flag(
        "kl_warmup_epochs",
        "float",
        None,
        "Epochs over which the KL's factor grows to its full value.",
        "0",
        lower_bound=0,
    ),
    Flag(
        "learn_prior_scale",
        "enum",
        "None",
        "Empirical Bayes: what shares a learned factor on the prior's scale.",
        choices=("None", *vi.PRIOR_SCALES),
    ),
)
LOW_RANK_FLAGS = (
    Flag(
        "vi_rank",
        "integer",
        None,
        "Rank of the covariance beside its diagonal.",
        "10, or all weights if there are fewer",
        lower_bound=1,
    ),
)
FLOW_FLAGS = (
    Flag("flow_couplings", "integer", 2, "Coupling layers of every layer's flow.", lower_bound=1),
    Flag("flow_hidden_size", "integer", 32, "Hidden units of a coupling layer.", lower_bound=1),
)
LAYERWISE_FLAGS = (
    Flag(
        "num_inducing",
        "integer",
        None,
        "Inducing inputs, which start as rows of the data.",
        "100, or all rows if there are fewer",
        lower_bound=1,
    ),
    Flag(
        "inducing",
        "enum",
        None,
        "Learned inducing inputs, or rows of each minibatch.",
        BY_DATA,
        choices=posteriors.INDUCING,
    ),
    Flag(
        "layerwise_precision",
        "enum",
        None,
        "Precisions of pseudo-outputs: by row and unit, a_row b_unit, or by row alone.",
        BY_DATA,
        choices=posteriors.PRECISIONS,
    ),
    Flag(
        "inducing_positions",
        "integer",
        8,
        "Positions of an inducing image, at most, at which a convolution is regressed.",
        lower_bound=1,
    ),
    *cmd_args_utils.PRETRAINING,
)
DROPOUT_FLAGS = (
    Flag(
        "dropout_rate",
        "float",
        0.1,
        "Probability that a channel is dropped.",
        lower_bound=0,
        below=1,
    ),
)
GAUSSIAN_DROPOUT_FLAGS = (
    Flag(
        "dropout_prior",
        "enum",
        "log_uniform",
        "Prior of the weights, or one normal for each, learned.",
        choices=gaussian_dropout.PRIORS,
    ),
    Flag(
        "prune_above",
        "float",
        gaussian_dropout.PRUNE_ABOVE,
        "Logarithm of noise over signal, alpha, beyond which a weight is removed from draws.",
    ),
)
SHARED_WITH_DROPOUT = ("vi_sigma_init", "vi_num_samples", "vi_estimator", "warm_start_epochs")
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
    "VI": VI_FLAGS,
    "Gaussian VI": GAUSSIAN_FLAGS,
    "Mean-field VI": MEAN_FIELD_FLAGS,
    "Low-rank VI": LOW_RANK_FLAGS,
    "Multiplicative flows": FLOW_FLAGS,
    "Layerwise VI": LAYERWISE_FLAGS,
    "MC dropout": DROPOUT_FLAGS,
    "Gaussian dropout": GAUSSIAN_DROPOUT_FLAGS,
    "Refinement": cmd_args_utils.REFINEMENT,
}
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


def refuse_flags_of_other_methods(settings: Settings) -> None:
    """Refuses what the chosen method or family would not read."""
    for method, families, flags in (
        ("vi", VI_FAMILIES, VI_FLAGS),
        ("vi", ("mean_field", "low_rank", "mnf"), GAUSSIAN_FLAGS),
        ("vi", ("mean_field",), MEAN_FIELD_FLAGS),
        ("vi", ("low_rank",), LOW_RANK_FLAGS),
        ("vi", ("mnf",), FLOW_FLAGS),
        ("vi", ("layerwise",), LAYERWISE_FLAGS),
        ("mc_dropout", VI_FAMILIES, DROPOUT_FLAGS),
        ("gaussian_dropout", VI_FAMILIES, GAUSSIAN_DROPOUT_FLAGS),
    ):
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if settings.method == "gaussian_dropout":
            given = [name for name in given if name not in SHARED_WITH_DROPOUT]
        if given and method != settings.method:
            raise UserError(f"{given[0]} is for --method={method}, not {settings.method}.")
        if given and settings.vi_family not in families:
            raise UserError(
                f"{given[0]} is for --vi_family={' or '.join(families)}, not {settings.vi_family}."
            )
    if settings.prior_from and settings.method == "gaussian_dropout":
        raise UserError("Gaussian dropout brings a prior of its own: it takes no prior_from.")
    if settings.prior_from and (settings.kl == "forward" or settings.learn_prior_scale != "None"):
        raise UserError(
            "prior_from leaves the prior as it is: with kl=reverse, and nothing learned."
        )
    if settings.mean_init_checkpoint and settings.init_checkpoint:
        raise UserError("Give mean_init_checkpoint or init_checkpoint, not both.")


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
    refuse_flags_of_other_methods(settings)
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
        OBJECTIVES[task.method],
        num_members=settings.num_members,
        measure=functools.partial(measure, task, family),
        initial_params=find_starts(task, directory, given),
        num_draws=1 if task.method == "map" else settings.vi_ensemble_size,
        change_draws=change_draws,
        judge=judges.get(task.method),
    )


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
        return {"remaining": local_scales.remaining_gain(task, result.state.params)}
    # With a learned prior q is no approximation of the posterior; a draw of the layerwise family
    # costs a regression for every unit.
    is_posterior = task.method == "vi" and task.settings.learn_prior_scale == "None"
    is_small = task.method == "layerwise" and trees.size(task.log_joint.shapes) <= SMALL
    if not isinstance(family, Family) or not (is_posterior or is_small):
        return {}
    # States of all families begin with the posterior.
    return {"pareto_k": local_scales.pareto_k(task, family, result.state[0])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
