"""Laplace's approximation around the networks of a finished run of run_sgd.py.

python run_sgd.py --dataset_name=digits --dir=runs/map
python run_laplace.py --run=runs/map                          Kronecker factors by layer
python run_laplace.py --run=runs/map --structure=last_layer   the last layer alone, full
"""

import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from haiku_posteriors.core import laplace, trees
from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import evidence, verdicts
from haiku_posteriors.utils.settings import Settings
from haiku_posteriors.utils.stages import local_scales
from haiku_posteriors.utils.tasks import Task
from haiku_posteriors.utils.train_utils import RunResult

FLAGS = (
    Flag(
        "structure",
        "enum",
        "kron",
        "What is kept of the curvature.",
        choices=laplace.STRUCTURES,
    ),
    Flag("num_draws", "integer", 100, "Draws around each network.", lower_bound=1),
)
GROUPS = {
    "Run": cmd_args_utils.OF_A_RUN,
    "Laplace": FLAGS,
    "Devices": cmd_args_utils.DEVICES,
}
MAX_REMAINING = 0.01  # nats per parameter that a mode may be below the top of its quadratic
ESTIMATOR = "Laplace's estimate, neither bound nor unbiased"


def judge(
    task: Task, log_evidence: np.ndarray | None, directory: pathlib.Path, result: RunResult
) -> None:
    """Says whether the networks are modes, and what the quadratic says of the evidence."""
    notes, problems = [], []
    remaining = local_scales.remaining_gain(task, result.state.params)
    if remaining is not None:
        most = float(np.max(remaining))
        sentence = f"By gradient and diagonal curvature, {most:.2g} nats are left to gain at the "
        if most > max(1.0, MAX_REMAINING * trees.size(task.log_joint.random_shapes)):
            problems.append(f"{sentence}network: it is no mode yet. Train it longer.")
        else:
            notes.append(f"{sentence}network: it is a mode.")
    if log_evidence is not None:
        each = ", ".join(f"{value:.2f}" for value in log_evidence)
        notes.append(f"Log-evidence by Laplace's approximation: {each}.")
        evidence.write(
            directory,
            ESTIMATOR,
            float(np.logaddexp.reduce(log_evidence) - np.log(len(log_evidence))),
            float("nan"),
            values=log_evidence,
            errors=None,
            weights=np.full(len(log_evidence), 1 / len(log_evidence)),
        )
    content = {"remaining_gain": None if remaining is None else remaining.tolist()}
    verdicts.tell(directory, Verdict(not problems, tuple(problems), tuple(notes)), content)


def run(settings: Settings) -> None:
    """Finds the curvature around every member of the run, draws, and leaves a run's folder."""
    task, opened = tasks.load_task_of_run("laplace", settings)
    settings = task.settings
    starts = checkpoint_utils.load_params(opened.path, task.log_joint.shapes)
    method = laplace.laplace(task.log_joint, settings.structure)
    directory = tasks.open_folder(task)
    tasks.execute(
        task,
        directory,
        method,
        num_chains=len(jax.tree.leaves(starts)[0]),
        num_steps=1,
        initial_params=starts,
        num_draws=settings.num_draws,
        unit="pass",
        keep_history=True,
        judge=lambda directory, result: judge(
            task,
            result.history["log_evidence"][:, -1] if "log_evidence" in result.history else None,
            directory,
            result,
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
