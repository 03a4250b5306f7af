"""What the predictions of a finished run say of the model, in numbers and sentences."""

from typing import Any, NamedTuple

import numpy as np

from haiku_posteriors.core.judging import loo, predictive_checks
from haiku_posteriors.core.judging.loo import Elpd
from haiku_posteriors.core.judging.predictive_checks import AgainstConstant
from haiku_posteriors.utils.train_utils import RunResult


class Judged(NamedTuple):
    """Numbers for summary.json, and sentences for the terminal."""

    numbers: dict[str, Any]
    sentences: list[str]


def judge(result: RunResult, temperature: float) -> Judged:
    """Posterior predictive checks on the test rows, elpd by LOO, Monte Carlo errors."""
    checks = predictive_checks.check(result.test_predictions)
    numbers: dict[str, Any] = {"posterior_predictive_checks": checks}
    sentences = [_describe_checks(checks, len(result.test_predictions.outputs[0, 0]))]
    beside = predictive_checks.against_constant(result.test_predictions)
    numbers["against_constant"] = beside._asdict()
    if beside.is_constant:
        sentences.append(describe_constant(beside))
    error = predictive_checks.monte_carlo_error(result.test_predictions)
    if error:
        numbers["monte_carlo_error"] = error._asdict()
        sentences.append(
            f"Monte Carlo error of mean predictions: {error.median:.2g} in the median, "
            f"{error.largest:.2g} at most ({error.largest_share:.1%} of a standard deviation)."
        )
    log_likelihoods = result.train_log_likelihoods
    if log_likelihoods.shape[0] * log_likelihoods.shape[1] >= loo.MIN_DRAWS and np.all(
        np.isfinite(log_likelihoods)
    ):
        found = loo.loo(log_likelihoods, temperature=temperature)
        numbers["elpd_loo"] = summarise(found)
        if temperature == 1:
            numbers["elpd_waic"] = summarise(loo.waic(log_likelihoods))
        sentences.append(describe_elpd(found))
    return Judged(numbers, sentences)


def describe_constant(beside: AgainstConstant) -> str:
    """What is to be said of predictions that are a constant."""
    return (
        f"Predictions hardly depend on the inputs: NLL {beside.nll:.3g} on the test rows, that of "
        f"one distribution for all of them {beside.constant_nll:.3g}. Nothing was learned but that."
    )


def summarise(found: Elpd) -> dict[str, float]:
    """An elpd for summary.json, without its rows."""
    return {
        "value": found.value,
        "error": found.error,
        "num_effective": found.num_effective,
        "num_doubtful": found.num_doubtful,
        "limit": found.limit,
    }


def describe_elpd(found: Elpd) -> str:
    """An elpd in a sentence, with what makes it doubtful."""
    doubt = ""
    if found.num_doubtful:
        doubt = (
            f" Pareto k exceeds {found.limit:.2f} in {found.num_doubtful} of {len(found.by_row)} "
            "rows, whose terms are not to be trusted."
        )
    return (
        f"elpd of the training rows, each left out (PSIS-LOO): {found.value:.1f} ± "
        f"{found.error:.1f}, {found.num_effective:.1f} effective parameters.{doubt}"
    )


def _describe_checks(checks: dict[str, float], num_rows: int) -> str:
    start = f"Posterior predictive check on {num_rows} test rows:"
    if "pit_distance" in checks:
        return (
            f"{start} the PIT is {checks['pit_distance']:.3f} from uniform "
            f"(p = {checks['pit_p_value']:.2g}); intervals of 90 % hold "
            f"{checks['coverage_90']:.1%}."
        )
    return (
        f"{start} {checks['accuracy_expected']:.1%} right answers expected, "
        f"{checks['accuracy_observed']:.1%} observed (p = {checks['p_value']:.2g})."
    )
