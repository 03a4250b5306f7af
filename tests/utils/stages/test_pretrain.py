"""Pretraining: each chain gets the best of its starts."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import data_utils
from haiku_posteriors.utils.stages import pretrain


class Still(NamedTuple):
    params: dict


def test_each_chain_gets_the_best_of_its_starts():
    """Of a method that stays where it starts, and says a log-joint that tells starts apart."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    dataset = data_utils.from_arrays(x, x[:, :1], x, x[:, :1])
    log_joint = make_log_joint(lambda x: hk.Linear(1)(x), x, make_prior(1.0), gaussian(0.3))

    def score(params):
        return jnp.sum(params["linear"]["w"])

    method = Method(
        lambda key, params: Still(params),
        lambda key, state, data: (state, {"log_joint": score(state.params)[None]}),
        lambda key, state, number: state.params,
    )

    def scores(num_chains, num_starts, **settings):
        params = pretrain.pretrain(
            method,
            log_joint,
            dataset,
            seed=0,
            num_chains=num_chains,
            num_starts=num_starts,
            **{"num_epochs": 1, **settings},
        )
        return np.asarray(jax.vmap(score)(params))

    np.testing.assert_allclose(scores(2, 4), scores(8, 1).reshape(2, 4).max(axis=1), rtol=1e-6)
    said = []
    scores(2, 4, num_epochs=100, time_limit=0.0, say=said.append)
    assert said[-1] == "Pretraining: cut short after 2 of 100 epochs."
