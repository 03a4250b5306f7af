"""Multiplicative normalising flows: weights times latents of one layer, whose law is a flow.

    z ~ q(z):   z_0 ~ N(m, diag(t)^2),   z = F(z_0),        F of coupling layers, for every layer
    w | z ~ N(w_ij; mu_ij z_i, sigma_ij^2)

    L = E_q[ log p_T(w, D) - log q(w | z) - log q(z) + log r(z | w) ]  <=  ELBO_T(q)  <=  log p_T(D)

(Louizos & Welling 2017, arXiv 1703.01961; the bound is that of Ranganath, Tran & Blei 2016, arXiv
1511.02386.) One z belongs to a row of a `hk.Linear` (an input) and to an output channel of a
`hk.Conv1D` or `hk.Conv2D`; biases and all other random weights are mean-field. Given z, q is
mean-field: the estimators of `core.vi` take its likelihood, `local` by interception of the layers,
and under a Gaussian prior E[log p(w) | z] is in closed form.

A coupling layer changes every second z by the others, x:  z <- z exp(a(x)) + b(x), of a network of
one hidden layer with 0 for a and b at first. The auxiliary model is

    r(z | w):   F_r(z) ~ N(v_i, 1 / p_i),    p_i = pi_i + sum_j mu_ij^2 / sigma_ij^2,
                                             v_i = (beta_i + sum_j mu_ij w_ij / sigma_ij^2) / p_i

with a flow F_r, pi and beta of its own: q(z | w) itself where both flows are the identity and pi,
beta belong to N(m, t^2), as at the start. (The paper's reads w through a learned network instead.)

Target: the q of this family with the highest L. Its density is not known, L is what can be said.
"""

import math
from typing import Any, NamedTuple

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

FIRST_SPREAD = 0.05  # of z around 1
MAX_LOG_SCALE = 2.0  # of one coupling layer


class Multiplicative(NamedTuple):
    """q and r.

    Attributes:
      mean: mu, of the random parameters; `None` elsewhere, as `core.trees.partition` leaves it.
      raw_scale: rho, likewise; sigma = softplus(rho).
      point: the other parameters.
      flows: of every layer's z, by the name of its weights: m, log t, and coupling layers of F.
      reverse: likewise: log pi, beta, and coupling layers of F_r.
    """

    mean: Params
    raw_scale: Params
    point: Params
    flows: dict[str, Params]
    reverse: dict[str, Params]


def multiplied_weights(log_joint: LogJoint) -> dict[str, int]:
    """Names of the weights with latents, and the axis along which these lie."""
    if log_joint.input_shapes is None:
        return {}
    calls = noisy_layers.record_calls(log_joint.network, log_joint.shapes, log_joint.input_shapes)
    modules = {call.module for call in calls if not call.grouped}
    return {
        name: -2 if len(leaf.shape) == 2 else -1
        for name, leaf in trees.named_leaves(log_joint.random_shapes).items()
        if trees.module_name(name) in modules and name.endswith("/w")
    }


def initial_multiplicative(
    rng_key: jax.Array,
    log_joint: LogJoint,
    params: Params,
    *,
    num_couplings: int,
    hidden_size: int,
    sigma_init: float = 1e-2,
    scale: Params | None = None,
) -> Multiplicative:
    """q around `params`: z around 1, flows the identity, r exact.

    Args:
      rng_key: of the hidden layers' weights.
      log_joint: the model.
      params: mu and the point estimates.
      num_couplings: coupling layers of every flow.
      hidden_size: of their networks.
      sigma_init: sigma, for every weight, unless
      scale: has it, in the structure of the random parameters.
    """
    mean, point = log_joint.partition(params)
    if scale is None:
        scale = jax.tree.map(lambda leaf: jnp.full_like(leaf, sigma_init), mean)
    leaves, flows, reverse = trees.named_leaves(mean), {}, {}
    for number, (name, axis) in enumerate(multiplied_weights(log_joint).items()):
        size, dtype = leaves[name].shape[axis], leaves[name].dtype
        keys = [jax.random.fold_in(rng_key, 2 * number + index) for index in range(2)]
        ones, couplings = jnp.ones(size, dtype), (size, num_couplings, hidden_size, dtype)
        flows[name] = {
            "mean": ones,
            "log_scale": math.log(FIRST_SPREAD) * ones,
            "couplings": _initial_couplings(keys[0], *couplings),
        }
        reverse[name] = {
            "log_precision": -2 * math.log(FIRST_SPREAD) * ones,
            "shift": ones / FIRST_SPREAD**2,
            "couplings": _initial_couplings(keys[1], *couplings),
        }
    raw_scale = jax.tree.map(vi.inverse_softplus, scale)
    return Multiplicative(mean, raw_scale, point, flows, reverse)


