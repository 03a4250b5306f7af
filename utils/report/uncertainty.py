"""The report on a run's uncertainty: on its test rows, on shifted ones and on foreign ones."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import detection, floors, metrics
from haiku_posteriors.core.judging.bootstrap import Estimate, bootstrap_error_of_two
from haiku_posteriors.core.judging.predictions import Predictions, evenly
from haiku_posteriors.utils.data_utils import Dataset
from haiku_posteriors.utils.datasets import shifts
from haiku_posteriors.utils.datasets.shifts import InputSpace, Shift
from haiku_posteriors.utils.plots import calibration, uncertainty
from haiku_posteriors.utils.report import pages, run_networks
from haiku_posteriors.utils.report.run_folders import OpenedRun
from haiku_posteriors.utils.report.run_networks import Predictor

PAGE = "uncertainty.html"
MAIN_SCORE = {"classification": "entropy", "regression": "total"}
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
DETECTION_LABELS = {
    "auroc": "AUROC",
    "auroc_epistemic": "AUROC, epistemic",
    "fpr95": "FPR95",
    "confidence": "mean confidence",
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

Scores = Mapping[str, np.ndarray]  # uncertainties of rows by the name of the score
ShiftResult = tuple[str, float, dict[str, float]]  # kind, strength, metrics


class Evaluation(NamedTuple):
    """One run on all data.

    Attributes:
      name: of the run.
      dataset: its data set's name.
      predictions: of the test rows, by the draws that were used.
      numbers: by `metric` on the test rows, `metric/foreign set` and `metric/kind/strength`.
      main_scores: the main uncertainty score of the test rows and of each foreign set's.
      shifts: metrics of every shift.
    """

    name: str
    dataset: str
    predictions: Predictions
    numbers: dict[str, Estimate]
    main_scores: dict[str, np.ndarray]
    shifts: list[ShiftResult]


def evaluate(
    run: OpenedRun,
    foreign_sets: Sequence[str] | None,
    max_draws: int,
    max_rows: int,
    data_dir: str | None,
    with_shifts: bool = True,
) -> tuple[Evaluation, list[str]]:
    """Rebuilds the network of a run, gives it draws of the run, and evaluates them.

    Args:
      run: the finished run.
      foreign_sets: names of data sets; None for those that suit the run's own.
      max_draws: maximum number of draws, evenly chosen.
      max_rows: maximum number of test rows in each shift, and of rows of each foreign set.
      data_dir: the folder of data files; None for the run's own.
      with_shifts: whether test rows are corrupted and rotated as well, in some fifty ways.

    Returns:
      The evaluation, and a sentence for each foreign set that could not be used.
    """
    problem = run_networks.problem_of_run(run, data_dir)
    log_joint, dataset = run_networks.load_run_problem(run, data_dir)
    draws = run_networks.choose_draws(log_joint, run, max_draws)
    predict = run_networks.predictor_of_run(log_joint, dataset, draws)
    test = predict(dataset.x_test, dataset.y_test)
    scores = detection.scores(test.task, test.flat_outputs)
    numbers = _test_numbers(test, scores)
    main_scores = {"test": scores[MAIN_SCORE[test.task]]}
    shifted: list[ShiftResult] = []
    left_out: list[str] = []
    if dataset.form.inputs.shape is not None and not dataset.form.inputs.is_tokens:
        space, values = shifts.input_space(
            dataset, problem.data_dir, problem.task, problem.table_options
        )
        if foreign_sets is None:
            foreign_sets = shifts.FOREIGN_SETS.get(dataset.name, ())
        foreign, left_out = _foreign_scores(
            foreign_sets, problem.data_dir, space, dataset, predict, max_rows
        )
        for name, outside in foreign.items():
            numbers |= _detection_numbers(name, scores, outside, MAIN_SCORE[test.task])
            main_scores[name] = outside[MAIN_SCORE[test.task]]
        if with_shifts:
            shifted = _shift_results(space, values, dataset, predict, max_rows)
        numbers |= {
            f"{metric}/{kind}/{strength:g}": Estimate(value)
            for kind, strength, found in shifted
            for metric, value in found.items()
        }
    elif foreign_sets:
        raise UserError(f"Foreign sets need inputs that are numbers; {dataset.name} has tokens.")
    evaluation = Evaluation(run.name, run.summary["dataset"], test, numbers, main_scores, shifted)
    return evaluation, left_out


def write(directory: pathlib.Path, evaluations: Sequence[Evaluation], notes: list[str]) -> None:
    """Writes uncertainty.html, .csv and .md with their pictures, and prints the table."""
    results = {e.name: e.numbers | _corruption_means(e.shifts) for e in evaluations}
    labels = _line_labels(results)
    pictures = _draw(directory, evaluations)
    pages.write_csv(directory / "uncertainty.csv", results)
    pages.write_markdown(directory / "uncertainty.md", results, labels)
    sections = {
        "": pages.html_list(notes, "warning"),
        "Numbers": pages.html_table(results, labels),
        "Pictures": "\n".join(pages.html_picture(p, text) for p, text in pictures.items()),
        "What the numbers mean": pages.html_list(DEFINITIONS),
    }
    title = f"Uncertainty on {evaluations[0].dataset}"
    pages.write_html(directory / PAGE, title, sections)
    print(pages.text_table(results, labels, "simple"))
    for sentence in notes:
        print(f"- {sentence}")
    print(f"The report is {directory / PAGE}; uncertainty.csv and .md are beside it.")


def _test_numbers(test: Predictions, scores: Scores) -> dict[str, Estimate]:
    main_score = scores[MAIN_SCORE[test.task]]
    numbers = floors.quality(test)
    numbers["aurc"] = Estimate(detection.area_under_risk_coverage(main_score, _losses(test)))
    if test.task == "classification":
        numbers["confidence"] = Estimate(float(1 - scores["one_minus_confidence"].mean()))
    return numbers


def _losses(test: Predictions) -> np.ndarray:
    return detection.losses_of_rows(test.task, test.flat_outputs, np.asarray(test.targets))


def _foreign_scores(
    names: Sequence[str],
    data_dir: str | None,
    space: InputSpace,
    dataset: Dataset,
    predict: Predictor,
    max_rows: int,
) -> tuple[dict[str, Scores], list[str]]:
    """Scores by foreign set, and a sentence for each set that could not be used."""
    found: dict[str, Scores] = {}
    left_out = []
    for name in names:
        try:
            rows = shifts.foreign_rows(name, data_dir, space, dataset.x_test, max_rows)
        except UserError as error:
            left_out.append(f"Left out: {error}")
            continue
        label = pathlib.Path(name).stem  # a data set's name, or a file's
        found[label] = detection.scores(dataset.task, predict(rows, None).flat_outputs)
    return found, left_out


def _detection_numbers(
    name: str, inside: Scores, outside: Scores, main_score: str
) -> dict[str, Estimate]:
    ordinary, foreign = inside[main_score], outside[main_score]
    found = {
        f"auroc/{name}": Estimate(
            detection.auroc(ordinary, foreign),
            bootstrap_error_of_two(detection.auroc, ordinary, foreign),
        ),
        f"auroc_epistemic/{name}": Estimate(
            detection.auroc(inside["epistemic"], outside["epistemic"])
        ),
        f"fpr95/{name}": Estimate(detection.false_positive_rate(ordinary, foreign)),
    }
    if "one_minus_confidence" in outside:
        confidence = float(1 - outside["one_minus_confidence"].mean())
        found[f"confidence/{name}"] = Estimate(confidence)
    return found


def _shift_results(
    space: InputSpace, values: np.ndarray, dataset: Dataset, predict: Predictor, max_rows: int
) -> list[ShiftResult]:
    """Metrics of evenly chosen test rows, corrupted and rotated; `values` are all of them."""
    few = evenly(len(values), max_rows)

    def results(found: Iterable[Shift]) -> list[ShiftResult]:
        return [
            (shift.kind, shift.strength, _metrics(predict(shift.inputs, dataset.y_test[few])))
            for shift in found
        ]

    return [
        *results(shifts.corruptions(space, values[few], dataset.x_test)),
        *results(shifts.rotations(space, values[few], dataset.x_test)),
    ]


def _metrics(predictions: Predictions) -> dict[str, float]:
    found = metrics.evaluate(
        predictions.task,
        predictions.flat_outputs,
        predictions.flat_log_likelihoods,
        np.asarray(predictions.targets),
    )
    return {name: found[name] for name in SHOWN[predictions.task]}


def _corruption_means(shifted: Sequence[ShiftResult]) -> dict[str, Estimate]:
    """Means over all kinds of corruption by severity."""
    by_severity: dict[str, list[float]] = {}
    for kind, strength, found in shifted:
        if kind != "rotation":
            for metric, value in found.items():
                by_severity.setdefault(f"{metric}/corrupted/{strength:g}", []).append(value)
    return {key: Estimate(float(np.mean(values))) for key, values in by_severity.items()}


def _line_labels(results: pages.Results) -> dict[str, str]:
    """Lines of the table: test rows, foreign sets, means over corruptions; the CSV has the rest."""
    labels = dict(LABELS)
    for key in next(iter(results.values())):
        metric, _, rest = key.partition("/")
        if rest.startswith("corrupted/"):
            if metric != "brier":  # in the CSV alone, as the table is long without it
                labels[key] = f"{LABELS[metric]}, corrupted, severity {rest.split('/')[1]}"
        elif rest and "/" not in rest:
            labels[key] = f"{DETECTION_LABELS[metric]}, {rest}"
    return labels


def _draw(directory: pathlib.Path, evaluations: Sequence[Evaluation]) -> dict[pathlib.Path, str]:
    """Draws what the evaluations allow; captions by file."""
    task = evaluations[0].predictions.task
    path = directory / "calibration.png"
    calibration.calibration_curves(path, {e.name: e.predictions for e in evaluations})
    pictures = {path: "Calibration on the test rows."}
    path = directory / "risk_coverage.png"
    by_run = {e.name: (e.main_scores["test"], _losses(e.predictions)) for e in evaluations}
    loss = "error" if task == "classification" else "mean squared error"
    uncertainty.risk_coverage(path, by_run, loss)
    pictures[path] = "Error of the rows that are left when the least certain are refused."
    if any(len(e.main_scores) > 1 for e in evaluations):
        path = directory / "entropies.png"
        label = "entropy of the prediction (nats)" if task == "classification" else "total std"
        uncertainty.distribution_functions(
            path, {e.name: e.main_scores for e in evaluations}, label
        )
        pictures[path] = (
            "Shares of rows with at most that uncertainty: foreign rows should be to the right."
        )
    for rotated, name, label in (
        (False, "corruptions.png", "severity"),
        (True, "rotations.png", "degrees"),
    ):
        shown = {
            e.name: [shift for shift in e.shifts if (shift[0] == "rotation") == rotated]
            for e in evaluations
        }
        if any(shown.values()):
            uncertainty.shift_curves(directory / name, shown, SHOWN[task][:3], LABELS, label)
            pictures[directory / name] = (
                "Turned test images." if rotated else "Corrupted test rows, mean over all kinds."
            )
    return pictures
