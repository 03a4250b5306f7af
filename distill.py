"""One network that predicts what all draws of a run predict together.

python distill.py --run=runs/hmc --dir=runs/student
python distill.py --run=runs/ensemble --num_copies=10 --input_noise=0.3 --model_name=mlp_400_400
python distill.py --run=runs/map --on_the_fly      from a chain of SGMCMC that starts at the run
"""

import pathlib
from collections.abc import Sequence

import jax

from haiku_posteriors.core import dark_knowledge, sgd, sgmcmc
from haiku_posteriors.core.data import num_minibatches
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.core.method import Method
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    optim_utils,
    script_utils,
    tasks,
    training_runs,
)
from haiku_posteriors.utils import settings as settings_table
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.report import run_folders, run_networks, training, verdicts
from haiku_posteriors.utils.report.run_folders import OpenedRun
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import sampler_scales, teaching
from haiku_posteriors.utils.tasks import Task

UPDATES, EVALUATIONS = 20_000, 10
FLAGS = (
    Flag(
        "model_name",
        "string",
        None,
        "The student's network, as for the run scripts.",
        "the teacher's",
    ),
    Flag(
        "weight_decay",
        "float",
        None,
        "Precision of the student's prior; the more inputs, the less it counts.",
        "the teacher's",
        above=0,
    ),
    Flag("num_members", "integer", 1, "Students.", lower_bound=1),
    Flag("input_noise", "float", 0.3, "Deviation of noise on inputs, as seen.", lower_bound=0),
    Flag(
        "on_the_fly",
        "bool",
        False,
        "Learn from a chain of SGMCMC, that starts at the run's last draw, while it runs.",
    ),
)
FOLDER_FLAGS = (
    Flag("num_draws", "integer", 200, "Draws of the teacher, at most.", lower_bound=1),
    Flag("num_copies", "integer", 4, "Noisy copies of every training input.", lower_bound=0),
    Flag("extra_inputs", "list", [], "Data sets whose test inputs are learned from, too."),
)
CHAIN_FLAGS = (
    Flag(
        "num_burnin_epochs",
        "integer",
        None,
        "Epochs of the chain before the student learns.",
        "a tenth of num_epochs",
        lower_bound=0,
    ),
    Flag(
        "bias_tolerance",
        "float",
        0.05,
        "Relative error of variances that the noise of gradients may make.",
        above=0,
    ),
)
TRAINING = (
    Flag("init_step_size", "float", 3e-3, "Adam's first step; it falls as a cosine.", above=0),
    Flag(
        "num_epochs",
        "integer",
        None,
        "Passes over the inputs.",
        f"{UPDATES:,} updates",
        lower_bound=1,
    ),
    Flag("batch_size", "integer", None, "Maximum rows per minibatch.", "200", lower_bound=1),
)
GROUPS = {
    "Run": cmd_args_utils.OF_A_RUN,
    "Student": FLAGS,
    "From a folder": FOLDER_FLAGS,
    "On the fly": CHAIN_FLAGS,
    "Training": TRAINING,
    "Devices": cmd_args_utils.DEVICES,
}


def load_task(settings: Settings) -> tuple[Task, OpenedRun]:
    """The student's task: the teacher's data, the student's network and likelihood."""
    for on_the_fly, flags in ((True, CHAIN_FLAGS), (False, FOLDER_FLAGS)):
        given = [flag.name for flag in flags if settings.was_given(flag.name)]
        if given and settings.on_the_fly != on_the_fly:
            raise UserError(f"{given[0]} is for on_the_fly={str(on_the_fly).lower()}.")
    own = {name: settings.values[name] for name in ("model_name", "weight_decay")}
    changes = {name: value for name, value in own.items() if value is not None}
    changes |= {"temperature": 1.0, "prior_from": None, "stochastic_params": ""}
    if settings.run and "gaussian" in str(
        run_folders.read_flags(pathlib.Path(settings.run)).get("likelihood")
    ):
        changes["likelihood"] = "heteroscedastic_gaussian"  # the student says mean and deviation
    return tasks.load_task_of_run("student", settings, changes)


