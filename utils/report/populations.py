"""What populations of sequential Monte Carlo say of themselves, and of the evidence."""

import pathlib

import numpy as np

from haiku_posteriors.core.judging import diagnostics, populations
from haiku_posteriors.utils.files import write_json
from haiku_posteriors.utils.plots import curves
from haiku_posteriors.utils.report import evidence
from haiku_posteriors.utils.report.chain_diagnostics import (
    PARAMETERS_DIAGNOSED,
    chosen_predictions,
)
from haiku_posteriors.utils.train_utils import RunResult


def report_smc(directory: pathlib.Path, result: RunResult) -> None:
    """Judges a run of SMC: evidence.json, diagnostics.json and .png, and a verdict."""
    history = result.history
    fractions = history["fraction"][:, -1]
    log_evidences = history["log_evidence"][:, -1]
    combined = populations.combine_log_evidences(log_evidences)
    # A population's particles are as many chains of one draw, all from its common start.
    rhat = populations.nested_rhat(chosen_predictions(result.test_predictions.outputs)[:, :, None])
    parameters = np.concatenate(
        [
            diagnostics.subsample_parameters(part, PARAMETERS_DIAGNOSED, num_batch_axes=2)
            for part in result.store.parts()
        ],
        axis=1,
    )
    parameter_rhat = populations.nested_rhat(parameters[:, :, None])
    at_end = history["fraction"] == fractions[:, None]
    acceptance = np.array(
        [
            values[chosen].mean()
            for values, chosen in zip(history["acceptance_probability"], at_end, strict=True)
        ]
    )
    num_ancestors = history["num_ancestors"][:, -1].astype(int)
    verdict = populations.verdict(
        rhat,
        combined,
        fractions=fractions,
        num_ancestors=num_ancestors,
        num_particles=parameters.shape[1],
        acceptance=acceptance,
    )
    num_gradients = int(history["num_gradients"].sum())
    evidence.write(
        directory,
        "sequential Monte Carlo, an estimate",
        combined.value if np.min(fractions) == 1 else np.nan,
        combined.error,
        values=log_evidences,
        errors=None,
        weights=combined.weights,
    )
    known = rhat[~np.isnan(rhat)]
    median, largest = (
        (float(np.median(known)), float(np.max(known))) if known.size else (np.nan, np.nan)
    )
    write_json(
        directory / "diagnostics.json",
        {
            "converged": verdict.converged,
            "problems": list(verdict.problems),
            "notes": list(verdict.notes),
            "predictions": {"median_nested_rhat": median, "largest_nested_rhat": largest},
            "fractions": fractions.tolist(),
            "num_temperatures": [int(np.sum(row < 1)) + 1 for row in history["fraction"]],
            "num_ancestors": num_ancestors.tolist(),
            "acceptance": acceptance.tolist(),
            "divergent": int(history["num_divergent"].sum()),
            "step_size": history["step_size"][:, -1].tolist(),
            "num_gradients": num_gradients,
        },
    )
    curves.chain_diagnostics(
        directory / "diagnostics.png", history["log_joint"], rhat, parameter_rhat
    )
    each = ", ".join(f"{value:.2f}" for value in log_evidences)
    print(
        f"Log-evidence: {combined.value:.2f} (error {combined.error:.2f}), of populations with "
        f"{each}; their standard deviation is {combined.spread:.2f}."
    )
    print(
        f"Predictions: nested R-hat {median:.3f} in the median, {largest:.3f} at most; "
        f"{num_gradients:,} gradients; {directory / 'diagnostics.png'}"
    )
    print("Verdict: converged." if verdict.converged else "Verdict: NOT converged.")
    for sentence in (*verdict.problems, *verdict.notes):
        print(f"- {sentence}")
