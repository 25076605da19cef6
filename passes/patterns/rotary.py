"""Finding how keys rotate and whether their projection has a bias.

The walk goes back from the new keys to the projections they come from, over whatever lies between:
views, norms, the two products of rotary embedding. What it finds decides what a page is freed of
before it is quantized. A wrong answer costs quality and time, never correctness, so the walk asks
for little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.patterns.layout import fixed, is_call, number, the_dim, value

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

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
    """Whether a projection that keys come from adds a bias."""
    return any(_bias(node) is not None for node in _before(keys, _is_projection))


def rotating_keys(keys: fx.Node) -> RotatingKeys | None:
    """Return how keys rotate, or None if they do not or the frequencies are not an input."""
    way = list(_before(keys, _is_projection))
    cosines = [node for node in way if is_call(node, aten.cos.default)]
    if not cosines:
        return None
    found = [
        node
        for node in _before(cosines[0], lambda node: node.op == "placeholder")
        if node.op == "placeholder" and _is_row_of_numbers(node)
    ]
    if len(found) != 1:
        return None
    pairs = fixed(found[0].meta["val"].shape[0])
    width = fixed(keys.meta["val"].shape[-1])
    if pairs is None or width is None or 2 * pairs > width:
        return None
    interleaved = any(_takes_every_other(node) for node in way)
    return RotatingKeys(Rotary(2 * pairs, interleaved), found[0])


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


def _is_projection(node: fx.Node) -> bool:
    return node.op == "placeholder" or is_call(
        node, aten.linear.default, aten.addmm.default, aten.mm.default
    )


def _bias(node: fx.Node) -> fx.node.Argument:
    """Return the bias that a projection adds, or None."""
    if is_call(node, aten.addmm.default):
        return node.args[0]
    if is_call(node, aten.linear.default) and len(node.args) > 2:
        return node.args[2]
    return None


def _is_row_of_numbers(node: fx.Node) -> bool:
    val = value(node)
    return val is not None and val.dim() == 1 and val.dtype.is_floating_point


def _takes_every_other(node: fx.Node) -> bool:
    """Whether a node is x[..., ::2] or x[..., 1::2]."""
    if not is_call(node, aten.slice.Tensor):
        return False
    step = node.args[4] if len(node.args) > 4 else 1
    return number(step) == 2.0 and the_dim(node, 1) == node.meta["val"].dim() - 1