class MultiplicativeFamily(NamedTuple):
    """The posteriors above: draws, and estimates of L.

    Attributes:
      log_joint: the model.
      estimator: of the likelihood given z, one of `vi.ESTIMATORS`.
    """

    log_joint: LogJoint
    estimator: str = "reparameterization"

    def draw(self, rng_key: jax.Array, q: Multiplicative) -> Params:
        """One draw of all parameters."""
        _, center, _ = self._latents(jax.random.fold_in(rng_key, 0), q)
        e = trees.normal_like(jax.random.fold_in(rng_key, 1), q.mean)
        return trees.merge(_perturbed(center, _scale(q), e), q.point)

    def evidence_terms(
        self, rng_key: jax.Array, q: Multiplicative, data: Data, num_samples: int
    ) -> tuple[ElboTerms, Params]:
        """The bound's terms, (num_samples,), differentiable, and draws.

        `entropy` is the bound of H[q]. The second half of an even number of draws has the opposite
        e and a z of its own, but the same for all of a draw's layers.
        """
        scale, temperature = _scale(q), self.log_joint.temperature
        conditional = vi.entropy(scale)

        def terms(index: jax.Array) -> tuple[ElboTerms, Params]:
            key = jax.random.fold_in(rng_key, index)
            z_key, noise_key, layer_key = (jax.random.fold_in(key, part) for part in range(3))
            z, center, log_q = self._latents(z_key, q)
            drawn = _perturbed(center, scale, trees.normal_like(noise_key, q.mean))
            params = trees.merge(drawn, q.point)
            log_likelihood = noisy_layers.sampled_log_likelihood(
                layer_key, self.log_joint, center, scale, params, data, self.estimator
            )
            log_prior = self.log_joint.expected_log_prior(center, scale, drawn)
            entropy = conditional - log_q + self._log_reverse(q, z, drawn)
            tempered = (log_likelihood / temperature, log_prior / temperature)
            return ElboTerms(*tempered, entropy), params

        return jax.vmap(terms)(jnp.arange(num_samples))

    def _latents(
        self, rng_key: jax.Array, q: Multiplicative
    ) -> tuple[dict[str, jax.Array], Params, jax.Array]:
        """z by name, the means mu z of all weights, and log q(z)."""
        noise = trees.normal_like(rng_key, {name: flow["mean"] for name, flow in q.flows.items()})
        latents, log_q = {}, jnp.zeros((), jax.tree.leaves(q.mean)[0].dtype)
        for name, flow in q.flows.items():
            deviation = jnp.exp(flow["log_scale"])
            first = flow["mean"] + deviation * noise[name]
            latents[name], log_det = _couple(flow["couplings"], first)
            log_q += jnp.sum(vi.log_normal(first, flow["mean"], deviation)) - log_det
        axes = multiplied_weights(self.log_joint)

        def center(name: str, mean: jax.Array) -> jax.Array:
            return mean * _along(latents[name], mean, axes[name]) if name in latents else mean

        return latents, trees.map_with_name(center, q.mean), log_q

    def _log_reverse(self, q: Multiplicative, z: dict[str, jax.Array], drawn: Params) -> jax.Array:
        """log r(z | w)."""
        means, raws, weights = (trees.named_leaves(tree) for tree in (q.mean, q.raw_scale, drawn))
        total = jnp.zeros((), jax.tree.leaves(q.mean)[0].dtype)
        for name, axis in multiplied_weights(self.log_joint).items():
            reverse, mean = q.reverse[name], means[name]
            ratio = mean / jnp.square(jax.nn.softplus(raws[name]))  # mu / sigma^2
            others = tuple(n for n in range(mean.ndim) if n != axis % mean.ndim)
            precision = jnp.exp(reverse["log_precision"]) + jnp.sum(ratio * mean, axis=others)
            shift = reverse["shift"] + jnp.sum(ratio * weights[name], axis=others)
            last, log_det = _couple(reverse["couplings"], z[name])
            deviation = jax.lax.rsqrt(precision)
            total += jnp.sum(vi.log_normal(last, shift / precision, deviation)) + log_det
        return total