def complete(task: Task, num_rows: int) -> Task:
    """Fills in lengths by the number of inputs that are learned from."""
    most = min(settings_table.BATCH_SIZE, len(task.dataset.y_train))
    settings = task.settings.fill({"batch_size": most}, "200, or all training rows")
    epochs = -(-UPDATES // num_minibatches(num_rows, settings.batch_size))
    settings = settings.fill({"num_epochs": epochs}, f"{UPDATES:,} updates")
    settings = settings.fill({"num_burnin_epochs": settings.num_epochs // 10}, "num_epochs / 10")
    every = max(1, settings.num_epochs // EVALUATIONS)
    fixed = {"optimizer": "Adam", "until_converged": False, "eval_freq": every, "save_freq": every}
    # Adam reads none; the chain's follows from its step.
    values = {"momentum_decay": None if settings.on_the_fly else 0.9, **settings.values, **fixed}
    return task._replace(settings=Settings(values, settings.sources))


def make_chain(task: Task, run: OpenedRun) -> Method:
    """The chain with its student."""
    settings, rows = task.settings, len(task.dataset.y_train)
    teacher, _ = run_networks.load_run_problem(run, settings.data_dir)
    teachers = task._replace(log_joint=teacher)
    starts = checkpoint_utils.load_params(run.path, teacher.shapes)
    start = jax.tree.map(lambda leaf: leaf[:1], starts)
    scales = sampler_scales.fit(teachers, start)
    print(sampler_scales.describe(scales, settings.batch_size), flush=True)
    transformation = sgmcmc.sghmc(
        sgmcmc.constant_with_burn_in(scales.step_size, scales.step_size, 1),
        scales.momentum_decay,
        sgmcmc.fixed_mass(scales.mass),
    )
    return dark_knowledge.dark_knowledge(
        task.log_joint,
        teacher,
        sgmcmc.sgmcmc(teacher, transformation, settings.batch_size),
        jax.tree.map(lambda leaf: leaf[0], start),
        optim_utils.make_optimizer(
            "Adam",
            settings.init_step_size,
            settings.num_epochs * num_minibatches(rows, settings.batch_size),
        ),
        settings.batch_size,
        input_noise=settings.input_noise,
        num_burn_in=settings.num_burnin_epochs,
    )


def taught_rows(task: Task, run: OpenedRun) -> Dataset:
    """The inputs to learn from, with what the teacher's draws say of them."""
    settings = task.settings
    taught = teaching.teach(
        run,
        run_networks.problem_of_run(run, settings.data_dir),
        task.dataset,
        num_draws=settings.num_draws,
        num_copies=settings.num_copies,
        input_noise=settings.input_noise,
        extra_inputs=settings.extra_inputs,
        seed=settings.seed,
    )
    print(f"The student learns from {len(taught.y_train):,} inputs.", flush=True)
    return taught


def run(settings: Settings) -> None:
    """Trains the students and leaves an ordinary run's folder."""
    task, teacher = load_task(settings)
    if settings.on_the_fly:
        learn_from_chain(complete(task, len(task.dataset.y_train)), teacher)
        return
    taught = taught_rows(task, teacher)
    task = complete(task, len(taught.y_train))
    optimizer = optim_utils.optimizer_of(task.settings, len(taught.y_train))
    training_runs.train(
        task,
        tasks.open_folder(task),
        sgd.sgd(task.log_joint, optimizer, task.settings.batch_size),
        training.LOG_JOINT,
        num_members=settings.num_members,
        taught=taught,
    )


def learn_from_chain(task: Task, teacher: OpenedRun) -> None:
    """Runs the chain with its student to their end."""
    note = "The chain is no part of the verdict: run_sgmcmc.py has one on its kind."
    directory = tasks.open_folder(task)
    tasks.execute(
        task,
        directory,
        make_chain(task, teacher),
        num_chains=task.settings.num_members,
        num_steps=task.settings.num_epochs,
        show=("teacher_log_joint",),
        judge=lambda directory, _: verdicts.tell(directory, Verdict(True, (), (note,)), {}),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
