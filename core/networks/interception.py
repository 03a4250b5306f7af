"""Interception of the calls of Haiku layers: networks are not rewritten."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

Layer = functools.partial[jax.Array]  # a function of the inputs; holds the call's other arguments


def intercept_layers(
    kinds: Collection[type[hk.Module]],
    intercept: Callable[[hk.Module, Layer, jax.Array], jax.Array],
) -> Any:
    """Context in which `intercept(module, layer, inputs)` runs in place of `layer(inputs)`.

    Args:
      kinds: classes of modules, exactly: a subclass may compute something else.
      intercept: what runs in place of their calls.
    """

    def method(
        next_method: Callable, arguments: tuple, keywords: dict, context: hk.MethodContext
    ) -> Any:
        if type(context.module) not in kinds or context.method_name != "__call__":
            return next_method(*arguments, **keywords)
        # Haiku's layers take `inputs`, by position or by name, and other arguments by name only.
        others = dict(keywords)
        inputs = arguments[0] if arguments else others.pop("inputs")
        layer = functools.partial(next_method, **others)
        return intercept(context.module, layer, jnp.asarray(inputs))

    return hk.intercept_methods(method)
