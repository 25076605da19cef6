"""KV heads that are repeated before they come first are repeated afterwards: one order for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcompile.passes.patterns.layout import fixed, peel, repeated_heads, the_dim, the_node

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
        wide = peel(the_node(node.args[0]))
        heads = repeated_heads(wide, 2)
        if heads is None:
            continue
        count, narrow = (fixed(x.meta["val"].shape[2]) for x in (wide, heads))
        if not count or not narrow:
            continue
        times = count // narrow
        with program.graph.inserting_before(node):
            first = program.graph.call_function(aten.transpose.int, (heads, 1, 2))
            first.meta = {**node.meta, "val": heads.meta["val"].transpose(1, 2)}
            how = (first, times, 1)
            repeated = program.graph.call_function(aten.repeat_interleave.self_int, how)
        repeated.meta = {
            **node.meta,
            "val": first.meta["val"].repeat_interleave(times, 1),
        }
        node.replace_all_uses_with(repeated)
        program.graph.erase_node(node)
