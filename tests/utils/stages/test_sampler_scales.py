"""Masses, steps and friction of SGMCMC against the exact curvature of a linear regression."""

import itertools
import math

import jax
import numpy as np
from scenarios import LinearGaussian

from haiku_posteriors.core import curvature, sgmcmc
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.settings import UPDATES_PER_DRAW, Settings
from haiku_posteriors.utils.stages import sampler_scales
from haiku_posteriors.utils.tasks import Task

RANDOM = np.random.default_rng(0)
INPUTS = (RANDOM.normal(size=(64, 3)) @ np.array([[1, 0.8, 0], [0, 1, 0], [0, 0, 0.1]])).astype(
    np.float32
)
TARGETS = (INPUTS.sum(axis=1, keepdims=True) + RANDOM.normal(size=(64, 1))).astype(np.float32)
EXACT = LinearGaussian(INPUTS, TARGETS, noise_std=0.5, prior_std=1.0, with_bias=False)


def fit(batch_size, bias_tolerance=0.05, momentum_decay=None):
    values = {"batch_size": batch_size, "bias_tolerance": bias_tolerance, "seed": 0}
    settings = Settings({**values, "momentum_decay": momentum_decay}, {})
    dataset = data_utils.from_arrays(INPUTS, TARGETS, INPUTS, TARGETS, standardize=False)
    starts = {"linear": {"w": np.zeros((2, 3, 1), np.float32)}}
    return sampler_scales.fit(Task("sgmcmc", settings, dataset, EXACT.log_joint()), starts)


def test_all_rows_take_the_largest_stride_and_the_least_friction():
    found = fit(64)
    diagonal = np.diag(EXACT.precision)
    np.testing.assert_allclose(np.ravel(found.mass["linear"]["w"]), diagonal, rtol=1e-4)
    scale = 1 / np.sqrt(diagonal)
    largest = np.linalg.eigvalsh(EXACT.precision * scale[:, None] * scale)[-1]
    np.testing.assert_allclose(found.largest, largest, rtol=1e-3)
    assert found.noise_bias == 0
    np.testing.assert_allclose(found.momentum_decay, math.exp(-2 / UPDATES_PER_DRAW))
    stride = math.sqrt(2 * found.step_size / (1 + found.momentum_decay))
    np.testing.assert_allclose(stride, 0.5 / math.sqrt(largest), rtol=1e-3)


def test_noise_is_met_by_friction_first_and_then_by_smaller_strides():
    """The bias of what is chosen is within the tolerance, that of the candidate before is not."""
    largest_stride = 0.5 / math.sqrt(fit(64).largest)
    for batch_size, tolerance in ((32, 2.0), (4, 0.05)):
        found = fit(batch_size, tolerance)
        assert 0 < found.noise_bias <= tolerance
        friction = -math.log(found.momentum_decay)
        stride = math.sqrt(2 * found.step_size / (1 + found.momentum_decay))
        candidates = list(itertools.islice(sampler_scales._candidates(largest_stride), 30))
        chosen = int(np.argmin([abs(h - stride) + abs(f - friction) for h, f in candidates]))
        np.testing.assert_allclose(candidates[chosen], (stride, friction), rtol=1e-3)
        assert chosen > 0
        h, f = candidates[chosen - 1]
        assert found.noise_bias * bias_factor(h, f) / bias_factor(stride, friction) > tolerance
    assert stride < largest_stride  # of the smallest minibatches


def bias_factor(stride, friction):
    """What of the stated bias depends on them: eps / (1 - beta)."""
    beta = math.exp(-friction)
    return (1 + beta) * stride**2 / (2 * (1 - beta))


def test_a_given_momentum_decay_is_kept():
    found = fit(4, momentum_decay=0.9)
    assert found.momentum_decay == 0.9 and found.noise_bias <= 0.05
    noise = curvature.gradient_noise(
        jax.random.key(0),
        EXACT.log_joint(),
        {"linear": {"w": np.zeros((3, 1), np.float32)}},
        EXACT.data(),
        4,
    )
    scale = jax.tree.map(lambda leaf: 1 / np.sqrt(leaf), found.mass)
    expected = float(sgmcmc.noise_bias(found.step_size, 0.9, noise, scale))
    np.testing.assert_allclose(found.noise_bias, expected, rtol=0.5)  # other minibatches
