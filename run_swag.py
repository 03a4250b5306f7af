"""SWAG: SGD at a constant step from the networks of a finished run, whose moments make a Gaussian.

python run_sgd.py --dataset_name=digits --dir=runs/map
python run_swag.py --run=runs/map
python run_swag.py --run=runs/map --num_epochs=200 --rank=30 --init_step_size=1e-5
"""

import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import optax

from haiku_posteriors.core import curvature, swag, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, checkpoint_utils, cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils import settings as settings_table
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import verdicts
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import local_scales
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

BATCH_SIZE = settings_table.BATCH_SIZE
FLAGS = (
    Flag(
        "num_epochs",
        "integer",
        200,
        "Passes over the data, burn-in included.",
        lower_bound=2,
    ),
    Flag(
        "num_burnin_epochs",
        "integer",
        None,
        "Epochs before the first is collected.",
        "a quarter of num_epochs",
        lower_bound=0,
    ),
    Flag("rank", "integer", 20, "Deviations that are kept.", lower_bound=2),
    Flag("num_draws", "integer", 100, "Draws around each network.", lower_bound=1),
    Flag(
        "init_step_size",
        "float",
        None,
        "Constant step size, for the gradient of the summed log-joint.",
        "that of the stationary law nearest to the posterior, by gradient noise",
        above=0,
    ),
    Flag(
        "batch_size",
        "integer",
        None,
        "Maximum rows per minibatch.",
        f"{BATCH_SIZE}, or a tenth of the rows if that is less",
        lower_bound=1,
    ),
    Flag("momentum_decay", "float", 0.9, "Momentum decay.", lower_bound=0, below=1),
)
GROUPS = {"Run": cmd_args_utils.OF_A_RUN, "SWAG": FLAGS, "Devices": cmd_args_utils.DEVICES}


def find_step_size(task: Task, starts: Params) -> float:
    """See `swag.nearest_step_size`; the least over the networks."""
    settings, log_joint = task.settings, task.log_joint

    def nearest(key: jax.Array, params: Params, data: Data) -> jax.Array:
        keys = [jax.random.fold_in(key, number) for number in range(2)]
        noise = curvature.gradient_noise(keys[0], log_joint, params, data, settings.batch_size)
        ones = jax.tree.map(jax.numpy.ones_like, params)
        largest = curvature.largest_eigenvalue(keys[1], log_joint, params, data, ones)
        return swag.nearest_step_size(
            trees.size(params), trees.total(noise), largest, settings.momentum_decay
        )

    return float(np.min(local_scales.over_members(task, chains.CURVATURE, nearest, starts)))


def complete(task: Task) -> Task:
    """Fills in what depends on the rows, and refuses what leaves nothing to collect."""
    rows, settings = len(task.dataset.y_train), task.settings
    settings = settings.fill({"batch_size": max(1, min(BATCH_SIZE, rows // 10))}, "by the rows")
    settings = settings.fill({"num_burnin_epochs": settings.num_epochs // 4}, "num_epochs / 4")
    if settings.num_burnin_epochs > settings.num_epochs - 2:
        raise UserError(
            f"Two epochs at least are collected: num_burnin_epochs ({settings.num_burnin_epochs}) "
            f"must be below num_epochs - 1 ({settings.num_epochs - 1})."
        )
    if settings.batch_size >= rows and not settings.was_given("init_step_size"):
        raise UserError(
            f"Minibatches of all {rows} rows have no gradient noise, of which SWAG's spread is "
            "made: give a smaller batch_size."
        )
    every = max(1, settings.num_epochs // 10)
    often = {"eval_freq": every, "save_freq": every}
    return task._replace(settings=Settings({**settings.values, **often}, settings.sources))


def judge(
    task: Task, starts: Params, step_size: float, directory: pathlib.Path, result: RunResult
) -> None:
    """Says what the Gaussian is, and whether SGD has left the networks it began with."""

    def value(key: jax.Array, params: Params, data: Data) -> jax.Array:
        return task.log_joint(params, data)

    found = [
        local_scales.over_members(task, chains.CURVATURE, value, params)
        for params in (starts, result.state.mean)
    ]
    fall = float(np.max(found[0] - found[1]))
    problems = []
    if fall > trees.size(task.log_joint.random_shapes):  # twice the depth of a posterior's bulk
        problems.append(
            f"The log-joint of the mean is {fall:.3g} nats below that of the network at the start: "
            "SGD has left its mode. Lower init_step_size."
        )
    note = (
        f"The Gaussian of SGD's way at step {step_size:.3g}: its spread is that of gradient noise, "
        "and the posterior's only as far as the two agree. compare_posteriors.py tells."
    )
    content = {"step_size": step_size, "fall": fall}
    verdicts.tell(directory, Verdict(not problems, tuple(problems), (note,)), content)


def run(settings: Settings) -> None:
    """Goes on with every member of the run by SGD, and leaves the Gaussian's draws."""
    task, opened = tasks.load_task_of_run("swag", settings)
    task = complete(task)
    settings = task.settings
    starts = checkpoint_utils.load_params(opened.path, task.log_joint.shapes)
    directory = tasks.open_folder(task)
    step_size = settings.init_step_size or find_step_size(task, starts)
    print(f"Constant step size {step_size:.3g}.", flush=True)
    optimizer = optax.sgd(step_size, settings.momentum_decay or None)
    tasks.execute(
        task,
        directory,
        swag.swag(
            task.log_joint,
            optimizer,
            settings.batch_size,
            rank=settings.rank,
            num_burn_in=settings.num_burnin_epochs,
        ),
        num_chains=len(jax.tree.leaves(starts)[0]),
        num_steps=settings.num_epochs,
        initial_params=starts,
        num_draws=settings.num_draws,
        judge=lambda directory, result: judge(task, starts, step_size, directory, result),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
