"""What the verdict on point estimates says of a learned noise, after training that shows it."""

import jax
import numpy as np
import optax
from scenarios import LinearGaussian

from haiku_posteriors.core import progress
from haiku_posteriors.core.likelihoods import gaussian
from haiku_posteriors.core.progress import Rules
from haiku_posteriors.core.sgd import sgd
from haiku_posteriors.utils.report import training

EPOCHS, FIRST_ROUND = 380, 100


def verdict(num_rows, num_columns):
    """Of two members on a linear regression with a learned noise, cut short in a second round."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(num_rows, num_columns)).astype(np.float32)
    targets = random.normal(size=(num_rows, 1)).astype(np.float32)
    model = LinearGaussian(inputs, targets, noise_std=1.0, prior_std=10.0)
    log_joint = model.log_joint(likelihood=gaussian(1.0, learn_noise=True))
    optimizer = optax.chain(optax.adam(0.01), progress.scale_by_step_factor())
    rules = Rules(0.2, FIRST_ROUND)
    method = progress.watch(sgd(log_joint, optimizer, num_rows), rules)
    data = model.data()

    def member(key):
        state = method.init(key, None)
        keys = jax.random.split(key, EPOCHS)
        return jax.lax.scan(lambda s, key: (method.step(key, s, data)[0], None), state, keys)[0]

    state = jax.device_get(jax.jit(jax.vmap(member))(jax.random.split(jax.random.key(0), 2)))
    noise = training.learned_noise(log_joint, state, num_rows)
    return training.judge_training(state.progress, rules, training.LOG_JOINT, noise=noise)


def test_more_weights_than_rows_have_no_mode_but_without_noise():
    """Targets that are noise alone: 20 weights pass through 10 of them."""
    found, content = verdict(num_rows=10, num_columns=20)
    assert not found.converged and "the learned noise falls" in found.problems[0]
    assert min(content["noise_share_of_gain"]) > 0.5


def test_fewer_weights_than_rows_have_a_mode():
    """The same training settles, and its verdict asks for smaller steps."""
    found, content = verdict(num_rows=100, num_columns=20)
    assert content["num_phases"] == [1, 1]
    assert not any("noise falls" in problem for problem in found.problems)
