"""Where a rewritten graph takes a size from: a number, an input, or a node that holds it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.ir.program import SizeSource
from kvcompile.passes.patterns.layout import fixed, same_size

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program

aten = torch.ops.aten


def size_of(program: Program, node: fx.Node, dim: int) -> fx.node.Argument:
    """Return a size of a node: a number, or a node that holds the same symbol."""
    size = node.meta["val"].shape[dim]
    if (number := fixed(size)) is not None:
        return number
    sizes = [n for n in program.placeholders if isinstance(n.meta.get("val"), torch.SymInt)]
    for same in (_same_symbol, same_size):  # the cheap question of all before the dear one of any
        for holder in sizes:
            if same(holder.meta["val"], size):
                return holder
    if node.op == "placeholder":
        return None
    made = program.graph.call_function(aten.sym_size.int, (node, dim))
    made.meta["val"] = size
    return made


def _same_symbol(a: torch.SymInt, b: torch.SymInt) -> bool:
    return bool(a.node.expr == b.node.expr)


def sum_of(program: Program, a: fx.node.Argument, b: fx.node.Argument) -> fx.Node:
    """Insert the sum of two sizes."""
    node = program.graph.call_function(operator.add, (a, b))
    node.meta["val"] = operator.add(
        *(x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b))
    )
    return node


def size_source(inputs: list[fx.Node], size: int | torch.SymInt) -> SizeSource | None:
    """Return where a size can be read off the inputs, or None."""
    if (number := fixed(size)) is not None:
        return SizeSource(number)
    for i, node in enumerate(inputs):
        val = node.meta["val"]
        if isinstance(val, torch.SymInt) and same_size(val, size):
            return SizeSource(None, i)
    for i, node in enumerate(inputs):
        val = node.meta["val"]
        for dim, extent in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt) and same_size(extent, size):
                return SizeSource(None, i, dim)
    return None
