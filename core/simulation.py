"""Parameters from the prior, data given them, and a method's draws given the data.

    w ~ p(w),    y_i ~ p(y | x_i, w),    w_1 .. w_n ~ the method's p(w | y)

What `core.judging.calibration_ranks` judges (Talts et al. 2018, arXiv 1804.06788). Everything is a
pure function of a key, so that many data sets are one program, by `lax.map` or `vmap` over keys.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from haiku_posteriors.core.data import Data
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method, State
from haiku_posteriors.core.trees import Params

Quantities = Callable[[Params, Data], jax.Array]  # scalars of parameters and data, (quantities,)


def simulate_regression(
    rng_key: jax.Array, log_joint: LogJoint, inputs: jax.Array
) -> tuple[Params, Data]:
    """Parameters from the prior and Gaussian targets given them.

    Args:
      rng_key: of this data set alone.
      log_joint: of a Gaussian likelihood, with all parameters random; its temperature is ignored.
      inputs: (rows, ...).
    """
    params = log_joint.sample_prior(jax.random.fold_in(rng_key, 0))
    mean, std = jnp.split(log_joint.predict(params, inputs), 2, axis=1)
    noise = jax.random.normal(jax.random.fold_in(rng_key, 1), mean.shape, mean.dtype)
    weights = jnp.ones(inputs.shape[0], inputs.dtype)
    return params, Data(inputs, mean + std * noise, weights, inputs.shape[0])


def posterior_draws(
    rng_key: jax.Array,
    method: Method,
    data: Data,
    quantities: Quantities,
    *,
    num_draws: int,
    num_steps: int,
    thinning: int | None,
) -> jax.Array:
    """Quantities of a method's draws given data, (num_draws, quantities).

    Args:
      rng_key: of this data set alone.
      method: run as one chain from where it starts by itself.
      data: all rows.
      quantities: of each draw.
      num_draws: n.
      num_steps: before the first draw, burn-in included.
      thinning: steps from one draw to the next; None if all are drawn from the last state.
    """
    step_key, sample_key = jax.random.fold_in(rng_key, 1), jax.random.fold_in(rng_key, 2)

    def advance(first: jax.Array | int, count: int, state: State) -> State:
        def body(index: jax.Array, state: State) -> State:
            return method.step(jax.random.fold_in(step_key, index), state, data)[0]

        return jax.lax.fori_loop(first, first + count, body, state)

    state = method.init(jax.random.fold_in(rng_key, 0), None)
    if thinning is None:
        draws = method.sample(sample_key, advance(0, num_steps, state), num_draws)
        return jax.vmap(lambda params: quantities(params, data))(draws)

    def collect(state: State, number: jax.Array) -> tuple[State, jax.Array]:
        draw = method.sample(jax.random.fold_in(sample_key, number), state, 1)
        value = quantities(jax.tree.map(lambda leaf: leaf[0], draw), data)
        return advance(num_steps + number * thinning, thinning, state), value

    state = advance(0, num_steps, state)
    return jax.lax.scan(collect, state, jnp.arange(num_draws))[1]
