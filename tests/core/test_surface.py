"""The plane through three points, and a quadratic log-joint on it in closed form."""

import haiku as hk
import jax
import numpy as np
import pytest

from haiku_posteriors.core import likelihoods, priors, surface
from haiku_posteriors.core.data import make_data
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import make_log_joint

NOISE, PRECISION, TEMPERATURE = 0.5, 4.0, 2.0


def params(weights, bias):
    return {
        "linear": {
            "w": np.asarray(weights, np.float32).reshape(-1, 1),
            "b": np.asarray([bias], np.float32),
        }
    }


POINTS = (params([0.0, 1.0], 0.5), params([2.0, 1.0], 1.0), params([1.5, -1.0], 0.0))


def flat(tree):
    return np.concatenate([np.ravel(tree["linear"][name]) for name in ("b", "w")]).astype(float)


def at(plane, s, t):
    return flat(plane.origin) + s * flat(plane.first) + t * flat(plane.second)


def test_the_three_points_are_where_they_are_said_to_be():
    plane = surface.make_plane(*POINTS)
    for point, (s, t) in zip(POINTS, plane.points, strict=True):
        np.testing.assert_allclose(at(plane, s, t), flat(point), atol=1e-6)
    first, second = flat(plane.first), flat(plane.second)
    assert first @ second == pytest.approx(0.0, abs=1e-5)
    np.testing.assert_allclose(plane.lengths, [np.linalg.norm(first), np.linalg.norm(second)])
    # <w3 - w1, w2 - w1> / |w2 - w1|^2, by hand: (1.5 * 2 + 0 - 0.5 * 0.5) / (4 + 0.25).
    np.testing.assert_allclose(plane.points, [[0, 0], [1, 0], [2.75 / 4.25, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ((POINTS[0], POINTS[0], POINTS[1]), "are the same"),
        ((POINTS[0], POINTS[1], POINTS[0]), "on one line"),
        ((params([0, 0], 0), params([1, 0], 0), params([3, 0], 0)), "on one line"),
    ],
)
def test_what_spans_no_plane_is_told(points, sentence):
    with pytest.raises(UserError, match=sentence):
        surface.make_plane(*points)


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_quadratic_log_joint_is_that_of_the_closed_form(at_once, num_microbatches):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2)).astype(np.float32)
    y = rng.normal(size=(12, 1)).astype(np.float32)
    log_joint = make_log_joint(
        lambda inputs: hk.Linear(1)(inputs),
        x,
        priors.make_prior(weight_decay=PRECISION),
        likelihoods.gaussian(NOISE),
        temperature=TEMPERATURE,
        num_microbatches=num_microbatches,
    )
    plane = surface.make_plane(*POINTS)
    coordinates = rng.uniform(-0.5, 1.5, size=(20, 2))
    log_prior, log_likelihood = surface.evaluate_on_plane(
        log_joint, jax.device_put(make_data(x, y)), plane, coordinates, at_once
    )
    for (s, t), prior, likelihood in zip(coordinates, log_prior, log_likelihood, strict=True):
        bias, *weights = at(plane, s, t)
        squares = bias**2 + np.sum(np.square(weights))
        expected = -0.5 * PRECISION * squares + 1.5 * np.log(PRECISION / (2 * np.pi))
        assert prior == pytest.approx(expected / TEMPERATURE, rel=1e-4, abs=1e-4)
        residual = y[:, 0] - x @ np.array(weights) - bias
        expected = -0.5 * np.sum((residual / NOISE) ** 2) - 12 * np.log(NOISE * np.sqrt(2 * np.pi))
        assert likelihood == pytest.approx(expected / TEMPERATURE, rel=1e-4, abs=1e-4)
