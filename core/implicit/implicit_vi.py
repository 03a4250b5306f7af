"""Implicit variational inference: the posterior by a neural sampler of weights.

    w = g(z) + s * e,        z ~ N(0, I_d),   e ~ N(0, I_D),   noise scales s in R^D

    ELBO_T(q) = E[ log p_T(w, D) ] + H[q]
    H[q] ~ E_z[ 1/2 logdet(I_d + B^T B) ] + sum_i log s_i + D/2 log(2 pi e),   B = diag(1/s) dg/dz

(arXiv 2310.06643, there with one fixed s). The entropy is that of g linearised at z: exact where g
is linear, too high where several z give the same w. Its log-determinant is computed by one of
ENTROPY_ESTIMATORS, see `core.implicit.jacobian`. Minibatches weighted as in `core.data` estimate
likelihoods, and draws of (z, e) expectations; over e alone, a Gaussian prior's is taken in closed
form.

Target: the q of this family with the least KL(q || p_T(w | D)). With s learned for every weight the
family contains mean-field VI (constant g) and Gaussians of covariance J J^T + diag(s)^2 (linear g);
with a small fixed s, D - d directions of the weights have next to no spread.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from haiku_posteriors.core import approximate_normals, trees, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.implicit import generators, jacobian
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.jacobian import LogDet
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.trees import Params

ENTROPY_ESTIMATORS = ("exact", "singular_value", "lanczos")
STARTS = ("network", "prior")
EXACT_LIMIT = 128  # latent size up to which `exact` is the default


class Estimator(NamedTuple):
    """How 1/2 logdet(I_d + B^T B) is estimated.

    Attributes:
      name: one of ENTROPY_ESTIMATORS.
      num_steps: K of `lanczos` and of `singular_value`.
      num_probes: of `lanczos`, for each z.
      warm_start: whether `singular_value` starts from the last step's vectors and not at random.
    """

    name: str
    num_steps: int = 20
    num_probes: int = 1
    warm_start: bool = False


class Sampler(NamedTuple):
    """All that is optimised.

    Attributes:
      generator: the parameters of g.
      log_scale: log s, in the structure of the random parameters; a leaf of shape () if s is fixed.
      point: the other parameters.
    """

    generator: Params
    log_scale: Params
    point: Params


class ImplicitState(NamedTuple):
    """The sampler, minibatches seen, the optimizer's state; vectors to start `singular_value`."""

    sampler: Sampler
    num_steps: jax.Array
    optimizer_state: optax.OptState
    vectors: jax.Array | None


class ImplicitTerms(NamedTuple):
    """Estimates of the ELBO's terms, tempered, one a draw of (z, e) or their means.

    Attributes:
      expected_log_likelihood: E[log p(D | w)] / T.
      expected_log_prior: E[log p(w)] / T.
      entropy: H[q].
      log_det: of which the entropy was made.
    """

    expected_log_likelihood: jax.Array
    expected_log_prior: jax.Array
    entropy: jax.Array
    log_det: LogDet

    @property
    def elbo(self) -> jax.Array:
        """Their sum."""
        return self.expected_log_likelihood + self.expected_log_prior + self.entropy


