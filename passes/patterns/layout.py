"""Seeing through operators that move data without changing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other)
_ALIASES = (*_CASTS, aten.slice.Tensor, aten.alias.default, aten.detach.default)
"""Operators that give the tensor itself if they change nothing about it."""


def value(node: fx.node.Argument) -> torch.Tensor | None:
    """Return the fake tensor a node stands for, or None."""
    if not isinstance(node, fx.Node):
        return None
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def the_node(arg: fx.node.Argument) -> fx.Node:
    """Return an operand that is known to be a node."""
    assert isinstance(arg, fx.Node)
    return arg


def the_dim(node: fx.Node, position: int, default: int = 0) -> int:
    """Return a dimension argument of a node as a number from 0 on."""
    dim = node.args[position] if len(node.args) > position else default
    assert isinstance(dim, int)
    rank = node.meta["val"].dim()
    return dim % rank if rank else dim


def same_size(a: object, b: object) -> bool:
    """Whether two sizes are known to be equal without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    left = a.node.expr if isinstance(a, torch.SymInt) else a
    right = b.node.expr if isinstance(b, torch.SymInt) else b
    # An equality that is guarded already does not always replace one symbol by the other.
    return bool(left == right) or statically_known_true(a == b)


def equal_now(a: object, b: object) -> bool:
    """Whether two sizes are equal in this call; another call for which that changes compiles anew.

    For symbols of one length that come in by different ways. Where `same_size` can tell, nothing
    is guarded.
    """
    return same_size(a, b) or bool(a == b)


def fixed(size: object) -> int | None:
    """Return a size as a number if it is one: a symbol may have been specialised since."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else None
    assert isinstance(size, int)
    return size


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are known to be equal without adding a guard."""
    return a.dim() == b.dim() and all(
        same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def is_call(node: fx.node.Argument, *targets: object) -> bool:
    """Whether a node calls one of these operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def peel(node: fx.Node) -> fx.Node:
    """Walk back over operators that change neither shape, dtype nor values."""
    while (before := _identity(node)) is not None:
        node = before
    return node


def same_memory(node: fx.Node) -> fx.Node:
    """Walk back over operators that give the very tensor they were given, under another name."""
    while is_call(node, *_ALIASES) and not _copies(node):
        before = _identity(node)
        if before is None:
            break
        node = before
    return node


def _copies(cast: fx.Node) -> bool:
    """Whether a cast makes a copy although it changes nothing."""
    assert isinstance(cast.target, torch._ops.OpOverload)
    given = zip(cast.target._schema.arguments, cast.args, strict=False)
    return bool(cast.kwargs.get("copy")) or any(a.name == "copy" and arg for a, arg in given)


def _identity(node: fx.Node) -> fx.Node | None:
    """Return the operand of a node that does nothing, or None."""
    source = node.args[0] if node.args else None
    mine, its = value(node), value(source)
    if not isinstance(source, fx.Node) or mine is None or its is None:
        return None
    if is_call(
        node,
        aten.contiguous.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.detach_.default,
        aten.lift_fresh_copy.default,
    ):
        return source
    if is_call(node, *_CASTS, aten._to_copy.default):
        return source if mine.dtype == its.dtype and mine.device == its.device else None
    if is_call(node, aten.dropout.default):
        rate, train = node.args[1], node.args[2]
        return source if rate == 0 or train is False else None
    if is_call(node, aten.slice.Tensor) and same_shape(mine, its):
        step = node.args[4] if len(node.args) > 4 else 1
        return source if step == 1 else None
    unchanged = is_call(
        node,
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
        aten._unsafe_view.default,
    )
    return source if unchanged and same_shape(mine, its) else None


def strip_repeat_kv(node: fx.Node) -> fx.Node:
    """Return `[B, K, T, D]` behind the copies that give every query head a KV head."""
    node = peel(node)
    heads = repeated_heads(node, 1)
    return node if heads is None else peel(heads)


def repeated_heads(node: fx.Node, dim: int) -> fx.Node | None:
    """Return the tensor of four dimensions each of whose heads a node repeats in a row, or None.

    Recognises `reshape(expand(unsqueeze(x, dim + 1)))` and `repeat_interleave(x, n, dim)`.

    Args:
        node: What may repeat heads.
        dim: The dimension that counts heads, 1 or 2.
    """
    if is_call(node, aten.repeat_interleave.self_int) and node.args[2:] == (dim,):
        return the_node(node.args[0])
    if not is_call(node, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    expanded = the_node(node.args[0])
    while is_call(expanded, aten.clone.default, aten.contiguous.default):
        expanded = the_node(expanded.args[0])
    if not is_call(expanded, aten.expand.default):
        return None
    unsqueezed = peel(the_node(expanded.args[0]))
    inserted = (dim + 1, dim - 4)
    if not is_call(unsqueezed, aten.unsqueeze.default) or unsqueezed.args[1] not in inserted:
        return None
    heads = the_node(unsqueezed.args[0])
    wide, narrow, big = value(node), value(heads), value(expanded)
    if wide is None or narrow is None or big is None or wide.dim() != 4 or narrow.dim() != 4:
        return None
    same = same_size(wide.shape[dim], big.shape[dim] * big.shape[dim + 1])
    kept = [d for d in range(4) if d != dim]
    return heads if same and all(same_size(wide.shape[d], narrow.shape[d]) for d in kept) else None


def number(arg: fx.node.Argument) -> float | None:
    """Return a Python number as a float, or None for anything else."""
    if isinstance(arg, int | float) and not isinstance(arg, bool):
        return float(arg)
    return None


def is_prefix_slice(node: fx.Node, dim: int) -> bool:
    """Whether a node is `x[..., :n]` along `dim`, starting at 0 with step 1."""
    if not is_call(node, aten.slice.Tensor) or the_dim(node, 1) != dim:
        return False
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return number(start) in (None, 0.0) and not isinstance(start, fx.Node) and number(step) == 1.0


def is_suffix_slice(node: fx.Node, dim: int) -> bool:
    """Whether a node is `x[..., n:]` along `dim`, with step 1."""
    if not is_call(node, aten.slice.Tensor) or the_dim(node, 1) != dim:
        return False
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    if number(step) != 1.0:
        return False
    if end is None or (isinstance(end, int) and end >= sys.maxsize):
        return True
    whole = the_node(node.args[0]).meta["val"].shape[dim]
    return same_size(end.meta["val"] if isinstance(end, fx.Node) else end, whole)


def writer(node: fx.Node, but: fx.Node | None = None) -> fx.Node | None:
    """Return an operator other than `but` that writes to a node or a view of it, or None."""
    return next(writers(node, but), None)


def writers(node: fx.Node, but: fx.Node | None = None) -> Iterator[fx.Node]:
    """Yield the operators other than `but` that write to a node or a view of it."""
    for user in node.users:
        if user is but or not isinstance(user.target, torch._ops.OpOverload):
            continue
        for argument, given in zip(user.target._schema.arguments, user.args, strict=False):
            if given is not node or argument.alias_info is None:
                continue
            if argument.alias_info.is_write:
                yield user
            yield from writers(user, but)
