"""Mixtures of members: draws in the right numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.method import Method
from haiku_posteriors.utils.stages import mixture


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1.0, 0.0], [0.26, 0.74], [0.04, 0.96]])
def test_draws_come_from_members_in_proportion(weights):
    def sample(rng_key, state, num_draws):
        return {"w": jnp.broadcast_to(state, (num_draws,))}

    method = Method(lambda *_: None, lambda *_: None, sample)
    draws = mixture.mixture_draws(method, jnp.array([0.0, 1.0]), np.array(weights), 5, 0)
    assert draws["w"].shape == (2, 5)
    assert draws["w"].sum() == round(weights[1] * 10)
