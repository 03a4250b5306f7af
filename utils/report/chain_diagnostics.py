"""What chains say about themselves at the end of a run: diagnostics.json, a picture, a verdict."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_posteriors.core.judging import diagnostics, temperatures
from haiku_posteriors.core.judging.bias import BiasReport
from haiku_posteriors.core.judging.diagnostics import Convergence, Verdict
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.core.judging.temperatures import Measured
from haiku_posteriors.utils.files import read_rows, write_json
from haiku_posteriors.utils.plots import curves
from haiku_posteriors.utils.report import verdicts
from haiku_posteriors.utils.train_utils import Answer, Enough, RunResult

# Diagnosing every prediction or weight of a large problem would take longer than it tells.
PREDICTIONS_DIAGNOSED = 500
PARAMETERS_DIAGNOSED = 1000
# Draws of each chain after which a run that ends by itself is judged: a look costs a second.
FIRST_LOOK, LOOK_EVERY = 400, 200
LAST_LOOK_IF_SPOILT = 800  # by divergences or lost chains, which more draws do not undo
# From so many draws on, a run ends that would need more than twice those it may take. While chains
# do not agree their effective sample size hardly grows, so that this pace is a hopeful one.
FIRST_LOOK_AT_PACE, HOPELESS = 1000, 2.0
STIFF = 5000  # gradients of a transition from which on a verdict speaks of their reason


def chosen_predictions(outputs: np.ndarray) -> np.ndarray:
    """A fixed subset of predictions, (chains, draws, rows, p) -> (chains, draws, predictions)."""
    predictions = outputs.reshape(*outputs.shape[:2], -1)
    # A known noise is the same in every draw, and not for chains to agree on.
    varying = np.flatnonzero(np.ptp(predictions, axis=(0, 1)) > 0)
    varying = varying if len(varying) else np.arange(predictions.shape[2])
    chosen = np.linspace(0, len(varying) - 1, PREDICTIONS_DIAGNOSED).astype(int)
    return predictions[:, :, varying[np.unique(chosen)]]


def diagnose(result: RunResult) -> tuple[Convergence, Convergence]:
    """Convergence of predictions at test points and of parameters, both of fixed subsets."""
    predictions = chosen_predictions(result.test_predictions.outputs)
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


class ChainRules(NamedTuple):
    """How chains are judged, at the end of a run and on the way.

    Attributes:
      num_burn_in: transitions that do not count.
      length: that transitions should have.
      adjusted: whether there is a Metropolis test.
      remedies: what this run did without, and might do with where chains do not agree.
    """

    num_burn_in: int
    length: float
    adjusted: bool = True
    remedies: tuple[str, ...] = ()

    def after_burn_in(self, history: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The part of the history, (chains, transitions), that counts."""
        return {name: values[:, self.num_burn_in :] for name, values in history.items()}

    def lost(self, history: Mapping[str, np.ndarray]) -> np.ndarray:
        """Chains that no longer move, given what counts of the history."""
        reach = history["num_leapfrog_steps"] * history["step_size"] / self.length
        return diagnostics.lost_chains(history["accepted"], reach)

    def verdict(
        self,
        predictions: Convergence,
        history: Mapping[str, np.ndarray],
        parameters: Convergence | None = None,
    ) -> Verdict:
        """The verdict on predictions of test rows and what counts of the history."""
        acceptance = history["acceptance_probability"].mean(axis=1)
        return diagnostics.verdict(
            predictions,
            num_chains=len(acceptance),
            num_divergent=int(history["divergent"].sum()),
            acceptance=acceptance if self.adjusted else None,
            energy_bfmi=diagnostics.energy_bfmi(history["energy"]) if "energy" in history else None,
            parameters=parameters,
            log_joint=diagnostics.convergence(history["log_joint"][:, :, None]),
            lost=self.lost(history),
            smaller_steps=(
                "lower step_size, or raise target_accept"
                if self.adjusted
                else "lower energy_variance"
            ),
            more_draws=". ".join((*self.remedies, diagnostics.MORE_DRAWS)),
        )

    def enough(self, most_transitions: int) -> Enough:
        """Ends a run when the verdict is converged, or cannot become so by more draws.

        Args:
          most_transitions: that the run may make after burn-in.
        """

        def is_asked(num_done: int) -> bool:
            after = num_done - self.num_burn_in
            return after >= FIRST_LOOK and after % _look_period(after) == 0

        def answer(predictions: Predictions, history: dict[str, np.ndarray]) -> Answer:
            counted = self.after_burn_in(history)
            num_done, num_divergent = counted["divergent"].shape[1], counted["divergent"].sum()
            convergence = diagnostics.convergence(chosen_predictions(predictions.outputs))
            sentence = _how_far(convergence, num_done, predictions.num_chains)
            if num_divergent or len(self.lost(counted)):
                sentence += f" {num_divergent:.0f} divergences, which more draws do not undo."
                return Answer(num_done >= LAST_LOOK_IF_SPOILT, sentence)
            if self.verdict(convergence, counted).converged:
                return Answer(True, sentence)
            needed = transitions_needed(convergence, num_done, predictions.num_chains)
            if num_done < FIRST_LOOK_AT_PACE or needed < HOPELESS * most_transitions:
                return Answer(False, sentence)
            return Answer(True, f"{sentence} {most_transitions} will not do: this is the end.")

        return Enough(is_asked, answer)


