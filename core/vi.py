"""Mean-field variational inference: the posterior by a Gaussian of independent coordinates.

    q(w) = prod_i N(w_i; mu_i, sigma_i^2),        sigma = softplus(rho)
    ELBO_T(q) = E_q[ log p_T(w, D) ] + H[q] = E_q[ log p(D | w) ] / T - KL_T(q)
    KL_T(q) = -E_q[ log p(w) ] / T - H[q]         (at T = 1 the divergence KL(q || p))

Maximised over mu, rho and the point estimates by stochastic gradients of the *summed* ELBO: the
likelihood from minibatches weighted as in `core.data`, its expectation from draws of q by one of
ESTIMATORS, the entropy in closed form; so is E_q[log p(w)] if the prior is Gaussian, and from a
draw of q if it is not. (Graves 2011; Blundell et al. 2015, arXiv 1505.05424.)

Target: the q of this family with the least KL(q || p_T(w | D)). It understates variances where the
posterior is correlated: for a Gaussian posterior of precision P it finds the exact mean and
sigma_i^2 = 1 / P_ii. At T = 1 the ELBO is a lower bound of log p(D).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import kl_weights, trees
from haiku_posteriors.core.data import Data, num_minibatches
from haiku_posteriors.core.densities import ElboTerms
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.likelihoods import PARAMETER_GROUP
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize
from haiku_posteriors.core.networks import noisy_layers
from haiku_posteriors.core.trees import Params

# How E_q[log p(D | w)] is estimated; `core.networks.noisy_layers` describes local and flipout.
ESTIMATORS = ("reparameterization", "local", "flipout")
KL_DIRECTIONS = ("reverse", "forward")
PRIOR_SCALES = ("one", "module", "leaf")  # what shares a learned prior scale


class VariationalParams(NamedTuple):
    """All that is optimised.

    Attributes:
      mean: mu, of the random parameters; `None` elsewhere, as `core.trees.partition` leaves it.
      raw_scale: rho, likewise.
      point: the other parameters.
      log_prior_scale: by group, the logarithm of a factor on the prior's scale; empty unless
        learned.
    """

    mean: Params
    raw_scale: Params
    point: Params
    log_prior_scale: dict[str, jax.Array]


class VIState(NamedTuple):
    """The variational parameters, the number of minibatches seen, the optimizer's state."""

    variational: VariationalParams
    num_steps: jax.Array
    optimizer_state: optax.OptState


class MeanFieldTerms(NamedTuple):
    """Estimates of the ELBO's terms, scalars, tempered.

    Attributes:
      expected_log_likelihood: E_q[log p(D | w)] / T.
      expected_log_prior: E_q[log p(w)] / T.
      divergence: KL_T(q), or KL(p || q) if the forward one was asked for.
    """

    expected_log_likelihood: jax.Array
    expected_log_prior: jax.Array
    divergence: jax.Array


def initial_variational(
    log_joint: LogJoint,
    params: Params,
    sigma_init: float = 1e-3,
    learn_prior_scale: str | None = None,
) -> VariationalParams:
    """q around `params`, with the standard deviation `sigma_init` for every random parameter."""
    mean, point = log_joint.partition(params)
    rho = inverse_softplus(sigma_init)
    raw_scale = jax.tree.map(lambda leaf: jnp.full_like(leaf, rho), mean)
    log_prior_scale = {}
    for name, leaf in trees.named_leaves(mean).items():
        if learn_prior_scale is not None and trees.module_name(name) != PARAMETER_GROUP:
            group = {"one": "*", "module": trees.module_name(name), "leaf": name}[learn_prior_scale]
            log_prior_scale[group] = jnp.zeros((), leaf.dtype)
    return VariationalParams(mean, raw_scale, point, log_prior_scale)


def around(
    log_joint: LogJoint, params: Params, scales: Params, learn_prior_scale: str | None = None
) -> VariationalParams:
    """q around `params` with the standard deviations `scales` of the random parameters."""
    begun = initial_variational(log_joint, params, learn_prior_scale=learn_prior_scale)
    return begun._replace(raw_scale=jax.tree.map(inverse_softplus, scales))


