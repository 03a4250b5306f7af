"""Mixtures: bounds of their ELBO against quadrature, and the weights that raise it most."""

import numpy as np
import pytest
from scipy import integrate, stats

from haiku_posteriors.core.implicit import mixtures


def test_bounds_hold_for_gaussians_near_and_far():
    """Two Gaussians against a known density: the mixture's ELBO by quadrature."""
    target = stats.norm(0, 2)

    def elbo(density):
        def integrand(x):
            q = density(x)
            return q * (target.logpdf(x) - np.log(q)) if q > 0 else 0.0

        return integrate.quad(integrand, -15, 15, limit=500, points=[-4, 0, 1, 4])[0]

    weights = np.array([0.3, 0.7])
    for centers, tight in (((-0.2, 0.3), "neither"), ((-4.0, 4.0), "upper"), ((1.0, 1.0), "lower")):
        parts = [stats.norm(center, 0.5) for center in centers]
        members = np.array([elbo(part.pdf) for part in parts])
        mixed = elbo(lambda x: sum(w * p.pdf(x) for w, p in zip(weights, parts, strict=True)))  # noqa: B023
        lower, upper = mixtures.elbo_bounds(members, weights)
        assert lower - 1e-6 <= mixed <= upper + 1e-6
        assert (abs(mixed - upper) < 1e-3) == (tight == "upper")
        assert (abs(mixed - lower) < 1e-3) == (tight == "lower")


def test_weights_by_elbo_maximise_the_upper_bound():
    elbos = np.array([-3.0, -2.0, -2.5])
    best = mixtures.weigh("elbo", elbos)
    assert best.sum() == pytest.approx(1)
    highest = mixtures.elbo_bounds(elbos, best)[1]
    assert highest == pytest.approx(np.log(np.exp(elbos).sum()))
    for other in np.random.default_rng(0).dirichlet(np.ones(3), 50):
        assert mixtures.elbo_bounds(elbos, other)[1] <= highest + 1e-12
    np.testing.assert_array_equal(mixtures.weigh("even", elbos), [1 / 3] * 3)
