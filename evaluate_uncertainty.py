"""Uncertainty of finished runs under shift and on foreign data.

python evaluate_uncertainty.py --runs=runs/hmc/x,runs/vi/y --data_dir=path/to/data
python evaluate_uncertainty.py --runs=runs/sgd/mnist --ood_sets=fashion_mnist,my_images.npz
"""

import pathlib
from collections.abc import Sequence

import jax
from absl import flags

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import script_utils
from haiku_posteriors.utils.report import run_folders, uncertainty

FLAGS = flags.FLAGS


def run(
    runs: Sequence[str],
    ood_sets: Sequence[str] | None,
    num_draws: int,
    num_rows: int,
    data_dir: str | None,
    directory: pathlib.Path | None,
) -> None:
    """Evaluates every run and writes one report of all.

    Args:
      runs: folders of finished runs on the same data.
      ood_sets: names of foreign data sets; None for those that suit the data set of the runs.
      num_draws: maximum draws per run.
      num_rows: maximum rows of each foreign or shifted set.
      data_dir: folder of data files; None for the one of each run.
      directory: folder of the report; None for `uncertainty` in the folder of the first run.
    """
    if not runs:
        raise UserError("Give the folders of finished runs as --runs.")
    opened = [run_folders.open_run(pathlib.Path(name).expanduser()) for name in runs]
    for other in opened[1:]:
        run_folders.refuse_other_data(other, opened[0])
    if run_folders.needs_float64(opened):
        jax.config.update("jax_enable_x64", True)
    evaluations, notes = [], []
    for one in run_folders.distinct_names(opened):
        print(f"Evaluating {one.path} ...", flush=True)
        evaluation, sentences = uncertainty.evaluate(one, ood_sets, num_draws, num_rows, data_dir)
        evaluations.append(evaluation)
        notes += [sentence for sentence in sentences if sentence not in notes]
    uncertainty.write(directory or opened[0].path / "uncertainty", evaluations, notes)


def define_flags() -> None:
    """Defines the flags of this script; not on import, so that several scripts can be imported."""
    flags.DEFINE_list("runs", [], "Folders of finished runs on the same data, separated by commas.")
    flags.DEFINE_list(
        "ood_sets", None, "Data sets to tell from the run's own; those that suit it by default."
    )
    flags.DEFINE_integer("num_draws", 50, "Maximum draws per run, evenly chosen.", lower_bound=1)
    flags.DEFINE_integer(
        "num_rows", 1000, "Maximum rows of each foreign or shifted set.", lower_bound=2
    )
    flags.DEFINE_string("data_dir", None, "Folder with data files; by default the one of each run.")
    flags.DEFINE_string(
        "dir", None, "Folder of the report; uncertainty/ in the first run's by default."
    )


def main() -> None:
    """Evaluates the runs that the flags name."""
    directory = pathlib.Path(FLAGS.dir) if FLAGS.dir else None
    run(FLAGS.runs, FLAGS.ood_sets, FLAGS.num_draws, FLAGS.num_rows, FLAGS.data_dir, directory)


if __name__ == "__main__":
    define_flags()
    script_utils.run_script(main)
