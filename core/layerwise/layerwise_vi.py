"""Variational inference with the layerwise posterior of `core.layerwise.posteriors`.

    ELBO_T(q) = E_q[ log p_T(w, D) ] + H[q]
              = E_q[ log p(D | w) / T + sum_l ( E[log p(w_l) / T | F_l] + H[w_l | F_l] ) ]

The terms of the sum are closed forms given the features F_l of the inducing inputs, and draws of
the earlier layers estimate their expectations; likelihoods come from minibatches weighted as in
`core.data`. Draws come in pairs of opposite noise. Target: the q of this family with the least
KL(q || p_T(w | D)); at T = 1 the ELBO is a lower bound of log p(D). For one layer and a Gaussian
likelihood the family contains the posterior, if there are as many inducing inputs as rows or
features.

Two kinds of inducing inputs:

    rows        U, v and the precisions are parameters. M rows of the data are a good start.
    minibatch   U are M rows of the minibatch, others at every step; v is what a learned network
                puts out for them, and precisions depend on the unit alone, so that nothing is
                stored per row. Every U makes a q, whose ELBO is a bound, and so is the mean of
                these over U. q knows the rows of U better than others: given U, they count once,
                and the n - M others of the minibatch stand for the N - M others of the data.
                Draws and densities are those of the U of the last step.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haiku_posteriors.core import trees
from haiku_posteriors.core.data import Data, Inputs, count_rows, num_minibatches, take_rows
from haiku_posteriors.core.densities import ElboTerms
from haiku_posteriors.core.errors import UserError, check_positive, unknown_name
from haiku_posteriors.core.layerwise import layers, posteriors
from haiku_posteriors.core.layerwise.layers import Shapes
from haiku_posteriors.core.layerwise.posteriors import Layerwise
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.method import Info, Method, minibatch_epoch, optimize
from haiku_posteriors.core.trees import Params

DRAWS_AT_ONCE = 8  # of `sample`: a draw of a wide layer holds a matrix for every unit


class LayerwiseState(NamedTuple):
    """The posterior and the optimizer's state."""

    posterior: Layerwise
    optimizer_state: optax.OptState


class LayerwiseFamily(NamedTuple):
    """The layerwise posteriors of a network, a `core.densities.Family`.

    Attributes:
      log_joint: the model.
      shapes: of the layers that are regressions.
    """

    log_joint: LogJoint
    shapes: Shapes

    def sample(self, rng_key: jax.Array, q: Layerwise, num_draws: int) -> Params:
        """Independent draws, (num_draws, ...)."""

        def draw(noise: Params) -> Params:
            return posteriors.draw(self.log_joint, self.shapes, q, noise).params

        noise = self._noise(rng_key, q, num_draws)
        return jax.lax.map(draw, noise, batch_size=min(num_draws, DRAWS_AT_ONCE))

    def log_density(self, q: Layerwise, params: Params) -> jax.Array:
        """log q(w), exact."""
        return posteriors.log_density(self.log_joint, self.shapes, q, params)

    def noise_like(self, q: Layerwise) -> Params:
        """Shapes of the noise of a draw."""
        return posteriors.noise_like(self.shapes, q)

    def transport(self, q: Layerwise, noise: Params) -> tuple[Params, jax.Array]:
        """w from standard normal noise x, and log N(x; 0, I) - log q(w)."""
        drawn = posteriors.draw(self.log_joint, self.shapes, q, noise)
        return drawn.params, drawn.log_volume

    def evidence_terms(
        self, rng_key: jax.Array, q: Layerwise, data: Data, num_samples: int
    ) -> tuple[ElboTerms, Params]:
        """Unbiased, differentiable estimates of the ELBO's terms, and the draws they are from.

        Args:
          rng_key: for all noise.
          q: where to evaluate.
          data: all data or a minibatch, with its weights.
          num_samples: draws of q; an even number comes in pairs of opposite noise.
        """
        if num_samples % 2:
            noise = self._noise(rng_key, q, num_samples)
        else:
            half = self._noise(rng_key, q, num_samples // 2)
            noise = jax.tree.map(lambda e: jnp.concatenate([e, -e]), half)

        def terms(noise: Params) -> tuple[ElboTerms, Params]:
            drawn = posteriors.draw(self.log_joint, self.shapes, q, noise)
            log_likelihood = self.log_joint.log_likelihood(drawn.params, data)
            tempered = log_likelihood / self.log_joint.temperature
            return ElboTerms(tempered, drawn.log_prior, drawn.entropy), drawn.params

        return jax.vmap(terms)(noise)

    def _noise(self, rng_key: jax.Array, q: Layerwise, count: int) -> Params:
        like = self.noise_like(q)
        stacked = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), like)
        return trees.normal_like(rng_key, stacked)


