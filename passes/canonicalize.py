"""Re-trace Dynamo's graph to pre-dispatch ATen: one spelling of everything."""

from __future__ import annotations

import builtins
import operator
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._sympy.symbol import SymT, symbol_is_type

from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.shards import (
    IS_SHARD,
    distributed,
    is_distributed,
    is_dtensor,
    local,
    refuse_distributed,
    respell_linear,
    shards_traced,
)
from kvcompile.passes.spell_repeats import spell_repeats
from kvcompile.passes.spell_writes import spell_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcompile.passes.base import PassOptions
    from kvcompile.passes.ir.program import Program

aten = torch.ops.aten

_UNTRACKED = object()

_PLACES = (operator, torch, torch.nn.functional, torch._C._nn)
"""Where functions are that Dynamo leaves as they are, and whose names are those of operators."""

_SEEN_BY_DYNAMO = (
    aten.add,
    aten.cat,
    aten.div,
    aten.expand,
    aten.gelu,
    aten.layer_norm,
    aten.linear,
    aten.matmul,
    aten.mean,
    aten.mul,
    aten.neg,
    aten.permute,
    aten.pow,
    aten.reshape,
    aten.rsqrt,
    aten.scaled_dot_product_attention,
    aten.silu,
    aten.slice,
    aten.softmax,
    aten.sub,
    aten.transpose,
    aten.unsqueeze,
    aten.view,
)
"""Operators, common and never their own argument, whose results Dynamo knows: `_Retrace.record`."""

IS_HANDLE = "kv_handle"
"""Metadata of an input: whether it was a handle when the graph was captured."""


class Canonicalize:
    """Re-trace to pre-dispatch ATen in the fake mode the graph was captured in."""

    name = "canonicalize"
    needs = Stage.CAPTURED
    gives = Stage.CANONICAL

    def run(self, program: Program, options: PassOptions) -> None:
        """Replace the graph by its re-trace; handle placeholders become plain fakes.

        `scaled_dot_product_attention` survives whole, matmul and softmax have one spelling, and
        symbolic sizes stay the ones that Dynamo guards on, because the fake mode is Dynamo's own.
        Distributed tensors become this process's shards.
        """
        captured = program.placeholders
        plain, fake_mode = plain_inputs(program.module)
        inputs = [local(value) for value in plain]
        # make_fx asks for the tracing context's fake mode and refuses two different ones.
        with (
            tracing(TracingContext(fake_mode)),
            fx_traceback.preserve_node_meta(),
            _without_tensor_meta(),
        ):
            retrace = _Retrace(program.module)
            retraced = make_fx(
                retrace.run,
                decomposition_table=retrace.shortcuts(),
                pre_dispatch=True,
                tracing_mode="symbolic",
                _allow_non_fake_inputs=True,
            )(*inputs)
        for before, after, value in zip(captured, _placeholders(retraced), plain, strict=True):
            after.meta["val"] = local(value)
            after.meta[IS_HANDLE] = before.meta["example_value"] is not value
            after.meta[IS_SHARD] = is_dtensor(value)
            if "tensor_dict" in before.meta:
                after.meta["tensor_dict"] = before.meta["tensor_dict"]
        for node in retraced.graph.nodes:
            node.meta.pop("tensor_meta", None)
        program.module = retraced
        if retrace.is_distributed:
            respell_linear(retraced.graph)
        spell_repeats(program)
        retraced.graph.eliminate_dead_code(is_impure)
        _refuse_fake_constants(retraced)
        spell_writes(program)
        retraced.recompile()