def evidence_terms(
    rng_key: jax.Array,
    log_joint: LogJoint,
    generator: Generator,
    estimator: Estimator,
    sampler: Sampler,
    data: Data,
    num_samples: int,
    vectors: jax.Array | None = None,
    place: Callable[[jax.Array], jax.Array] = lambda array: array,
) -> tuple[ImplicitTerms, jax.Array | None]:
    """Differentiable estimates of the ELBO's terms, each at its own (z, e).

    Args:
      rng_key: of all that is random here.
      log_joint: the model.
      generator: g.
      estimator: of the log-determinant.
      sampler: where to evaluate.
      data: all data or a minibatch, with its weights.
      num_samples: draws of (z, e).
      vectors: from which `singular_value` starts, (num_samples, d); random by default.
      place: spreads an array with a leading axis of draws over devices, or returns it as it is.

    Returns:
      The terms, (num_samples,) each, and the vectors at which `singular_value` ended, else None.
    """
    scales = jax.tree.map(jnp.exp, sampler.log_scale)

    def function(z: jax.Array) -> Params:
        return generator.apply(sampler.generator, z)

    def half_log_det(z: jax.Array, start: jax.Array | None) -> tuple[LogDet, jax.Array | None]:
        if estimator.name == "exact":
            return jacobian.exact(function, z, scales), None
        assert start is not None
        steps = estimator.num_steps
        if estimator.name == "lanczos":
            return jacobian.lanczos(function, z, scales, start, num_steps=steps), None
        return jacobian.singular_value(function, z, scales, start, num_steps=steps)

    def terms_at(z: jax.Array, e: jax.Array, start: jax.Array | None) -> tuple:
        mean, scale, drawn = _weights(generator, sampler, z, e)
        log_likelihood = log_joint.log_likelihood(trees.merge(drawn, sampler.point), data)
        log_prior = log_joint.expected_log_prior(mean, scale, drawn)
        log_det, end = half_log_det(z, start)
        entropy = jacobian.linearised_entropy(log_det.value, sampler.log_scale, mean)
        tempered = (log_likelihood / log_joint.temperature, log_prior / log_joint.temperature)
        return ImplicitTerms(*tempered, entropy, log_det), end

    draw_key, start_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)
    normal = functools.partial(approximate_normals.approximate_normal_like, draw_key)
    z, e = _latents(generator, sampler, num_samples, normal)
    if estimator.name == "lanczos":
        signs = jacobian.sign_probes(start_key, num_samples * estimator.num_probes, z[0])
        vectors = signs.reshape(num_samples, estimator.num_probes, -1)
    elif estimator.name == "singular_value" and vectors is None:
        vectors = jax.random.normal(start_key, z.shape, z.dtype)
    return jax.vmap(terms_at)(*jax.tree.map(place, (z, e, vectors)))


def default_estimator(generator: Generator) -> str:
    """`exact` for small latents, `lanczos` for large ones."""
    return "exact" if generator.latent_size <= EXACT_LIMIT else "lanczos"


