"""A layer's conditional posterior against dense Gaussians in NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from haiku_posteriors.core.layerwise import regressions

UNITS = 2


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(6, 3), (3, 5)])
def test_moments_and_density(rows, size, shared):
    """Draws are affine in the noise: its matrix gives the exact covariance, in either space."""
    generator = np.random.default_rng(rows)
    features = generator.normal(size=(rows, size))
    outputs = generator.normal(size=(rows, UNITS))
    logs = generator.normal(size=(rows, 1 if shared else UNITS))
    point = generator.normal(size=(size, UNITS))

    @jax.jit
    def ours(features, outputs, logs, point):
        regression = regressions.regress(features, outputs, logs)
        zeros = {
            name: jnp.zeros(shape)
            for name, shape in regressions.noise_shapes(rows, size, UNITS).items()
        }
        moments = regression.draw(zeros), jax.jacobian(regression.draw)(zeros)
        numbers = regression.log_density(point), regression.log_det, regression.second_moment
        return *moments, *numbers

    with jax.enable_x64(True):
        arrays = map(jnp.asarray, (features, outputs, logs, point))
        mean, jacobian, density, log_det, second_moment = ours(*arrays)
    columns = np.concatenate(
        [np.reshape(leaf, (size, UNITS, -1)) for leaf in jacobian.values()], axis=-1
    )
    expected_density = expected_log_det = expected_second = 0.0
    for unit in range(UNITS):
        weights = np.exp(logs[:, 0 if shared else unit])
        precision = np.eye(size) + features.T @ (weights[:, None] * features)
        covariance = np.linalg.inv(precision)
        center = covariance @ features.T @ (weights * outputs[:, unit])
        np.testing.assert_allclose(mean[:, unit], center, atol=1e-10)
        spread = columns[:, unit] @ columns[:, unit].T
        np.testing.assert_allclose(spread, covariance, atol=1e-10)
        expected_density += scipy.stats.multivariate_normal.logpdf(
            point[:, unit], center, covariance
        )
        expected_log_det += np.linalg.slogdet(precision)[1]
        expected_second += center @ center + np.trace(covariance)
    cross = columns[:, 0] @ columns[:, 1].T
    np.testing.assert_allclose(cross, 0, atol=1e-10)  # units are independent
    assert float(density) == pytest.approx(expected_density)
    assert float(log_det) == pytest.approx(expected_log_det)
    assert float(second_moment) == pytest.approx(expected_second)
