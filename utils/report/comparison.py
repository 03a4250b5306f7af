"""The report of a comparison: comparison.html, .csv, .md and the pictures."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging import floors, loo
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.loo import Elpd
from haiku_posteriors.utils import ensemble_utils, files
from haiku_posteriors.utils.logging_utils import tell
from haiku_posteriors.utils.plots import calibration, comparison, predictive
from haiku_posteriors.utils.report import pages, run_folders, run_networks
from haiku_posteriors.utils.report.run_folders import OpenedRun

LABELS = {
    "draws": "draws",
    "arrived": "arrived (1) or not (0)",
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "nll_difference": "NLL - reference's",
    "elpd_loo": "elpd, PSIS-LOO",
    "elpd_waic": "elpd, WAIC",
    "elpd_difference": "elpd - reference's, PSIS-LOO",
    "doubtful_rows": "rows of doubtful Pareto k",
    "ece": "ECE",
    "brier": "Brier score",
    "coverage_90": "coverage of 90 % intervals",
    "agreement": "agreement",
    "total_variation": "total variation",
    "w1": "W1 of functions",
    "std_ratio": "std of functions, ratio",
    "parameter_std_ratio": "std of parameters, ratio",
    "correlation_error": "error of correlations",
    "median_rhat": "R-hat, median",
    "largest_rhat": "R-hat, largest",
    "smallest_bulk_ess": "ESS, least",
    "seconds": "seconds",
    "megabytes": "peak memory, MB",
}
DISTANCES = {
    key: LABELS[key]
    for key in (
        *("agreement", "total_variation", "w1", "std_ratio"),
        *("parameter_std_ratio", "correlation_error"),
    )
}
DEFINITIONS = (
    "± is a standard error: over the test rows (bootstrap) and, of distances, over draws (blocks "
    "of draws, or whole chains, left out); for parameters and floors, the standard deviation over "
    "ways to halve the reference's chains. The randomness of training is in neither.",
    "The floor is what draws from the reference itself score: one half of its chains against the "
    "other, thinned to as many draws as the method has. Distances of finite sets of draws are "
    "above zero by chance alone, the more so the fewer there are; the method is measured against "
    "the same halves with the same number of draws. Green: within two standard errors of the "
    "floor, or better, as the average of a few point estimates can be.",
    "elpd is the sum over training rows of the log-density that the posterior without a row would "
    "give it, by Pareto-smoothed importance sampling (PSIS-LOO) or by WAIC: the larger the better. "
    "Its difference from the reference's is paired, row by row. Where the Pareto shape k of a row "
    "exceeds 0.7 the row is told to be doubtful, and so is the sum. Of methods that do not draw "
    "from the posterior it says what their draws would give if they were its.",
    "Agreement is the share of rows with the same most probable class, total variation the mean of "
    "half the absolute differences of class probabilities, both of predictions averaged over "
    "draws.",
    "W1 of functions is the mean over test rows of the Wasserstein distance between the two sets "
    "of draws of the network's function (means in regression, centred logits in classification), "
    "in the reference's standard deviations. The ratio of their standard deviations is a geometric "
    "mean; below 1 the method is too sure of its function.",
    "Of the parameters, the median ratio of standard deviations and the root mean square error of "
    "all correlations, over at most 300 of them. Symmetries of the network (relabelled units) are "
    "in these numbers: a chain that visits several copies of a mode is wider than one that does "
    "not.",
    "R-hat and effective sample size (ESS) are of predictions at test rows, for Markov chains.",
    "Arrived is each run's own verdict (docs/verdicts.md): chains that agree, training at its own "
    "optimum. Distances of a run that has not arrived say nothing of its method.",
)
PAGE = "comparison.html"
MAX_PARAMETERS = 300  # parameters compared, with all their correlations
GRID_POINTS = 300
GRID_MARGIN = 0.3  # how far beyond the data the panels reach, in units of their range
MAX_DRAWS_SHOWN = 200


def write(
    directory: pathlib.Path,
    reference: OpenedRun,
    candidates: Sequence[OpenedRun],
    data_dir: str | None = None,
) -> None:
    """Compares, writes everything, and prints the table.

    Args:
      directory: the folder to write to.
      reference: the run to measure against.
      candidates: the runs to measure.
      data_dir: the folder of data files, for predictions beyond the test rows; None for the folder
        that each run used.

    Raises:
      UserError: a candidate cannot be compared with the reference.
    """
    for candidate in candidates:
        run_folders.refuse_other_data(candidate, reference)
    reference, *candidates = run_folders.distinct_names([reference, *candidates])
    files.open_report(directory, PAGE)
    results = _results(reference, candidates)
    warnings, notes = remarks(reference, candidates)
    pictures, left_out = _draw(directory, reference, candidates, results, data_dir)
    notes += left_out
    title = f"Against {reference.name}"
    if reference.flags:
        title += f": {reference.flags['model_name']} on {reference.summary['dataset']}"
    pages.write_markdown(directory / "comparison.md", results, LABELS)
    pages.write_csv(directory / "comparison.csv", results)
    sections = {
        "": pages.html_list(warnings, "warning") + pages.html_list(notes),
        "Numbers": pages.html_table(results, LABELS),
        "Pictures": "\n".join(
            pages.html_picture(path, caption) for path, caption in pictures.items()
        ),
        "What the numbers mean": pages.html_list(DEFINITIONS),
    }
    pages.write_html(directory / PAGE, title, sections)
    print(pages.text_table(results, LABELS, "simple"))
    print("In brackets: the floor, what as many draws of the reference itself would score.")
    for sentence in warnings:
        print(f"Warning: {sentence}")
    for sentence in notes:
        print(f"- {sentence}")
    print(f"The report is {directory / PAGE}; comparison.csv and .md are beside it.")


def remarks(reference: OpenedRun, candidates: Sequence[OpenedRun]) -> tuple[list[str], list[str]]:
    """Warnings, which make the numbers doubtful, and notes; a sentence each."""
    warnings, notes = [], []
    if reference.diagnostics.get("problems"):
        problems = " ".join(reference.diagnostics["problems"])
        warnings.append(f"The reference has not converged by its own verdict. {problems}")
    num_draws, num_chains = reference.predictions.num_draws, reference.predictions.num_chains
    if not floors.halve(num_draws, num_chains):
        notes.append(
            f"{reference.name} has {num_draws} draw(s): distances between functions and floors "
            "cannot be told from it."
        )
    elif num_chains == 1:
        warnings.append(
            "The reference is one chain: its floor is the distance between its two halves, which "
            "does not show what the chain as a whole misses."
        )
    if all(run.predictions.targets is None for run in (reference, *candidates)):
        notes.append(
            "There are no labels: give --targets for accuracy, likelihood and calibration."
        )
    for candidate in candidates:
        if candidate.diagnostics.get("problems"):
            problems = " ".join(candidate.diagnostics["problems"])
            warnings.append(
                f"{candidate.name} has not arrived by its own verdict: its distances are those of "
                f"an unfinished run. {problems}"
            )
        if candidate.flags and reference.flags:
            differing = run_folders.flag_differences(candidate, reference)
            if differing:
                warnings.append(
                    f"{candidate.name} is of another posterior: {', '.join(differing)}. Its "
                    "distances measure that, too."
                )
    return warnings, notes


def _results(reference: OpenedRun, candidates: Sequence[OpenedRun]) -> pages.Results:
    theirs = reference.predictions
    # Of a reference that cannot be halved, only mean predictions are compared.
    with_parameters = reference.flags and floors.halve(theirs.num_draws, theirs.num_chains)
    reference_sample = (
        run_folders.read_parameters(reference, MAX_PARAMETERS) if with_parameters else None
    )
    results = {}
    elpds = {run.name: elpd_of_run(run) for run in (reference, *candidates)}
    for run in (reference, *candidates):
        tell(f"Comparing {run.name} with {reference.name} ...")
        parameters = None
        if reference_sample is not None and run.flags:
            sample = reference_sample
            if run is not reference:
                sample = run_folders.read_parameters(run, MAX_PARAMETERS)
            if sample.shapes == reference_sample.shapes:  # of the same network
                parameters = (sample.values, reference_sample.values)
        results[run.name] = (
            _facts(run)
            | floors.quality(run.predictions)
            | floors.likelihood_difference(run.predictions, theirs)
            | _elpd_numbers(run, reference, elpds)
            | floors.compare(run.predictions, theirs, parameters)
        )
    return results


def elpd_of_run(run: OpenedRun) -> tuple[Elpd, Elpd | None] | None:
    """By LOO and, at temperature 1, by WAIC; None where the draws are too few or not known."""
    found = run_folders.read_train_log_likelihoods(run)
    if found is None or found[0].shape[0] * found[0].shape[1] < loo.MIN_DRAWS:
        return None
    temperature = float(run.flags.get("temperature", 1.0))
    by_waic = loo.waic(found[0]) if temperature == 1 else None
    return loo.loo(found[0], temperature=temperature), by_waic


def _elpd_numbers(
    run: OpenedRun, reference: OpenedRun, elpds: Mapping[str, tuple[Elpd, Elpd | None] | None]
) -> dict[str, Estimate]:
    ours, theirs = elpds[run.name], elpds[reference.name]
    if ours is None:
        return {}
    by_loo, by_waic = ours
    numbers = {
        "elpd_loo": Estimate(by_loo.value, by_loo.error),
        "doubtful_rows": Estimate(float(by_loo.num_doubtful)),
    }
    if by_waic:
        numbers["elpd_waic"] = Estimate(by_waic.value, by_waic.error)
    if theirs and run is not reference:
        numbers["elpd_difference"] = Estimate(*loo.difference(by_loo, theirs[0]))
    return numbers


def _facts(run: OpenedRun) -> dict[str, Estimate]:
    summary, convergence = run.summary, run.diagnostics.get("predictions", {})
    found = {"draws": float(run.predictions.num_draws)}
    if run.diagnostics.get("converged") is not None:
        found["arrived"] = float(run.diagnostics["converged"])
    found |= {
        key: convergence[key]
        for key in ("median_rhat", "largest_rhat", "smallest_bulk_ess")
        if convergence.get(key) is not None  # null where draws were too few to tell
    }
    if "seconds" in summary:
        found["seconds"] = summary["seconds"]
    if "peak_memory_bytes" in summary:
        found["megabytes"] = summary["peak_memory_bytes"] / 1e6
    return {name: Estimate(float(value)) for name, value in found.items()}


def _draw(
    directory: pathlib.Path,
    reference: OpenedRun,
    candidates: Sequence[OpenedRun],
    results: pages.Results,
    data_dir: str | None,
) -> tuple[dict[pathlib.Path, str], list[str]]:
    """Draws what the data allow; captions by file, and a sentence on what could not be drawn."""
    tell("Drawing ...")
    pictures, left_out = {}, []
    everyone = (reference, *candidates)
    if reference.flags and reference.predictions.task == "regression":
        path = directory / "predictive.png"
        try:
            if _predictive_panel(path, [run for run in everyone if run.flags], data_dir):
                pictures[path] = "Predictive distributions, all on the same axes."
        except UserError as error:  # the data are elsewhere; the predictions are here
            left_out.append(f"Predictive distributions are not drawn. {error}")
    compared = {candidate.name: results[candidate.name] for candidate in candidates}
    if any(key in run for run in compared.values() for key in DISTANCES):
        path = directory / "distances.png"
        comparison.distance_bars(path, compared, DISTANCES)
        pictures[path] = "Distances from the reference (agreement: the more the better; ratios: 1)."
    if any(run.predictions.targets is not None for run in everyone):
        path = directory / "calibration.png"
        calibration.calibration_curves(path, {run.name: run.predictions for run in everyone})
        pictures[path] = "Calibration on the test rows."
    scored = {
        run.name: run.predictions
        for run in everyone
        if run.predictions.targets is not None and run.predictions.log_likelihoods is not None
    }
    if any(predictions.num_draws > 1 for predictions in scored.values()):
        path = directory / "draws.png"
        comparison.draw_curves(path, scored)
        pictures[path] = (
            "NLL and accuracy of the mixture against its number of draws, on average over choices."
        )
    spread = {c.name: c.predictions for c in candidates if c.predictions.num_draws > 1}
    if reference.predictions.num_draws > 1 and spread:
        path = directory / "spread.png"
        comparison.spread_scatter(path, spread, reference.name, reference.predictions)
        pictures[path] = (
            "Standard deviation of the network's function at test rows: below the line, the "
            "method is surer than the reference."
        )
    return pictures, left_out


def _predictive_panel(path: pathlib.Path, runs: Sequence[OpenedRun], data_dir: str | None) -> bool:
    """Draws all runs on one grid; False where the data have more than one input or target."""
    panels = {}
    for run in runs:
        log_joint, dataset = run_networks.load_run_problem(run, data_dir)
        if dataset.form.inputs.shape != (1,) or dataset.y_train.shape[1:] != (1,):
            return False
        low, high = float(dataset.x_train.min()), float(dataset.x_train.max())
        margin = GRID_MARGIN * (high - low)
        grid = np.linspace(low - margin, high + margin, GRID_POINTS)
        draws = run_networks.choose_draws(log_joint, run, MAX_DRAWS_SHOWN)
        predict = run_networks.predictor_of_run(log_joint, dataset, draws)
        panels[run.name] = predict(grid[:, None], None).flat_outputs
    targets = ensemble_utils.targets_in_original_units(dataset.y_train, dataset.form)
    predictive.predictive_panel(path, panels, grid, dataset.x_train, targets)
    return True
