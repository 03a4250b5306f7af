"""Uncertainty of finished runs under shift and on foreign data.

python evaluate_uncertainty.py --runs=runs/hmc/x,runs/vi/y --data_dir=path/to/data
python evaluate_uncertainty.py --runs=runs/sgd/mnist --ood_sets=fashion_mnist,my_images.npz
python evaluate_uncertainty.py --runs=runs/sgd/mnist --shifts=false       foreign sets alone
"""

import pathlib
from collections.abc import Sequence

import jax

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import files, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import run_folders, uncertainty
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag("runs", "paths", [], "Folders of finished runs on the same data, separated by commas."),
    Flag(
        "ood_sets",
        "list",
        None,
        "Data sets to tell from the run's own, separated by commas.",
        "those that suit it",
    ),
    Flag("num_draws", "integer", 50, "Maximum draws per run, evenly chosen.", lower_bound=1),
    Flag("num_rows", "integer", 1000, "Maximum rows per foreign or shifted set.", lower_bound=2),
    Flag("shifts", "bool", True, "Corrupt and rotate test rows, too: most of the time."),
    Flag("data_dir", "path", None, "Folder with data files.", "the one of each run"),
    Flag("dir", "path", None, "Folder of the report.", "'uncertainty' in the first run's folder"),
)
GROUPS = {"Evaluation": FLAGS}


def evaluate(
    runs: Sequence[str],
    ood_sets: Sequence[str] | None,
    num_draws: int,
    num_rows: int,
    data_dir: str | None,
    directory: pathlib.Path | None,
    with_shifts: bool = True,
) -> None:
    """Evaluates every run and writes one report of all.

    Args:
      runs: folders of finished runs on the same data.
      ood_sets: names of foreign data sets; None for those that suit the data set of the runs.
      num_draws: maximum draws per run.
      num_rows: maximum rows of each foreign or shifted set.
      data_dir: folder of data files; None for the one of each run.
      directory: folder of the report; None for `uncertainty` in the folder of the first run.
      with_shifts: whether test rows are corrupted and rotated.
    """
    if not runs:
        raise UserError("Give the folders of finished runs as --runs.")
    opened = [run_folders.open_run(pathlib.Path(name)) for name in runs]
    for other in opened[1:]:
        run_folders.refuse_other_data(other, opened[0])
    if run_folders.needs_float64(opened):
        jax.config.update("jax_enable_x64", True)
    directory = directory or opened[0].path / "uncertainty"
    files.open_report(directory, uncertainty.PAGE)
    evaluations, notes = [], []
    for one in run_folders.distinct_names(opened):
        print(f"Evaluating {one.path} ...", flush=True)
        evaluation, sentences = uncertainty.evaluate(
            one, ood_sets, num_draws, num_rows, data_dir, with_shifts
        )
        evaluations.append(evaluation)
        notes += [sentence for sentence in sentences if sentence not in notes]
    uncertainty.write(directory, evaluations, notes)


def run(settings: Settings) -> None:
    """Evaluates what the flags name."""
    tasks.show_if_asked(settings)
    evaluate(
        settings.runs,
        settings.ood_sets,
        settings.num_draws,
        settings.num_rows,
        settings.data_dir,
        pathlib.Path(settings.dir) if settings.dir else None,
        settings.shifts,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
