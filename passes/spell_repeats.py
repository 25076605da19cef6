"""KV heads that are repeated before they come first are repeated afterwards: one order for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    peel,
    same_size,
    the_dim,
    the_node,
    value,
)

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program

aten = torch.ops.aten


def spell_repeats(program: Program) -> None:
    """Turn `repeat(x, 2).transpose(1, 2)` into `repeat(x.transpose(1, 2), 1)`, x [B, T, K, D].

    Patterns look for repeated heads behind [B, K, T, D], as most models have them.
    """
    for node in program.graph.find_nodes(op="call_function", target=aten.transpose.int):
        if {the_dim(node, 1), the_dim(node, 2)} != {1, 2} or node.meta["val"].dim() != 4:
            continue
        found = _repeated(peel(the_node(node.args[0])))
        if found is None:
            continue
        heads, times = found
        with program.graph.inserting_before(node):
            first = program.graph.call_function(aten.transpose.int, (heads, 1, 2))
            first.meta = {**node.meta, "val": heads.meta["val"].transpose(1, 2)}
            how = (first, times, 1)
            repeated = program.graph.call_function(aten.repeat_interleave.self_int, how)
        repeated.meta = {**node.meta, "val": first.meta["val"].repeat_interleave(times, 1)}
        node.replace_all_uses_with(repeated)
        program.graph.erase_node(node)


def _repeated(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return x [B, T, K, D] and how often each of its heads is repeated in a row, or None."""
    if is_call(node, aten.repeat_interleave.self_int) and node.args[2:] == (2,):
        times = node.args[1]
        return (the_node(node.args[0]), times) if isinstance(times, int) else None
    if not is_call(node, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    expanded = the_node(node.args[0])
    while is_call(expanded, aten.clone.default, aten.contiguous.default):
        expanded = the_node(expanded.args[0])
    if not is_call(expanded, aten.expand.default):
        return None
    unsqueezed = peel(the_node(expanded.args[0]))
    if not is_call(unsqueezed, aten.unsqueeze.default) or unsqueezed.args[1] not in (3, -2):
        return None
    heads = the_node(unsqueezed.args[0])
    wide, narrow, big = value(node), value(heads), value(expanded)
    if wide is None or narrow is None or big is None or wide.dim() != 4 or narrow.dim() != 4:
        return None
    times, count = fixed(big.shape[3]), fixed(narrow.shape[2])
    if times is None or count is None or fixed(wide.shape[2]) != times * count:
        return None
    same = all(same_size(wide.shape[d], narrow.shape[d]) for d in (0, 1, 3))
    return (heads, times) if same else None
