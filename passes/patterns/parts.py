"""K and V as parts of one tensor: the operators that take them out and those that join them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.ir.fused import FusedLayout
from kvcompile.passes.patterns.layout import fixed, is_call, number, peel, the_dim, the_node, value

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten

PIECES = (
    aten.unbind.int,
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
"""Operators that return all parts; each is then taken by its number."""


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of four dimensions that is one of the two parts of another.

    Attributes:
        base: The fused tensor.
        dim: The dimension of `base` that tells the parts apart.
        is_stacked: Whether the parts do not have that dimension.
        comes_first: Whether it is the first of the two.
        size: Its extent in that dimension; 1 if it is stacked.
        order: For each of its dimensions, which one of `base` that is.
    """

    base: fx.Node
    dim: int
    is_stacked: bool
    comes_first: bool
    size: int
    order: tuple[int, ...]

    def goes_with(self, other: Part) -> bool:
        """Whether the two make up the whole, and lie in it alike."""
        whole = 2 if self.is_stacked else fixed(self.base.meta["val"].shape[self.dim])
        mine = (self.base, self.dim, self.is_stacked, not self.comes_first)
        its = (other.base, other.dim, other.is_stacked, other.comes_first)
        return mine == its and self.size + other.size == whole

    def layout(self, is_k: bool) -> FusedLayout:
        """Return how K and V lie in the fused tensor, if this is K, or V."""
        return FusedLayout(self.dim, self.is_stacked, self.comes_first is is_k)

    def permutation(self) -> list[int]:
        """Return how the dimensions of the part are to be permuted, had `base` not been."""
        kept = sorted(self.order)
        return [kept.index(dim) for dim in self.order]


def parts_of(node: fx.Node) -> list[Part]:
    """Return what a node is a part of: a tensor, what that is a permutation of, and so on."""
    part, found = _taken(node), []
    while part is not None:
        base = peel(part.base)
        found.append(replace(part, base=base))
        dims = _permuted(base)
        if dims is None:
            break
        order = tuple(dims[dim] for dim in part.order)
        part = replace(part, base=the_node(base.args[0]), dim=dims[part.dim], order=order)
    return found


def part_of(node: fx.Node) -> Part | None:
    """Return what a node is a part of, had that not been permuted, or None."""
    found = parts_of(node)
    return found[-1] if found else None


def _permuted(node: fx.Node) -> list[int] | None:
    """Return for each dimension of a permuted tensor which one it was, or None."""
    dims = list(range(node.meta["val"].dim())) if value(node) is not None else []
    if is_call(node, aten.permute.default):
        given = node.args[1]
        assert isinstance(given, Sequence)
        return [int(dim) % len(dims) for dim in given]  # type: ignore[arg-type]
    if is_call(node, aten.transpose.int):
        a, b = the_dim(node, 1), the_dim(node, 2)
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    return None


def _taken(node: fx.Node) -> Part | None:
    """Return what a node takes from its operand, as a part of that."""
    mine = value(node)
    if mine is None or mine.dim() != 4 or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if is_call(node, aten.select.int):
        base, place = node.args[0], node.args[2]
        if not isinstance(place, int) or not -2 <= place < 2:
            return None
        return _stacked(base, _dim_of(base, node.args[1]), place % 2)
    if node.target is operator.getitem:
        return _piece(node.args[0], node.args[1])
    if not is_call(node, aten.slice.Tensor, aten.narrow.default):
        return None
    base, dim = node.args[0], _dim_of(node.args[0], node.args[1] if len(node.args) > 1 else 0)
    start = number(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else 0.0
    if start is None or (len(node.args) > 4 and node.args[4] != 1):
        return None
    return _joined(base, dim, mine, int(start))


def _piece(pieces: fx.Node, place: object) -> Part | None:
    if not is_call(pieces, *PIECES) or place not in (0, 1):
        return None
    base, given = the_node(pieces.args[0]), pieces.meta["val"]
    if len(given) != 2:
        return None
    assert isinstance(place, int)
    where = 1 if is_call(pieces, aten.unbind.int) else 2
    dim = _dim_of(base, pieces.args[where] if len(pieces.args) > where else 0)
    if where == 1:
        return _stacked(base, dim, place)
    start = 0 if place == 0 else fixed(given[0].shape[dim])
    return None if start is None else _joined(base, dim, given[place], start)


def _dim_of(node: fx.Node, dim: object) -> int:
    assert isinstance(dim, int)
    return dim % int(node.meta["val"].dim())


def _stacked(base: fx.Node, dim: int, place: int) -> Part | None:
    whole = base.meta["val"]
    if whole.dim() != 5 or fixed(whole.shape[dim]) != 2:
        return None
    return Part(base, dim, True, place == 0, 1, tuple(d for d in range(5) if d != dim))


def _joined(base: fx.Node, dim: int, part: torch.Tensor, start: int) -> Part | None:
    whole = base.meta["val"]
    if whole.dim() != 4 or dim == 0:
        return None
    size, total = fixed(part.shape[dim]), fixed(whole.shape[dim])
    if size is None or total is None or size == total or (start != 0 and start + size != total):
        return None
    return Part(base, dim, False, start == 0, size, (0, 1, 2, 3))


def joined_pair(node: fx.Node) -> tuple[fx.Node, fx.Node, int, bool] | None:
    """Return the two tensors of four dimensions that a node joins, where, and if it stacks them."""
    if not is_call(node, aten.stack.default, aten.cat.default):
        return None
    is_stack = is_call(node, aten.stack.default)
    parts, dim = node.args[0], the_dim(node, 1)
    if not isinstance(parts, Sequence) or len(parts) != 2 or (dim == 0 and not is_stack):
        return None
    first, second = the_node(parts[0]), the_node(parts[1])
    if any(n.meta["val"].dim() != 4 for n in (first, second)):
        return None
    return first, second, dim, is_stack


def readers(base: fx.Node, like: Part) -> Iterator[tuple[fx.Node, Part | None]]:
    """Yield who reads a fused tensor, and as which part; None for a reader of another kind.

    Whoever asks for a size only, and whoever has no reader, counts for nothing; nor does the
    graph's output, where it is the tensor itself.
    """
    stack = [(user, base) for user in base.users]
    while stack:
        user, source = stack.pop()
        part = next((part for part in parts_of(user) if part.base is base), None)
        if part is not None:
            alike = (part.dim, part.is_stacked) == (like.dim, like.is_stacked)
            yield user, part if alike else None
        elif is_call(user, *PIECES) or _permuted(user) is not None or peel(user) is base:
            stack.extend((its_user, user) for its_user in user.users)
        elif user.op == "output":
            if peel(source) is not base:
                yield user, None
        elif user.users and not is_call(user, aten.sym_size.int):
            yield user, None
