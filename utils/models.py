"""The built-in networks, and how a user's own is found.

A network is a plain Haiku function `(inputs, num_outputs) -> outputs`: no training flag, no state,
no Bayesian layers, and no step that mixes the rows of a batch, so that a log-likelihood is a sum
over rows. The floating-point type follows the inputs; integer inputs take JAX's default one.

Counts of parameters below include every weight, bias and normalisation parameter.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_posteriors.core.data import Inputs
from haiku_posteriors.core.errors import UserError, unknown_name

Activation = Callable[[jax.Array], jax.Array]
Network = Callable[[Inputs], jax.Array]

VOCABULARY_SIZE = 20_000
IN_MEMORY = "<memory>"  # in place of the file of a network that was given as a function


class FilterResponseNorm(hk.Module):
    """Filter response normalisation with a thresholded linear unit; 3 parameters a channel.

    With nu2 the mean of x^2 over height and width, of one row and one channel:

        y = max(gamma * x / sqrt(nu2 + eps) + beta, tau)

    Unlike batch normalisation it looks at one row at a time, so the likelihood factorises over rows
    and there are no running averages. (Singh and Krishnan, 2020, arXiv 1911.09737.)
    """

    def __init__(self, eps: float = 1e-6, name: str | None = None):
        super().__init__(name=name)
        self.eps = eps

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalises images of shape (rows, height, width, channels)."""
        shape, dtype = inputs.shape[-1:], inputs.dtype
        gamma = hk.get_parameter("gamma", shape, dtype, init=jnp.ones)
        beta = hk.get_parameter("beta", shape, dtype, init=jnp.zeros)
        tau = hk.get_parameter("tau", shape, dtype, init=jnp.zeros)
        mean_square = jnp.mean(jnp.square(inputs), axis=(1, 2), keepdims=True)
        return jnp.maximum(gamma * inputs * jax.lax.rsqrt(mean_square + self.eps) + beta, tau)


