"""x * cos + rotate(x) * sin => x turns by cos and sin: rotary embedding, spelled out.

`rotate` is (-second half, first half) of the channels that turn (Llama, GPT-NeoX), or
(-x1, x0, -x3, x2, ...) (GPT-J). All channels turn, or the first R of them (RoFormer,
https://arxiv.org/abs/2104.09864). What is matched is exactly this, over operators that move data
without changing it; nothing is assumed about cosines and sines.

Letters: B batch, H heads, S tokens, D channels, R channels that turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    peel,
    same_size,
    the_dim,
    the_node,
    value,
)

aten = torch.ops.aten

CODE = "KVC406"


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a query or a key [B, H, S, D] turns.

    Attributes:
        x: What turns, with the channels that stand still: D channels of it from `first` on.
        first: The first channel.
        cos: Broadcasts to the channels of x that turn.
        sin: The same.
        rotary: The channels that turn together.
        tokens_first: Whether all of this is [B, S, H, D] instead, and transposed afterwards.
    """

    x: fx.Node
    first: int
    cos: fx.Node
    sin: fx.Node
    rotary: Rotary
    tokens_first: bool


@dataclass(frozen=True, eq=False)
class _Channels:
    """`count` channels of a node, from `first` on, each `step`-th."""

    node: fx.Node
    first: int
    count: int
    step: int = 1

    def part(self, first: int, count: int, step: int = 1) -> _Channels:
        """Return channels of these."""
        return _Channels(self.node, self.first + first * self.step, count, self.step * step)

    def is_same(self, other: _Channels) -> bool:
        """Whether both are the same channels of the same node."""
        mine = (self.node, self.first, self.count, self.step)
        return mine == (other.node, other.first, other.count, other.step)


