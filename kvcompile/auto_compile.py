"""transformers compiles decoding by itself on accelerators; not what is compiled already.

With a static cache there, `generate` calls `torch.compile(model.__call__)`, that is Inductor.
PyTorch then looks through the compiled model at the original one, and Inductor meets handles in the
cache, which it cannot write to. A model that this backend compiles is called as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from kvcompile.wrappers import compiled_call, innermost


def install(backend: Callable[..., Any]) -> None:
    """Let models of transformers that `backend` compiles decode by it; idempotent.

    Whoever has such a model has imported transformers, so it need not be imported here.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return
    models = module.PreTrainedModel
    plain = getattr(models, "get_compiled_call", None)
    if plain is None or hasattr(plain, "_kvcompile"):
        return

    @functools.wraps(plain)
    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        if _is_compiled(self, backend):
            return self.__call__
        return plain(self, compile_config)

    get_compiled_call._kvcompile = True  # type: ignore[attr-defined]
    models.get_compiled_call = get_compiled_call


def _is_compiled(model: Any, backend: Callable[..., Any]) -> bool:
    """Whether calls of a model from this thread are compiled by a backend, however it was said."""
    functions: tuple[Any, Any] = compiled_call(model), model.forward
    for function in functions:
        callback = getattr(getattr(function, "dynamo_ctx", None), "callback", None)
        if callback is None and hasattr(function, "_torchdynamo_orig_callable"):
            callback = inspect.getclosurevars(function).nonlocals.get("callback")
        if callback is not None and innermost(callback) is backend:
            return True
    return False
