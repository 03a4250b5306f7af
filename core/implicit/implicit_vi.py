"""Implicit variational inference: the posterior by a neural sampler of weights.

    w = g(z) + s * e,        z ~ N(0, I_d),   e ~ N(0, I_D),   noise scales s in R^D

    ELBO_T(q) = E[ log p_T(w, D) ] + H[q],        for H[q] one of

    linearised     E_z[ 1/2 logdet(I_d + B^T B) ] + sum_i log s_i + D/2 log(2 pi e)
    hierarchical   E[ -log q(w, z) + log r(z | w) ]
    sivi           E[ -log 1/(K+1) sum_{k=0..K} q(w | z_k) ]
    uivi           H[q] itself, of which there is the gradient alone

with B = diag(1/s) dg/dz. The first is arXiv 2310.06643, there with one fixed s: the entropy of g
linearised at z, exact where g is linear, and no bound elsewhere. Where several z give the same w it
is too high, without limit: training can raise it by folding g, and the sum may exceed log p_T(D).
Its log-determinant is computed by an `objectives.Estimator`, see `core.implicit.jacobian`; what
these say of bounds is said of the log-determinant. The second is at most H[q] for every reverse
model r, here an encoder that is trained with g (`core.implicit.encoders`): the sum is a lower bound
of log p_T(D), see `core.implicit.bounds`; so it is with the third, for every K
(`core.implicit.semi_implicit`), and with the value that is reported of the fourth
(`core.implicit.unbiased`). Minibatches weighted as in `core.data` estimate
likelihoods, and draws of (z, e) expectations; over e alone, a Gaussian prior's is taken in closed
form.

Target: the q of this family with the least KL(q || p_T(w | D)), as far as the entropy is right.
With s learned for every weight the family contains mean-field VI (constant g) and Gaussians of
covariance J J^T + diag(s)^2 (linear g); with a small fixed s, D - d directions of the weights have
next to no spread.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.implicit import encoders, generators, semi_implicit, unbiased
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.objectives import (
    EntropyEstimator,
    Estimator,
    ImplicitTerms,
    Objective,
    complete_estimator,
    evidence_terms,
)
from haiku_posteriors.core.implicit.samplers import (
    Sampler,
    Start,
    initial_sampler,
    normal_latents,
    weights_at,
)
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.trees import Params


class ImplicitState(NamedTuple):
    """The state between minibatches.

    Attributes:
      sampler: see there.
      num_steps: minibatches seen.
      optimizer_state: of the optax optimizer.
      vectors: from which `singular_value` starts, (num_samples, d); None unless warm-started.
      log_step_size: of `uivi`; None elsewhere.
    """

    sampler: Sampler
    num_steps: jax.Array
    optimizer_state: optax.OptState
    vectors: jax.Array | None
    log_step_size: jax.Array | None = None


def implicit_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    generator: Generator | None = None,
    estimator: EntropyEstimator = None,
    num_samples: int = 4,
    learn_noise_scale: bool = True,
    start: Start = Start(),  # noqa: B008
    objective: Objective = Objective(),  # noqa: B008
    place: Callable[[jax.Array], jax.Array] = lambda array: array,
    noise: str = "reparameterization",
) -> Method:
    """Maximises the objective over g and s (and an encoder); one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation, of the gradient of -objective / N; Adam with a step size
        of 1e-3 by default.
      batch_size: maximum rows per minibatch.
      generator: g; by default the one that `generators.automatic` describes.
      estimator: of the objective's entropy: an `Estimator` of the linearised one, by default that
        of `default_estimator`; a `Mixture` for sivi, an `Unbiased` for uivi.
      num_samples: draws of (z, e) per minibatch.
      learn_noise_scale: whether s is learned, one for every weight, or stays one fixed number.
      start: where g and s begin.
      objective: the entropy, weights and annealing.
      place: see `evidence_terms`; with it, devices share the draws of a step.
      noise: likewise. Given z, weights are independent Gaussians, as in mean-field VI: `local`
        draws a layer's outputs for each row in place of one e for all rows.

    Returns:
      The method; `init` also takes `vi.VariationalParams` for a start from mean-field VI. Infos
      are, at each minibatch: `log_joint`, `expected_log_likelihood`, `expected_log_prior`,
      `entropy`, and their sum without any weights or annealing, which is called what it is:
      `linearised_estimate`, `hierarchical_bound` or `semi_implicit_bound`; `objective` is with
      them. Of uivi, `reverse_acceptance` is that of HMC and `bound_gap` how far the ELBO may be
      above the bound, by an upper one. For the linearised
      entropy also `log_det_lower` and, where known, `log_det_upper`, of 1/2 logdet A;
      `smallest_singular_value` of B and `residual` of the estimator.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> generator = generators.make_generator(generators.MLP(2), log_joint.random_shapes)
      >>> method = implicit_vi(log_joint, batch_size=8, generator=generator)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if generator is None:
        shapes = log_joint.random_shapes
        generator = generators.make_generator(generators.automatic(shapes), shapes)
    chosen = complete_estimator(objective, estimator, generator)
    if noise not in vi.ESTIMATORS:
        raise unknown_name("noise", noise, vi.ESTIMATORS)
    start.check()
    if not 0 < objective.annealing_start <= 1:
        raise UserError(
            f"annealing_start must be above 0 and at most 1, not {objective.annealing_start}."
        )
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    warm = isinstance(chosen, Estimator) and chosen.name == "singular_value" and chosen.warm_start

    def learned_part(sampler: Sampler) -> Sampler:
        return sampler if learn_noise_scale else sampler._replace(log_scale=None)

    def init(rng_key: jax.Array, params: Params | vi.VariationalParams | None) -> ImplicitState:
        network_key, generator_key = (jax.random.fold_in(rng_key, index) for index in range(2))
        params = log_joint.init(network_key) if params is None else params
        sampler = initial_sampler(
            generator_key, log_joint, generator, params, start, learn_noise_scale
        )
        dtype = jax.tree.leaves(sampler.log_scale)[0].dtype
        if chosen is None:
            encoder_key = jax.random.fold_in(rng_key, 3)
            encoder = encoders.init_encoder(encoder_key, generator.latent_size, dtype)
            sampler = sampler._replace(encoder=encoder)
        vectors = None
        if warm:
            shape = (num_samples, generator.latent_size)
            vectors = jax.random.normal(jax.random.fold_in(rng_key, 2), shape, dtype)
        log_step_size = None
        if isinstance(chosen, unbiased.Unbiased):
            log_step_size = jnp.full((), math.log(unbiased.FIRST_STEP_SIZE), dtype)
        zero = jnp.zeros((), jnp.int32)
        optimizer_state = optimizer.init(learned_part(sampler))
        return ImplicitState(sampler, zero, optimizer_state, vectors, log_step_size)

    def update(rng_key: jax.Array, state: ImplicitState, batch: Data) -> tuple[ImplicitState, Info]:
        def loss(learned: Sampler) -> tuple[jax.Array, tuple]:
            fixed = {} if learn_noise_scale else {"log_scale": state.sampler.log_scale}
            each, vectors = evidence_terms(
                rng_key,
                log_joint,
                generator,
                chosen,
                learned._replace(**fixed),
                batch,
                num_samples,
                state.vectors,
                state.log_step_size,
                place,
                noise,
            )
            terms = jax.tree.map(jnp.mean, each)
            value = objective.value(terms, state.num_steps)
            return -value / batch.num_rows, (value, terms, vectors)

        learned = learned_part(state.sampler)
        gradient, (value, terms, vectors) = jax.grad(loss, has_aux=True)(learned)
        learned, optimizer_state = optimize(optimizer, gradient, state.optimizer_state, learned)
        sampler = state.sampler._replace(
            **{name: part for name, part in learned._asdict().items() if part is not None}
        )
        num_steps = optax.safe_increment(state.num_steps)
        log_step_size = state.log_step_size
        if terms.acceptance is not None and log_step_size is not None:
            log_step_size = unbiased.adapt(log_step_size, terms.acceptance)
        new = ImplicitState(
            sampler, num_steps, optimizer_state, vectors if warm else None, log_step_size
        )
        return new, _info(terms, chosen) | {"objective": value}

    def step(rng_key: jax.Array, state: ImplicitState, data: Data) -> tuple[ImplicitState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: ImplicitState, num_draws: int) -> Params:
        z_and_e = normal_latents(rng_key, generator, state.sampler, num_draws)
        drawn = jax.vmap(lambda z, e: weights_at(generator, state.sampler, z, e)[2])(*z_and_e)
        return trees.merge(drawn, repeat(state.sampler.point, num_draws))

    return Method(init, step, sample, in_minibatches=True)


def _info(terms: ImplicitTerms, estimator: EntropyEstimator) -> Info:
    info = {
        "log_joint": terms.expected_log_likelihood + terms.expected_log_prior,
        "expected_log_likelihood": terms.expected_log_likelihood,
        "expected_log_prior": terms.expected_log_prior,
        "entropy": terms.entropy,
    }
    log_det = terms.log_det
    if terms.acceptance is not None and terms.gap is not None:
        info |= {"reverse_acceptance": terms.acceptance, "bound_gap": terms.gap}
    if log_det is None or not isinstance(estimator, Estimator):
        is_mixture = isinstance(estimator, semi_implicit.Mixture)
        name = "semi_implicit_bound" if is_mixture else "hierarchical_bound"
        return info | {name: terms.total}
    info |= {
        "linearised_estimate": terms.total,
        "log_det_lower": log_det.lower,
        "smallest_singular_value": log_det.smallest_singular_value,
        "residual": log_det.residual,
    }
    has_upper = estimator.name != "singular_value"
    return info | ({"log_det_upper": log_det.upper} if has_upper else {})
