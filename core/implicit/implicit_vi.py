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
Its log-determinant is computed by one of ENTROPY_ESTIMATORS, see `core.implicit.jacobian`; what
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

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import approximate_normals, trees, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.implicit import (
    bounds,
    encoders,
    generators,
    jacobian,
    semi_implicit,
    unbiased,
)
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.jacobian import LogDet
from haiku_posteriors.core.implicit.samplers import (
    Sampler,
    Start,
    initial_sampler,
    latents,
    normal_latents,
    weights_at,
)
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize, repeat
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.trees import Params

ENTROPIES = ("linearised", "hierarchical", "sivi", "uivi")
ENTROPY_ESTIMATORS = ("exact", "singular_value", "lanczos")  # of the linearised one
EXACT_LIMIT = 128  # latent size up to which `exact` is the default


class Estimator(NamedTuple):
    """How the linearised entropy's 1/2 logdet(I_d + B^T B) is estimated.

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


# None is for the hierarchical entropy, whose encoder is in the sampler.
EntropyEstimator = Estimator | semi_implicit.Mixture | unbiased.Unbiased | None


class Objective(NamedTuple):
    """What is maximised: a E[log p(D | w)] / T + b E[log p(w)] / T + c H; all 1 by default.

    Attributes:
      entropy: of which kind H is, one of ENTROPIES.
      entropy_weight: c.
      prior_weight: b.
      annealing_start: a at the first minibatch, if it is annealed.
      annealing_steps: minibatches in which a grows to 1, by equal factors; 0 for a = 1.
    """

    entropy: str = "linearised"
    entropy_weight: float = 1.0
    prior_weight: float = 1.0
    annealing_start: float = 1e-3
    annealing_steps: int = 0

    def value(self, terms: "ImplicitTerms", num_steps: jax.Array) -> jax.Array:
        """The objective at minibatch `num_steps` = 0, 1, ..., for terms that are scalars."""
        progress = jnp.minimum(num_steps / max(self.annealing_steps, 1), 1.0)
        annealed = self.annealing_start ** (1 - progress) if self.annealing_steps else jnp.ones(())
        return (
            annealed.astype(terms.entropy.dtype) * terms.expected_log_likelihood
            + self.prior_weight * terms.expected_log_prior
            + self.entropy_weight * terms.entropy
        )


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


class ImplicitTerms(NamedTuple):
    """Estimates of the ELBO's terms, tempered, one per draw of (z, e) or their means.

    Attributes:
      expected_log_likelihood: E[log p(D | w)] / T.
      expected_log_prior: E[log p(w)] / T.
      entropy: H, of one of the ENTROPIES.
      log_det: the estimate that the linearised entropy contains; None for the others.
      acceptance: of HMC in `uivi`, the same for all draws; None elsewhere.
      gap: of `uivi`, an upper bound of H less `entropy`, which is a lower one; None elsewhere.
    """

    expected_log_likelihood: jax.Array
    expected_log_prior: jax.Array
    entropy: jax.Array
    log_det: LogDet | None
    acceptance: jax.Array | None = None
    gap: jax.Array | None = None

    @property
    def total(self) -> jax.Array:
        """Their sum: a lower bound of log p_T(D) unless the entropy is linearised."""
        return self.expected_log_likelihood + self.expected_log_prior + self.entropy


def evidence_terms(
    rng_key: jax.Array,
    log_joint: LogJoint,
    generator: Generator,
    estimator: EntropyEstimator,
    sampler: Sampler,
    data: Data,
    num_samples: int,
    vectors: jax.Array | None = None,
    log_step_size: jax.Array | None = None,
    place: Callable[[jax.Array], jax.Array] = lambda array: array,
    noise: str = "reparameterization",
) -> tuple[ImplicitTerms, jax.Array | None]:
    """Differentiable estimates of the objective's terms, each at its own (z, e).

    Args:
      rng_key: for z, e, probes and starting vectors.
      log_joint: the model.
      generator: g.
      estimator: of the entropy: a record of the linearised one's log-determinant, of `sivi` or of
        `uivi`; None for the hierarchical one, by the sampler's encoder.
      sampler: where to evaluate.
      data: all data or a minibatch, with its weights.
      num_samples: draws of (z, e).
      vectors: from which `singular_value` starts, (num_samples, d); random by default.
      log_step_size: of HMC in `uivi`.
      place: spreads an array with a leading axis of draws over devices; the identity by default.
      noise: how the likelihood's expectation over e is estimated given z, one of `vi.ESTIMATORS`.

    Returns:
      The terms, (num_samples,) each, and the vectors at which `singular_value` ended, else None.
    """
    scales = jax.tree.map(jnp.exp, sampler.log_scale)

    def function(z: jax.Array) -> Params:
        return generator.apply(sampler.generator, z)

    def half_log_det(
        estimator: Estimator, z: jax.Array, start: jax.Array | None
    ) -> tuple[LogDet, jax.Array | None]:
        if estimator.name == "exact":
            return jacobian.exact(function, z, scales), None
        assert start is not None
        steps = estimator.num_steps
        if estimator.name == "lanczos":
            return jacobian.lanczos(function, z, scales, start, num_steps=steps), None
        return jacobian.singular_value(function, z, scales, start, num_steps=steps)

    def terms_at(
        key: jax.Array,
        z: jax.Array,
        e: jax.Array,
        start: jax.Array | None,
        entropy: jax.Array | None,
    ) -> tuple:
        mean, scale, drawn = weights_at(generator, sampler, z, e)
        log_likelihood = noisy_layers.sampled_log_likelihood(
            key, log_joint, mean, scale, trees.merge(drawn, sampler.point), data, noise
        )
        log_prior = log_joint.expected_log_prior(mean, scale, drawn)
        log_det, end = None, None
        if isinstance(estimator, Estimator):
            log_det, end = half_log_det(estimator, z, start)
            entropy = jacobian.linearised_entropy(log_det.value, sampler.log_scale, mean)
        elif estimator is None:
            entropy = encoded_entropy(z, e)
        assert entropy is not None
        tempered = (log_likelihood / log_joint.temperature, log_prior / log_joint.temperature)
        return ImplicitTerms(*tempered, entropy, log_det), end

    if estimator is None:
        assert sampler.encoder is not None
        make_reverse = encoders.encoded_reverse(sampler.encoder, generator.latent_size)
        encoded_entropy = bounds.outer_entropy(generator, sampler, make_reverse)
    draw_key, start_key, noise_key = (jax.random.fold_in(rng_key, index) for index in range(3))
    normal = functools.partial(approximate_normals.approximate_normal_like, draw_key)
    z, e = latents(normal, generator, sampler, num_samples)
    if isinstance(estimator, Estimator) and estimator.name == "lanczos":
        signs = jacobian.sign_probes(start_key, num_samples * estimator.num_probes, z[0])
        vectors = signs.reshape(num_samples, estimator.num_probes, -1)
    elif isinstance(estimator, Estimator) and vectors is None:
        # Of `singular_value`; `exact` does not look at them, and they are not computed.
        vectors = jax.random.normal(start_key, z.shape, z.dtype)
    z, e, vectors = jax.tree.map(place, (z, e, vectors))
    entropies, gaps, acceptance = None, None, None
    if isinstance(estimator, semi_implicit.Mixture):  # of all draws at once
        entropies = semi_implicit.lower_entropies(
            start_key, generator, sampler, z, e, estimator.num_draws
        )
    elif isinstance(estimator, unbiased.Unbiased):
        assert log_step_size is not None
        entropies, gaps, acceptance = unbiased.entropies(
            start_key, generator, sampler, z, e, log_step_size, estimator
        )
    noise_keys = jax.random.split(noise_key, num_samples)
    terms, ends = jax.vmap(terms_at)(noise_keys, z, e, vectors, entropies)
    return terms._replace(acceptance=acceptance, gap=gaps), ends


def default_estimator(generator: Generator) -> str:
    """`exact` for small latents, `lanczos` for large ones."""
    return "exact" if generator.latent_size <= EXACT_LIMIT else "lanczos"


def default_entropy(generator: Generator) -> str:
    """Of training that is to end by itself: a bound wherever the reverse model can be good.

    The linearised entropy bounds nothing: where g may fold, training gains by folds for ever while
    the bound of the same q falls (docs/implicit.md). For large latents the encoder of the bound
    knows no correlations of z given w, which costs an unknown number of nats: linearised there.
    """
    return "hierarchical" if generator.latent_size <= encoders.LAPLACE_LIMIT else "linearised"


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
    if objective.entropy not in ENTROPIES:
        raise unknown_name("objective", objective.entropy, ENTROPIES)
    if objective.entropy == "hierarchical":
        chosen: EntropyEstimator = None
    else:
        kinds: dict[str, Estimator | semi_implicit.Mixture | unbiased.Unbiased] = {
            "linearised": Estimator(default_estimator(generator)),
            "sivi": semi_implicit.Mixture(),
            "uivi": unbiased.Unbiased(),
        }
        kind = kinds[objective.entropy]
        chosen = kind if estimator is None else estimator
        if type(chosen) is not type(kind):
            raise UserError(f"{chosen} does not estimate the entropy of {objective.entropy}.")
    linearised = chosen if isinstance(chosen, Estimator) else None
    if linearised and linearised.name not in ENTROPY_ESTIMATORS:
        raise unknown_name("entropy", linearised.name, ENTROPY_ESTIMATORS)
    if noise not in vi.ESTIMATORS:
        raise unknown_name("noise", noise, vi.ESTIMATORS)
    start.check()
    if not 0 < objective.annealing_start <= 1:
        raise UserError(
            f"annealing_start must be above 0 and at most 1, not {objective.annealing_start}."
        )
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    warm = linearised and linearised.name == "singular_value" and linearised.warm_start

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
