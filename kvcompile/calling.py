"""How a user's model is called: compiled apart from what the user has compiled, with its cache."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

CACHE_PARAMETERS = ("cache", "past_key_values")
"""Names that transformers has given to the cache, newest first."""


def isolated(model: nn.Module, name: str) -> Callable[..., Any]:
    """Return a function that calls the model, with a code object of its own.

    Dynamo keeps what it compiles by code object. With a new one it compiles anew, counts its
    limit of recompilations anew, and leaves what the user has compiled alone.

    Args:
        model: What to call.
        name: What the function is called in Dynamo's logs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(
        call.__code__.replace(co_name=name), call.__globals__, closure=call.__closure__
    )


def cache_parameter(model: nn.Module) -> str | None:
    """Return the name under which the model's forward takes its cache; None if it takes none."""
    return next((name for name in CACHE_PARAMETERS if accepts(model, name)), None)


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward names this parameter."""
    return name in inspect.signature(model.forward).parameters
