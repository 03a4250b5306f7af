"""The log-joint log p(w, D) of a Haiku network, a prior and a likelihood, with a temperature.

    log p_T(w, D) = [ log p(w) + sum_i a_i log p(y_i | x_i, w) ] / T

With weights a_i = 1 this is the full-batch log-joint; with the weights that `core.data` gives to a
minibatch it is an unbiased estimate of it. Methods depend on this object only.
"""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Iterator

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_posteriors.core import fixed_sums, likelihoods, trees
from haiku_posteriors.core.data import Data, Inputs, pad
from haiku_posteriors.core.errors import UserError, check_positive
from haiku_posteriors.core.likelihoods import Likelihood
from haiku_posteriors.core.networks import convolutions
from haiku_posteriors.core.priors import Prior
from haiku_posteriors.core.trees import Params

Network = Callable[[Inputs], jax.Array]

MAX_REASON = 300  # letters of another program's error that are repeated in ours


@dataclasses.dataclass(frozen=True)
class LogJoint:
    """log p(w, D) as a function of a parameter pytree and `Data`.

    The parameters are Haiku's nested dict, with a further group `likelihood` if the likelihood
    has parameters. Those whose names match `stochastic_params` are random and carry the prior;
    the rest are point estimates under a flat prior.

    Attributes:
      init: rng_key -> params, by the network's own initialisers.
      network: (params, inputs) -> outputs (rows, k).
      prior: over the network's random parameters.
      likelihood: the observation model.
      temperature: T; divides prior and likelihood alike. No method divides by it again.
      num_microbatches: number of pieces in which the rows pass through the network.
      stochastic_params: regular expression searched for in parameter names.
      input_shapes: shapes and dtypes of one row of inputs; None where nobody knows them.
    """

    init: Callable[[jax.Array], Params]
    network: Callable[[Params, Inputs], jax.Array]
    prior: Prior
    likelihood: Likelihood
    temperature: float = 1.0
    num_microbatches: int = 1
    stochastic_params: str = ""
    input_shapes: Inputs | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def shapes(self) -> Params:
        """Shapes and dtypes of the parameters, a pytree of `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @property
    def random_shapes(self) -> Params:
        """Those of the random parameters, with `None` for the point estimates."""
        return self.partition(self.shapes)[0]

    @property
    def prior_scales(self) -> Params:
        """The prior's standard deviation of each random leaf, a float, not tempered."""
        return trees.map_with_name(lambda name, _: self.prior.scale(name), self.random_shapes)

    def __call__(self, params: Params, data: Data) -> jax.Array:
        """log p_T(w, D), a scalar."""
        log_prior, log_likelihood = self.terms(params, data)
        return log_prior + log_likelihood

    def terms(self, params: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        """log p(w) / T and log p(D | w) / T, apart because their sum loses digits."""
        return (
            self.log_prior(params) / self.temperature,
            self.log_likelihood(params, data) / self.temperature,
        )

    def difference(self, new: Params, old: Params, data: Data) -> jax.Array:
        """log p_T(new, D) - log p_T(old, D), summed over differences of single terms.

        At a million weights the log-prior is of order 1e6, where float32 resolves 0.06 nats; the
        differences of single terms are small and keep their digits.
        """
        log_prior, log_likelihood = self.term_differences(new, old, data)
        return (log_prior + log_likelihood) / self.temperature

    def term_differences(self, new: Params, old: Params, data: Data) -> tuple[jax.Array, jax.Array]:
        """log p(new) - log p(old) and the same of log p(D | w), not tempered; see `difference`."""
        log_prior = trees.total(
            jax.tree.map(jnp.subtract, *map(self._log_prior_densities, (new, old)))
        )
        return log_prior, self._sum_over_rows(self._weighted_difference, (new, old), data)

    def partition(self, params: Params) -> tuple[Params, Params]:
        """The random parameters and the point estimates; `core.trees.merge` joins them again."""
        return trees.partition(params, self.stochastic_params)

    def log_prior(self, params: Params) -> jax.Array:
        """log p(w) over the random parameters, not tempered."""
        return trees.total(self._log_prior_densities(params))

    def sample_prior(self, rng_key: jax.Array) -> Params:
        """A draw of the random parameters from p(w), `None` for the point estimates."""
        random = dict(self.random_shapes)
        if self.prior.is_whole:
            return self.prior.sample(rng_key, random)
        own = random.pop(likelihoods.PARAMETER_GROUP, None)
        drawn = self.prior.sample(jax.random.fold_in(rng_key, 0), random)
        if jax.tree.leaves(own):
            own = self.likelihood.sample_prior(jax.random.fold_in(rng_key, 1))
        return drawn if own is None else {**drawn, likelihoods.PARAMETER_GROUP: own}

    def expected_log_prior(self, mean: Params, scale: Params, drawn: Params) -> jax.Array:
        """E[log p(w)] over w ~ N(mean, diag(scale)^2), not tempered, or an unbiased estimate of it.

        A Gaussian's log-density is quadratic: its expectation is its value at the mean, less half
        of the scales' squares over the prior's. For other densities it is the value at a draw.

        Args:
          mean: of the random parameters, `None` elsewhere.
          scale: their standard deviations, likewise.
          drawn: a draw of them, likewise.
        """
        if self.prior.precisions is not None:
            squares = jax.tree.map(lambda s, p: p * s**2, scale, self.prior.precisions(scale))
            return self.log_prior(mean) - trees.total(squares) / 2
        if self.prior.family != "gaussian":
            return self.log_prior(drawn)
        scale, group = dict(scale), likelihoods.PARAMETER_GROUP
        if scale.pop(group, None) is not None:  # the likelihood's own have another prior
            mean = {**mean, group: drawn[group]}
        squares = trees.map_with_name(lambda name, s: jnp.square(s / self.prior.scale(name)), scale)
        return self.log_prior(mean) - trees.total(squares) / 2

    def log_likelihoods(self, params: Params, inputs: Inputs, targets: jax.Array) -> jax.Array:
        """log p(y_i | x_i, w) for each row, not tempered; (rows,)."""
        own = params.get(likelihoods.PARAMETER_GROUP, {})
        return self.likelihood.log_likelihood(self.network(params, inputs), targets, own)

    def log_likelihood(self, params: Params, data: Data) -> jax.Array:
        """sum_i a_i log p(y_i | x_i, w), not tempered."""
        return self._sum_over_rows(self._weighted_sum, params, data)

    def predict(self, params: Params, inputs: Inputs) -> jax.Array:
        """Class probabilities, or means and standard deviations; (rows, p)."""
        own = params.get(likelihoods.PARAMETER_GROUP, {})
        return self.likelihood.predict(self.network(params, inputs), own)

    def _log_prior_densities(self, params: Params) -> Params:
        random = dict(self.partition(params)[0])
        if self.prior.is_whole:
            return self.prior.log_densities(random)
        own = random.pop(likelihoods.PARAMETER_GROUP, None)
        densities = self.prior.log_densities(random)
        return (densities, self.likelihood.log_prior(own)) if jax.tree.leaves(own) else densities

    def _weighted_sum(self, params: Params, data: Data) -> jax.Array:
        return jnp.sum(data.weights * self.log_likelihoods(params, data.inputs, data.targets))

    def _weighted_difference(self, params: tuple[Params, Params], data: Data) -> jax.Array:
        new, old = (self.log_likelihoods(p, data.inputs, data.targets) for p in params)
        return jnp.sum(data.weights * (new - old))

    def _sum_over_rows(
        self, function: Callable[[Params, Data], jax.Array], params: Params, data: Data
    ) -> jax.Array:
        def whole(params: Params, data: Data) -> jax.Array:
            if self.num_microbatches == 1:
                return function(params, data)
            return _accumulate(function, self.num_microbatches, params, data)

        if data.placement is None or data.placement.num_blocks is None:
            return whole(params, data)
        return fixed_sums.sum_in_blocks(whole, params, data)


def make_log_joint(
    network: Network,
    example_inputs: Inputs,
    prior: Prior,
    likelihood: Likelihood,
    *,
    temperature: float = 1.0,
    num_microbatches: int = 1,
    stochastic_params: str = "",
) -> LogJoint:
    """Builds the log-joint of a plain Haiku function; refuses networks without a posterior.

    Args:
      network: an untransformed Haiku function, inputs (rows, ...) -> outputs (rows, k). Several
        inputs are a dict or tuple of arrays.
      example_inputs: at least one row; only shape and dtype matter.
      prior: see `core.priors.make_prior`.
      likelihood: see `core.likelihoods`.
      temperature: posterior temperature.
      num_microbatches: pieces in which sums over rows are accumulated, to hold fewer activations.
      stochastic_params: regular expression naming the random parameters; empty for all.

    Returns:
      The log-joint.

    Example:

      >>> import haiku as hk, jax, numpy as np
      >>> from haiku_posteriors.core.data import make_data
      >>> from haiku_posteriors.core.likelihoods import gaussian
      >>> from haiku_posteriors.core.log_joint import make_log_joint
      >>> from haiku_posteriors.core.priors import make_prior
      >>> inputs = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
      >>> log_joint = make_log_joint(
      ...     lambda x: hk.nets.MLP([3, 1])(x), inputs, make_prior(1.0), gaussian(noise_std=0.1)
      ... )
      >>> data = make_data(inputs, inputs**2)
      >>> params = log_joint.init(jax.random.key(0))
      >>> log_joint(params, data).shape
      ()
      >>> jax.tree.map(lambda leaf: leaf.shape, log_joint.shapes)["mlp/~/linear_0"]
      {'b': (3,), 'w': (1, 3)}
    """
    check_positive(temperature=temperature)
    if num_microbatches < 1:
        raise UserError(f"num_microbatches must be at least 1, not {num_microbatches}.")
    example = jax.tree.map(lambda leaf: jnp.asarray(leaf[:1]), example_inputs)
    transformed = hk.transform_with_state(network)
    with _mistakes_told(example):
        shapes, state = jax.eval_shape(transformed.init, jax.random.key(0), example)
    if jax.tree.leaves(state):
        raise UserError(
            "The network keeps non-trainable state "
            f"({', '.join(trees.named_leaves(state))}), e.g. batch statistics, with which the "
            "likelihood of a datum depends on its batch and there is no posterior; use a "
            "normalisation without state such as hk.LayerNorm or filter response normalisation."
        )
    if likelihoods.PARAMETER_GROUP in shapes:
        raise UserError(f"No module may be named '{likelihoods.PARAMETER_GROUP}'; it is taken.")

    def init(rng_key: jax.Array) -> Params:
        params, _ = transformed.init(rng_key, example)
        own = likelihood.init()
        return {**params, likelihoods.PARAMETER_GROUP: own} if own else params

    def apply(params: Params, inputs: Inputs) -> jax.Array:
        # No random key: a log-joint is a function of the parameters alone.
        with convolutions.fast_gradients():
            return transformed.apply(params, state, None, inputs)[0]

    input_shapes = jax.eval_shape(lambda: example)
    log_joint = LogJoint(
        *(init, apply, prior, likelihood, temperature),
        *(num_microbatches, stochastic_params, input_shapes),
    )
    with _mistakes_told(example):
        outputs = jax.eval_shape(apply, log_joint.shapes, example)
    if not isinstance(outputs, jax.ShapeDtypeStruct):
        raise UserError(f"The network gives a {type(outputs).__name__}, not one array.")
    if not jax.tree.leaves(log_joint.shapes):
        raise UserError("The network has no parameters, and so no posterior.")
    if outputs.shape != (1, likelihood.num_outputs):
        raise UserError(
            f"The likelihood needs network outputs of shape (rows, {likelihood.num_outputs}), "
            f"but this network gives (rows{''.join(f', {n}' for n in outputs.shape[1:])})."
        )
    _check_pattern(stochastic_params, log_joint.shapes)
    return log_joint


@contextlib.contextmanager
def _mistakes_told(example: Inputs) -> Iterator[None]:
    """What a network raises while it is traced, as a sentence that says where."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the user's function may fail in any way
        if "PRNGKey" in str(error):  # Haiku's, of a function that has no key
            raise UserError(
                "The network draws random numbers (dropout inside it, for instance), with which it "
                "is no function of its parameters; leave them out (run_vi.py --method=mc_dropout "
                "adds dropout itself)."
            ) from error
        places = [
            f"{frame.filename}, line {frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "site-packages" not in frame.filename and frame.filename != __file__
        ]
        where = f" ({places[-1]})" if places else ""
        reason = " ".join(str(error).split())
        raise UserError(
            f"The network fails on inputs of shape {_shapes_told(example)}{where}: "
            f"{type(error).__name__}: {reason[:MAX_REASON]}"
        ) from error


def _shapes_told(example: Inputs) -> str:
    told = {
        name: f"(rows, {', '.join(map(str, leaf.shape[1:]))}) and type {leaf.dtype}"
        for name, leaf in trees.named_leaves(example).items()
    }
    return ", ".join(f"{name} {shape}".strip() for name, shape in told.items())


def _check_pattern(pattern: str, shapes: Params) -> None:
    try:
        random, _ = trees.partition(shapes, pattern)
    except re.error as error:
        raise UserError(
            f"stochastic_params '{pattern}' is not a regular expression: {error}."
        ) from error
    if not jax.tree.leaves(random):
        raise UserError(
            f"stochastic_params '{pattern}' matches no parameter; "
            f"the names are {', '.join(trees.named_leaves(shapes))}."
        )


def _accumulate(
    function: Callable[[Params, Data], jax.Array], pieces: int, params: Params, data: Data
) -> jax.Array:
    """sum over pieces of the data of function(params, piece), holding one piece's activations.

    Value and gradient are accumulated in the same pass, so that differentiating costs one
    forward and one backward pass per piece and no activation outlives its piece. (Reverse-mode
    differentiation only, and once.)
    """
    data = pad(data, pieces)  # `make_data` pads the full data beforehand; this is for minibatches

    def split(leaf: jax.Array) -> jax.Array:
        # Strided, not blocked: the leading axis may be spread over devices, and this way each
        # device holds an equal part of every piece.
        return leaf.reshape(-1, pieces, *leaf.shape[1:]).swapaxes(0, 1)

    @jax.custom_vjp
    def total(params: Params, batches: Data) -> jax.Array:
        return jax.lax.map(lambda batch: function(params, batch), batches).sum()

    def forward(params: Params, batches: Data) -> tuple[jax.Array, Params]:
        def add(carry: tuple[jax.Array, Params], batch: Data) -> tuple:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(function)(params, batch)), None

        zero = jax.tree.map(jnp.zeros_like, (jax.eval_shape(total, params, batches), params))
        return jax.lax.scan(add, zero, batches)[0]

    def backward(gradient: Params, cotangent: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(lambda leaf: cotangent * leaf, gradient), None

    total.defvjp(forward, backward)
    return total(params, jax.tree.map(split, data))
