"""Products of generators that are linear in their features, against Jacobians of g / s itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core.implicit import generators, whitening
from haiku_posteriors.core.implicit.generators import MLP
from haiku_posteriors.core.implicit.samplers import Sampler

CENTER = {"first": {"w": jnp.ones((6, 3)), "b": jnp.zeros(3)}, "noise": {"log": jnp.zeros(())}}
SPREAD = jax.tree.map(lambda leaf: jnp.float32(0.5), CENTER)


@pytest.mark.parametrize(
    "description", [MLP(4), MLP(4, (5,)), MLP(4, (5, 3)), MLP(4, (5,), linear_path=False)], ids=str
)
def test_products_are_those_of_the_jacobian(description):
    generator = generators.make_generator(description, CENTER)
    weights = generator.init(jax.random.key(0), CENTER, SPREAD)
    log_scale = jax.tree.map(
        lambda leaf: 0.1 * jnp.arange(1.0 * leaf.size).reshape(leaf.shape), CENTER
    )
    sampler = Sampler(weights, log_scale, {})
    z = jnp.array([0.3, -1.2, 0.7, 2.0])
    target = jnp.linspace(-1, 1, generator.num_weights)
    scales = jnp.exp(ravel_pytree(log_scale)[0])

    def in_units_of_noise(z):
        return ravel_pytree(generator.apply(weights, z))[0] / scales

    whitened, log_scales = whitening.whitened_map(generator, sampler)
    gram, pulled = whitening.normal_equations(whitened, z, target)
    assert isinstance(whitened, whitening.WhitenedReadout)
    jacobian = np.asarray(jax.jacrev(in_units_of_noise)(z), np.float64)
    residual = np.asarray(target - in_units_of_noise(z), np.float64)
    np.testing.assert_allclose(whitened(z), in_units_of_noise(z), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_scales, jnp.log(scales), rtol=1e-6)
    np.testing.assert_allclose(gram, jacobian.T @ jacobian, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pulled, jacobian.T @ residual, rtol=1e-4, atol=1e-5)


def test_maps_in_general_have_the_same_products():
    generator = generators.make_generator(MLP(4, (5,)), CENTER)
    weights = generator.init(jax.random.key(0), CENTER, SPREAD)
    sampler = Sampler(weights, jax.tree.map(jnp.zeros_like, CENTER), {})
    readout, _ = whitening.whitened_map(generator, sampler)
    general, _ = whitening.whitened_map(generator._replace(readout=None), sampler)
    z, target = jnp.arange(4.0), jnp.ones(generator.num_weights)
    for one, other in zip(
        whitening.normal_equations(readout, z, target),
        whitening.normal_equations(general, z, target),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
