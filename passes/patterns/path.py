"""Walking back from K or V as the attention takes it, over operators that only move data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from kvcompile.passes.patterns.layout import (
    is_call,
    is_prefix_slice,
    is_suffix_slice,
    peel,
    strip_repeat_kv,
    the_dim,
    the_node,
)
from kvcompile.passes.patterns.token_writes import is_write

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Path:
    """Where walking back from K or V ended, how its dimensions were permuted, and what was cut."""

    node: fx.Node
    swapped: bool
    prefix: fx.Node | None = None
    suffix: fx.Node | None = None

    @property
    def token_dim(self) -> int:
        """Dimension of the node that counts tokens."""
        return 1 if self.swapped else 2


def before_path(path: Path) -> Path | None:
    """Step back over one layout operator, or return None where there is none."""
    node = path.node
    peeled = peel(node)
    if peeled is not node:
        return replace(path, node=the_node(node.args[0]))
    if is_call(node, aten.transpose.int):
        if {the_dim(node, 1), the_dim(node, 2)} == {1, 2}:
            return replace(path, node=the_node(node.args[0]), swapped=not path.swapped)
        return None
    if is_call(node, aten.permute.default) and node.args[1] == [0, 2, 1, 3]:
        return replace(path, node=the_node(node.args[0]), swapped=not path.swapped)
    # Who knows how far a static buffer is filled reads no more of it, and needs no mask for that.
    if is_prefix_slice(node, path.token_dim):
        inner = the_node(node.args[0])
        cut = replace(path, node=inner, prefix=path.prefix or node)
        return cut if is_write(peel(inner)) else None
    # Of a window that still holds what it may have to take back, the attention reads the end.
    if is_suffix_slice(node, path.token_dim) and path.suffix is None:
        inner = the_node(node.args[0])
        is_grown = is_call(peel(inner), aten.cat.default)
        return replace(path, node=inner, suffix=node) if is_grown else None
    stripped = strip_repeat_kv(node)
    return replace(path, node=stripped) if stripped is not node else None
