"""When chains have drawn enough: the verdict on the way, and what more draws cannot mend."""

import numpy as np

from haiku_posteriors.core.judging import diagnostics
from haiku_posteriors.core.judging.predictions import Predictions
from haiku_posteriors.utils.report.chain_diagnostics import ChainRules, enough_draws

CHAINS, BURN_IN = 4, 50


def chains(num_draws, shift=0.0, num_divergent=0):
    """Predictions and history of independent draws; the first chain is `shift` deviations off."""
    random = np.random.default_rng(0)
    outputs = random.normal(size=(CHAINS, num_draws, 10, 2))
    outputs[0] += shift
    total = BURN_IN + num_draws
    history = {
        "log_joint": random.normal(size=(CHAINS, total)),
        "energy": random.normal(size=(CHAINS, total)),
        "acceptance_probability": np.full((CHAINS, total), 0.9),
        "accepted": random.uniform(size=(CHAINS, total)) < 0.9,
        "num_leapfrog_steps": np.full((CHAINS, total), 10.0),
        "step_size": np.full((CHAINS, total), 0.1),
        "divergent": np.zeros((CHAINS, total)),
    }
    history["divergent"][0, :BURN_IN] = 1  # of burn-in, which does not count
    history["divergent"][1, BURN_IN : BURN_IN + num_divergent] = 1
    return Predictions("regression", outputs), history


def answer(*arguments, most_transitions=8000, **settings):
    enough = ChainRules(BURN_IN, length=1.0).enough(most_transitions)
    return enough.answer(*chains(*arguments, **settings))


def is_enough(*arguments, **settings):
    return answer(*arguments, **settings).is_enough


def test_good_chains_are_enough_and_others_go_on():
    assert is_enough(400)
    assert not is_enough(40)  # too few draws
    assert not is_enough(400, shift=1.0)


def test_a_spoilt_run_does_not_go_on_for_ever():
    assert not is_enough(400, num_divergent=1)
    assert is_enough(800, num_divergent=1)


def test_a_run_that_cannot_arrive_ends_and_says_so():
    """Its effective sample size is some 4 of 400: it would take 100 times its 1,000 draws."""
    assert not is_enough(800, shift=6.0)
    found = answer(1000, shift=6.0)
    assert found.is_enough and "8000 will not do" in found.sentence
    assert not is_enough(1000, shift=6.0, most_transitions=10**6)


def test_whoever_waits_is_told_how_far_it_is():
    sentence = answer(400, shift=6.0).sentence
    assert sentence.startswith("400 draws a chain: largest R-hat of predictions ")
    assert sentence.endswith(" of 400.")
    assert "1 divergences, which more draws do not undo" in answer(400, num_divergent=1).sentence


def test_advice_names_what_a_run_did_without():
    _, history = chains(400)
    apart = diagnostics.convergence(chains(400, shift=6.0)[0].outputs)
    remedy = "Vary the lengths of trajectories (trajectory_jitter=0.5)"
    rules = ChainRules(BURN_IN, length=1.0, remedies=(remedy,))
    problem = rules.verdict(apart, rules.after_burn_in(history)).problems[0]
    assert f"do not agree. {remedy}. Burn in longer" in problem


def test_when_it_is_asked():
    is_asked = ChainRules(BURN_IN, length=1.0).enough(8000).is_asked
    assert [done for done in range(1, 1060) if is_asked(done)] == [450, 650, 850, 1050]
    assert [done for done in range(1850, 3000) if is_asked(done)] == [1850, 2050, 2450, 2850]


def test_looks_at_many_draws_are_rarer():
    """A look costs in proportion to the draws: their number grows by the logarithm of these."""
    is_asked = enough_draws(num_burn_in=10, period=5).is_asked
    asked = [(done - 10) / 5 for done in range(8000 * 5 + 11) if is_asked(done)]
    first, then = list(range(400, 2000, 200)), list(range(2000, 4000, 400))
    assert asked == [*first, *then, *range(4000, 8000, 800), 8000]