class TokenEmbedding(hk.Module):
    """One learned vector a token. `hk.Embed` is always float32; this follows JAX's default type."""

    def __init__(self, num_tokens: int, width: int, name: str | None = None):
        super().__init__(name=name)
        self.shape = (num_tokens, width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens of any shape to vectors; a token too large is taken for the last one."""
        init = hk.initializers.TruncatedNormal()
        embeddings = hk.get_parameter("embeddings", self.shape, jnp.zeros(()).dtype, init=init)
        return embeddings[tokens]


def _as_float(inputs: jax.Array) -> jax.Array:
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        return inputs
    return inputs.astype(jnp.zeros(()).dtype)


def _as_images(inputs: jax.Array) -> jax.Array:
    if inputs.ndim == 3:
        inputs = inputs[..., None]
    if inputs.ndim != 4:
        raise UserError(
            "A convolutional network needs inputs of shape (rows, height, width, channels), "
            f"not {inputs.shape}."
        )
    return _as_float(inputs)


def _mlp(
    inputs: jax.Array, widths: Sequence[int], num_outputs: int, activation: Activation = jax.nn.relu
) -> jax.Array:
    hidden = hk.Flatten()(_as_float(inputs))
    for index, width in enumerate(widths):
        hidden = activation(hk.Linear(width, name=f"hidden_{index}")(hidden))
    return hk.Linear(num_outputs, name="output")(hidden)


def logistic_regression(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """One dense layer on the flattened inputs: (d + 1) * num_outputs parameters."""
    return _mlp(inputs, (), num_outputs)


def mlp_toy(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Hidden layers of 7 and 10, ELU: 105 parameters from 1 input to 1 output."""
    return _mlp(inputs, (7, 10), num_outputs, jax.nn.elu)


def mlp_20_20(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Two hidden layers of 20, ReLU: 481 parameters from 1 input to 1 output."""
    return _mlp(inputs, (20, 20), num_outputs)


def mlp_50(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """One hidden layer of 50, ReLU: 50 d + 101 parameters with 1 output."""
    return _mlp(inputs, (50,), num_outputs)


def mlp_regression(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Two hidden layers of 100, ReLU: 100 d + 10,402 parameters with 2 outputs."""
    return _mlp(inputs, (100, 100), num_outputs)


def mlp_regression_small(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """`mlp_50` with outputs for mean and noise, as in the HMC study: 50 d + 152 parameters."""
    return mlp_50(inputs, num_outputs)


def mlp_classification(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Two hidden layers of 256, ReLU: 269,322 parameters on 28x28x1 with 10 classes."""
    return _mlp(inputs, (256, 256), num_outputs)


def mlp_400_400(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Two hidden layers of 400, ReLU: 478,410 parameters on 28x28x1 with 10 classes."""
    return _mlp(inputs, (400, 400), num_outputs)


def lenet5(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """5x5 convolutions (6, 16) without padding, each with ReLU and 2x2 max-pool; dense 120, 84.

    44,426 parameters on 28x28x1 with 10 classes. Needs at least 16x16 pixels.
    """
    hidden = _as_images(inputs)
    if min(hidden.shape[1:3]) < 16:
        height, width = hidden.shape[1:3]
        raise UserError(f"lenet5 needs images of at least 16x16 pixels, not {height}x{width}.")
    for index, channels in enumerate((6, 16)):
        convolution = hk.Conv2D(channels, 5, padding="VALID", name=f"conv_{index}")
        hidden = jax.nn.relu(convolution(hidden))
        hidden = hk.max_pool(hidden, (2, 2, 1), (2, 2, 1), "VALID")
    return _mlp(hidden, (120, 84), num_outputs)


def lenet(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Three 5x5 convolutions (6, 16, 120), each with ReLU and a 3x3 max-pool of stride 2; dense 84.

    142,646 parameters on 32x32x3 with 10 classes. Needs at least 15x15 pixels.
    """
    hidden = _as_images(inputs)
    if min(hidden.shape[1:3]) < 15:
        raise UserError(
            f"lenet needs images of at least 15x15 pixels, not {hidden.shape[1]}x{hidden.shape[2]}."
        )
    for index, channels in enumerate((6, 16, 120)):
        hidden = jax.nn.relu(hk.Conv2D(channels, 5, name=f"conv_{index}")(hidden))
        hidden = hk.max_pool(hidden, (3, 3, 1), (2, 2, 1), "VALID")
    return _mlp(hidden, (84,), num_outputs)


def _resnet20(inputs: jax.Array, num_outputs: int, activation: Activation) -> jax.Array:
    def conv_norm(images: jax.Array, width: int, kernel: int, stride: int, name: str) -> jax.Array:
        images = hk.Conv2D(width, kernel, stride, name=f"{name}_conv")(images)
        return FilterResponseNorm(name=f"{name}_norm")(images)

    hidden = activation(conv_norm(_as_images(inputs), 16, 3, 1, "stem"))
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(3):
            name = f"stage_{stage}_block_{block}"
            changes_shape = stage > 0 and block == 0
            stride = 2 if changes_shape else 1
            residual = activation(conv_norm(hidden, channels, 3, stride, f"{name}_first"))
            residual = conv_norm(residual, channels, 3, 1, f"{name}_second")
            if changes_shape:
                hidden = conv_norm(hidden, channels, 1, stride, f"{name}_shortcut")
            hidden = activation(hidden + residual)
    return hk.Linear(num_outputs, name="output")(jnp.mean(hidden, axis=(1, 2)))


def resnet20_frn(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """ResNet-20 (3 stages of 3 blocks; 16, 32, 64 channels), filter response normalisation, ReLU.

    Convolutions have biases; the shortcut into a stage of another width is a normalised 1x1
    convolution; a mean over all pixels precedes the output, so any image size will do.
    274,042 parameters on 3 channels with 10 classes, 279,892 with 100.
    """
    return _resnet20(inputs, num_outputs, jax.nn.relu)


def resnet20_frn_swish(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """`resnet20_frn` with swish in place of ReLU; the same counts."""
    return _resnet20(inputs, num_outputs, jax.nn.swish)


def _wide_resnet(inputs: jax.Array, num_outputs: int, depth: int, widening: int) -> jax.Array:
    def norm_relu(hidden: jax.Array, name: str) -> jax.Array:
        return jax.nn.relu(FilterResponseNorm(name=f"{name}_norm")(hidden))

    # As in the original, convolutions have no biases: beta of the next normalisation shifts.
    conv = functools.partial(hk.Conv2D, with_bias=False)
    hidden = conv(16, 3, name="stem_conv")(_as_images(inputs))
    for stage, channels in enumerate((16 * widening, 32 * widening, 64 * widening)):
        for block in range((depth - 4) // 6):
            name = f"stage_{stage}_block_{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            active = norm_relu(hidden, f"{name}_first")
            residual = conv(channels, 3, stride, name=f"{name}_first_conv")(active)
            residual = norm_relu(residual, f"{name}_second")
            residual = conv(channels, 3, name=f"{name}_second_conv")(residual)
            if block == 0:
                hidden = conv(channels, 1, stride, name=f"{name}_shortcut_conv")(active)
            hidden = hidden + residual
    hidden = norm_relu(hidden, "final")
    return hk.Linear(num_outputs, name="output")(jnp.mean(hidden, axis=(1, 2)))


def wide_resnet_16_4(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Pre-activation wide ResNet, depth 16, width 4, filter response normalisation, ReLU.

    2,750,698 parameters on 3 channels with 10 classes: 2,745,274 in convolutions and output, as in
    the original (Zagoruyko and Komodakis, 2016), and 3 for each of 1,808 normalised channels.
    """
    return _wide_resnet(inputs, num_outputs, depth=16, widening=4)


def wide_resnet_28_10(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """`wide_resnet_16_4` with depth 28 and width 10.

    36,545,860 parameters on 3 channels with 100 classes: 36,518,932 in convolutions and output,
    and 3 for each of 8,976 normalised channels.
    """
    return _wide_resnet(inputs, num_outputs, depth=28, widening=10)


def cnn_lstm(inputs: jax.Array, num_outputs: int) -> jax.Array:
    """Embedding 20000x128, convolution 64 of width 5, ReLU, max-pool 4, LSTM 128, its last step.

    2,700,098 parameters with 2 outputs. `inputs` are integer tokens (rows, length), length >= 8.
    """
    if not jnp.issubdtype(inputs.dtype, jnp.integer) or inputs.ndim != 2 or inputs.shape[1] < 8:
        raise UserError(
            "cnn_lstm needs integer tokens of shape (rows, length) with length at least 8, "
            f"not {inputs.dtype} of shape {inputs.shape}. A file of one's own says --inputs=tokens."
        )
    hidden = TokenEmbedding(VOCABULARY_SIZE, 128, name="embedding")(inputs)
    hidden = jax.nn.relu(hk.Conv1D(64, 5, padding="VALID", name="conv")(hidden))
    # Windows that do not overlap are a reshape; the gradient of `hk.max_pool` is far slower on CPU.
    rows, steps = hidden.shape[0], hidden.shape[1] // 4
    hidden = hidden[:, : 4 * steps].reshape(rows, steps, 4, 64).max(axis=2)
    lstm = hk.LSTM(128, name="lstm")
    _, state = hk.dynamic_unroll(lstm, hidden, lstm.initial_state(rows), time_major=False)
    return hk.Linear(num_outputs, name="output")(state.hidden)


# fmt: off
NETWORKS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    function.__name__: function for function in (
        logistic_regression, mlp_toy, mlp_20_20, mlp_50, mlp_regression, mlp_regression_small,
        mlp_classification, mlp_400_400, lenet5, lenet, resnet20_frn, resnet20_frn_swish,
        wide_resnet_16_4, wide_resnet_28_10, cnn_lstm,
    )
}
# fmt: on


def get_network(
    name: str | Callable[..., jax.Array], num_outputs: int, several: Sequence[str] = ()
) -> Network:
    """Finds a network by name.

    Args:
        name: a key of `NETWORKS`, or `package.module:function` or `path/to/file.py:function` for
            one of the user's own, looked for in the working directory first. The function takes
            `inputs` and, if it has a parameter of that name, `num_outputs`. Or the function itself.
        num_outputs: width of the network's last layer.
        several: names of the inputs, where there are several: a function with a parameter of each
            name gets them so, and any other a dict (or tuple) of them.

    Returns:
        A Haiku function of `inputs` alone, ready for `hk.transform`.

    Raises:
        UserError: there is no such built-in, module or function.
    """
    function = name if callable(name) else _find(name)
    try:
        sized = "num_outputs" in inspect.signature(function).parameters
        network = functools.partial(function, num_outputs=num_outputs) if sized else function
        signature = inspect.signature(network)
        if several and {*several} <= signature.parameters.keys():
            signature.bind(**dict.fromkeys(several))
            return lambda inputs: network(**inputs)
        signature.bind(None)
    except (TypeError, ValueError):
        parts = f" ({', '.join(several)})" if several else ""
        raise UserError(
            f"Network '{name}' cannot be called with the inputs{parts} alone, or with the inputs "
            "and num_outputs."
        ) from None
    return network


def source_of(name: str | Callable[..., jax.Array]) -> dict[str, str | None]:
    """Where a network's code is, and the SHA-256 of that file; nothing for a built-in one.

    A built-in network belongs to a version of this package and changes with it alone. Of a
    function without a name, the SHA-256 is of its own source, where Python knows that.
    """
    if callable(name):
        try:
            source = inspect.getsource(name)
        except (OSError, TypeError):
            return {"file": IN_MEMORY, "sha256": None}
        return {"file": IN_MEMORY, "sha256": hashlib.sha256(source.encode()).hexdigest()}
    if ":" not in name:
        return {"file": None, "sha256": None}
    file = inspect.getsourcefile(inspect.unwrap(_find(name)))
    assert file is not None
    path = pathlib.Path(file).resolve()
    return {"file": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def check_tokens(name: str, tokens: Inputs) -> None:
    """Refuses tokens that a built-in network does not know."""
    if name == "cnn_lstm" and tokens.max() >= VOCABULARY_SIZE:
        raise UserError(f"cnn_lstm knows tokens below {VOCABULARY_SIZE} only.")


def _find(name: str) -> Callable[..., jax.Array]:
    if ":" not in name:
        if name not in NETWORKS:
            own = ("package.module:function", "path/to/file.py:function")
            raise unknown_name("network", name, [*NETWORKS, *own])
        return NETWORKS[name]
    module_name, _, function_name = name.rpartition(":")
    try:
        module = _import(module_name)
    except Exception as error:  # the user's module may fail in any way
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = ""
        if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or " "):
            hint = f"; modules are looked for in {os.getcwd()} and in the folders of PYTHONPATH"
        raise UserError(
            f"Network '{name}': '{module_name}' cannot be imported ({why}){hint}."
        ) from error
    if not hasattr(module, function_name):
        raise UserError(f"Network '{name}': module '{module_name}' has no '{function_name}'.")
    function = getattr(module, function_name)
    if inspect.isclass(function):
        raise UserError(
            f"Network '{name}': '{function_name}' is a class; name a function of the inputs that "
            f"calls one, such as lambda inputs: {function_name}(...)(inputs)."
        )
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"Network '{name}': '{function_name}' is not a function ({kind}).")
    return function


def _import(name: str) -> ModuleType:
    """A module by its name, or by the path of its file, whose own folder it may import from."""
    folder = str(pathlib.Path(name).expanduser().resolve().parent)
    is_file = name.endswith(".py")
    place = folder if is_file else os.getcwd()
    if place not in sys.path:
        sys.path.insert(0, place)
    if not is_file:
        return importlib.import_module(name)
    path = pathlib.Path(name).expanduser().resolve()
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def default_network_name(task: str, input_shape: tuple[int, ...], input_is_integer: bool) -> str:
    """Chooses the built-in network for data of which nothing but its form is known.

    For tables a small one, whose posterior HMC reaches by itself.

    Args:
        task: "regression" or "classification".
        input_shape: shape of one row of the inputs.
        input_is_integer: whether the inputs are integers; in one dimension these are tokens.
    """
    if input_is_integer and len(input_shape) == 1:
        return "cnn_lstm"
    if len(input_shape) == 3 and min(input_shape[:2]) >= 28 and input_shape[2] >= 3:
        return "lenet"
    if task == "classification" and len(input_shape) > 1:
        return "mlp_classification"
    return "mlp_toy" if task == "regression" and input_shape == (1,) else "mlp_50"
