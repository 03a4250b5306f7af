"""Uncertainty of finished runs under shift and on foreign data.

python evaluate_uncertainty.py --runs=runs/hmc/x,runs/vi/y --data_dir=path/to/data
python evaluate_uncertainty.py --runs=runs/sgd/mnist --ood_sets=fashion_mnist,my_images.npz
"""

import pathlib

from absl import flags

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, script_utils
from haiku_posteriors.utils.report import run_folders, uncertainty

FLAGS = flags.FLAGS

cmd_args_utils.define_common_flags()
flags.declare_key_flag("dir")
flags.declare_key_flag("data_dir")
flags.DEFINE_list("runs", [], "Folders of finished runs on the same data, separated by commas.")
flags.DEFINE_list(
    "ood_sets", None, "Data sets to tell from the run's own; those that suit it by default."
)
flags.DEFINE_integer("num_draws", 50, "At most so many draws, evenly chosen.", lower_bound=1)
flags.DEFINE_integer(
    "num_rows", 1000, "At most so many rows of each foreign or shifted set.", lower_bound=2
)


def main() -> None:
    """Evaluates every run and writes one report of all."""
    run_folders.refuse_flags_of_runs(allowed=("dir", "data_dir"))
    if not FLAGS.runs:
        raise UserError("Give the folders of finished runs as --runs.")
    runs = [run_folders.open_run(pathlib.Path(name).expanduser()) for name in FLAGS.runs]
    for run in runs[1:]:
        run_folders.refuse_other_data(run, runs[0])
    directory = pathlib.Path(FLAGS.dir) if FLAGS.dir else runs[0].path / "uncertainty"
    evaluations, notes = [], []
    for run in run_folders.distinct_names(runs):
        print(f"Evaluating {run.path} ...", flush=True)
        evaluation, sentences = uncertainty.evaluate(
            run, FLAGS.ood_sets, FLAGS.num_draws, FLAGS.num_rows
        )
        evaluations.append(evaluation)
        notes += [sentence for sentence in sentences if sentence not in notes]
    uncertainty.write(directory, evaluations, notes)


if __name__ == "__main__":
    script_utils.run_script(main)