def find_family(
    log_joint: LogJoint, inducing_inputs: Inputs, max_positions: int = 8
) -> LayerwiseFamily:
    """The family for a network; refused where no layer can be drawn given its inputs.

    Args:
      log_joint: with a Gaussian prior.
      inducing_inputs: U, (rows, ...); only shape and dtype matter.
      max_positions: positions of an inducing image, at most, that a convolution is a regression on.
    """
    if log_joint.prior.family != "gaussian":
        raise UserError(
            "The layerwise posterior needs a Gaussian prior, under which a layer given its inputs "
            f"is a regression; not {log_joint.prior.family}."
        )
    shapes = layers.find_layers(log_joint, inducing_inputs, max_positions)
    if not shapes:
        raise UserError(
            "The layerwise posterior draws a layer's weights given its inputs, and this network "
            "has no layer for that: none of its random hk.Linear, hk.Conv1D and hk.Conv2D is "
            "called once, outside of loops, on rows, with weights that nothing else reads."
        )
    return LayerwiseFamily(log_joint, shapes)


def layerwise_vi(
    log_joint: LogJoint,
    optimizer: optax.GradientTransformation | None = None,
    batch_size: int = 32,
    *,
    inducing_inputs: Inputs | None = None,
    inducing: str = "rows",
    precision: str = "unit",
    max_positions: int = 8,
    rows_per_input: float = 1.0,
    num_samples: int = 8,
    sigma_init: float = 1e-2,
) -> Method:
    """Maximises the ELBO; one step is one epoch.

    Args:
      log_joint: the model, with a Gaussian prior.
      optimizer: any optax transformation; by default Adam with a step size of 0.03 and b2 = 0.99.
      batch_size: maximum rows per minibatch.
      inducing_inputs: U at the start, (M, ...), such as rows of the data; by default 10 standard
        normal ones.
      inducing: "rows" or "minibatch", see above.
      precision: of the pseudo-outputs: one by row and "unit"; "factored", a_row b_unit; or one by
        row, "shared" by all units, which is the cheapest.
      max_positions: see `find_family`.
      rows_per_input: N / M, how many rows an inducing input stands for, at the start.
      num_samples: draws of q per minibatch; even numbers come in pairs of opposite noise.
      sigma_init: standard deviation at the start of what is no regression.

    Returns:
      The method. Infos are, at each minibatch: `log_joint`, the estimate of E_q[log p_T(w, D)];
      `expected_log_likelihood`, tempered; `kl`; `elbo`, their difference.

    Example, with `log_joint` and `data` as in `make_log_joint`:

      >>> method = layerwise_vi(log_joint, batch_size=8, inducing_inputs=data.inputs[:4])
      >>> state = method.init(jax.random.key(0), None)
      >>> step = jax.jit(method.step)
      >>> for epoch in range(2):
      ...     state, info = step(jax.random.key(epoch), state, data)
      >>> draws = method.sample(jax.random.key(9), state, num_draws=5)
      >>> draws["mlp/~/linear_1"]["w"].shape
      (5, 3, 1)
    """
    for kind, name, known in (
        ("inducing", inducing, posteriors.INDUCING),
        ("precision", precision, posteriors.PRECISIONS),
    ):
        if name not in known:
            raise unknown_name(kind, name, known)
    check_positive(sigma_init=sigma_init, rows_per_input=rows_per_input)
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, not {num_samples}.")
    given = _standard_inputs(log_joint) if inducing_inputs is None else inducing_inputs
    given = jax.tree.map(jnp.asarray, given)
    family = find_family(log_joint, given, max_positions)
    optimizer = optax.adam(0.03, b2=0.99) if optimizer is None else optimizer
    learns_inputs = inducing == "rows" and _are_floats(given)

    def learned_part(q: Layerwise) -> Layerwise:
        return q if learns_inputs else q._replace(inducing_inputs=None)

    def init(rng_key: jax.Array, params: Params | None) -> LayerwiseState:
        params = log_joint.init(jax.random.fold_in(rng_key, 0)) if params is None else params
        q = posteriors.initial(
            jax.random.fold_in(rng_key, 1),
            log_joint,
            family.shapes,
            params,
            given,
            inducing=inducing,
            precision=precision,
            rows_per_input=rows_per_input,
            sigma_init=sigma_init,
        )
        return LayerwiseState(q, optimizer.init(learned_part(q)))

    def update(
        rng_key: jax.Array, state: LayerwiseState, batch: Data
    ) -> tuple[LayerwiseState, Info]:
        inputs = state.posterior.inducing_inputs
        if inducing == "minibatch":
            key = jax.random.fold_in(rng_key, 1)
            inputs, batch = split_batch(key, batch, batch_size, count_rows(inputs))

        def whole(learned: Layerwise) -> Layerwise:
            return learned if learns_inputs else learned._replace(inducing_inputs=inputs)

        def loss(learned: Layerwise) -> tuple[jax.Array, ElboTerms]:
            key = jax.random.fold_in(rng_key, 0)
            each, _ = family.evidence_terms(key, whole(learned), batch, num_samples)
            terms = jax.tree.map(jnp.mean, each)
            return -terms.elbo, terms

        learned = learned_part(state.posterior)
        gradient, terms = jax.grad(loss, has_aux=True)(learned)
        learned, optimizer_state = optimize(optimizer, gradient, state.optimizer_state, learned)
        info = {
            "log_joint": terms.expected_log_likelihood + terms.expected_log_prior,
            "expected_log_likelihood": terms.expected_log_likelihood,
            "kl": -terms.expected_log_prior - terms.entropy,
            "elbo": terms.elbo,
        }
        return LayerwiseState(whole(learned), optimizer_state), info

    def step(rng_key: jax.Array, state: LayerwiseState, data: Data) -> tuple[LayerwiseState, Info]:
        return minibatch_epoch(rng_key, update, state, data, batch_size)

    def sample(rng_key: jax.Array, state: LayerwiseState, num_draws: int) -> Params:
        return family.sample(rng_key, state.posterior, num_draws)

    return Method(init, step, sample, in_minibatches=True)


