"""What is kept close to K or V, though not as a cache that is recognised."""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.canonicalize import IS_HANDLE
from kvcompile.passes.patterns.layout import is_call, value

aten = torch.ops.aten

_WEIGHTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.embedding.default)
"""Operators behind which a tensor is no longer K or V in another form."""


def kept_nearby(outputs: tuple[object, ...], node: fx.Node, depth: int = 8) -> fx.Node | None:
    """Return a tensor close to `node` that the graph returns or is given as a cache, or None."""
    returned = set(outputs)
    seen, front = {node}, [node]
    for _ in range(depth):
        following: list[fx.Node] = []
        for at in front:
            val = value(at)
            # Of five dimensions where K and V are one tensor.
            cached = val is not None and val.dim() in (4, 5)
            if cached and (at in returned or at.meta.get(IS_HANDLE)):
                return at
            near = () if is_call(at, *_WEIGHTS) else at.all_input_nodes
            layout = [u for u in at.users if is_call(u, aten.slice.Tensor, *_MOVES)]
            following += [n for n in (*near, *layout) if n not in seen]
            seen |= set(following)
        front = following
    return None


_MOVES = (
    aten.cat.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.index_put_.default,
    aten.copy_.default,
)
