"""Mixtures: the bound of their ELBO against quadrature, and the weights."""

import numpy as np
import pytest
from scipy import integrate, stats

from haiku_posteriors.core.implicit import mixtures


def test_the_bound_holds_for_gaussians_near_and_far():
    """Two Gaussians against a known density: the mixture's ELBO by quadrature."""
    target = stats.norm(0, 2)

    def elbo(density):
        def integrand(x):
            q = density(x)
            return q * (target.logpdf(x) - np.log(q)) if q > 0 else 0.0

        return integrate.quad(integrand, -15, 15, limit=500, points=[-4, 0, 1, 4])[0]

    weights, errors = np.array([0.3, 0.7]), np.array([0.1, 0.2])
    for centers, tight in (((-0.2, 0.3), False), ((-4.0, 4.0), False), ((1.0, 1.0), True)):
        parts = [stats.norm(center, 0.5) for center in centers]
        members = np.array([elbo(part.pdf) for part in parts])
        mixed = elbo(lambda x: sum(w * p.pdf(x) for w, p in zip(weights, parts, strict=True)))  # noqa: B023
        value, error = mixtures.of_mixture(members, errors, weights)
        assert value <= mixed + 1e-6
        assert (abs(mixed - value) < 1e-3) == tight
        assert error == pytest.approx(np.hypot(0.03, 0.14))


def test_weights_by_evidence_are_best_for_members_that_do_not_overlap():
    """Their mixture's ELBO is sum_k pi_k L_k + H[pi]."""
    values = np.array([-3.0, -2.0, -2.5])

    def mixed(weights):
        return weights @ (values - np.log(weights))

    best = mixtures.weigh("evidence", values)
    assert best.sum() == pytest.approx(1)
    assert mixed(best) == pytest.approx(np.log(np.exp(values).sum()))
    for other in np.random.default_rng(0).dirichlet(np.ones(3), 50):
        assert mixed(other) <= mixed(best) + 1e-12
    np.testing.assert_array_equal(mixtures.weigh("even", values), [1 / 3] * 3)