def implicit_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    generator: Generator | None = None,
    estimator: Estimator | None = None,
    num_samples: int = 4,
    noise_scale: float = 1e-2,
    learn_noise_scale: bool = True,
    start: str = "network",
    init_spread: float = 0.1,
    entropy_weight: float = 1.0,
    prior_weight: float = 1.0,
    annealing_start: float = 1e-3,
    annealing_steps: int = 0,
    place: Callable[[jax.Array], jax.Array] = lambda array: array,
) -> Method:
    """Maximises the ELBO over g and s; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation, of the gradient of -ELBO / N; Adam with a step size of
        1e-3 by default.
      batch_size: at most so many rows a minibatch.
      generator: g; by default as `generators.automatic` describes it.
      estimator: of the log-determinant; that of `default_estimator` by default.
      num_samples: draws of (z, e) a minibatch.
      noise_scale: s, at the start if it is learned. Not used in a start from a mean-field
        posterior, whose marginal standard deviations are kept, a share `init_spread` from g.
      learn_noise_scale: whether s is learned, for every weight.
      start: where g(z) begins: "network", around parameters (given ones, or the network's own
        start) by `init_spread` times their root mean square in each module; or "prior", with the
        mean and the standard deviations of the prior.
      init_spread: see `start`.
      entropy_weight, prior_weight: factors in the objective; only with 1 is it the ELBO.
      annealing_start, annealing_steps: the likelihood's factor grows from the one to 1, by equal
        ratios, in so many minibatches.
      place: see `evidence_terms`; with it, devices share the draws of a step.

    Returns:
      The method; `init` also takes `vi.VariationalParams` for a start from mean-field VI. Infos
      are, at each minibatch: `log_joint`, `expected_log_likelihood`, `expected_log_prior`,
      `entropy` and `elbo` (without any weights or annealing); `entropy_lower` and, where known,
      `entropy_upper`; `smallest_singular_value` of B and `residual` of the estimator.
    """
    if generator is None:
        shapes = log_joint.random_shapes
        generator = generators.make_generator(generators.automatic(shapes), shapes)
    estimator = Estimator(default_estimator(generator)) if estimator is None else estimator
    for kind, name, known in (
        ("entropy", estimator.name, ENTROPY_ESTIMATORS),
        ("start", start, STARTS),
    ):
        if name not in known:
            raise unknown_name(kind, name, known)
    check_positive(noise_scale=noise_scale, init_spread=init_spread)
    if not 0 < annealing_start <= 1:
        raise UserError(f"annealing_start must be above 0 and at most 1, not {annealing_start}.")
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    warm = estimator.name == "singular_value" and estimator.warm_start

    def init(rng_key: jax.Array, params: Params | vi.VariationalParams | None) -> ImplicitState:
        network_key, generator_key = (jax.random.fold_in(rng_key, index) for index in range(2))
        params = log_joint.init(network_key) if params is None else params
        center, spread, log_scale, point = _start(
            log_joint, params, start, init_spread, noise_scale, learn_noise_scale
        )
        sampler = Sampler(generator.init(generator_key, center, spread), log_scale, point)
        dtype = jax.tree.leaves(center)[0].dtype
        vector_shape = (num_samples, generator.latent_size)
        return ImplicitState(
            sampler,
            jnp.zeros((), jnp.int32),
            optimizer.init(_learned(sampler)),
            jax.random.normal(jax.random.fold_in(rng_key, 2), vector_shape, dtype)
            if warm
            else None,
        )

    def _learned(sampler: Sampler) -> Sampler:
        return sampler if learn_noise_scale else sampler._replace(log_scale=None)

    def update(rng_key: jax.Array, state: ImplicitState, batch: Data) -> tuple[ImplicitState, Info]:
        progress = jnp.minimum(state.num_steps / max(annealing_steps, 1), 1.0)
        annealed = annealing_start ** (1 - progress) if annealing_steps else jnp.ones(())

        def loss(learned: Sampler) -> tuple[jax.Array, tuple[ImplicitTerms, jax.Array | None]]:
            fixed = {} if learn_noise_scale else {"log_scale": state.sampler.log_scale}
            each, vectors = evidence_terms(
                rng_key,
                log_joint,
                generator,
                estimator,
                learned._replace(**fixed),
                batch,
                num_samples,
                state.vectors,
                place,
            )
            found = jax.tree.map(jnp.mean, each)
            objective = (
                annealed.astype(found.entropy.dtype) * found.expected_log_likelihood
                + prior_weight * found.expected_log_prior
                + entropy_weight * found.entropy
            )
            return -objective / batch.num_rows, (found, vectors)

        learned = _learned(state.sampler)
        gradient, (found, vectors) = jax.grad(loss, has_aux=True)(learned)
        learned, optimizer_state = optimize(optimizer, gradient, state.optimizer_state, learned)
        sampler = state.sampler._replace(
            **{name: part for name, part in learned._asdict().items() if part is not None}
        )
        new = ImplicitState(
            sampler,
            optax.safe_increment(state.num_steps),
            optimizer_state,
            vectors if warm else None,
        )
        return new, _info(found, has_upper=estimator.name != "singular_value")

    def step(rng_key: jax.Array, state: ImplicitState, data: Data) -> tuple[ImplicitState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: ImplicitState, num_draws: int) -> Params:
        normal = functools.partial(trees.normal_like, rng_key)
        latents = _latents(generator, state.sampler, num_draws, normal)
        drawn = jax.vmap(lambda z, e: _weights(generator, state.sampler, z, e)[2])(*latents)
        return trees.merge(drawn, repeat(state.sampler.point, num_draws))

    return Method(init, step, sample)


