"""The sampler of weights w = g(z) + s * e: what is optimised, its draws, and where it starts.

z ~ N(0, I_d),   e ~ N(0, I_D),   noise scales s in R^D
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import Inputs
from haiku_posteriors.core.errors import check_positive, unknown_name
from haiku_posteriors.core.implicit import generators
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params

STARTS = ("mean_field", "network", "prior")


class Sampler(NamedTuple):
    """All that is optimised.

    Attributes:
      generator: the parameters of g.
      log_scale: log s, in the structure of the random parameters; leaves of shape () if s is fixed.
      point: the other parameters.
      encoder: of the reverse model, where the objective has one (`core.implicit.encoders`).
    """

    generator: Params
    log_scale: Params
    point: Params
    encoder: Params | None = None


class Start(NamedTuple):
    """Where a sampler begins.

    Attributes:
      kind: "network" or "mean_field", around what is given: a mean-field posterior, or parameters
        (else the network's own initialisation), by `init_spread` times their root mean square in
        each module; or "prior", with the mean and the standard deviations of the prior.
      init_spread: of g(z), relative to the parameters.
      noise_scale: s, its first value if it is learned. Not used in a start from a mean-field
        posterior, whose marginal standard deviations are kept, a share `init_spread` of them from
        g.
    """

    kind: str = "network"
    init_spread: float = 0.1
    noise_scale: float = 1e-2

    def check(self) -> None:
        """Refuses unknown names and scales that are not positive."""
        if self.kind not in STARTS:
            raise unknown_name("start", self.kind, STARTS)
        check_positive(noise_scale=self.noise_scale, init_spread=self.init_spread)


def default_start(log_joint: LogJoint, inputs: Inputs) -> str:
    """Where training that ends by itself begins: "mean_field", or "network" for a regression.

    If outputs are affine in the random parameters, the log-joint of a known noise or of classes has
    one mode: from there with full steps a sampler ends sooner than after mean-field VI. In other
    networks it loses what the start had found (docs/implicit.md). Tried at two points and the one
    between them, on a few rows `inputs`.
    """
    keys = (jax.random.fold_in(jax.random.key(0), index) for index in range(3))
    random, point = log_joint.partition(log_joint.init(next(keys)))
    first, last = (trees.normal_like(key, random) for key in keys)
    between = jax.tree.map(lambda a, b: (a + b) / 2, first, last)
    with jax.default_matmul_precision("highest"):  # else rounding is a bend, on accelerators
        ends = [log_joint.network(trees.merge(w, point), inputs) for w in (first, between, last)]
    bend = jnp.max(jnp.abs(ends[0] - 2 * ends[1] + ends[2]))
    is_affine = bend < 1e-4 * jnp.max(jnp.abs(jnp.stack(ends)))
    return "network" if is_affine else "mean_field"


def initial_sampler(
    rng_key: jax.Array,
    log_joint: LogJoint,
    generator: Generator,
    params: Params | vi.VariationalParams,
    start: Start,
    learn_noise_scale: bool,
) -> Sampler:
    """The sampler at its start, around `params`, with one s per weight if it is to be learned."""
    if isinstance(params, vi.VariationalParams):
        center, point = params.mean, params.point
        spread, log_scale = _spread_of_mean_field(params, start.init_spread)
    else:
        center, point = log_joint.partition(params)
        shape_of_scale = jnp.shape if learn_noise_scale else lambda leaf: ()
        log_scale = jax.tree.map(
            lambda leaf: jnp.full(shape_of_scale(leaf), math.log(start.noise_scale), leaf.dtype),
            center,
        )
        if start.kind == "prior":
            center, spread = _prior_moments(log_joint, center)
        else:
            spread = _spread_by_module(center, start.init_spread)
    return Sampler(generator.init(rng_key, center, spread), log_scale, point)


def latents(
    normal: Callable[[jax.Array], jax.Array],
    generator: Generator,
    sampler: Sampler,
    num_draws: int,
) -> tuple[jax.Array, jax.Array]:
    """z (draws, d) and e (draws, D): parts of one array, since each draw takes time to compile.

    `normal` gives values in the shape of an array: for posterior draws standard normal ones, in
    training those of `core.approximate_normals`, of the same moments, which cost a fraction.
    """
    shape = (num_draws, generator.latent_size + generator.num_weights)
    both = normal(jnp.zeros(shape, jax.tree.leaves(sampler.log_scale)[0].dtype))
    return both[:, : generator.latent_size], both[:, generator.latent_size :]


def normal_latents(
    rng_key: jax.Array, generator: Generator, sampler: Sampler, num_draws: int
) -> tuple[jax.Array, jax.Array]:
    """`latents` of exactly normal values, as draws and bounds need them."""
    return latents(functools.partial(trees.normal_like, rng_key), generator, sampler, num_draws)


def weights_at(
    generator: Generator, sampler: Sampler, z: jax.Array, e: jax.Array
) -> tuple[Params, Params, Params]:
    """g(z), s and w = g(z) + s * e, for z (d,) and e (D,)."""
    mean = generator.apply(sampler.generator, z)
    scale = jax.tree.map(
        lambda log_s, m: jnp.broadcast_to(jnp.exp(log_s), m.shape), sampler.log_scale, mean
    )
    _, unravel = ravel_pytree(mean)
    return mean, scale, jax.tree.map(lambda m, s, e: m + s * e, mean, scale, unravel(e))


def _prior_moments(log_joint: LogJoint, params: Params) -> tuple[Params, Params]:
    """Where a start as the prior is centred, and its standard deviations.

    The likelihood's own parameters have a law of their own, and start at their stated values.
    """
    likelihood = log_joint.likelihood
    own = trees.named_leaves({PARAMETER_GROUP: likelihood.init()})

    def mean(name: str, leaf: jax.Array) -> jax.Array:
        return own[name].astype(leaf.dtype) if name in own else jnp.zeros_like(leaf)

    def spread(name: str, leaf: jax.Array) -> jax.Array:
        std = likelihood.prior_std if name in own else log_joint.prior.scale(name)
        return jnp.full((), std, leaf.dtype)

    return trees.map_with_name(mean, params), trees.map_with_name(spread, params)


def _spread_of_mean_field(variational: vi.VariationalParams, share: float) -> tuple[Params, Params]:
    """Spread of g and log s that share the marginal variances of a mean-field posterior."""
    deviation = jax.tree.map(jax.nn.softplus, variational.raw_scale)
    spread = jax.tree.map(lambda s: share * _root_mean_square(s), deviation)
    rest = math.sqrt(max(1 - share**2, 1e-2))
    return spread, jax.tree.map(lambda s: jnp.log(rest * s), deviation)


def _spread_by_module(center: Params, share: float) -> Params:
    """`share` of the root mean square of a module's largest array.

    Biases often start at 0: they take the scale of their module's other arrays.
    """
    sizes: dict[str, jax.Array] = {}
    for group in generators.groups(center).values():
        largest = jnp.max(jnp.stack([_root_mean_square(leaf) for leaf in group.values()]))
        sizes |= dict.fromkeys(group, jnp.maximum(largest, 1e-3))
    return trees.map_with_name(lambda name, leaf: share * sizes[name], center)


def _root_mean_square(leaf: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(leaf)))
