"""What scripts share, as far as it is not seen in the scripts' own tests."""

import types
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import data_utils, script_utils


class Still(NamedTuple):
    params: dict


def test_pretraining_keeps_the_best_start_of_each_chain(monkeypatch):
    """Of a method that stays where it starts, and says a log-joint that tells starts apart."""
    monkeypatch.setattr(script_utils, "FLAGS", types.SimpleNamespace(seed=0))
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

    def scores(num_chains, num_starts):
        params = script_utils.pretrain(
            method,
            log_joint,
            dataset,
            num_chains=num_chains,
            num_starts=num_starts,
            num_epochs=1,
        )
        return np.asarray(jax.vmap(score)(params))

    np.testing.assert_allclose(scores(2, 4), scores(8, 1).reshape(2, 4).max(axis=1), rtol=1e-6)
