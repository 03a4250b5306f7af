"""What the prior says: draws of its moments, and a picture for each kind of data."""

import math

import haiku as hk
import jax
import numpy as np
import pytest
from picture_checks import check_picture

from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils.problem import Problem, load_problem
from haiku_posteriors.utils.report import prior_predictive

pytestmark = pytest.mark.usefixtures("first_device_only")


def test_draws_have_the_moments_of_the_prior_and_point_estimates_have_none():
    """2,000 draws: 5 standard errors of a mean are 0.11, of a deviation 8 %."""
    log_joint = make_log_joint(
        lambda x: hk.Linear(1)(x),
        np.zeros((1, 3), np.float32),
        make_prior(4.0, groups=[("w", 1.0)]),
        gaussian(0.05, learn_noise=True),
        stochastic_params="w|likelihood",
    )
    sample = jax.jit(prior_predictive.sample_prior, static_argnums=(1, 2))
    draws = sample(jax.random.key(0), log_joint, 2000)
    assert draws["linear"]["w"].shape == (1, 2000, 3, 1)
    assert abs(float(draws["linear"]["w"].mean())) < 0.11
    assert float(draws["linear"]["w"].std()) == pytest.approx(1, rel=0.08)
    noise = draws["likelihood"]["log_noise_std"]
    # log sigma = log(0.05 / 3) - log |x|, whose mean is (gamma + log 2) / 2 and variance pi^2 / 8.
    mean = math.log(0.05 / 3) + (np.euler_gamma + math.log(2)) / 2
    assert float(noise.mean()) == pytest.approx(mean, abs=0.13)
    assert float(noise.std()) == pytest.approx(math.pi / math.sqrt(8), rel=0.12)
    assert float(np.ptp(draws["linear"]["b"])) == 0


@pytest.mark.parametrize("name", ["toy_regression", "diabetes", "two_moons"])
def test_pictures(name, tmp_path):
    network = "logistic_regression" if name == "two_moons" else "mlp_toy"
    _, dataset, log_joint = load_problem(Problem(name, model_name=network))
    prior_predictive.draw(tmp_path / "prior.png", log_joint, dataset, seed=0)
    check_picture(tmp_path / "prior.png")