def _latents(
    generator: Generator,
    sampler: Sampler,
    num_draws: int,
    normal: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """z (draws, d) and e (draws, D): parts of one array, since each draw takes time to compile.

    `normal` gives values in the shape of an array: for posterior draws standard normal ones, in
    training those of `core.approximate_normals`, of the same moments, which cost a fraction.
    """
    shape = (num_draws, generator.latent_size + generator.num_weights)
    both = normal(jnp.zeros(shape, jax.tree.leaves(sampler.log_scale)[0].dtype))
    return both[:, : generator.latent_size], both[:, generator.latent_size :]


def _weights(
    generator: Generator, sampler: Sampler, z: jax.Array, e: jax.Array
) -> tuple[Params, Params, Params]:
    """g(z), s and w = g(z) + s * e."""
    mean = generator.apply(sampler.generator, z)
    scale = jax.tree.map(
        lambda log_s, m: jnp.broadcast_to(jnp.exp(log_s), m.shape), sampler.log_scale, mean
    )
    _, unravel = ravel_pytree(mean)
    return mean, scale, jax.tree.map(lambda m, s, e: m + s * e, mean, scale, unravel(e))


def _start(
    log_joint: LogJoint,
    params: Params | vi.VariationalParams,
    start: str,
    init_spread: float,
    noise_scale: float,
    learn_noise_scale: bool,
) -> tuple[Params, Params, Params, Params]:
    """Centre and spread of g, log s, and the point estimates."""

    def root_mean_square(leaf: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.square(leaf)))

    def constant_scale(leaf: jax.Array) -> jax.Array:
        shape = leaf.shape if learn_noise_scale else ()
        return jnp.full(shape, math.log(noise_scale), leaf.dtype)

    if isinstance(params, vi.VariationalParams):
        deviation = jax.tree.map(jax.nn.softplus, params.raw_scale)
        # Shares of the variance: of the generator's spread and of the noise.
        spread = jax.tree.map(lambda s: init_spread * root_mean_square(s), deviation)
        rest = math.sqrt(max(1 - init_spread**2, 1e-2))
        log_scale = jax.tree.map(lambda s: jnp.log(rest * s), deviation)
        return params.mean, spread, log_scale, params.point
    center, point = log_joint.partition(params)
    log_scale = jax.tree.map(constant_scale, center)
    if start == "prior":
        spread = trees.map_with_name(
            lambda name, leaf: jnp.full((), log_joint.prior.scale(name), leaf.dtype), center
        )
        return jax.tree.map(jnp.zeros_like, center), spread, log_scale, point
    # Biases often start at 0: they take the scale of their module's other arrays.
    sizes: dict[str, jax.Array] = {}
    for group in generators.groups(center).values():
        largest = jnp.max(jnp.stack([root_mean_square(leaf) for leaf in group.values()]))
        sizes |= dict.fromkeys(group, jnp.maximum(largest, 1e-3))
    spread = trees.map_with_name(lambda name, leaf: init_spread * sizes[name], center)
    return center, spread, log_scale, point


def _info(found: ImplicitTerms, has_upper: bool) -> Info:
    log_det = found.log_det
    rest = found.entropy - log_det.value
    info = {
        "log_joint": found.expected_log_likelihood + found.expected_log_prior,
        "expected_log_likelihood": found.expected_log_likelihood,
        "expected_log_prior": found.expected_log_prior,
        "entropy": found.entropy,
        "elbo": found.elbo,
        "entropy_lower": rest + log_det.lower,
        "smallest_singular_value": log_det.smallest_singular_value,
        "residual": log_det.residual,
    }
    return info | ({"entropy_upper": rest + log_det.upper} if has_upper else {})
