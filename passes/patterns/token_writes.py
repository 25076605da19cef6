"""Tokens written into a buffer at given positions, in its spellings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from kvcompile.passes.patterns.layout import (
    is_call,
    peel,
    same_memory,
    same_size,
    the_dim,
    the_node,
    value,
)

aten = torch.ops.aten

_WRITES = (
    aten.index_copy_.default,
    aten.index_copy.default,
    aten.index_put_.default,
    aten.scatter_.src,
)

_EXPANSIONS = (aten.expand.default, aten.expand_as.default)
_RESHAPES = (aten.unsqueeze.default, aten.view.default, aten.reshape.default)


@dataclass(frozen=True, eq=False)
class TokenWrite:
    """`buffer[.., position, ..] = new` along one dimension.

    Attributes:
        buffer: The buffer, of four dimensions; what is written to a copy of it has not reached it.
        dim: The dimension that positions count in.
        position: Where the new tokens go, int [S].
        new: The new tokens, laid out like the buffer.
    """

    buffer: fx.Node
    dim: int
    position: fx.Node
    new: fx.Node


def is_write(node: fx.Node) -> bool:
    """Whether a node is an operator that can write tokens at positions."""
    return is_call(node, *_WRITES)


def token_write(node: fx.Node) -> TokenWrite | None:
    """Return what a node writes where, or None if it does not write whole tokens of every row."""
    buffer = value(node)
    if buffer is None or buffer.dim() != 4 or not is_write(node):
        return None
    if is_call(node, aten.index_put_.default):
        return _index_put(node)
    position, new = (the_node(node.args[i]) for i in (2, 3))
    dim = the_dim(node, 1)
    if is_call(node, aten.scatter_.src):
        found = _vector(position, dim)
        same = value(position), value(new)
        if found is None or not _fits(buffer, dim, same[0]) or not _fits(buffer, dim, same[1]):
            return None
        position = found
    return TokenWrite(_buffer(node), dim, position, new)


def _buffer(node: fx.Node) -> fx.Node:
    """Return the buffer that a write in place reaches, or that another one starts from."""
    target = the_node(node.args[0])
    return peel(target) if is_call(node, aten.index_copy.default) else same_memory(target)


def _index_put(node: fx.Node) -> TokenWrite | None:
    """Match `buffer[:, :, position] = new` with one vector of positions and nothing broadcast."""
    indices, new = node.args[1:3]
    if node.kwargs or (len(node.args) > 3 and node.args[3]):  # adds to what is there
        return None
    assert isinstance(indices, list | tuple)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    (dim, index), buffer, new = given[0], value(node), _whole(the_node(new))
    position, tokens = value(index), value(new)
    if position is None or position.dim() != 1 or position.dtype not in (torch.int64, torch.int32):
        return None
    if buffer is None or tokens is None or not _fits(buffer, dim, tokens):
        return None
    if not same_size(tokens.shape[dim], position.shape[0]):
        return None
    return TokenWrite(_buffer(node), dim, the_node(index), new)


def _whole(new: fx.Node) -> fx.Node:
    """Return new tokens with four dimensions: an assignment drops the first ones if they are 1."""
    shape, before = value(new), value(new.args[0]) if new.args else None
    if shape is None or before is None or before.dim() != 4 or not is_call(new, *_RESHAPES):
        return new
    dropped = 4 - shape.dim()
    ones = all(same_size(size, 1) for size in before.shape[:dropped])
    same = zip(before.shape[dropped:], shape.shape, strict=True)
    return the_node(new.args[0]) if ones and all(same_size(a, b) for a, b in same) else new


def _fits(buffer: torch.Tensor, dim: int, tokens: torch.Tensor | None) -> bool:
    """Whether tokens have the shape of the buffer except for how many they are."""
    return (
        tokens is not None
        and tokens.dim() == 4
        and all(same_size(tokens.shape[d], buffer.shape[d]) for d in range(4) if d != dim)
    )


def _vector(index: fx.Node, dim: int) -> fx.Node | None:
    """Return the positions [S] that an index repeats along every dimension but `dim`, or None."""
    while is_call(index, *_EXPANSIONS):
        index = the_node(index.args[0])
    shape = value(index)
    if shape is None or shape.dim() != 4:
        return None
    if not all(same_size(shape.shape[d], 1) for d in range(4) if d != dim):
        return None
    length = shape.shape[dim]
    while is_call(index, *_RESHAPES):
        index = the_node(index.args[0])
    vector = value(index)
    if vector is None or vector.dim() != 1 or not same_size(vector.shape[0], length):
        return None
    return index
