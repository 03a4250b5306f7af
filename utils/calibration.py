"""Simulation-based calibration of any method on a small network: recipes, and the simulation.

The network has one input, one hidden layer of tanh and one output, a standard normal prior and a
learned noise: small enough for hundreds of posteriors, and with all that makes posteriors of
networks hard. What is ranked does not change when hidden units are relabelled.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_posteriors.core import METHODS, simulation
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP, gaussian
from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.core.sgmcmc import sghmc
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import chains, devices

NOISE_STD = 0.3  # the median of the prior of the noise
INPUT_RANGE = (-2.0, 2.0)
POINTS = (-1.0, 0.5, 3.0)  # where predictions are ranked: two among the data, one outside
DATA_SETS_AT_ONCE = 25


class Recipe(NamedTuple):
    """How a method comes to nearly independent draws of such a posterior.

    Attributes:
      make: (log-joint, rows) -> the method.
      num_steps: before the first draw.
      thinning: steps between draws; None if the last state gives them all.
      is_exact: whether it claims the posterior itself: then ranks must be uniform.
    """

    make: Callable[[LogJoint, int], Method]
    num_steps: int
    thinning: int | None
    is_exact: bool


def _make(name: str, **settings: object) -> Callable[[LogJoint, int], Method]:
    return lambda log_joint, rows: METHODS[name](log_joint, **settings)


def _make_full_batch(name: str, **settings: object) -> Callable[[LogJoint, int], Method]:
    return lambda log_joint, rows: METHODS[name](log_joint, batch_size=rows, **settings)


# A new method is one entry here; the slow tests take those that claim to be exact from it.
RECIPES = {
    "hmc": Recipe(_make("hmc", num_burn_in=300, target_accept=0.9), 300, 15, True),
    "adjusted_mclmc": Recipe(_make("adjusted_mclmc", num_burn_in=300), 300, 15, True),
    "smc": Recipe(_make("smc", num_particles=100, max_num_leapfrog_steps=50), 50, None, True),
    "mclmc": Recipe(_make("mclmc", num_burn_in=300), 300, 15, False),
    "sgmcmc": Recipe(_make_full_batch("sgmcmc", sampler=sghmc(1e-4, 0.9)), 20_000, 1_000, False),
    "mean_field_vi": Recipe(
        _make_full_batch("mean_field_vi", sigma_init=0.01, num_samples=4), 4_000, None, False
    ),
    "low_rank_vi": Recipe(
        _make_full_batch("low_rank_vi", sigma_init=0.01, num_samples=4), 4_000, None, False
    ),
    "mnf_vi": Recipe(
        _make_full_batch("mnf_vi", sigma_init=0.01, num_samples=4), 4_000, None, False
    ),
    "layerwise_vi": Recipe(_make_full_batch("layerwise_vi", num_samples=4), 4_000, None, False),
    "implicit": Recipe(_make_full_batch("implicit", num_samples=4), 4_000, None, False),
    "mc_dropout": Recipe(_make_full_batch("mc_dropout"), 4_000, None, False),
    "sgd": Recipe(_make_full_batch("sgd", optimizer=optax.adam(1e-2)), 4_000, None, False),
}
EXACT_METHODS = tuple(name for name, recipe in RECIPES.items() if recipe.is_exact)


def find_recipe(method: str) -> Recipe:
    """The recipe of a method in `core.METHODS`."""
    if method in RECIPES:
        return RECIPES[method]
    if method in METHODS:
        raise UserError(f"There is no recipe for {method} yet: add one to utils/calibration.py.")
    raise unknown_name("method", method, RECIPES)


def make_problem(num_rows: int, num_hidden: int, temperature: float = 1.0) -> LogJoint:
    """The log-joint; a temperature other than 1 makes it a wrong one on purpose."""

    def network(inputs: jax.Array) -> jax.Array:
        return hk.nets.MLP([num_hidden, 1], activation=jnp.tanh)(inputs)

    likelihood = gaussian(NOISE_STD, learn_noise=True)
    inputs = rows_of(num_rows)
    return make_log_joint(network, inputs, make_prior(1.0), likelihood, temperature=temperature)


def rows_of(num_rows: int) -> np.ndarray:
    """The inputs of every data set, (rows, 1)."""
    return np.linspace(*INPUT_RANGE, num_rows, dtype=np.float32)[:, None]


def quantity_names() -> list[str]:
    """What is ranked."""
    return ["log-joint", "log noise", *(f"f({point:g})" for point in POINTS)]


def quantities(log_joint: LogJoint, params: Params, data: Data) -> jax.Array:
    """The log-joint at T = 1, the learned noise and predictions, (quantities,)."""
    log_value = log_joint.log_prior(params) + log_joint.log_likelihood(params, data)
    noise = params[PARAMETER_GROUP]["log_noise_std"]
    points = jnp.array(POINTS, data.inputs.dtype)[:, None]
    outputs = log_joint.network(params, points)[:, 0]
    return jnp.concatenate([jnp.stack([log_value, noise]), outputs])


def simulate(
    log_joint: LogJoint,
    method: Method,
    *,
    num_rows: int,
    num_data_sets: int,
    num_draws: int,
    num_steps: int,
    thinning: int | None,
    seed: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """True values (some, quantities) and draws (some, num_draws, quantities), in equal portions.

    All data sets run in one compiled program: on CPUs in turn, else side by side.
    """
    inputs = jnp.asarray(rows_of(num_rows))
    of = functools.partial(quantities, log_joint)

    def calibrate_one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Two purposes, so that a method's numbers are not those its data were made with.
        data_key = chains.chain_key(seed, chains.SIMULATE, 0, index)
        params, data = simulation.simulate_regression(data_key, log_joint, inputs)
        draws = simulation.posterior_draws(
            chains.chain_key(seed, chains.STEP, 0, index),
            method,
            data,
            of,
            num_draws=num_draws,
            num_steps=num_steps,
            thinning=thinning,
        )
        return of(params, data), draws

    at_once = max(n for n in range(1, DATA_SETS_AT_ONCE + 1) if num_data_sets % n == 0)
    in_turn = devices.batches_are_slow(devices.make_mesh(1))

    @jax.jit
    def calibrate(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        if in_turn:
            return jax.lax.map(calibrate_one, indices)
        return jax.vmap(calibrate_one)(indices)

    for first in range(0, num_data_sets, at_once):
        yield devices.to_host(calibrate(np.arange(first, first + at_once)))
