"""Finding how keys rotate and whether their projection has a bias.

The walk goes back from the new keys to the projections they come from, over whatever lies between:
views, norms, the two products of rotary embedding. What it finds decides what a page is freed of
before it is quantized. A page is freed only of what makes it finer, so a wrong answer costs a few
bytes and a little time, and the walk asks for little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.patterns.layout import fixed, is_call, number, the_dim, the_node, value

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RotatingKeys:
    """Rotary embedding of the keys of one attention.

    Attributes:
        rotary: The channels that turn together.
        frequencies: The input that holds radians per token, one per pair of channels.
    """

    rotary: Rotary
    frequencies: fx.Node


def has_bias(keys: fx.Node) -> bool:
    """Whether a projection or a norm that keys come from adds a bias."""
    return any(_adds_bias(node) for node in _before(keys, _is_projection))


def rotating_keys(keys: fx.Node) -> RotatingKeys | None:
    """Return how keys rotate, or None if their first channels do not by one input's frequencies."""
    way = list(_before(keys, _is_projection))
    if not _rotates_first_channels(keys):
        return None
    inputs = {
        source
        for node in way
        if is_call(node, aten.cos.default)
        for source in _before(node, lambda node: node.op == "placeholder")
        if source.op == "placeholder" and _is_row_of_numbers(source)
    }
    if len(inputs) != 1:
        return None
    (frequencies,) = inputs
    pairs = fixed(frequencies.meta["val"].shape[0])
    width = fixed(keys.meta["val"].shape[-1])
    if not pairs or width is None or 2 * pairs > width:
        return None
    interleaved = any(_takes_every_other(node) for node in way)
    return RotatingKeys(Rotary(2 * pairs, interleaved), frequencies)


def _rotates_first_channels(keys: fx.Node) -> bool:
    """Whether rotary embedding is applied to the beginning of keys, not behind other channels."""
    node = keys
    while is_call(node, *_MOVES):
        node = the_node(node.args[0])
    if is_call(node, aten.cat.default) and _joins_channels(node):
        parts = node.args[0]
        assert isinstance(parts, (list, tuple))
        node = the_node(parts[0])
    return any(is_call(n, aten.cos.default) for n in _before(node, _is_projection))


def _joins_channels(node: fx.Node) -> bool:
    """Whether a concatenation is one of channels, the last dimension."""
    rank: int = node.meta["val"].dim()
    return the_dim(node, 1) == rank - 1


def _before(node: fx.Node, ends: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield a node and what it is computed from, up to and including the nodes where it `ends`."""
    seen, stack = {node}, [node]
    while stack:
        here = stack.pop()
        yield here
        if ends(here):
            continue
        for source in here.all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)


_MOVES = (
    aten.transpose.int,
    aten.permute.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.to.dtype,
    aten._to_copy.default,
)
_PROJECTIONS = (
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.baddbmm.default,
)


def _is_projection(node: fx.Node) -> bool:
    return node.op == "placeholder" or is_call(node, *_PROJECTIONS)


def _adds_bias(node: fx.Node) -> bool:
    if is_call(node, aten.addmm.default, aten.baddbmm.default):
        return True
    if is_call(node, aten.linear.default):
        return len(node.args) > 2 and node.args[2] is not None
    if is_call(node, aten.layer_norm.default):
        return len(node.args) > 3 and node.args[3] is not None
    if is_call(node, aten.add.Tensor):
        # The sum of a parameter and a number is a weight: norms multiply by 1 + w.
        return node.meta["val"].dim() > 1 and any(_is_parameter(arg) for arg in node.args[:2])
    return False


def _is_parameter(arg: fx.node.Argument) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "placeholder" and _is_row_of_numbers(arg)


def _is_row_of_numbers(node: fx.Node) -> bool:
    val = value(node)
    return val is not None and val.dim() == 1 and val.dtype.is_floating_point


def _takes_every_other(node: fx.Node) -> bool:
    """Whether a node is x[..., ::2] or x[..., 1::2] of keys, not of the angles."""
    if not is_call(node, aten.slice.Tensor):
        return False
    step = node.args[4] if len(node.args) > 4 else 1
    if number(step) != 2.0 or the_dim(node, 1) != node.meta["val"].dim() - 1:
        return False
    before = _before(node, _is_projection)
    return not any(is_call(n, aten.cos.default, aten.sin.default) for n in before)
