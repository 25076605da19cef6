"""Operands that an attention operator takes: one mask, and a query that carries factors.

The letters are those of `AttentionSite`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.patterns.layout import fixed

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite, Bias

aten = torch.ops.aten


def visible(site: AttentionSite) -> fx.Node | None:
    """Return the mask alone with four dimensions, True meaning visible, or None."""
    mask = site.mask
    if mask is None:
        return None
    while mask.meta["val"].dim() < 4:
        mask = _insert(mask.graph, aten.unsqueeze.default, mask, 0)
    return _insert(mask.graph, aten.logical_not.default, mask) if site.mask_hides else mask


def with_one_mask(program: Program, site: AttentionSite) -> AttentionSite:
    """Return the site with mask and biases as one additive mask, and factors in its query.

    Nodes are inserted where the graph inserts; what layers share is added up once.
    """
    graph, q = program.graph, site.q
    for factor in site.factors:
        by = aten.div.Tensor if factor.divides else aten.mul.Tensor
        scaled = _insert(graph, by, q, factor.node)
        # A scale of higher precision would make the query another dtype than the keys.
        q = _insert(graph, aten.to.dtype, scaled, site.q.meta["val"].dtype)
    site = replace(site, q=q, factors=())
    if site.biases:
        total: fx.Node | None = None
        for bias in (b for b in site.biases if b.hides is None):
            mine = _bias(graph, bias, site.num_q_heads)
            total = mine if total is None else _insert(graph, aten.add.Tensor, total, mine)
        mask = visible(site)
        if total is None:
            total = mask
        elif site.mask_kind == "bool":
            assert mask is not None
            hidden = _insert(graph, aten.logical_not.default, mask)
            total = _insert(graph, aten.masked_fill.Scalar, total, hidden, -torch.inf)
        elif mask is not None:
            total = _sum(graph, mask, total)
        for bias in (b for b in site.biases if b.hides is not None):
            hidden = _bias(graph, bias, site.num_q_heads)
            if not bias.hides:
                hidden = _insert(graph, aten.logical_not.default, hidden)
            total = _insert(graph, aten.masked_fill.Scalar, total, hidden, -torch.inf)
        site = replace(site, mask=total, mask_kind="additive", mask_hides=False, biases=())
    program.sites = tuple(site if s.index == site.index else s for s in program.sites)
    return site


def _sum(graph: fx.Graph, mask: fx.Node, bias: fx.Node) -> fx.Node:
    """Return mask + bias; what the mask hides is the lowest number of the sum's dtype."""
    total = _insert(graph, aten.add.Tensor, bias, mask)
    mine, dtype = mask.meta["val"].dtype, total.meta["val"].dtype
    if mine == dtype:
        return total
    # The lowest number of a narrow dtype would be a visible one of a wide dtype.
    hidden = _insert(graph, aten.lt.Scalar, mask, torch.finfo(mine).min / 2)
    return _insert(graph, aten.masked_fill.Scalar, total, hidden, torch.finfo(dtype).min)


def _bias(graph: fx.Graph, bias: Bias, num_q_heads: int) -> fx.Node:
    """Return a bias, times its factor, with four dimensions."""
    node = bias.node
    if bias.joined and node.meta["val"].dim() == 3 and fixed(node.meta["val"].shape[0]) != 1:
        node = _insert(graph, aten.unflatten.int, node, 0, [-1, num_q_heads])
    while node.meta["val"].dim() < 4:
        node = _insert(graph, aten.unsqueeze.default, node, 0)
    return node if bias.factor == 1.0 else _insert(graph, aten.mul.Tensor, node, bias.factor)


def _insert(graph: fx.Graph, target: torch._ops.OpOverload, *args: object) -> fx.Node:
    """Insert a call, or return the same call if it was inserted before."""
    first = args[0]
    assert isinstance(first, fx.Node)
    for user in first.users:
        if user.meta.get("inserted") and user.target is target and user.args == args:
            return user
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    vals = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    node.meta.update(val=target(*vals), inserted=True)
    return node
