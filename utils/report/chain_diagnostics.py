"""What chains say about themselves at the end of a run: diagnostics.json, a picture, a verdict."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.judging.diagnostics import Convergence
from haiku_posteriors.utils.files import write_json
from haiku_posteriors.utils.plots import curves
from haiku_posteriors.utils.train_utils import RunResult

# Diagnosing every prediction or weight of a large problem would take longer than it tells.
PREDICTIONS_DIAGNOSED = 500
PARAMETERS_DIAGNOSED = 1000


def chosen_predictions(result: RunResult) -> np.ndarray:
    """A fixed subset of the predictions at test points, (chains, draws, predictions)."""
    chains, draws = result.test_predictions.outputs.shape[:2]
    predictions = result.test_predictions.outputs.reshape(chains, draws, -1)
    # A known noise is the same in every draw, and not for chains to agree on.
    varying = np.flatnonzero(np.ptp(predictions, axis=(0, 1)) > 0)
    varying = varying if len(varying) else np.arange(predictions.shape[2])
    chosen = np.linspace(0, len(varying) - 1, PREDICTIONS_DIAGNOSED).astype(int)
    return predictions[:, :, varying[np.unique(chosen)]]


def diagnose(result: RunResult) -> tuple[Convergence, Convergence]:
    """Convergence of predictions at test points and of parameters, both of fixed subsets."""
    predictions = chosen_predictions(result)
    parameters = np.concatenate(
        [
            diagnostics.subsample_parameters(part, PARAMETERS_DIAGNOSED, num_batch_axes=2)
            for part in result.store.parts()
        ],
        axis=1,
    )
    return (
        diagnostics.convergence(predictions),
        diagnostics.convergence(parameters),
    )


def report_hmc(
    directory: pathlib.Path, result: RunResult, num_burn_in: int, notes: Sequence[str] = ()
) -> None:
    """Judges a run of HMC, after burn-in, and says what to change; `notes` are added."""
    history = {name: values[:, num_burn_in:] for name, values in result.history.items()}
    predictions, parameters = diagnose(result)
    log_joint = diagnostics.convergence(history["log_joint"][:, :, None])
    num_gradients = int(np.sum(history["num_leapfrog_steps"]))
    acceptance = history["acceptance_probability"].mean(axis=1)
    bfmi = diagnostics.energy_bfmi(history["energy"])
    verdict = diagnostics.verdict(
        predictions,
        num_chains=len(acceptance),
        num_divergent=int(history["divergent"].sum()),
        acceptance=acceptance,
        energy_bfmi=bfmi,
        parameters=parameters,
        log_joint=log_joint,
    )
    _write(
        directory,
        predictions,
        parameters,
        result,
        converged=verdict.converged,
        problems=list(verdict.problems),
        notes=[*verdict.notes, *notes],
        acceptance=acceptance.tolist(),
        energy_bfmi=bfmi.tolist(),
        divergent=int(history["divergent"].sum()),
        divergent_in_burn_in=int(result.history["divergent"][:, :num_burn_in].sum()),
        step_size=history["step_size"][:, -1].tolist(),
        num_leapfrog_steps=history["num_leapfrog_steps"].mean(axis=1).tolist(),
        log_joint=_summary(log_joint),
        num_gradients=num_gradients,
    )
    least = np.nanmin(predictions.bulk_ess, initial=np.inf)
    if np.isfinite(least):
        print(
            f"{num_gradients:,} gradients after burn-in: an effective sample size of "
            f"{1000 * least / num_gradients:.3g} per 1,000 gradients, "
            f"{least / result.seconds:.3g} per second of the run."
        )
    sizes = ", ".join(f"{size:.3g}" for size in history["step_size"][:, -1])
    print(f"Step sizes, frozen after burn-in: {sizes}; acceptance {acceptance.mean():.2f}.")
    print("Verdict: converged." if verdict.converged else "Verdict: NOT converged.")
    for sentence in (*verdict.problems, *verdict.notes, *notes):
        print(f"- {sentence}")


def report_sampler(directory: pathlib.Path, result: RunResult) -> None:
    """R-hat and effective sample size of a sampler that knows no acceptance."""
    _write(directory, *diagnose(result), result)


def _write(
    directory: pathlib.Path,
    predictions: Convergence,
    parameters: Convergence,
    result: RunResult,
    **further: Any,
) -> None:
    """diagnostics.json and diagnostics.png, and a line for the terminal."""
    content = {
        "predictions": _summary(predictions),
        "parameters": _summary(parameters),
        **further,
    }
    write_json(directory / "diagnostics.json", content)
    log_joint = result.history.get("log_joint")
    curves.chain_diagnostics(
        directory / "diagnostics.png", log_joint, predictions.rhat, parameters.rhat
    )
    summary = content["predictions"]
    print(
        f"Predictions: largest R-hat {summary['largest_rhat']:.3f}, smallest effective sample "
        f"size {summary['smallest_bulk_ess']:.0f} (bulk), {summary['smallest_tail_ess']:.0f} "
        f"(tail); {directory / 'diagnostics.png'}"
    )


def _summary(convergence: Convergence) -> dict[str, float]:
    """Extremes and medians over the quantities that changed at all."""

    def over(function: Any, values: np.ndarray) -> float:
        known = values[np.isfinite(values)]
        return float(function(known)) if known.size else float("nan")

    return {
        "largest_rhat": over(np.max, convergence.rhat),
        "median_rhat": over(np.median, convergence.rhat),
        "smallest_bulk_ess": over(np.min, convergence.bulk_ess),
        "median_bulk_ess": over(np.median, convergence.bulk_ess),
        "smallest_tail_ess": over(np.min, convergence.tail_ess),
    }
