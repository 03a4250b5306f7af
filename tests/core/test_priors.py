"""Priors against SciPy's densities, their stated variance, and their own samples."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from haiku_posteriors.core import priors
from haiku_posteriors.core.errors import UserError

STD = 0.7
WEIGHT_DECAY = 1 / STD**2


class ScaleMixture:
    """weight N(0, a^2) + (1 - weight) N(0, (ratio a)^2) written out with SciPy."""

    def __init__(self, std, weight, ratio):
        self.weight = weight
        self.narrow = std / math.sqrt(weight + (1 - weight) * ratio**2)
        self.wide = ratio * self.narrow

    def pdf(self, x):
        return self.weight * scipy.stats.norm.pdf(x, scale=self.narrow) + (
            1 - self.weight
        ) * scipy.stats.norm.pdf(x, scale=self.wide)

    def cdf(self, x):
        return self.weight * scipy.stats.norm.cdf(x, scale=self.narrow) + (
            1 - self.weight
        ) * scipy.stats.norm.cdf(x, scale=self.wide)


REFERENCES = {
    "gaussian": ({}, scipy.stats.norm(scale=STD)),
    "scale_mixture": ({"weight": 0.3, "ratio": 8.0}, ScaleMixture(STD, 0.3, 8.0)),
    "logistic": ({}, scipy.stats.logistic(scale=STD * math.sqrt(3) / math.pi)),
    "laplace": ({}, scipy.stats.laplace(scale=STD / math.sqrt(2))),
    "student_t": ({"degrees_of_freedom": 5.0}, scipy.stats.t(5.0, scale=STD * math.sqrt(3 / 5))),
}


def test_every_family_has_a_reference():
    assert set(REFERENCES) == set(priors.FAMILIES)


@pytest.mark.parametrize("family", REFERENCES)
def test_log_density_equals_scipy(family):
    arguments, reference = REFERENCES[family]
    prior = priors.make_prior(WEIGHT_DECAY, family, **arguments)
    values = np.linspace(-4, 4, 41, dtype=np.float32)
    ours = [float(prior.log_density({"layer": {"w": jnp.array([v])}})) for v in values]
    np.testing.assert_allclose(ours, np.log(reference.pdf(values)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", REFERENCES)
def test_density_is_normalised_with_the_stated_variance(family):
    arguments, _ = REFERENCES[family]
    prior = priors.make_prior(WEIGHT_DECAY, family, **arguments)
    x = np.linspace(-200, 200, 2_000_001)
    density = np.exp(np.asarray(jax.vmap(prior.log_density)({"w": jnp.asarray(x)})), dtype=float)
    assert scipy.integrate.trapezoid(density, x) == pytest.approx(1, abs=1e-4)
    # The tails of the t distribution beyond 200 hold 1e-6 of the variance.
    assert scipy.integrate.trapezoid(density * x**2, x) == pytest.approx(STD**2, rel=1e-3)


@pytest.mark.parametrize("family", REFERENCES)
def test_samples_follow_the_density(family):
    """Kolmogorov-Smirnov at level 1e-4 on one fixed seed a family."""
    arguments, reference = REFERENCES[family]
    prior = priors.make_prior(WEIGHT_DECAY, family, **arguments)
    draws = prior.sample(jax.random.key(3), {"w": jnp.zeros(20_000)})["w"]
    assert scipy.stats.kstest(np.asarray(draws), reference.cdf).pvalue > 1e-4


def test_groups_take_the_first_matching_weight_decay():
    prior = priors.make_prior(4.0, groups=[("/b$", 100.0), ("linear", 25.0)])
    assert prior.scale("linear/b") == pytest.approx(0.1)
    assert prior.scale("linear/w") == pytest.approx(0.2)
    assert prior.scale("conv/w") == pytest.approx(0.5)
    params = {"linear": {"w": jnp.array([0.3]), "b": jnp.array([0.05])}}
    expected = scipy.stats.norm.logpdf(0.3, scale=0.2) + scipy.stats.norm.logpdf(0.05, scale=0.1)
    assert float(prior.log_density(params)) == pytest.approx(expected, rel=1e-5)


def test_samples_differ_between_leaves_of_one_shape():
    prior = priors.make_prior(1.0)
    draw = prior.sample(jax.random.key(0), {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    assert not np.allclose(draw["a"], draw["b"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"weight_decay": -1.0}, "weight_decay must be positive"),
        ({"weight_decay": 1.0, "family": "gausian"}, "Did you mean 'gaussian'"),
        ({"weight_decay": 1.0, "groups": [("(", 1.0)]}, "not a regular expression"),
        ({"weight_decay": 1.0, "family": "student_t", "degrees_of_freedom": 2.0}, "must exceed 2"),
        ({"weight_decay": 1.0, "family": "scale_mixture", "weight": 1.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        priors.make_prior(**arguments)
