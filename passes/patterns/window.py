"""Sliding windows: of a state that has grown, the last tokens are handed on, or read.

A buffer of fixed length (`StaticSlidingWindowLayer` of transformers) takes them back by `copy_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    is_prefix_slice,
    is_suffix_slice,
    number,
    peel,
    same_memory,
    same_size,
    the_dim,
    the_node,
    value,
)
from kvcompile.passes.patterns.path import Path
from kvcompile.passes.patterns.token_writes import token_write

aten = torch.ops.aten


def positions_of(outputs: tuple[object, ...], node: fx.Node) -> tuple[int, ...]:
    """Return where a node is among the outputs, as it is or under another name."""
    return tuple(
        i
        for i, out in enumerate(outputs)
        if isinstance(out, fx.Node) and (out is node or peel(out) is node)
    )


def kept_part(
    outputs: tuple[object, ...], state: fx.Node, token_dim: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return how many of the last tokens of a state are outputs, and where among these."""
    for user in state.users:
        if peel(user) is peel(state):
            kept, found = kept_part(outputs, user, token_dim)
            if found:
                return kept, found
        if is_suffix_slice(user, token_dim) and (found := positions_of(outputs, user)):
            kept = fixed(user.meta["val"].shape[token_dim])
            return (None, ()) if kept is None else (kept, found)
    return None, ()


def past_in(suffix: fx.Node, new: fx.Node, token_dim: int) -> int | None:
    """Return how many past tokens are in the end of a state that the attention reads."""
    seen, added = (node.meta["val"].shape[token_dim] for node in (suffix, new))
    return fixed(seen - added)


def is_handed_on(user: fx.Node, state: fx.Node, token_dim: int, output: fx.Node) -> bool:
    """Whether a reader of a state is the part of it that the graph returns, and nothing else."""
    is_same = peel(user) is state
    if set(user.users) == {output}:
        return is_same or is_suffix_slice(user, token_dim)
    return (
        is_same
        and bool(user.users)
        and all(is_handed_on(further, state, token_dim, output) for further in user.users)
    )


@dataclass(frozen=True, eq=False)
class Slide:
    """A buffer of fixed length that takes the last tokens of what the attention reads.

    Attributes:
        kind: As of a `StateUpdate`.
        copied: The `copy_` into the buffer.
        new: The new tokens, laid out like the buffer.
        buffer: The buffer.
        past_part: The part of the buffer before the new tokens, or None.
    """

    kind: Literal["slide", "fresh_slide"]
    copied: fx.Node
    new: fx.Node
    buffer: fx.Node
    past_part: fx.Node | None


def slide(path: Path) -> Slide | None:
    """Match what attention reads of a buffer that slides, in one of three spellings.

    `buffer.copy_(roll(buffer, -1)[-1] := new)`, read as the buffer; `cat(part of buffer, new)`; and
    a prompt longer than a buffer of zeros; of the last two the buffer takes the end.
    """
    return _rolled(path) or _moved_on(path) or _filled(path)


def _rolled(path: Path) -> Slide | None:
    node, dim = path.node, path.token_dim
    if not is_call(node, aten.copy_.default) or node.meta["val"].dim() != 4:
        return None
    buffer, write = same_memory(the_node(node.args[0])), token_write(the_node(node.args[1]))
    if buffer.op != "placeholder" or write is None or write.dim != dim:
        return None
    rolled, size = write.buffer, fixed(buffer.meta["val"].shape[dim])
    if not is_call(rolled, aten.roll.default) or size is None or size < 2:
        return None
    source, *how = rolled.args
    is_one_step = how in ([[-1], [dim]], [[-1], [dim - 4]])
    if same_memory(the_node(source)) is not buffer or not is_one_step:
        return None
    if _constant(write.position) not in (-1, size - 1):
        return None
    return Slide("slide", node, write.new, buffer, None)


def _constant(node: fx.Node) -> int | None:
    """Return the number of a constant tensor of one element, or None."""
    node = peel(node)
    if node.op != "get_attr":
        return None
    held = getattr(node.graph.owning_module, str(node.target), None)
    held = held.constant if isinstance(held, FakeTensor) else held
    return int(held) if isinstance(held, torch.Tensor) and held.numel() == 1 else None


def _moved_on(path: Path) -> Slide | None:
    node, dim = path.node, path.token_dim
    if not is_call(node, aten.cat.default) or the_dim(node, 1) != dim:
        return None
    parts = node.args[0]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return None
    past, new = the_node(parts[0]), the_node(parts[1])
    if not is_call(past, aten.slice.Tensor) or the_dim(past, 1) != dim:
        return None
    buffer = same_memory(the_node(past.args[0]))
    # The last tokens but one of a full buffer, or the first ones, which are all that it holds.
    is_end = is_suffix_slice(past, dim) and number(past.args[2]) == 1.0
    if buffer.op != "placeholder" or not (is_end or is_prefix_slice(past, dim)):
        return None
    copied = _taken_back(node, dim, buffer)
    return None if copied is None else Slide("slide", copied, new, buffer, past)


def _filled(path: Path) -> Slide | None:
    copied = _taken_back(path.node, path.token_dim, None)
    if copied is None:
        return None
    return Slide("fresh_slide", copied, path.node, peel(the_node(copied.args[0])), None)


def _taken_back(grown: fx.Node, dim: int, buffer: fx.Node | None) -> fx.Node | None:
    """Return the copy of the last tokens into a buffer, one of zeros if none is given, or None."""
    for user in grown.users:
        if peel(user) is peel(grown) and (found := _taken_back(user, dim, buffer)) is not None:
            return found
        if not is_suffix_slice(user, dim):
            continue
        for copy in user.users:
            if not is_call(copy, aten.copy_.default) or copy.args[1] is not user:
                continue
            target, taken = the_node(copy.args[0]), value(user)
            into = value(target)
            if taken is None or into is None or not same_size(taken.shape[dim], into.shape[dim]):
                continue
            if same_memory(target) is buffer or (buffer is None and is_zeros(peel(target))):
                return copy
    return None


def is_zeros(buffer: fx.Node) -> bool:
    """Whether a node makes a tensor of zeros."""
    if is_call(buffer, aten.full.default):
        return number(buffer.args[1]) == 0.0
    return is_call(buffer, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
