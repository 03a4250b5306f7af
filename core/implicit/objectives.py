"""What implicit VI maximises: kinds of entropy, and estimates of the objective's terms.

The formulas of all four, and which of them is a bound, are in `core.implicit.implicit_vi`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from haiku_posteriors.core import approximate_normals, trees
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.errors import UserError, unknown_name
from haiku_posteriors.core.implicit import bounds, encoders, jacobian, semi_implicit, unbiased
from haiku_posteriors.core.implicit.generators import Generator
from haiku_posteriors.core.implicit.jacobian import LogDet
from haiku_posteriors.core.implicit.samplers import Sampler, latents, weights_at
from haiku_posteriors.core.log_joint import LogJoint
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


def complete_estimator(
    objective: Objective, estimator: EntropyEstimator, generator: Generator
) -> EntropyEstimator:
    """The given estimator, refused where it is of another kind; by default the one that suits."""
    if objective.entropy not in ENTROPIES:
        raise unknown_name("objective", objective.entropy, ENTROPIES)
    if objective.entropy == "hierarchical":
        return None
    kinds: dict[str, Estimator | semi_implicit.Mixture | unbiased.Unbiased] = {
        "linearised": Estimator(default_estimator(generator)),
        "sivi": semi_implicit.Mixture(),
        "uivi": unbiased.Unbiased(),
    }
    kind = kinds[objective.entropy]
    chosen = kind if estimator is None else estimator
    if type(chosen) is not type(kind):
        raise UserError(f"{chosen} does not estimate the entropy of {objective.entropy}.")
    if isinstance(chosen, Estimator) and chosen.name not in ENTROPY_ESTIMATORS:
        raise unknown_name("entropy", chosen.name, ENTROPY_ESTIMATORS)
    return chosen