def multiplicative_flow_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    num_couplings: int = 2,
    hidden_size: int = 32,
    sigma_init: float = 1e-2,
    estimator: str = "reparameterization",
    num_samples: int = 1,
) -> Method:
    """Maximises L; one step is one epoch.

    Args:
      log_joint: the model.
      optimizer: any optax transformation; Adam with a step size of 1e-2 by default.
      batch_size: maximum rows per minibatch.
      num_couplings: coupling layers of every flow.
      hidden_size: of their networks.
      sigma_init: sigma at the start.
      estimator: one of `vi.ESTIMATORS`, applied given z.
      num_samples: draws of q per minibatch.

    Returns:
      The method; `init` also takes a `Multiplicative`. Infos as in `elbo_ascent`, where `elbo` is
      L, below the ELBO.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = multiplicative_flow_vi(log_joint, batch_size=8)
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    if estimator not in vi.ESTIMATORS:
        raise unknown_name("estimator", estimator, vi.ESTIMATORS)
    check_positive(sigma_init=sigma_init, num_couplings=num_couplings, hidden_size=hidden_size)
    if not multiplied_weights(log_joint):
        raise UserError(
            "Multiplicative flows need layers: this network has no hk.Linear, hk.Conv1D or "
            "hk.Conv2D with random weights."
        )
    family = MultiplicativeFamily(log_joint, estimator)

    def start(rng_key: jax.Array, params: Params | Multiplicative | None) -> Multiplicative:
        if isinstance(params, Multiplicative):
            return params
        network_key, flow_key = (jax.random.fold_in(rng_key, index) for index in range(2))
        params = log_joint.init(network_key) if params is None else params
        return initial_multiplicative(
            flow_key,
            log_joint,
            params,
            num_couplings=num_couplings,
            hidden_size=hidden_size,
            sigma_init=sigma_init,
        )

    def terms(rng_key: jax.Array, q: Multiplicative, data: Data, num_samples: int) -> ElboTerms:
        return family.evidence_terms(rng_key, q, data, num_samples)[0]

    return elbo_ascent(start, terms, family.draw, optimizer, batch_size, num_samples)


def _scale(q: Multiplicative) -> Params:
    return jax.tree.map(jax.nn.softplus, q.raw_scale)


def _perturbed(center: Params, scale: Params, noise: Params) -> Params:
    return jax.tree.map(lambda c, s, e: c + s * e, center, scale, noise)


def _along(values: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """`values` along an axis of `like`, 1 along the others."""
    shape = [1] * like.ndim
    shape[axis] = values.size
    return values.reshape(shape)


def _initial_couplings(
    rng_key: jax.Array, size: int, num_couplings: int, hidden_size: int, dtype: Any
) -> Params:
    """Of networks with outputs 0: hidden weights (couplings, size, hidden), outputs beside them."""
    shape = (num_couplings, size, hidden_size)
    return {
        "hidden": jax.random.normal(rng_key, shape, dtype) / math.sqrt(size),
        "bias": jnp.zeros((num_couplings, hidden_size), dtype),
        "log_scale": jnp.zeros((num_couplings, hidden_size, size), dtype),
        "shift": jnp.zeros((num_couplings, hidden_size, size), dtype),
        "constant": jnp.zeros((num_couplings, 2, size), dtype),
    }


def _couple(couplings: Params, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """F(z) and log |det dF / dz|; coupling layer k changes the z of the other parity than k."""
    log_det = jnp.zeros((), z.dtype)
    parity = jnp.arange(z.size) % 2
    for number in range(couplings["hidden"].shape[0]):
        own = jax.tree.map(lambda leaf: leaf[number], couplings)  # noqa: B023
        changes = (parity != number % 2).astype(z.dtype)
        hidden = jnp.tanh((1 - changes) * z @ own["hidden"] + own["bias"])
        raw = hidden @ own["log_scale"] + own["constant"][0]
        log_scale = changes * MAX_LOG_SCALE * jnp.tanh(raw / MAX_LOG_SCALE)
        shift = changes * (hidden @ own["shift"] + own["constant"][1])
        z, log_det = z * jnp.exp(log_scale) + shift, log_det + jnp.sum(log_scale)
    return z, log_det