def match(turned: fx.Node) -> Rotation | Missed:
    """Match a query or a key [B, H, S, D]."""
    node, tokens_first = peel(turned), False
    while is_call(node, aten.transpose.int) and {the_dim(node, 1), the_dim(node, 2)} == {1, 2}:
        node, tokens_first = peel(the_node(node.args[0])), not tokens_first
    still: list[fx.Node] = []
    if len(parts := _joined(node)) == 2:
        node, still = peel(parts[0]), parts[1:]
    rounded = node
    while is_call(node, aten.to.dtype):  # a rotation in another dtype is not folded, but recognised
        node = peel(the_node(node.args[0]))
    found = _sum(node)
    if isinstance(found, Missed):
        return found
    x, cos, sin, interleaved = found
    before, after = x.node.meta["val"].shape[:-1], node.meta["val"].shape[:-1]
    if not all(map(same_size, before, after)):
        return Missed(CODE, "what turns is repeated along the cosines", node, near_miss=_NEAREST)
    for rest in map(_channels, still):
        if rest is None or not rest.is_same(x.part(x.count, rest.count)):
            reason = "the channels behind those that turn are of something else"
            return Missed(CODE, reason, node, near_miss=_NEAREST)
    dtypes = {n.meta["val"].dtype for n in (rounded, node, x.node, cos, sin)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return Missed(CODE, f"rotation in several dtypes: {names}", node, near_miss=_NEAREST)
    if x.step != 1:
        return Missed(CODE, "channels that turn do not lie side by side", node, near_miss=_NEAREST)
    return Rotation(x.node, x.first, cos, sin, Rotary(x.count, interleaved), tokens_first)


_NEAREST = "x * cos + rotate(x) * sin, matched but for this"


def _sum(node: fx.Node) -> tuple[_Channels, fx.Node, fx.Node, bool] | Missed:
    """Match x * cos + rotate(x) * sin: return x, cos, sin, and whether pairs are neighbours."""
    if not is_call(node, aten.add.Tensor) or node.kwargs:
        name = str(node.target) if node.op == "call_function" else "an input"
        return Missed(CODE, f"{name} where x * cos + rotate(x) * sin was looked for", node)
    products = [peel(arg) for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if not all(is_call(product, aten.mul.Tensor) for product in products) or len(products) < 2:
        return Missed(CODE, "a sum of something else than two products", node)
    nearest = ""
    for straight, across in (products, products[::-1]):
        for sin, partner in _operands(across):
            rotated = _rotated(partner)
            if rotated is None:
                continue
            nearest = "rotate(x) * sin"
            for cos, x in _operands(straight):
                channels = _channels(x)
                if channels is not None and channels.is_same(rotated[0]):
                    return rotated[0], cos, sin, rotated[1]
    return Missed(
        CODE,
        "a sum of two products that is no x * cos + rotate(x) * sin",
        node,
        near_miss=f"{nearest}, whose x is not what cos is multiplied with" if nearest else "",
    )


def _operands(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the operands of a product in both orders."""
    a, b = product.args[:2]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return []
    return [(a, b), (b, a)]


def _rotated(node: fx.Node) -> tuple[_Channels, bool] | None:
    """Return the x of a rotate(x), and whether its pairs are neighbours."""
    node = peel(node)
    interleaved = not is_call(node, aten.cat.default)
    parts = _stacked(node) if interleaved else _joined(node)
    if len(parts) != 2 or not is_call(negated := peel(parts[0]), aten.neg.default):
        return None
    second, first = _channels(the_node(negated.args[0])), _channels(parts[1])
    if first is None or second is None or not 0 < first.count == second.count:
        return None
    count = first.count
    x = _Channels(first.node, first.first, 2 * count, first.step)
    expected = (x.part(0, count), x.part(count, count))
    if interleaved:
        if first.step % 2:
            return None
        x = _Channels(first.node, first.first, 2 * count, first.step // 2)
        expected = (x.part(0, count, 2), x.part(1, count, 2))
    if not (first.is_same(expected[0]) and second.is_same(expected[1])):
        return None
    return x, interleaved


def _joined(node: fx.Node) -> list[fx.Node]:
    """Return what a node concatenates along the channels, or nothing."""
    if not is_call(node, aten.cat.default) or the_dim(node, 1) != node.meta["val"].dim() - 1:
        return []
    parts = node.args[0]
    assert isinstance(parts, (list, tuple))
    return [the_node(part) for part in parts]


def _stacked(node: fx.Node) -> list[fx.Node]:
    """Return what a node stacks behind the channels and then counts as channels, or nothing."""
    if not is_call(
        node, aten.flatten.using_ints, aten.reshape.default, aten.view.default
    ) or not isinstance(node.args[0], fx.Node):
        return []
    stack = peel(node.args[0])
    if not is_call(stack, aten.stack.default):
        return []
    flat, deep = node.meta["val"].shape, stack.meta["val"].shape
    joins_last = len(deep) == len(flat) + 1 and same_size(flat[-1], deep[-1] * deep[-2])
    if not joins_last or the_dim(stack, 1) != len(deep) - 1:
        return []
    if not all(same_size(a, b) for a, b in zip(flat[:-1], deep[:-2], strict=True)):
        return []
    parts = stack.args[0]
    assert isinstance(parts, (list, tuple))
    return [the_node(part) for part in parts]


def _channels(node: fx.Node) -> _Channels | None:
    """Return a node as channels of the node that they are cut from."""
    node = peel(node)
    val = value(node)
    count = None if val is None or not val.dim() else fixed(val.shape[-1])
    if count is None:
        return None
    if not is_call(node, aten.slice.Tensor) or the_dim(node, 1) != node.meta["val"].dim() - 1:
        return _Channels(node, 0, count)
    whole = _channels(the_node(node.args[0]))
    first = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    first = 0 if first is None else first
    if whole is None or not isinstance(first, int) or not isinstance(step, int):
        return None
    return whole.part(first + whole.count if first < 0 else first, count, step)


def same_values(a: fx.node.Argument, b: fx.node.Argument) -> bool:
    """Whether two arguments are the same node, or the same views and copies of the same one."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        alike = a.op == b.op == "call_function" and a.target is b.target and a.target in _COPIES
        return a is b or (alike and a.kwargs == b.kwargs and same_values(a.args, b.args))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_values, a, b))
    return type(a) is type(b) and a == b


_COPIES = (
    aten.unsqueeze.default,
    aten.repeat_interleave.self_int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.cat.default,
    aten.to.dtype,
    aten._to_copy.default,
)


def angles_fit(angles: fx.Node, rotation: Rotation, turned: fx.Node) -> bool:
    """Whether cosines or sines are those of the tokens: one number per token and channel."""
    shape = list(angles.meta["val"].shape)
    shape = [1] * (4 - len(shape)) + shape
    if rotation.tokens_first:
        shape[1], shape[2] = shape[2], shape[1]
    batch, _, tokens, _ = turned.meta["val"].shape
    rows, heads, steps, dim = shape
    return (
        len(shape) == 4
        and (same_size(rows, 1) or same_size(rows, batch))
        and same_size(heads, 1)
        and same_size(steps, tokens)
        and same_size(dim, rotation.rotary.dim)
    )
