"""SGD, MAP estimates and deep ensembles.

python run_sgd.py                                      embedded toy regression
python run_sgd.py --num_members=10                     a deep ensemble, in one program
python run_sgd.py --num_members=50 --refine=mclmc      each moved to the posterior
python run_sgd.py --dataset_name=digits --model_name=mlp_classification
"""

from collections.abc import Sequence

from haiku_posteriors.core import sgd
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
from haiku_posteriors.utils.stages import local_scales, refine

FLAGS = (Flag("num_members", "integer", 1, "Members of the deep ensemble.", lower_bound=1),)
GROUPS = {
    **cmd_args_utils.PROBLEM,
    "Training": cmd_args_utils.OPTIMIZER,
    "Ensemble": FLAGS,
    "Refinement": cmd_args_utils.REFINEMENT,
}


def run(settings: Settings) -> None:
    """Trains the members and leaves the run in its folder."""
    task = tasks.load_task("sgd", settings)
    settings, log_joint = task.settings, task.log_joint
    num_rows = len(task.dataset.y_train)
    optimizer = optim_utils.optimizer_of(settings, num_rows)
    starts = checkpoint_utils.load_starts(
        settings.init_checkpoint, log_joint.shapes, settings.num_members, "num_members"
    )
    directory = tasks.open_folder(task)
    training_runs.train(
        task,
        directory,
        sgd.sgd(log_joint, optimizer, settings.batch_size),
        training.LOG_JOINT,
        num_members=settings.num_members,
        measure=lambda result: local_scales.of_point_estimates(task, result.state),
        initial_params=starts,
        change_draws=refine.stage(task, directory),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
