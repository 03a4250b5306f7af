"""Inverse Cholesky factors and their gradient against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.factors import BLOCK, inverse_factor


def numpy_factor(matrix):
    return np.linalg.inv(np.linalg.cholesky(matrix))


@pytest.mark.parametrize("size", [5, BLOCK + 1])
def test_value_and_gradient(size):
    generator = np.random.default_rng(size)
    root = generator.normal(size=(2, size, size))
    matrix = np.eye(size) + root @ root.swapaxes(1, 2)
    weights, direction = generator.normal(size=(2, 2, size, size))
    direction = direction + direction.swapaxes(1, 2)
    with jax.enable_x64(True):

        def loss(matrix):
            factor = inverse_factor(matrix)
            return jnp.sum(weights * factor), factor

        function = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, factor), gradient = function(jnp.asarray(matrix))
    np.testing.assert_allclose(factor, numpy_factor(matrix), atol=1e-12)
    step = 1e-5
    change = numpy_factor(matrix + step * direction) - numpy_factor(matrix - step * direction)
    expected = np.sum(weights * change) / (2 * step)
    assert np.sum(np.asarray(gradient) * direction) == pytest.approx(expected, rel=1e-6, abs=1e-8)
    np.testing.assert_allclose(gradient, np.swapaxes(gradient, 1, 2), atol=1e-12)