def report_chains(
    directory: pathlib.Path,
    result: RunResult,
    rules: ChainRules,
    bias: BiasReport | None = None,
    remarks: Sequence[str] = (),
) -> None:
    """Judges a run of HMC or MCLMC, after burn-in, and says what to change.

    Args:
      directory: of the run.
      result: of the run, with its history.
      rules: of the verdict.
      bias: of transitions without a Metropolis test.
      remarks: further notes.
    """
    history = rules.after_burn_in(result.history)
    if history["accepted"].shape[1] == 0:
        problem = "The run ended in burn-in, before any draw that counts: give it more time."
        verdicts.tell(directory, Verdict(False, (problem,), tuple(remarks)), {})
        return
    predictions, parameters = diagnose(result)
    num_gradients = int(np.sum(history["num_leapfrog_steps"]))
    acceptance = history["acceptance_probability"].mean(axis=1)
    verdict = rules.verdict(predictions, history, parameters)
    problems, notes = list(verdict.problems), [*verdict.notes, *remarks]
    least = np.nanmin(predictions.bulk_ess, initial=np.inf)
    further: dict[str, Any] = {}
    if np.isfinite(least):
        further["ess_per_1000_gradients"] = 1000 * float(least) / num_gradients
    if "energy" in history:
        further["energy_bfmi"] = diagnostics.energy_bfmi(history["energy"]).tolist()
    weight = float(history["tail_weight"][0, -1]) if "tail_weight" in history else 0.0
    if weight > 0:
        further["momentum_degrees_of_freedom"] = 1 / weight
        notes.append(
            f"Momenta had heavy tails ({1 / weight:.3g} degrees of freedom), since the log-joint "
            "varies more than Gaussian ones can follow."
        )
    notes += _notes_on_pace(history, predictions, bool(problems))
    sizes = history["step_size"].max(axis=1)  # but for transitions that were made again
    if not rules.adjusted:
        further["energy_variance"] = history["energy_variance"].mean(axis=1).tolist()
        made_again = float(np.mean(history["step_size"] < 0.75 * sizes[:, None]))
        further["made_with_shorter_steps"] = made_again
        if made_again > 0:
            notes.append(
                f"{made_again:.1%} of the transitions were made again with shorter steps, since "
                "energy was not conserved well enough."
            )
    if bias is not None:
        problems += bias.problems
        notes += bias.notes
        further["bias"] = _bias_summary(bias)
    _write(
        directory,
        predictions,
        parameters,
        result,
        converged=not problems,
        problems=problems,
        notes=notes,
        acceptance=acceptance.tolist(),
        divergent=int(history["divergent"].sum()),
        divergent_in_burn_in=int(result.history["divergent"][:, : rules.num_burn_in].sum()),
        lost_chains=rules.lost(history).tolist(),
        step_size=sizes.tolist(),
        num_leapfrog_steps=history["num_leapfrog_steps"].mean(axis=1).tolist(),
        log_joint=_summary(diagnostics.convergence(history["log_joint"][:, :, None])),
        num_gradients=num_gradients,
        **further,
    )
    if np.isfinite(least):
        print(
            f"{num_gradients:,} gradients after burn-in: an effective sample size of "
            f"{1000 * least / num_gradients:.3g} per 1,000 gradients, "
            f"{least / result.seconds:.3g} per second of the run."
        )
    shown_sizes = ", ".join(f"{size:.3g}" for size in sizes)
    tuned_for = (
        f"acceptance {acceptance.mean():.2f}"
        if rules.adjusted
        else f"energy variance {history['energy_variance'].mean():.2g} per step and dimension"
    )
    print(f"Step sizes, frozen after burn-in: {shown_sizes}; {tuned_for}.")
    if bias is not None and bias.shifts:
        shown = "; ".join(
            f"{name} {found.value:.3f} +- {found.error:.3f}" for name, found in bias.shifts.items()
        )
        print(f"Shifts under exact transitions, in posterior standard deviations: {shown}.")
    _tell(problems, notes)


