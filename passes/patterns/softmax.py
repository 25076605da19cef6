"""matmul(softmax(matmul(q, kᵀ) * scale + mask), v) => attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.ir.result import Missed
from kvcompile.passes.patterns.candidate import Candidate
from kvcompile.passes.patterns.layout import (
    is_call,
    number,
    peel,
    strip_repeat_kv,
    the_dim,
    the_node,
    value,
)

if TYPE_CHECKING:
    from kvcompile.passes.ir.site import MaskKind

aten = torch.ops.aten

STEPS = 4
"""Parts of the pattern, for near misses: probabilities times values, mask, scale, scores."""

_HIDDEN = -1e4
"""A score filled with less than this weighs nothing after the softmax, in any dtype."""


def is_anchor(node: fx.Node) -> bool:
    """Whether matching starts at this node: a softmax over the last of four dimensions."""
    if not is_call(node, aten.softmax.int, aten._softmax.default):
        return False
    val = value(node)
    return val is not None and val.dim() == 4 and the_dim(node, 1) == 3


def match(node: fx.Node) -> Candidate | Missed:
    """Match around one softmax."""
    product = _only_consumer(node)
    if not is_call(product, aten.matmul.default, aten.bmm.default):
        return _near("KVC111", "the probabilities are not multiplied with values", product, 0)
    assert isinstance(product, fx.Node)
    probabilities, v = product.args[0], product.args[1]
    if not isinstance(probabilities, fx.Node) or _forward_peel(probabilities) is not node:
        return _near("KVC111", "the probabilities are the second factor", product, 0)
    masked = _masked(_forward_peel(node.args[0]))
    if isinstance(masked, Missed):
        return masked
    scores, mask, kind, hides = masked
    scale = 1.0
    if is_call(scores, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        factor = number(scores.args[1])
        if factor is None:
            return _near("KVC104", "the scores are scaled by a tensor", scores, 2)
        scale = 1.0 / factor if "div" in str(scores.target) else factor
        scores = _forward_peel(scores.args[0])
    if not is_call(scores, aten.matmul.default, aten.bmm.default):
        return _near("KVC112", f"{scores.target} stands between scores and softmax", scores, 2)
    q, k_transposed = scores.args[0], peel(the_node(scores.args[1]))
    if not _swaps_last_two(k_transposed):
        return _near("KVC113", "the second factor of the scores is not transposed", scores, 3)
    if not math.isfinite(scale) or scale == 0.0:
        return _near("KVC104", f"the scores are scaled by {scale}", scores, 2)
    return Candidate(
        out=product,
        q=the_node(q),
        k=strip_repeat_kv(the_node(k_transposed.args[0])),
        v=strip_repeat_kv(the_node(v)),
        mask=mask,
        mask_kind=kind,
        mask_hides=hides,
        scale=scale,
    )


def _masked(
    node: fx.Node,
) -> tuple[fx.Node, fx.Node | None, MaskKind, bool] | Missed:
    """Split `scores + mask`, `masked_fill(scores, m, -inf)` or `where(m, scores, -inf)`."""
    if is_call(node, aten.add.Tensor):
        left, right = node.args[0], node.args[1]
        if node.kwargs:
            return _near("KVC114", f"the mask is added with {node.kwargs}", node, 1)
        if value(right) is None:
            return _near("KVC114", "a number is added to the scores", node, 1)
        return _forward_peel(left), the_node(right), "additive", False
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill_.Scalar):
        scores, mask, fill = node.args[0], node.args[1], number(node.args[2])
        if fill is None or fill > _HIDDEN:
            return _near("KVC115", f"masked scores become {fill}, which is not -inf", node, 1)
        return _forward_peel(scores), the_node(mask), "bool", True
    if is_call(node, aten.where.ScalarOther):
        mask, scores, fill = node.args[0], node.args[1], number(node.args[2])
        if fill is None or fill > _HIDDEN:
            return _near("KVC115", f"masked scores become {fill}, which is not -inf", node, 1)
        return _forward_peel(scores), the_node(mask), "bool", False
    if is_call(node, aten.tanh.default) or (
        is_call(node, aten.mul.Tensor) and is_call(node.args[0], aten.tanh.default)
    ):
        return _near("KVC116", "the scores are capped by tanh", node, 1)
    return node, None, "none", False


def _forward_peel(arg: fx.node.Argument) -> fx.Node:
    """Walk back over casts and identities: the kernels accumulate in fp32 whatever the cast."""
    node = peel(the_node(arg))
    while is_call(node, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default):
        node = peel(the_node(node.args[0]))
    return node


def _only_consumer(node: fx.Node) -> fx.Node | None:
    """Follow casts and inactive dropout forward to the single real consumer."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        casts = is_call(user, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default)
        if not (casts or peel(user) is peel(node)):
            return user
        node = user
    return None


def _swaps_last_two(node: fx.Node) -> bool:
    if is_call(node, aten.transpose.int):
        return {the_dim(node, 1), the_dim(node, 2)} == {2, 3}
    return is_call(node, aten.permute.default) and node.args[1] == [0, 1, 3, 2]


def _near(code: str, reason: str, node: fx.Node | None, matched: int) -> Missed:
    return Missed(
        code,
        reason,
        node,
        hint='build the model with attn_implementation="sdpa" if it offers that',
        near_miss=f"softmax attention, {matched} of {STEPS} parts",
    )
