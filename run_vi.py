"""Mean-field variational inference, MC dropout, and the MAP estimate of the same problem.

python run_vi.py                                    embedded toy regression, a Gaussian q
python run_vi.py --vi_estimator=flipout             noise of other signs for every row
python run_vi.py --method=mc_dropout --dropout_rate=0.1
python run_vi.py --method=map
python run_vi.py --vi_ensemble_size=100 --refine=mclmc   each draw moved to the posterior
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from haiku_posteriors.core import dropout, kl_weights, sgd, vi
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    optim_utils,
    script_utils,
    tasks,
)
from haiku_posteriors.utils.cmd_args_utils import BY_DATA, Flag
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import refine
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    Flag("method", "enum", "vi", "What to fit.", choices=("vi", "mc_dropout", "map")),
    Flag("vi_ensemble_size", "integer", 20, "Draws to predict with.", lower_bound=1),
    Flag("num_members", "integer", 1, "Approximations from different starts.", lower_bound=1),
    Flag("mean_init_checkpoint", "path", None, "The same as init_checkpoint."),
)
# Flags that one method alone reads: given to another, they would do nothing without a word.
VI_FLAGS = (
    Flag("vi_sigma_init", "float", None, "Standard deviation of q at the start.", BY_DATA, above=0),
    Flag(
        "vi_estimator",
        "enum",
        None,
        "How draws of q enter the gradient.",
        BY_DATA,
        choices=vi.ESTIMATORS,
    ),
    Flag("vi_num_samples", "integer", 1, "Draws of q per minibatch.", lower_bound=1),
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
        BY_DATA,
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
GROUPS = {
    **cmd_args_utils.PROBLEM,
    "Training": cmd_args_utils.OPTIMIZER,
    "Approximation": FLAGS,
    "Mean-field VI": VI_FLAGS,
    "MC dropout": DROPOUT_FLAGS,
    "Refinement": cmd_args_utils.REFINEMENT,
}


def make_method(task: Task) -> Method:
    """The method that the settings describe; says what it covers."""
    settings, log_joint = task.settings, task.log_joint
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows, settings.num_epochs)
    if task.method == "map":
        return sgd.sgd(log_joint, optimizer, settings.batch_size)
    if task.method == "mc_dropout":
        method = dropout.mc_dropout(
            log_joint, settings.dropout_rate, optimizer, settings.batch_size
        )
        print(f"Dropped: inputs of {', '.join(dropout.dropped_modules(log_joint))}.")
        return method
    batches = num_minibatches(num_rows, settings.batch_size)
    learn_prior_scale = settings.learn_prior_scale
    method = vi.mean_field_vi(
        log_joint,
        optimizer,
        settings.batch_size,
        sigma_init=settings.vi_sigma_init,
        estimator=settings.vi_estimator,
        kl=settings.kl,
        kl_weight=_number_or_name(settings.kl_weight),
        kl_warmup_steps=round(settings.kl_warmup_epochs * batches),
        num_samples=settings.vi_num_samples,
        learn_prior_scale=None if learn_prior_scale == "None" else learn_prior_scale,
    )
    if settings.vi_estimator != "reparameterization":
        covered, drawn = noisy_layers.covered_parameters(
            log_joint, task.dataset.form.inputs.example(), settings.vi_estimator
        )
        by_weight = f"; drawn as weights: {', '.join(drawn)}" if drawn else ""
        total = len(covered) + len(drawn)
        print(f"'{settings.vi_estimator}' covers {len(covered)} of {total} arrays{by_weight}.")
    return method


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def refuse_flags_of_other_methods(settings: Settings) -> None:
    """Refuses what the chosen method would not read."""
    for method, flags in {"vi": VI_FLAGS, "mc_dropout": DROPOUT_FLAGS}.items():
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if given and method != settings.method:
            raise UserError(f"{given[0]} is for --method={method}, not {settings.method}.")
    if settings.mean_init_checkpoint and settings.init_checkpoint:
        raise UserError("Give mean_init_checkpoint or init_checkpoint, not both.")


def report_prior_scales(directory: pathlib.Path, result: RunResult) -> None:
    """Prints the learned factors, a number per member."""
    for group, logarithms in result.state.variational.log_prior_scale.items():
        factors = ", ".join(f"{factor:.3g}" for factor in np.exp(logarithms))
        print(f"Prior scale of {group}: {factors} times 1 / sqrt(weight_decay).")


def run(settings: Settings) -> None:
    """Fits the members and leaves the run in its folder."""
    refuse_flags_of_other_methods(settings)
    task = tasks.load_task(settings.method, settings)
    settings = task.settings
    method = make_method(task)
    starts = checkpoint_utils.load_starts(
        settings.mean_init_checkpoint or settings.init_checkpoint,
        task.log_joint.shapes,
        settings.num_members,
        "num_members",
    )
    directory = tasks.open_folder(task)
    tasks.execute(
        task,
        directory,
        method,
        num_chains=settings.num_members,
        num_steps=settings.num_epochs,
        initial_params=starts,
        num_draws=1 if task.method == "map" else settings.vi_ensemble_size,
        change_draws=refine.stage(task, directory),
        judge=report_prior_scales if task.method == "vi" else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
