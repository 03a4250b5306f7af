"""A run's uncertainty on its own test rows, on shifted ones and on foreign ones, as a report."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import detection, floors, metrics
from haiku_posteriors.core.judging.floors import Estimate
from haiku_posteriors.utils.datasets import shifts
from haiku_posteriors.utils.datasets.shifts import Shift
from haiku_posteriors.utils.ensemble_utils import Predictions, targets_in_original_units
from haiku_posteriors.utils.plots import comparison, uncertainty
from haiku_posteriors.utils.report import pages, run_folders
from haiku_posteriors.utils.report.run_folders import Predictive

FLAGS = flags.FLAGS

SHOWN = {
    "classification": ("accuracy", "nll", "ece", "brier"),
    "regression": ("rmse", "nll", "coverage_90"),
}
LABELS = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "coverage_90": "coverage of 90 % intervals",
    "confidence": "mean confidence",
    "aurc": "area under risk-coverage",
}
DEFINITIONS = (
    "AUROC is the probability that a foreign row is less certain than a test row (1/2: chance), by "
    "the entropy of the mean prediction or, 'epistemic', by the mutual information of label and "
    "weights. FPR95 is the share of foreign rows that pass a threshold on the entropy which 95 % "
    "of the test rows pass; lower is better.",
    "Risk-coverage: the error (in regression, squared error) of the rows that are left when the "
    "least certain ones are refused; its area is the mean over all coverages.",
    "Shifts keep the labels: corruptions in five severities made on the fly, and rotations. ± is a "
    "standard error over rows (bootstrap).",
)


class Evaluation(NamedTuple):
    """One run, on everything.

    Attributes:
      predictive: the run with the draws that were used, on the test rows.
      numbers: by `test metric`, `metric/foreign set` and `metric/kind/strength`.
      entropies: uncertainty scores of test rows and of each foreign set's.
      shifts: metrics of every shift.
    """

    predictive: Predictive
    numbers: dict[str, Estimate]
    entropies: dict[str, np.ndarray]
    shifts: list[tuple[str, float, dict[str, float]]]


def evaluate(
    run: Predictive, foreign_sets: Sequence[str] | None, num_draws: int, num_rows: int
) -> tuple[Evaluation, list[str]]:
    """Reloads network and draws of a run and evaluates them.

    Args:
      run: the finished run.
      foreign_sets: names of data sets; None for those that suit the run's own.
      num_draws: at most so many draws, evenly chosen.
      num_rows: at most so many test rows in each shift, and so many of each foreign set.

    Returns:
      The evaluation, and a sentence for each foreign set that could not be used.
    """
    log_joint, dataset = run_folders.load_problem(run)
    draws = run_folders.choose_draws(log_joint, run, num_draws)
    predict = run_folders.make_predictor(log_joint, dataset, draws)
    targets = targets_in_original_units(dataset.y_test, dataset)
    test = predict(dataset.x_test, dataset.y_test)
    used = run._replace(
        outputs=test.outputs, log_likelihoods=test.log_likelihoods, targets=targets, num_chains=1
    )
    scores = detection.scores(run.task, test.outputs)
    main_score = "entropy" if run.task == "classification" else "total"
    losses = detection.losses_of_rows(run.task, test.outputs, targets)
    numbers = floors.quality(used)
    numbers["aurc"] = Estimate(detection.area_under_risk_coverage(scores[main_score], losses))
    if run.task == "classification":
        numbers["confidence"] = Estimate(float(1 - scores["one_minus_confidence"].mean()))
    entropies, sentences = {"test": scores[main_score]}, []
    by_shift: list[tuple[str, float, dict[str, float]]] = []
    if np.issubdtype(dataset.x_test.dtype, np.floating):
        space, values = shifts.input_space(dataset, FLAGS.data_dir, FLAGS.task)
        foreign = shifts.FOREIGN_SETS.get(dataset.name, ())
        for name in foreign if foreign_sets is None else foreign_sets:
            try:
                rows = shifts.foreign_rows(name, FLAGS.data_dir, space, dataset.x_test, num_rows)
            except UserError as error:
                sentences.append(f"Left out: {error}")
                continue
            outside = detection.scores(run.task, predict(rows).outputs)
            label = pathlib.Path(name).stem  # a data set's name, or a file's
            numbers |= _detection(label, scores, outside, main_score)
            entropies[label] = outside[main_score]
        few = run_folders.evenly(len(values), num_rows)
        ways: Iterable[Callable[..., Iterable[Shift]]] = (
            shifts.corruptions,
            shifts.rotations,
        )
        for way in ways:
            for shift in way(space, values[few], dataset.x_test):
                found = _metrics(run.task, predict(shift.inputs, dataset.y_test[few]), targets[few])
                by_shift.append((shift.kind, shift.strength, found))
                numbers |= {
                    f"{name}/{shift.kind}/{shift.strength:g}": Estimate(value)
                    for name, value in found.items()
                }
    elif foreign_sets:
        raise UserError(f"Foreign sets need inputs that are numbers; {dataset.name} has tokens.")
    return Evaluation(used, numbers, entropies, by_shift), sentences


def write(directory: pathlib.Path, evaluations: Sequence[Evaluation], notes: list[str]) -> None:
    """Writes uncertainty.html, .csv and .md with their pictures, and prints the table."""
    results = {e.predictive.name: _with_means(e) for e in evaluations}
    labels = _labels(results)
    pictures = _draw(directory, evaluations)
    pages.write_csv(directory / "uncertainty.csv", results)
    pages.write_markdown(directory / "uncertainty.md", results, labels)
    sections = {
        "": pages.html_list(notes, "warning"),
        "Numbers": pages.html_table(results, labels),
        "Pictures": "\n".join(pages.html_picture(p, text) for p, text in pictures.items()),
        "What the numbers mean": pages.html_list(DEFINITIONS),
    }
    dataset = evaluations[0].predictive.summary["dataset"]
    pages.write_html(directory / "uncertainty.html", f"Uncertainty on {dataset}", sections)
    print(pages.text_table(results, labels, "simple"))
    for sentence in notes:
        print(f"- {sentence}")
    print(f"The report is {directory / 'uncertainty.html'}; uncertainty.csv and .md are beside it.")


def _metrics(task: str, predictions: Predictions, targets: np.ndarray) -> dict[str, float]:
    found = metrics.evaluate(task, *predictions, targets)
    return {name: found[name] for name in SHOWN[task]}


def _detection(
    name: str, inside: Mapping[str, np.ndarray], outside: Mapping[str, np.ndarray], score: str
) -> dict[str, Estimate]:
    rng = np.random.default_rng(0)
    ordinary, foreign = inside[score], outside[score]
    resampled = [
        detection.auroc(rng.choice(ordinary, ordinary.size), rng.choice(foreign, foreign.size))
        for _ in range(floors.RESAMPLES // 4)
    ]
    found = {
        f"auroc/{name}": Estimate(detection.auroc(ordinary, foreign), float(np.std(resampled))),
        f"auroc_epistemic/{name}": Estimate(
            detection.auroc(inside["epistemic"], outside["epistemic"])
        ),
        f"fpr95/{name}": Estimate(detection.false_positive_rate(ordinary, foreign)),
    }
    if "one_minus_confidence" in outside:
        confidence = float(1 - outside["one_minus_confidence"].mean())
        found[f"confidence/{name}"] = Estimate(confidence)
    return found


def _with_means(evaluation: Evaluation) -> dict[str, Estimate]:
    """The numbers, and means over all corruptions by severity."""
    numbers = dict(evaluation.numbers)
    by_severity: dict[str, list[float]] = {}
    for kind, strength, found in evaluation.shifts:
        if kind != "rotation":
            for metric, value in found.items():
                by_severity.setdefault(f"{metric}/corrupted/{strength:g}", []).append(value)
    means = {key: Estimate(float(np.mean(values))) for key, values in by_severity.items()}
    return numbers | means


def _labels(results: pages.Results) -> dict[str, str]:
    """Lines of the table: test rows, foreign sets, means over corruptions; the CSV has the rest."""
    labels = dict(LABELS)
    words = {
        "auroc": "AUROC",
        "auroc_epistemic": "AUROC, epistemic",
        "fpr95": "FPR95",
        "confidence": "mean confidence",
    }
    for key in next(iter(results.values())):
        metric, _, rest = key.partition("/")
        if rest.startswith("corrupted/"):
            if metric == "brier":  # in the CSV
                continue
            labels[key] = f"{LABELS[metric]}, corrupted, severity {rest.split('/')[1]}"
        elif rest and "/" not in rest:
            labels[key] = f"{words[metric]}, {rest}"
    return labels


def _draw(directory: pathlib.Path, evaluations: Sequence[Evaluation]) -> dict[pathlib.Path, str]:
    task = evaluations[0].predictive.task
    pictures = {directory / "calibration.png": "Calibration on the test rows."}
    comparison.calibration_curves(
        directory / "calibration.png", [e.predictive for e in evaluations]
    )
    path = directory / "risk_coverage.png"
    uncertainty.risk_coverage(
        path,
        {
            e.predictive.name: (
                e.entropies["test"],
                detection.losses_of_rows(
                    task, e.predictive.outputs, np.asarray(e.predictive.targets)
                ),
            )
            for e in evaluations
        },
        "error" if task == "classification" else "mean squared error",
    )
    pictures[path] = "Error of the rows that are left when the least certain are refused."
    if any(len(e.entropies) > 1 for e in evaluations):
        path = directory / "entropies.png"
        label = "entropy of the prediction (nats)" if task == "classification" else "total std"
        uncertainty.distribution_functions(
            path, {e.predictive.name: e.entropies for e in evaluations}, label
        )
        pictures[path] = (
            "Shares of rows with at most that uncertainty: foreign rows should be to the right."
        )
    for turned, name, label in (
        (False, "corruptions.png", "severity"),
        (True, "rotations.png", "degrees"),
    ):
        shown = {
            e.predictive.name: [shift for shift in e.shifts if (shift[0] == "rotation") == turned]
            for e in evaluations
        }
        if any(shown.values()):
            uncertainty.shift_curves(directory / name, shown, SHOWN[task][:3], LABELS, label)
            pictures[directory / name] = (
                "Turned test images." if turned else "Corrupted test rows, mean over all kinds."
            )
    return pictures
