"""Distributed tensors (DTensor): what a graph does with them is done on this process's shards.

Every process of a tensor-parallel model captures the same graph, with sharded weights among its
inputs. Traced with DTensors around its own shards, the graph becomes what this process runs: plain
operators and collectives, with as many heads as this process has.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten

IS_SHARD = "shard"
"""Metadata of an input: whether it is given as a DTensor, of which the graph takes the shard."""


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor; asked without loading `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor or the mesh of devices that one lies on."""
    return is_dtensor(value) or _mesh(value) is not None


def _mesh(value: object) -> object | None:
    """Return the mesh that a value is, or that Dynamo traces as this value."""
    module = sys.modules.get("torch.distributed.device_mesh")
    mesh = value.real_obj if isinstance(value, FakeScriptObject) else value
    return mesh if module is not None and isinstance(mesh, module.DeviceMesh) else None


def local(captured: Any) -> Any:
    """Return what one process's graph takes for a captured input; None for a mesh."""
    if is_dtensor(captured):
        return captured._local_tensor
    return captured if _mesh(captured) is None else None


def distributed(captured: Any, shard: Any) -> Any:
    """Return the input as it was captured, around what `local` made of it."""
    if is_dtensor(captured):
        return type(captured)(shard, captured._spec, requires_grad=False)
    return shard if (mesh := _mesh(captured)) is None else mesh


@contextmanager
def shards_traced() -> Iterator[None]:
    """Let the current trace see what a DTensor runs on its shard, not the DTensor itself.

    A trace before dispatch is asked before DTensor is, and cannot take one.
    """
    mode = get_proxy_mode()
    assert isinstance(mode, ProxyTorchDispatchMode)
    with ProxyTorchDispatchMode(mode.tracer, mode.tracing_mode):
        yield


def respell_linear(graph: fx.Graph) -> None:
    """Spell a matrix times a transposed one as `linear`, which dispatch to DTensor has taken apart.

    Every other `linear` of a canonical graph is whole, and later passes look for that.
    """
    for node in graph.nodes:
        bias: fx.Node | None
        if node.target is aten.mm.default:
            (x, transposed), bias = node.args, None
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, x, transposed = node.args
        else:
            continue
        has_row = bias is None or bias.meta["val"].dim() == 1
        if transposed.target is aten.t.default and has_row:
            node.target, node.args = aten.linear.default, (x, transposed.args[0], bias)


def refuse_distributed(outputs: Any) -> None:
    """Raise if a DTensor is among a graph's outputs.

    Raises:
        ValueError: Names the output and says what to do.
    """
    for i, value in enumerate(outputs):
        if is_dtensor(value):
            raise ValueError(
                f"output {i} of the graph is a DTensor; let the model return and cache local "
                "tensors (use_local_output=True, or to_local())"
            )
