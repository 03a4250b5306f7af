"""Gaussian multiplicative dropout with a learned rate for every weight, as variational inference.

    q(w) = N(w; theta, alpha theta^2),      i.e. w = theta (1 + sqrt(alpha) e),  e ~ N(0, 1)
    objective = E_q[ log p(D | w) ] - sum_i KL(alpha_i) - KL of all other parameters to their prior

over theta and sigma^2 = alpha theta^2 (Kingma, Salimans & Welling 2015, arXiv 1506.02557; in this
parameterisation Molchanov, Ashukha & Vetrov 2017, arXiv 1701.05369). The prior of the weights is
one under which the KL depends on alpha alone, one of PRIORS:

    log_uniform      p(|w|) ~ 1 / |w|, improper: -KL is, up to a constant and 0.01 nats,
                     k1 sigmoid(k2 + k3 log alpha) - 1/2 log(1 + 1 / alpha) - k1
    empirical_bayes  N(0, l^2) with an l for every weight that maximises the objective,
                     l^2 = theta^2 + sigma^2: -KL = -1/2 log(1 + 1 / alpha), exactly (as in the
                     relevance vector machine; Kharitonov et al. 2018, arXiv 1811.00596)

A weight that the data do not need has alpha -> infinity: it is noise around 0, and can be removed.
Draws have weights with log alpha above a threshold set to 0. Biases and all that is no weight keep
the log-joint's own prior, as in mean-field VI.

Target: the q of this family that maximises the objective. The prior is not the log-joint's: q is no
approximation of its posterior, and its bound none of its evidence.
"""

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees, vi
from haiku_posteriors.core.data import Data
from haiku_posteriors.core.densities import ElboTerms
from haiku_posteriors.core.elbo_ascent import elbo_ascent
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Method
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.trees import Params
from haiku_posteriors.core.vi import VariationalParams

PRIORS = ("log_uniform", "empirical_bayes")
K1, K2, K3 = 0.63576, 1.87320, 1.48695  # of Molchanov et al., equation 14
PRUNE_ABOVE = 3.0  # log alpha: beyond, dropping with a probability of 0.95 has this variance


def negative_divergence(log_alpha: jax.Array, prior: str) -> jax.Array:
    """-KL(q || prior) of weights, elementwise; its maximum, for alpha -> infinity, is 0."""
    found = -0.5 * jax.nn.softplus(-log_alpha)
    if prior == "empirical_bayes":
        return found
    return found + K1 * (jax.nn.sigmoid(K2 + K3 * log_alpha) - 1)


def log_alphas(q: VariationalParams) -> dict[str, jax.Array]:
    """log sigma^2 / theta^2 of all weights (leaves `w`), by name."""
    scales = trees.named_leaves(jax.tree.map(jax.nn.softplus, q.raw_scale))
    return {
        # theta^2 + 1e-16: a weight of exactly 0 has a large alpha, and a gradient.
        name: 2 * jnp.log(scales[name]) - jnp.log(jnp.square(mean) + 1e-16)
        for name, mean in trees.named_leaves(q.mean).items()
        if _is_weight(name)
    }


def draw(rng_key: jax.Array, q: VariationalParams, prune_above: jax.Array | float) -> Params:
    """One draw of all parameters, without the weights whose log alpha is above the threshold."""
    found = log_alphas(q)
    return trees.map_with_name(
        lambda name, leaf: (
            jnp.where(found[name] > prune_above, jnp.zeros_like(leaf), leaf)
            if name in found
            else leaf
        ),
        vi.sample_params(rng_key, q),
    )


def gaussian_dropout(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    prior: str = "log_uniform",
    sigma_init: float = 1e-2,
    estimator: str = "reparameterization",
    num_samples: int = 1,
    prune_above: float = PRUNE_ABOVE,
) -> Method:
    """Maximises the objective; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      prior: one of PRIORS.
      sigma_init: standard deviation of q at the start.
      estimator: one of `vi.ESTIMATORS`; `local` is that of the papers.
      num_samples: draws of q per minibatch.
      prune_above: log alpha beyond which draws have 0.

    Returns:
      The method; `init` also takes `VariationalParams`. Infos are those of `elbo_ascent`, with the
      objective as `elbo`.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = gaussian_dropout(log_joint, batch_size=8)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if prior not in PRIORS:
        raise unknown_name("prior", prior, PRIORS)
    if estimator not in vi.ESTIMATORS:
        raise unknown_name("estimator", estimator, vi.ESTIMATORS)
    check_positive(sigma_init=sigma_init)
    if log_joint.temperature != 1:
        raise UserError("Gaussian dropout brings its own prior, which has no temperature: use 1.")
    if not any(map(_is_weight, trees.named_leaves(log_joint.random_shapes))):
        raise UserError("Gaussian dropout is for weights ('w' of a layer), and none is random.")

    def start(rng_key: jax.Array, params: Params | None) -> VariationalParams:
        if isinstance(params, VariationalParams):
            return params
        params = log_joint.init(rng_key) if params is None else params
        return vi.initial_variational(log_joint, params, sigma_init)

    def terms(rng_key: jax.Array, q: VariationalParams, data: Data, count: int) -> ElboTerms:
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        others = trees.map_with_name(lambda name, leaf: None if _is_weight(name) else leaf, scale)
        of_weights = sum(
            jnp.sum(negative_divergence(found, prior)) for found in log_alphas(q).values()
        )

        def one(key: jax.Array) -> ElboTerms:
            drawn = vi.sample_params(jax.random.fold_in(key, 0), q)
            log_likelihood = noisy_layers.sampled_log_likelihood(
                jax.random.fold_in(key, 1), log_joint, q.mean, scale, drawn, data, estimator
            )
            return ElboTerms(
                log_likelihood,
                of_weights + _other_log_prior(log_joint, drawn),
                vi.entropy(others) if jax.tree.leaves(others) else jnp.zeros_like(log_likelihood),
            )

        return jax.vmap(one)(jax.random.split(rng_key, count))

    return elbo_ascent(
        start,
        terms,
        lambda key, q: draw(key, q, prune_above),
        optimizer,
        batch_size,
        num_samples,
    )


def _other_log_prior(log_joint: LogJoint, drawn: Params) -> jax.Array:
    """log p of all but the weights: their densities at 0 are a constant, and taken off."""

    without = trees.map_with_name(
        lambda name, leaf: jnp.zeros_like(leaf) if _is_weight(name) else leaf, drawn
    )
    weights = trees.map_with_name(
        lambda name, leaf: jnp.zeros_like(leaf) if _is_weight(name) else None,
        log_joint.partition(drawn)[0],
    )
    return log_joint.log_prior(without) - trees.total(log_joint.prior.log_densities(weights))


def _is_weight(name: str) -> bool:
    return name.endswith("/w")
