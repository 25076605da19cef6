"""scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), mask) => attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from kvcompile.passes.ir.result import Missed
from kvcompile.passes.patterns.candidate import Candidate
from kvcompile.passes.patterns.layout import number, strip_repeat_kv, the_node, value

if TYPE_CHECKING:
    from kvcompile.passes.ir.site import MaskKind

aten = torch.ops.aten


def is_anchor(node: fx.Node) -> bool:
    """Whether matching starts at this node."""
    return node.target is aten.scaled_dot_product_attention.default


def match(node: fx.Node) -> Candidate | Missed:
    """Match one call of the operator."""
    schema = aten.scaled_dot_product_attention.default._schema.arguments
    given: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    given.update(zip((a.name for a in schema), node.args, strict=False))
    given.update(node.kwargs)
    if given["dropout_p"] != 0.0:
        return Missed(
            "KVC102",
            f"attention dropout {given['dropout_p']} is on",
            node,
            hint="call model.eval() before generating",
        )
    q, k, v = (the_node(given[name]) for name in ("query", "key", "value"))
    mask = given["attn_mask"]
    q_value = value(q)
    if q_value is None or q_value.dim() != 4:
        rank = "unknown" if q_value is None else str(q_value.dim())
        return Missed("KVC103", f"the query has {rank} dimensions, not [B, H, S, D]", node)
    scale = 1.0 / math.sqrt(int(q_value.shape[3])) if given["scale"] is None else given["scale"]
    factor = number(scale)
    if factor is None:
        return Missed("KVC104", "the attention scale is computed in the graph", node)
    mask_value = value(mask)
    kind: MaskKind = "none" if mask is None else "additive"
    if mask_value is not None and mask_value.dtype == torch.bool:
        kind = "bool"
    if given["is_causal"]:
        if mask is not None:
            return Missed("KVC105", "a mask and is_causal are given together", node)
        kind = "causal"
    return Candidate(
        out=node,
        q=q,
        k=strip_repeat_kv(k),
        v=strip_repeat_kv(v),
        mask=mask,
        mask_kind=kind,
        mask_hides=False,
        scale=factor,
    )
