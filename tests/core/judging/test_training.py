"""The verdict on training: each sentence for its case, with what to change."""

import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.judging import training, trends
from haiku_posteriors.core.judging.training import Bound, Objective, Training
from haiku_posteriors.core.judging.trends import Trend
from haiku_posteriors.core.progress import Progress

ELBO = Objective("ELBO", "Raise the draws per step")
TOLERANCE = 0.3


def judged(gain, error, is_reached=True, epochs=100, objectives=None, **further):
    gain, error = np.atleast_1d(gain).astype(float), np.atleast_1d(error).astype(float)
    count = len(gain)
    reached = None if is_reached is None else np.broadcast_to(is_reached, count)
    found = Training(
        Trend(jnp.asarray(gain), jnp.asarray(error)),
        np.broadcast_to(epochs, count),
        reached,
        np.zeros(count) if objectives is None else np.asarray(objectives),
    )
    return training.verdict(found, ELBO, TOLERANCE, **further)


def test_each_problem_has_its_sentence_and_remedy():
    assert judged(0.0, 0.01).converged
    assert judged(0.1, 0.01, is_reached=None).converged
    for found, words in {
        judged(3.0, 0.1): ("still rises, by 3 +- 0.23 nats in the last 100 epochs", "time_limit"),
        judged(3.0, 0.1, is_reached=None): ("still rises, by 3", "num_epochs=auto"),
        judged(0.1, 1.0): ("Noise hides", "Raise the draws per step"),
        judged(-5.0, 0.1): ("falls, by 5 nats", "lower init_step_size"),
        judged(0.0, 0.01, is_reached=False): ("while smaller steps still paid", "time_limit"),
        judged(0.0, 0.0, is_reached=None, epochs=0): ("cut short", "num_epochs"),
        judged(0.0, 0.01, remaining=np.array([40.0])): ("40 nats are left", "smaller steps"),
    }.items():
        assert not found.converged and len(found.problems) == 1
        assert all(word in found.problems[0] for word in words), found.problems


def test_members_are_named_and_compared():
    found = judged([0.0, 4.0, 5.0], [0.01, 0.1, 0.1], objectives=[-10.0, -100.0, -90.0])
    assert "member(s) 1, 2 of 3" in found.problems[0] and "by 5 +-" in found.problems[0]
    assert "optima of different height" in found.notes[0]
    assert "same height" in judged([0.0, 0.0], [0.1, 0.1], objectives=[-10.0, -10.2]).notes[0]
    assert not judged([0.0, 0.0], [0.1, 0.1], epochs=[100, 0]).notes  # heights are not known yet


def test_a_family_that_is_too_narrow_is_a_note_and_no_problem():
    far, near = (judged(0.0, 0.01, pareto_k=np.array([k])) for k in (1.4, 0.3))
    assert far.converged and "far from the posterior" in far.notes[0]
    assert "near enough" in near.notes[0]


def test_an_objective_above_its_bound_is_a_note():
    def noted(objective):
        bound = Bound(np.array([-50.0, -20.0]), np.array([0.5, 0.5]))
        objectives = [objective - 30, objective]
        return judged([0.0, 0.0], [0.01, 0.01], objectives=objectives, bound=bound)

    near, far = noted(-18.5), noted(-15.0)
    assert near.converged and "-20.00 +- 0.50 nats, the ELBO -18.50" in near.notes[-1]
    assert "as good as a bound" in near.notes[-1]
    assert far.converged and "5.0 nats of it are no part of the bound" in far.notes[-1]


def test_an_objective_that_cannot_be_seen_is_not_converged():
    near, far = (judged([0.0, 0.0], [0.01, 0.01], gap=np.array([0.01, g])) for g in (0.1, 3.0))
    assert near.converged and not far.converged
    assert "by up to 3 nats" in far.problems[0] and "cannot be told" in far.problems[0]


def noisy_round(falls, num_weights=50):
    """A round of 5 batches of 10 epochs in which -n log sigma rises by 4 nats a batch, or else."""
    per_batch, numbers = 4.0, 40
    progress = Progress(*[None] * len(Progress._fields))._replace(
        num_values=np.array([5]),
        epoch=np.array([50]),
        round_length=np.array([100]),
        values=np.concatenate([per_batch * np.arange(5), np.zeros(5)])[None],
    )
    log_sigma = -per_batch / numbers * np.array([2.5, 5.0]) if falls else np.zeros(2)
    before, now = np.exp(log_sigma)[:, None]
    return training.falling_noise(progress, before, now, num_weights, numbers, unlikely=1.1)


def test_a_noise_that_falls_without_end_is_named():
    noise = noisy_round(falls=True)
    np.testing.assert_allclose(noise.share, 1, rtol=1e-6)
    (found,) = judged(9.0, 0.1, False, noise=noise, remaining=np.array([40.0])).problems
    assert "the learned noise falls" in found and "from 0.779 on average to 0.607" in found
    assert "100 % of the rise" in found and "noise_std" in found and "train longer" not in found
    both = noise._replace(share=np.array([1.0, 0.1]), before=np.ones(2), now=np.ones(2))
    first, second = judged([9.0, 9.0], [0.1, 0.1], False, noise=both).problems
    assert "member(s) 0 of 2" in first and "noise falls" in first
    assert "member(s) 1 of 2" in second and "train longer" in second
    few_weights = noisy_round(falls=True, num_weights=30)  # have a mode, however far it is
    likely = noise._replace(unlikely=0.5)  # as the prior has it, falls by little
    for other in (noisy_round(falls=False), few_weights, likely):
        assert "train longer" in judged(9.0, 0.1, False, noise=other).problems[0]
    assert judged(0.0, 0.01, noise=noise).converged


def test_error_rates():
    """Series cut short, which rise by four tolerances, and series at rest; 2,000 of each.

    Noise of a batch is such that the error of the gain is a sixth of the tolerance. A verdict of
    convergence on a series that rises by as much as the tolerance is stated to be wrong in 2.5 %.
    """
    noise = np.random.default_rng(0).normal(size=(2000, trends.NUM_BATCHES))
    noise *= TOLERANCE / 6 / (trends.NUM_BATCHES / np.sqrt(np.sum(trends.POSITIONS**2)))
    line = trends.POSITIONS / trends.NUM_BATCHES

    def share_converged(rise):
        found = trends.trend(noise + rise * line)
        verdicts = [
            training.verdict(
                Training(
                    Trend(found.gain[index : index + 1], found.error[index : index + 1]),
                    np.array([100]),
                    None,
                    np.zeros(1),
                ),
                ELBO,
                TOLERANCE,
            ).converged
            for index in range(500)
        ]
        return np.mean(verdicts)

    assert share_converged(4 * TOLERANCE) == 0
    assert share_converged(TOLERANCE) < 0.025 + 5 * np.sqrt(0.025 / 500)
    assert share_converged(0.0) > 0.95