def _notes_on_pace(
    history: Mapping[str, np.ndarray], predictions: Convergence, has_problems: bool
) -> list[str]:
    """How long chains would take that have not drawn enough, and why; `history` is what counts."""
    notes = []
    num_chains, num_done = history["accepted"].shape
    needed = transitions_needed(predictions, num_done, num_chains)
    if needed > num_done:
        # Without hours: a resumed run, which took others, has the same verdict.
        notes.append(
            "At this pace effective sample sizes suffice after some "
            f"{float(f'{needed:.2g}'):,.0f} transitions of each chain, {needed / num_done:.2g} "
            "times those so far; while R-hat is large, after more. A larger num_iterations with "
            "until_converged goes on from here."
        )
    per_transition = float(np.median(history["num_leapfrog_steps"]))
    if has_problems and per_transition >= STIFF:
        notes.append(
            f"A transition takes {per_transition:,.0f} gradients: the posterior is stiff, as by a "
            "learned noise that is tiny. A given noise_std, a stronger prior (weight_decay) or "
            "fewer weights make it milder; each is another posterior."
        )
    return notes


def _tell(problems: Sequence[str], notes: Sequence[str]) -> None:
    print("Verdict: NOT converged." if problems else "Verdict: converged.")
    for sentence in (*problems, *notes):
        print(f"- {sentence}")


def _bias_summary(bias: BiasReport) -> dict[str, Any]:
    return {
        "shifts": {
            name: {"value": found.value, "error": found.error}
            for name, found in bias.shifts.items()
        },
        "acceptance": bias.acceptance,
        "num_gradients": bias.num_gradients,
    }


def enough_draws(num_burn_in: int, period: int) -> Enough:
    """Ends a sampler without acceptance when R-hat and effective sample sizes of predictions allow.

    Args:
      num_burn_in: steps before draws are taken.
      period: steps from draw to draw.
    """

    def is_asked(num_done: int) -> bool:
        draws, rest = divmod(num_done - num_burn_in, period)
        return rest == 0 and draws >= FIRST_LOOK and draws % _look_period(draws) == 0

    def answer(predictions: Predictions, history: dict[str, np.ndarray]) -> Answer:
        convergence = diagnostics.convergence(chosen_predictions(predictions.outputs))
        num_draws, num_chains = predictions.outputs.shape[1], predictions.num_chains
        sentence = _how_far(convergence, num_draws, num_chains)
        return Answer(_sampler_verdict(convergence, num_chains).converged, sentence)

    return Enough(is_asked, answer)


def transitions_needed(predictions: Convergence, num_done: int, num_chains: int) -> float:
    """After how many the least effective sample size suffices, if it grows as it has."""
    found = _summary(predictions)
    least = min(found["smallest_bulk_ess"], found["smallest_tail_ess"])
    return num_done * diagnostics.MIN_ESS_PER_CHAIN * num_chains / least


