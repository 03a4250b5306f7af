"""Judges runs of any methods against a reference run, usually HMC's, on the same data.

python compare_posteriors.py --reference=runs/hmc/x --candidates=runs/vi/y,runs/sgmcmc/z
python compare_posteriors.py --reference=hmc_probs.csv.gz --candidates=ours.npz --targets=cifar10 \\
  --data_dir=path/to/data                                published class probabilities
"""

import pathlib

from absl import flags

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import cmd_args_utils, script_utils
from haiku_posteriors.utils.report import comparison, prediction_files, run_folders
from haiku_posteriors.utils.report.run_folders import Predictive

FLAGS = flags.FLAGS

cmd_args_utils.define_common_flags()
flags.declare_key_flag("dir")
flags.declare_key_flag("data_dir")
flags.DEFINE_string(
    "reference", None, "Run folder, or file of class probabilities (.csv, .csv.gz, .npz)."
)
flags.DEFINE_multi_string(
    "candidates", [], "Run folders or files, separated by commas; may be given several times."
)
flags.DEFINE_string(
    "targets", None, "For files of probabilities: a file of test labels, or a data set's name."
)


def open_any(name: str) -> Predictive:
    """A run's folder, or a file of predictions."""
    path = pathlib.Path(name).expanduser()
    if not path.is_dir() and prediction_files.is_prediction_file(path):
        return prediction_files.open_predictions(path)
    return run_folders.open_run(path)


def main() -> None:
    """Opens everything, refuses what cannot be compared, and writes the comparison."""
    run_folders.refuse_flags_of_runs(allowed=("dir", "data_dir"))
    names = [name for group in FLAGS.candidates for name in group.split(",") if name]
    if not FLAGS.reference:
        raise UserError("Give the run or file to measure against as --reference.")
    labels = None
    if FLAGS.targets:
        labels = prediction_files.read_labels(FLAGS.targets, FLAGS.data_dir)
    opened = [open_any(name) for name in (FLAGS.reference, *names)]
    if labels is None:
        labels = next((p.targets for p in opened if p.targets is not None), None)
    if labels is not None:
        opened = [
            prediction_files.with_targets(p, labels) if p.targets is None else p for p in opened
        ]
    directory = pathlib.Path(FLAGS.dir or "runs/comparison")
    comparison.write(directory, opened[0], opened[1:])


if __name__ == "__main__":
    script_utils.run_script(main)
