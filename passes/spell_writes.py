"""Assignments to a range of tokens of a buffer become `index_copy_`, one spelling for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    number,
    same_memory,
    same_shape,
    the_dim,
    the_node,
    value,
)

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program

aten = torch.ops.aten

Size = int | fx.Node

_RANGES = (aten.slice.Tensor, aten.narrow.default)


def spell_writes(program: Program) -> None:
    """Turn `buffer[:, :, start : start + S] = new` into `index_copy_` at start, start + 1, ...

    For inputs of four dimensions. Whoever reads the buffer later reads the result, which is the
    buffer: afterwards its readers follow from its writes, as they do for other in-place operators.
    """
    positions: dict[object, fx.Node] = {}
    for buffer in program.placeholders:
        tensor = value(buffer)
        if tensor is None or tensor.dim() != 4 or not tensor.is_floating_point():
            continue
        names = list(_names(buffer))
        for copy in _range_copies(names):
            written = _respell(program.graph, copy, positions)
            if written is None:
                continue
            later = _behind(written)
            for name in names:
                name.replace_all_uses_with(written, delete_user_cb=later.__contains__)
            names.append(written)


def _names(buffer: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that are the whole buffer itself, under whatever name."""
    yield buffer
    for user in buffer.users:
        if same_memory(user) is not user and user.args[0] is buffer:
            yield from _names(user)


def _range_copies(names: list[fx.Node]) -> list[fx.Node]:
    """Return the copies into a range of a buffer, in the order of the graph for each name."""
    found = []
    for view in [user for name in names for user in name.users]:
        if is_call(view, *_RANGES) and len(view.users) == 1:
            copy = next(iter(view.users))
            if is_call(copy, aten.copy_.default) and copy.args[0] is view and not copy.users:
                found.append(copy)
    return found


def _respell(graph: fx.Graph, copy: fx.Node, positions: dict[object, fx.Node]) -> fx.Node | None:
    """Replace a copy into a range, and return what does the same; None if it is left alone."""
    view, new = the_node(copy.args[0]), the_node(copy.args[1])
    buffer, target, tokens = the_node(view.args[0]), value(view), value(new)
    dim, start = the_dim(view, 1), _start(view, value(buffer))
    if start is None or target is None or tokens is None or dim not in (1, 2):
        return None
    if tokens.dtype != target.dtype or not same_shape(tokens, target):
        return None
    key = (start, str(target.shape[dim]), target.device)
    with graph.inserting_before(copy):
        if key not in positions:
            positions[key] = _positions(graph, start, new, dim)
        where = (buffer, dim, positions[key], new)
        written = graph.call_function(aten.index_copy_.default, where)
    written.meta = {**copy.meta, "val": buffer.meta["val"]}
    graph.erase_node(copy)
    graph.erase_node(view)
    return written


def _start(view: fx.Node, buffer: torch.Tensor | None) -> Size | None:
    """Return where a range starts, counted from 0; None if that is not known."""
    start = view.args[2] if len(view.args) > 2 else 0
    step = view.args[4] if is_call(view, aten.slice.Tensor) and len(view.args) > 4 else 1
    if number(step) != 1.0 or buffer is None:
        return None
    if isinstance(start, fx.Node):
        val = start.meta.get("val")
        known = isinstance(val, int | torch.SymInt) and statically_known_true(val >= 0)
        return start if known else None
    if start is None:
        return 0
    assert isinstance(start, int)
    size = fixed(buffer.shape[the_dim(view, 1)])
    if start >= 0:
        return start
    return None if size is None else max(start + size, 0)


def _positions(graph: fx.Graph, start: Size, new: fx.Node, dim: int) -> fx.Node:
    """Insert start, start + 1, ..., one number per new token."""
    tokens = new.meta["val"]
    size = tokens.shape[dim]
    count: Size | None = fixed(size)
    if count is None:
        count = graph.call_function(aten.sym_size.int, (new, dim))
        count.meta["val"] = size
    device = {"device": tokens.device, "pin_memory": False}
    counted = graph.call_function(aten.arange.default, (count,), device)
    assert isinstance(tokens, FakeTensor)
    with tokens.fake_mode:
        counted.meta["val"] = torch.empty(size, dtype=torch.int64, device=tokens.device)
    if start == 0:
        return counted
    moved = graph.call_function(aten.add.Tensor, (counted, start))
    moved.meta["val"] = counted.meta["val"]
    return moved


def _behind(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that come after one."""
    found: set[fx.Node] = set()
    while node.next.op != "root":
        node = node.next
        found.add(node)
    return found