def _how_far(predictions: Convergence, num_draws: int, num_chains: int) -> str:
    """A sentence on how far chains are from agreeing, for whoever waits."""
    found = _summary(predictions)
    least = min(found["smallest_bulk_ess"], found["smallest_tail_ess"])
    return (
        f"{num_draws} draws a chain: largest R-hat of predictions {found['largest_rhat']:.3f} "
        f"(median {found['median_rhat']:.3f}), least effective sample size {least:.0f} of "
        f"{diagnostics.MIN_ESS_PER_CHAIN * num_chains}."
    )


def _look_period(num_draws: int) -> int:
    """Draws from look to look: twice as many from ten times as many on, for what a look costs."""
    period = LOOK_EVERY
    while num_draws >= 10 * period:
        period *= 2
    return period


def _sampler_verdict(
    predictions: Convergence,
    num_chains: int,
    parameters: Convergence | None = None,
    log_joint: Convergence | None = None,
) -> Verdict:
    return diagnostics.verdict(
        predictions,
        num_chains=num_chains,
        num_divergent=0,
        acceptance=None,
        energy_bfmi=None,
        parameters=parameters,
        log_joint=log_joint,
        more_draws="Run longer (num_epochs, time_limit), or burn in longer (num_burnin_epochs)",
    )


def kinetic_temperature(directory: pathlib.Path, num_burn_in: int) -> float | None:
    """Mean squared velocity over the evaluations after burn-in; None of samplers without one."""
    found = [
        row["kinetic_temperature"]
        for row in read_rows(directory / "metrics.jsonl")
        if "kinetic_temperature" in row and row["epoch"] > num_burn_in
    ]
    return float(np.mean(found)) if found else None


def judge_sampler(
    result: RunResult, measured: Measured | None, remarks: Sequence[str] = ()
) -> tuple[Verdict, Convergence, Convergence, dict[str, Any]]:
    """The verdict on a run of SGMCMC, and what it is from.

    Args:
      result: of the run.
      measured: temperatures and log-joints of its draws; None where these are too few.
      remarks: further notes.

    Returns:
      The verdict, convergence of predictions and of parameters, further numbers.
    """
    predictions, parameters = diagnose(result)
    log_joint, further, problems = None, {}, []
    if measured is not None:
        log_joint = diagnostics.convergence(measured.log_joint[:, :, None])
        found = measured.temperatures
        problems = temperatures.problems(
            found, "Lower bias_tolerance, init_step_size or final_step_size, or raise batch_size."
        )
        further = {
            "log_joint": _summary(log_joint),
            "configurational_temperature": found.configurational.value,
            "configurational_temperature_error": found.configurational.error,
            "kinetic_temperature": found.kinetic,
            "noise_bias": found.noise_bias,
        }
    num_chains = result.test_predictions.num_chains
    verdict = _sampler_verdict(predictions, num_chains, parameters, log_joint)
    verdict = Verdict(
        verdict.converged and not problems,
        (*verdict.problems, *problems),
        (*verdict.notes, *remarks),
    )
    return verdict, predictions, parameters, further


def sampler_content(result: RunResult, measured: Measured | None) -> dict[str, Any]:
    """All that there is to say of a run of SGMCMC in numbers, as diagnostics.json has it."""
    verdict, predictions, parameters, further = judge_sampler(result, measured)
    summaries = {"predictions": _summary(predictions), "parameters": _summary(parameters)}
    return {**summaries, **verdicts.as_content(verdict), **further}


def report_sampler(
    directory: pathlib.Path,
    result: RunResult,
    measured: Measured | None,
    remarks: Sequence[str] = (),
) -> None:
    """Judges a run of SGMCMC, in its folder, as `judge_sampler` does, and says what to change."""
    verdict, predictions, parameters, further = judge_sampler(result, measured, remarks)
    content = verdicts.as_content(verdict)
    _write(directory, predictions, parameters, result, **content, **further)
    if measured is not None:
        found = measured.temperatures
        kinetic = "" if found.kinetic is None else f", kinetic {found.kinetic:.3f}"
        noise = (
            ""
            if found.noise_bias is None
            else (
                f"; by formula, noise of gradients makes variances {found.noise_bias:.1%} too large"
            )
        )
        print(
            f"Temperatures: configurational {found.configurational.value:.3f} +- "
            f"{found.configurational.error:.3f}{kinetic}{noise}."
        )
    _tell(verdict.problems, verdict.notes)


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
