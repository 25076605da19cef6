"""Running a graph that was not rewritten: handles among its inputs become dense tensors.

Compilers trace through tensor subclasses and would lose or refuse writes to a handle. They are
given the dense tensors instead, and writes reach what the handle stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvcompile.runtime.handle import KVTensor

INPUT = "graph input"
"""Operator name under which a handle given to an unrewritten graph is counted."""


def with_dense_inputs(captured: fx.GraphModule, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return `inner`, compiled for dense inputs, as a callable that takes handles too.

    A static handle is a buffer: it becomes the dense buffer it stands for, so that the graph's
    writes persist. A growing one is read, unless the graph writes to anything at all.
    """
    handles = [
        i
        for i, node in enumerate(n for n in captured.graph.nodes if n.op == "placeholder")
        if isinstance(node.meta.get("example_value"), KVTensor)
    ]
    if not handles:
        return inner
    writes = any(_may_write(node) for node in captured.graph.nodes)

    def run(*args: Any) -> Any:
        given = list(args)
        for i in handles:
            handle = given[i]
            if isinstance(handle, KVTensor):
                given[i] = dense_input(handle, is_written=writes)
        return inner(*given)

    return run


def dense_input(handle: KVTensor, *, is_written: bool) -> torch.Tensor:
    """Return the dense tensor of a handle for a graph that reads it, or writes to it."""
    static = handle.store is not None and handle.store.capacity is not None
    return handle.turn_dense(INPUT) if is_written or static else handle.read(INPUT)


def _may_write(node: fx.Node) -> bool:
    """Whether a torch-level call changes a tensor in place."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    return node.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))
