"""The report of runs on data that arrived in parts: a table, a CSV file, and curves.

Online is the posterior of one part as the prior of the next; batch is one run on all parts so far;
naive is a run on each part, with the first prior, that starts where the one before ended.
"""

import pathlib
from collections.abc import Mapping, Sequence

from haiku_posteriors.core.judging import floors, predictive_checks
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.utils.logging_utils import tell
from haiku_posteriors.utils.plots import sweep
from haiku_posteriors.utils.report import pages, run_folders

LABELS = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL", "brier": "Brier score"}


def warn(path: pathlib.Path, part: int, num_parts: int) -> None:
    """Says so where the posterior of a part predicts the same for all inputs."""
    if not _is_constant(path):
        return
    passed_on = "and has nothing to pass on" if part < num_parts else "so the stream failed"
    tell(
        f"WARNING: after part {part} the posterior is no better than one prediction for all rows, "
        f"{passed_on}. Larger parts, a narrower prior of the first (weight_decay; the one with the "
        "highest ELBO on the first part), a smaller network or another family may help."
    )


def _is_constant(path: pathlib.Path) -> bool:
    predictions = run_folders.open_run(path).predictions
    known = predictions.targets is not None and predictions.log_likelihoods is not None
    return known and predictive_checks.against_constant(predictions).is_constant


def write(directory: pathlib.Path, folders: Mapping[str, Sequence[pathlib.Path]]) -> None:
    """Reads the finished runs of each kind, writes stream.csv, .md and .png, and prints."""
    found: dict[str, list[dict[str, Estimate]]] = {
        kind: [floors.quality(run_folders.open_run(path).predictions) for path in paths]
        for kind, paths in folders.items()
    }
    shown = {key: text for key, text in LABELS.items() if key in next(iter(found.values()))[0]}
    labels = {f"{key}/{kind}": f"{text}, {kind}" for key, text in shown.items() for kind in found}
    results = {
        f"part {part + 1}": {
            f"{key}/{kind}": numbers[part][key] for key in shown for kind, numbers in found.items()
        }
        for part in range(len(next(iter(found.values()))))
    }
    pages.write_csv(directory / "stream.csv", results)
    pages.write_markdown(directory / "stream.md", results, labels)
    sweep.part_curves(directory / "stream.png", found, shown)
    print(pages.text_table(results, labels, "simple"))
    for kind, paths in folders.items():
        empty = [str(part + 1) for part, path in enumerate(paths) if _is_constant(path)]
        if empty:
            print(f"No better than one prediction for all rows: {kind}, part {', '.join(empty)}.")
    print(f"In {directory}: stream.csv, .md and .png.")
