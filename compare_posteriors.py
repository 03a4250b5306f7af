"""Judges runs of any methods against a reference run, usually HMC's, on the same data.

python compare_posteriors.py --reference=runs/hmc/x --candidates=runs/vi/y,runs/sgmcmc/z
python compare_posteriors.py --reference=hmc_probs.csv.gz --candidates=ours.npz --targets=cifar10 \\
  --data_dir=path/to/data                                published class probabilities
"""

import os
import pathlib
import time
from collections.abc import Sequence

import jax

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.utils import logging_utils, script_utils, tasks
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.report import comparison, prediction_files, run_folders
from haiku_posteriors.utils.report.run_folders import OpenedRun
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag(
        "reference",
        "path",
        None,
        "Run folder, or file of class probabilities (.csv, .csv.gz, .npz).",
    ),
    Flag(
        "candidates",
        "paths",
        [],
        "Run folders or files, separated by commas; may be given several times.",
    ),
    Flag(
        "targets",
        "string",
        None,
        "For files of probabilities: a file of test labels, or the name of a data set.",
    ),
    Flag("data_dir", "path", None, "Folder with data files.", "the one of each run"),
    Flag("dir", "path", None, "Folder of the report.", "a new one under runs/comparison"),
)
GROUPS = {"Comparison": FLAGS}


def compare(
    reference: str | None,
    candidates: Sequence[str],
    targets: str | None,
    data_dir: str | None,
    directory: pathlib.Path,
) -> None:
    """Opens everything, refuses what cannot be compared, and writes the comparison.

    Args:
      reference: run folder or file of class probabilities to measure against.
      candidates: run folders or files to measure.
      targets: file of test labels or name of a data set, for files that bring none.
      data_dir: folder of data files; None for the one of each run.
      directory: folder of the report.
    """
    if not reference:
        raise UserError("Give the run or file to measure against as --reference.")
    labels = prediction_files.read_labels(targets, data_dir) if targets else None
    opened = []
    for name in (reference, *candidates):
        logging_utils.tell(f"Reading {name} ...")
        opened.append(open_run_or_file(name))
    if run_folders.needs_float64(opened):
        jax.config.update("jax_enable_x64", True)
    if labels is None:
        known = (o.predictions.targets for o in opened if o.predictions.targets is not None)
        labels = next(known, None)
    if labels is not None:
        opened = [
            prediction_files.with_targets(o, labels) if o.predictions.targets is None else o
            for o in opened
        ]
    comparison.write(directory, opened[0], opened[1:], data_dir)


def open_run_or_file(name: str) -> OpenedRun:
    """Opens a run's folder, or a file of class probabilities."""
    path = pathlib.Path(name)
    if not path.is_dir() and prediction_files.is_prediction_file(path):
        return prediction_files.open_predictions(path)
    return run_folders.open_run(path)


def run(settings: Settings) -> None:
    """Compares what the flags name."""
    tasks.show_if_asked(settings)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = pathlib.Path(settings.dir or f"runs/comparison/{stamp}_{os.getpid()}")
    compare(settings.reference, settings.candidates, settings.targets, settings.data_dir, directory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