def _refuse_fake_constants(module: fx.GraphModule) -> None:
    """Raise if tensors that were made on the way became constants: they have no values.

    Function transforms, `vmap` among them, hide what they do from a trace before dispatch.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(operator.attrgetter(str(node.target))(module), FakeTensor):
            raise ValueError(f"the trace lost how {node.target} is computed (torch.func, vmap?)")


@contextmanager
def _without_tensor_meta() -> Iterator[None]:
    """Leave out the `tensor_meta` of each node while this thread traces; make_fx has no switch.

    Nobody reads it here or below: every stage and Inductor take sizes from `val`. Its questions
    about contiguity are a sixth of the time of a trace over symbolic sizes, and they add guards:
    asked of a slice of the past, they fix the length of the past to the one being traced.
    """
    extract = "_extract_tensor_metadata"
    original = getattr(proxy_tensor, extract, None)
    if original is None:  # a torch that no longer computes it has nothing to leave out
        yield
        return
    this_thread = threading.get_ident()

    def skip(*args: Any) -> Any:
        return None if threading.get_ident() == this_thread else original(*args)

    with mock.patch.object(proxy_tensor, extract, skip):
        yield


class _Retrace(fx.Interpreter):
    """Runs the captured graph so that what make_fx sees is what will run.

    Under `dynamic=True` Dynamo passes every float attribute, the attention's scale among them, as
    a tensor and reads it with `item()`. Asking for its value adds a guard on that value. And
    make_fx only records that a graph enters and leaves autocast, and would take every dtype within
    for the one outside; entering a region by hand does both.
    """

    module: fx.GraphModule
    node: fx.Node | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.regions: list[torch.autocast] = []
        values = (n.meta.get("example_value") for n in self.module.graph.nodes)
        self.is_distributed = any(is_distributed(value) for value in values)
        try:
            return super().run(*args, **kwargs)
        finally:
            while self.regions:
                self.regions.pop().__exit__(None, None, None)

    def shortcuts(self) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
        """Return `record` for every overload whose results Dynamo has seen, as make_fx asks."""
        if any(_reshapes_in_place(node) for node in self.module.graph.nodes):
            return {}  # what Dynamo shows of a value is then its last shape, not its first
        overloads = [getattr(op, name) for op in _SEEN_BY_DYNAMO for name in op.overloads()]
        return {op: partial(self.record, op) for op in overloads if not op._schema.is_mutable}

    def record(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Record an operator as one node whose value is the one that Dynamo found.

        Dynamo has run this very call on fakes of the same mode. Running it again, with what it is
        composed of, was a third to nearly half of a trace over symbolic sizes.

        Returns `NotImplemented`, which makes make_fx run the operator, where the call may not be
        the same: a node that is composed of several operators, results that stand for a handle,
        constants that a later `item()` may ask for, autocast, which chooses dtypes.
        """
        if self.node is None:
            return NotImplemented
        known = self.node.meta.get("example_value")
        mode = proxy_tensor.get_proxy_mode()
        if (
            type(known) is not FakeTensor
            or mode is None
            or not isinstance(tracer := mode.tracer, proxy_tensor.PythonKeyTracer)
            or _operator(self.node) != op._opname
            or torch.is_autocast_enabled(known.device.type)
        ):
            return NotImplemented
        leaves, spec = tree_flatten((args, kwargs))
        proxies = [_proxy_of(leaf, tracer) for leaf in leaves]
        if any(proxy is _UNTRACKED for proxy in proxies):  # `in` would ask proxies, and record that
            return NotImplemented
        call_args, call_kwargs = tree_unflatten(proxies, spec)
        name = tracer.graph._target_to_str(op._opname)
        node = tracer.create_proxy("call_function", op, call_args, call_kwargs, name=name)
        self.node = None  # what the call does besides is not this operator
        return proxy_tensor.track_tensor_tree(known, node, constant=None, tracer=tracer)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        value = n.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and _is_input_float(value):
            return float(value)
        if n.target is _enter_autocast:
            self.regions.append(torch.autocast(*n.args))  # type: ignore[arg-type]
            return self.regions[-1].__enter__()
        if n.target is _exit_autocast:
            return self.regions.pop().__exit__(None, None, None)
        if self.is_distributed:
            return self.run_beside_shards(n, value)
        return super().run_node(n)

    def run_beside_shards(self, n: fx.Node, value: object) -> Any:
        """Run a node of a graph with distributed tensors."""
        if n.op == "placeholder":
            return distributed(value, super().run_node(n))
        operands = [self.env[operand] for operand in n.all_input_nodes]
        if n.op == "output":
            refuse_distributed(fx.map_arg(n.args[0], self.env.__getitem__))
        if not any(is_distributed(v) for v in (value, *operands)):
            return super().run_node(n)
        with shards_traced():
            return super().run_node(n)


def _proxy_of(leaf: object, tracer: proxy_tensor.PythonKeyTracer) -> object:
    """Return what stands for an argument in the graph that is being recorded."""
    if isinstance(leaf, torch.Tensor):
        tracked = proxy_tensor.fetch_object_proxy(tracer, leaf)
        if isinstance(tracked, torch.Tensor) or tracked.constant is not None:
            return _UNTRACKED
        return tracked.proxy
    if isinstance(leaf, proxy_tensor.py_sym_types):
        return proxy_tensor.fetch_sym_proxy(tracer)(leaf)
    return leaf


def _operator(call: fx.Node) -> str | None:
    """Return the name of the ATen operator that a captured call is, if it is one alone.

    A function of the user's may bear the name of an operator and call it on the way.
    """
    if call.target is operator.getitem:
        match call.args[1]:
            case (builtins.Ellipsis, slice()):
                return "slice"
    if call.op == "call_method":
        return str(call.target)
    name = str(getattr(call.target, "__name__", ""))
    is_torchs = any(getattr(place, name, None) is call.target for place in _PLACES)
    return name if is_torchs else None


def _reshapes_in_place(call: fx.Node) -> bool:
    """Whether a call changes the shape or the strides of its argument: `t_`, `unsqueeze_`, ..."""
    if isinstance(call.target, torch._ops.OpOverload):
        return torch.Tag.inplace_view in call.target.tags
    name = getattr(call.target, "__name__", call.target)
    packet = getattr(aten, str(name), None) if call.op.startswith("call") else None
    return isinstance(packet, torch._ops.OpOverloadPacket) and any(
        torch.Tag.inplace_view in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _is_input_float(value: torch.SymFloat) -> bool:
    """Whether a number follows from float inputs alone, not from sizes."""
    return all(symbol_is_type(s, SymT.FLOAT) for s in value.node.expr.free_symbols)


def plain_inputs(captured: fx.GraphModule) -> tuple[list[object], FakeTensorMode]:
    """Return fakes of a captured graph's inputs, dense ones for handles, and their fake mode.

    Distributed tensors and meshes stay what they are.
    """
    values = [n.meta["example_value"] for n in _placeholders(captured)]
    fake_mode = _fake_mode(values)
    return [_plain(v, fake_mode) for v in values], fake_mode


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _fake_mode(values: list[object]) -> FakeTensorMode:
    """Return the fake mode of the captured values, or a new one for a graph without tensors."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            inner = getattr(value, value.__tensor_flatten__()[0][0])
            if isinstance(inner, FakeTensor):
                return inner.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def _plain(value: object, fake_mode: FakeTensorMode) -> object:
    """Return the dense fake that a handle stands for; anything else as it is."""
    if is_dtensor(value) or not (
        isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)
    ):
        return value
    with fake_mode:
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)


def is_impure(node: fx.Node) -> bool:
    """Whether a node matters though nobody reads its result.

    In-place operators do, and those that return nothing at all: assertions. Dropout that is off
    draws no number.
    """
    target = node.target
    if target is torch.ops.aten.dropout.default and (node.args[1] == 0 or node.args[2] is False):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return node.is_impure()
    return node.is_impure() or target._schema.is_mutable or not target._schema.returns