def _are_floats(inputs: Inputs) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(inputs))


def _standard_inputs(log_joint: LogJoint, count: int = 10) -> Inputs:
    if log_joint.input_shapes is None or not _are_floats(log_joint.input_shapes):
        raise UserError("Give inducing_inputs: rows of the data, for instance.")
    shapes = jax.tree.map(
        lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), log_joint.input_shapes
    )
    return trees.normal_like(jax.random.key(0), shapes)


def split_batch(
    rng_key: jax.Array, batch: Data, batch_size: int, count: int
) -> tuple[Inputs, Data]:
    """`count` of a minibatch's inputs as U, and the minibatch with weights that know of them.

        sum_{i in U} l_i + (N - M) / (n - M) sum_{i in the minibatch, not in U} l_i

    is, given U, an unbiased estimate of the sum over all data of an l that may depend on U. With
    weights N / n the rows of U, which q fits best, would be M / n of the sum in place of M / N.

    Args:
      rng_key: for the choice.
      batch: a uniformly random subset of the data, with padding of weight 0.
      batch_size: of which it is a minibatch.
      count: M.

    Returns:
      U, and all rows of the minibatch with their new weights.
    """
    batches = num_minibatches(batch.num_rows, batch_size)
    least = batch.num_rows // batches
    if count > least or (batches > 1 and count == least):
        others = "" if batches == 1 else ", of which some must be others"
        raise UserError(
            f"{count} inducing inputs cannot be rows of a minibatch of {least}{others}: lower "
            "num_inducing, or raise batch_size."
        )
    available = -(-batch.num_rows // batches)  # without the padding that devices ask for
    chosen = jax.random.permutation(rng_key, available)[:count]
    # A short minibatch's padding is a row of another one: chosen, it counts as one of U.
    is_chosen = jnp.zeros(batch.weights.shape, bool).at[chosen].set(True)
    is_other = (batch.weights > 0) & ~is_chosen
    num_others = jnp.sum(is_other).astype(batch.weights.dtype)
    stands_for = (batch.num_rows - count) / jnp.maximum(num_others, 1)
    zero = jnp.zeros((), batch.weights.dtype)
    weights = jnp.where(is_chosen, zero + 1, jnp.where(is_other, stands_for, zero))
    return take_rows(batch.inputs, chosen), dataclasses.replace(batch, weights=weights)
