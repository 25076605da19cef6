"""Where the position of a new token comes from: a number among the inputs, or not."""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.ir.program import PositionSource
from kvcompile.passes.patterns.layout import fixed, is_call, number, peel, the_node, value, writers

aten = torch.ops.aten

_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
)
"""Operators that leave the first number where it is; the dtypes of positions are integers."""

_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def position_source(inputs: list[fx.Node], position: fx.Node) -> PositionSource | None:
    """Return the input whose first number is the first of some positions, or None.

    Recognises `c`, a vector of positions, and `arange(S) + c`, as counters of static caches are
    added to; also behind reshapes and casts among integers. The input is read before the graph
    runs, so that what the graph writes to it must come after the graph's own reading: after the
    sum, or, where positions are the input itself, after all that uses them.

    Args:
        inputs: The graph's inputs.
        position: Positions of the new tokens, int [S].
    """
    node, total = position, None
    while node.op != "placeholder":
        before = _behind(node)
        if before is None:
            return None
        if is_call(node, aten.add.Tensor):
            total = node
        node = before
    shape = value(position)
    new_len = fixed(shape.shape[0]) if shape is not None and shape.dim() == 1 else None
    if new_len is None or not _is_integer(node) or node not in inputs:
        return None
    writes = list(writers(node))
    reads = [n for n in position.users if n not in writes] if total is None else [total]
    if not _all_before(reads, writes):
        return None
    return PositionSource(
        input=inputs.index(node),
        counts_up=total is not None or new_len == 1,
        advances=len(writes) == 1 and _adds(node, writes[0], new_len),
    )


def _behind(node: fx.Node) -> fx.Node | None:
    """Return the operand with the same first number, or None."""
    if is_call(node, aten.add.Tensor) and not node.kwargs:
        for count, other in (node.args, node.args[::-1]):
            if _is_count(count) and isinstance(other, fx.Node) and _is_one_number(other):
                return other
        return None
    if (before := peel(node)) is not node:
        return before
    source = node.args[0] if node.args else None
    if is_call(node, *_RESHAPES) and isinstance(source, fx.Node) and _is_integer(node):
        return source
    return None


def _is_count(node: fx.node.Argument) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if not isinstance(node, fx.Node) or not is_call(node, *_ARANGES):
        return False
    start = node.args[0] if node.target is not aten.arange.default else 0
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    return number(start) == 0 and number(step) == 1


def _is_integer(node: fx.Node) -> bool:
    val = value(node)
    return val is not None and val.dtype in (torch.int64, torch.int32)


def _is_one_number(node: fx.Node) -> bool:
    val = value(node)
    return val is not None and all(fixed(size) == 1 for size in val.shape)


def _all_before(nodes: list[fx.Node], others: list[fx.Node]) -> bool:
    order = {n: i for i, n in enumerate(others[0].graph.nodes)} if others else {}
    return all(order[node] < order[other] for node in nodes for other in others)


def _adds(counter: fx.Node, write: fx.Node, new_len: int) -> bool:
    """Whether a write to a counter adds `new_len` to it."""
    is_add = is_call(write, aten.add_.Tensor, aten.add_.Scalar) and not write.kwargs
    if not is_add or write.args[1] != new_len:
        return False
    return peel(the_node(write.args[0])) is counter
