"""`torch.compile(model, backend="kvcompile").generate(...)` runs compiled.

PyTorch's wrapper forwards attributes to the original module, so that its `generate` would call the
original forward, uncompiled and without a word. For wrappers of this backend, `generate` and its
kin run on the original module while that module's calls, in this thread, go to the wrapper.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from torch._dynamo.eval_frame import OptimizedModule

from kvcompile.codegen.errors import KvcompileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

GENERATORS = frozenset({"generate", "generate_batch"})


class HeadSplitError(KvcompileError):
    """Tensor parallelism would cut a KV head in pieces."""


class _ThreadGate:
    """Stands in a module's `_compiled_call_impl`; sends each thread where it asked to go."""

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None) -> None:
        self.before = before
        self.plain = before if before is not None else module._call_impl
        self.compiled: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = self.compiled.get(threading.get_ident())
        return (stack[-1] if stack else self.plain)(*args, **kwargs)


_lock = threading.Lock()


class _Compiled:
    """Context in which calls of `module` from this thread run `compiled`."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self.compiled = module, compiled

    def __enter__(self) -> None:
        with _lock:
            gate = self.module._compiled_call_impl
            if not isinstance(gate, _ThreadGate):
                gate = _ThreadGate(self.module, gate)
                self.module._compiled_call_impl = gate
            gate.compiled.setdefault(threading.get_ident(), []).append(self.compiled)

    def __exit__(self, *exception: object) -> None:
        with _lock:
            gate = self.module._compiled_call_impl
            assert isinstance(gate, _ThreadGate)
            stack = gate.compiled[threading.get_ident()]
            stack.pop()
            if not stack:
                del gate.compiled[threading.get_ident()]
            if not gate.compiled:
                self.module._compiled_call_impl = gate.before


def compiled_call(module: nn.Module) -> object:
    """Return what a call of a module from this thread goes to, or None if it is not compiled."""
    gate: object = module._compiled_call_impl
    if isinstance(gate, _ThreadGate):
        stack = gate.compiled.get(threading.get_ident())
        return stack[-1] if stack else gate.before
    return gate


def innermost(function: object) -> object:
    """Return the innermost compiler function of what Dynamo calls back."""
    names = ("_torchdynamo_orig_backend", "compiler_fn", "_torchdynamo_orig_callable")
    while True:
        inner = next((f for n in names if (f := getattr(function, n, None)) is not None), None)
        if inner is None or inner is function:
            return function
        function = inner


def refuse_split_heads(model: Any) -> None:
    """Raise if transformers has sharded a model with fewer KV heads than would go round.

    Its own forward, and Dynamo with it, finds that out as a `view` of a wrong size.

    Raises:
        HeadSplitError: Names the heads and the processes.
    """
    processes = getattr(model, "_tp_size", None) or 1
    tensor_parallel = sys.modules.get("transformers.distributed.tensor_parallel")
    heads_of = getattr(tensor_parallel, "get_kv_heads_per_rank", None)
    if processes == 1 or heads_of is None:
        return
    heads = getattr(model.config.get_text_config(decoder=True), "num_key_value_heads", None)
    if isinstance(heads, int) and heads_of(model.tp_plan, heads, processes) is None:
        hint = "take a number of processes that divides the heads"
        if heads == 1:
            hint += ', or give each the whole head: "colwise_gather_output" for k_proj and v_proj'
        raise HeadSplitError(
            f"tp_plan splits k_proj and v_proj among {processes} processes, which {heads} KV "
            f"head{'s' * (heads != 1)} cannot be divided among; {hint}"
        )


def install(backend: Callable[..., Any]) -> None:
    """Let wrappers whose compiler is `backend` run their generators compiled; idempotent."""
    if getattr(OptimizedModule.__getattr__, "_kvcompile", False):
        return
    plain_getattr = OptimizedModule.__getattr__

    @functools.wraps(plain_getattr)
    def getattr_with_generators(self: OptimizedModule, name: str) -> Any:
        found = plain_getattr(self, name)
        if name not in GENERATORS or innermost(self.dynamo_ctx.callback) is not backend:
            return found
        module = self._orig_mod

        @functools.wraps(found)
        def run(*args: Any, **kwargs: Any) -> Any:
            refuse_split_heads(module)
            with _Compiled(module, self.dynamo_ctx(module._call_impl)):
                return found(*args, **kwargs)

        return run

    getattr_with_generators._kvcompile = True  # type: ignore[attr-defined]
    OptimizedModule.__getattr__ = getattr_with_generators  # type: ignore[method-assign]