def inverse_softplus(sigma: float | jax.Array) -> jax.Array:
    """rho for a standard deviation."""
    return sigma + jnp.log(-jnp.expm1(-sigma))


def sample_params(rng_key: jax.Array, variational: VariationalParams) -> Params:
    """One draw of all parameters: w = mu + sigma e, and the point estimates as they are."""
    noise = trees.normal_like(rng_key, variational.mean)
    drawn = jax.tree.map(
        lambda mean, raw, e: mean + jax.nn.softplus(raw) * e,
        variational.mean,
        variational.raw_scale,
        noise,
    )
    return trees.merge(drawn, variational.point)


def evidence_terms(
    rng_key: jax.Array,
    log_joint: LogJoint,
    variational: VariationalParams,
    data: Data,
    estimator: str = "reparameterization",
    kl: str = "reverse",
    num_samples: int = 1,
) -> MeanFieldTerms:
    """Unbiased, differentiable estimates of the ELBO's terms (see `noisy_layers` on `local`).

    Args:
      rng_key: for all noise.
      log_joint: the model.
      variational: where to evaluate.
      data: all data or a minibatch, with its weights.
      estimator: one of ESTIMATORS.
      kl: one of KL_DIRECTIONS.
      num_samples: draws of q to average.

    Returns:
      The terms.
    """
    mean, scale = variational.mean, jax.tree.map(jax.nn.softplus, variational.raw_scale)

    def sample(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = sample_params(jax.random.fold_in(key, 0), variational)
        log_likelihood = noisy_layers.sampled_log_likelihood(
            jax.random.fold_in(key, 1), log_joint, mean, scale, drawn, data, estimator
        )
        return log_likelihood, _expected_log_prior(log_joint, variational, scale, drawn)

    sample_key, prior_key = jax.random.fold_in(rng_key, 0), jax.random.fold_in(rng_key, 1)
    samples = jax.vmap(sample)(jax.random.split(sample_key, num_samples))
    log_likelihood, log_prior = (jnp.mean(term) / log_joint.temperature for term in samples)
    if kl == "reverse":
        divergence = -log_prior - entropy(scale)
    else:
        divergence = _forward_divergence(prior_key, log_joint, variational, scale)
    return MeanFieldTerms(log_likelihood, log_prior, divergence)


class MeanFieldFamily(NamedTuple):
    """The mean-field posteriors of a network, a `core.densities.Family`.

    Attributes:
      log_joint: the model.
    """

    log_joint: LogJoint

    def log_density(self, q: VariationalParams, params: Params) -> jax.Array:
        """log q(w) of the random parameters, exact."""
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        random = self.log_joint.partition(params)[0]
        return trees.total(jax.tree.map(log_normal, random, q.mean, scale))

    def noise_like(self, q: VariationalParams) -> Params:
        """Shapes of the noise of a draw."""
        return q.mean

    def transport(self, q: VariationalParams, noise: Params) -> tuple[Params, jax.Array]:
        """w = mu + sigma x from standard normal noise x, and log N(x; 0, I) - log q(w)."""
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        random = jax.tree.map(lambda m, s, e: m + s * e, q.mean, scale, noise)
        return trees.merge(random, q.point), trees.total(jax.tree.map(jnp.log, scale))

    def evidence_terms(
        self, rng_key: jax.Array, q: VariationalParams, data: Data, num_samples: int
    ) -> tuple[ElboTerms, Params]:
        """The ELBO's terms, (num_samples,), with weights drawn as such, and the draws."""
        noise = jax.vmap(lambda key: trees.normal_like(key, q.mean))(
            jax.random.split(rng_key, num_samples // 2)
        )
        scale = jax.tree.map(jax.nn.softplus, q.raw_scale)
        log_joint = self.log_joint

        def terms(noise: Params) -> tuple[ElboTerms, Params]:
            random = jax.tree.map(lambda m, s, e: m + s * e, q.mean, scale, noise)
            drawn = trees.merge(random, q.point)
            log_likelihood = log_joint.log_likelihood(drawn, data) / log_joint.temperature
            log_prior = _expected_log_prior(log_joint, q, scale, drawn) / log_joint.temperature
            return ElboTerms(log_likelihood, log_prior, entropy(scale)), drawn

        return jax.vmap(terms)(jax.tree.map(lambda e: jnp.concatenate([e, -e]), noise))


def mean_field_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    sigma_init: float = 1e-3,
    estimator: str = "reparameterization",
    kl: str = "reverse",
    kl_weight: float | str | kl_weights.KLWeight = 1.0,
    kl_warmup_steps: int = 0,
    num_samples: int = 1,
    learn_prior_scale: str | None = None,
) -> Method:
    """Maximises the ELBO; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      sigma_init: standard deviation of q at the start.
      estimator: one of ESTIMATORS.
      kl: "reverse", KL(q || p), as the ELBO has it; or "forward", KL(p || q) to the *prior* in its
        place (parameters of the likelihood keep the reverse one). The latter bounds nothing: it
        spreads q over the whole prior, where the reverse one allows q to be narrow.
      kl_weight: the factor of the KL, 1 for the ELBO; a number, a name in
        `kl_weights.KL_WEIGHTS`, or a function such as those.
      kl_warmup_steps: number of minibatches in which the factor grows linearly to its full value.
      num_samples: draws of q per minibatch.
      learn_prior_scale: maximise the ELBO over a factor on the prior's scale too (empirical
        Bayes): "one" factor for all, or one per "module" or "leaf". The more there are, the more
        they overfit. The prior of a likelihood's own parameter is not scaled.

    Returns:
      The method; `init` also takes `VariationalParams`. Infos are, at each minibatch: `log_joint`,
      the estimate of E_q[log p_T(w, D)]; `expected_log_likelihood`, tempered; `kl`, not weighted;
      `elbo`, their difference; `objective`, the same with the KL weighted; and
      `prior_scale/<group>` for each factor that is learned.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = mean_field_vi(log_joint, batch_size=8)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    for kind, name, known in (
        ("estimator", estimator, ESTIMATORS),
        ("kl", kl, KL_DIRECTIONS),
        ("learn_prior_scale", learn_prior_scale, (None, *PRIOR_SCALES)),
    ):
        if name not in known:
            raise unknown_name(kind, str(name), map(str, known))
    check_positive(sigma_init=sigma_init)
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}.")
    if kl == "forward" and (log_joint.temperature != 1 or learn_prior_scale is not None):
        raise UserError("With the forward KL, temperature must be 1 and the prior's scale fixed.")
    weigh = kl_weights.make_kl_weight(kl_weight)
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer

    def init(rng_key: jax.Array, params: Params | VariationalParams | None) -> VIState:
        if isinstance(params, VariationalParams):
            variational = params
        else:
            params = log_joint.init(rng_key) if params is None else params
            variational = initial_variational(log_joint, params, sigma_init, learn_prior_scale)
        return VIState(variational, jnp.zeros((), jnp.int32), optimizer.init(variational))

    def update(rng_key: jax.Array, state: VIState, batch: Data) -> tuple[VIState, Info]:
        batches = num_minibatches(batch.num_rows, batch_size)
        number = state.num_steps % batches + 1
        factor = jnp.asarray(weigh(number, batches, trees.size(state.variational.mean)))
        if kl_warmup_steps:
            factor = factor * jnp.minimum((state.num_steps + 1) / kl_warmup_steps, 1.0)

        def loss(
            variational: VariationalParams,
        ) -> tuple[jax.Array, tuple[MeanFieldTerms, jax.Array]]:
            terms = evidence_terms(
                rng_key, log_joint, variational, batch, estimator, kl, num_samples
            )
            weighted = factor.astype(terms.divergence.dtype) * terms.divergence
            objective = terms.expected_log_likelihood - weighted
            return -objective, (terms, objective)

        gradient, (terms, objective) = jax.grad(loss, has_aux=True)(state.variational)
        variational, optimizer_state = optimize(
            optimizer, gradient, state.optimizer_state, state.variational
        )
        info = {
            "log_joint": terms.expected_log_likelihood + terms.expected_log_prior,
            "expected_log_likelihood": terms.expected_log_likelihood,
            "kl": terms.divergence,
            "elbo": terms.expected_log_likelihood - terms.divergence,
            "objective": objective,
        }
        for group, value in state.variational.log_prior_scale.items():
            info[f"prior_scale/{group}"] = jnp.exp(value)
        return VIState(variational, optax.safe_increment(state.num_steps), optimizer_state), info

    def step(rng_key: jax.Array, state: VIState, data: Data) -> tuple[VIState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: VIState, num_draws: int) -> Params:
        keys = jax.random.split(rng_key, num_draws)
        return jax.vmap(lambda key: sample_params(key, state.variational))(keys)

    return Method(init, step, sample, in_minibatches=True)


def log_normal(value: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """log N(value; mean, std^2), elementwise."""
    constant = 0.5 * math.log(2 * math.pi)
    return -0.5 * jnp.square((value - mean) / std) - jnp.log(std) - constant


def entropy(scale: Params) -> jax.Array:
    """H[q] = sum_i log sigma_i + D / 2 (1 + log 2 pi)."""
    logs = trees.total(jax.tree.map(jnp.log, scale))
    return logs + 0.5 * trees.size(scale) * (1 + math.log(2 * math.pi))


def _expected_log_prior(
    log_joint: LogJoint, variational: VariationalParams, scale: Params, drawn: Params
) -> jax.Array:
    """E_q[log p(w)], not tempered: see `LogJoint.expected_log_prior`.

    With a factor c on the prior's scale, log p(w; c) is log p(w / c) - log c for every family.
    """
    random = log_joint.partition(drawn)[0]
    factors = variational.log_prior_scale

    def log_factor(name: str) -> jax.Array | float:
        if trees.module_name(name) == PARAMETER_GROUP:
            return 0.0
        return next((factors[g] for g in (name, trees.module_name(name), "*") if g in factors), 0.0)

    def divided(tree: Params) -> Params:
        return trees.map_with_name(lambda name, leaf: leaf * jnp.exp(-log_factor(name)), tree)

    sizes = trees.map_with_name(lambda name, leaf: leaf.size * log_factor(name), random)
    terms = (divided(tree) for tree in (variational.mean, scale, random))
    return log_joint.expected_log_prior(*terms) - trees.total(sizes)


def _forward_divergence(
    rng_key: jax.Array, log_joint: LogJoint, variational: VariationalParams, scale: Params
) -> jax.Array:
    """KL(p || q) = sum_i [ log sigma_i + log(2 pi) / 2 + (s_i^2 + mu_i^2) / 2 sigma_i^2 ] - H[p].

    Exact in q for every family, since all have mean 0 and variance s^2. H[p], a constant, is exact
    for the Gaussian (by its value at w = s) and from a draw of the prior for the others.
    """
    prior = log_joint.prior
    mean, std = dict(variational.mean), dict(scale)
    own_mean, own_std = (tree.pop(PARAMETER_GROUP, None) for tree in (mean, std))

    def cross_entropy(name: str, mu: jax.Array, sigma: jax.Array) -> jax.Array:
        square = prior.scale(name) ** 2 + jnp.square(mu)
        return jnp.log(sigma) + 0.5 * math.log(2 * math.pi) + square / (2 * jnp.square(sigma))

    if prior.family == "gaussian":
        at = trees.map_with_name(lambda name, mu: jnp.full_like(mu, prior.scale(name)), mean)
    else:
        at = prior.sample(jax.random.fold_in(rng_key, 0), mean)
    divergence = trees.total(trees.map_with_name(cross_entropy, mean, std)) + prior.log_density(at)
    if jax.tree.leaves(own_mean):
        drawn = sample_params(jax.random.fold_in(rng_key, 1), variational)[PARAMETER_GROUP]
        divergence -= log_joint.likelihood.log_prior(drawn) + entropy(own_std)
    return divergence
