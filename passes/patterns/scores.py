"""Reading what a softmax is given: `mask + bias + cap * tanh(scale * q kᵀ / cap)`, in any spelling.

The walk goes from the softmax back to the product of q and k. What is added outside of a factor or
of the cap stays as it is; what a factor multiplies carries that factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.site import Bias, Factor
from kvcompile.passes.patterns.layout import is_call, number, peel, the_node, value

if TYPE_CHECKING:
    from kvcompile.passes.ir.site import MaskKind

aten = torch.ops.aten

STEPS = 4
"""Parts of the pattern, for near misses: probabilities times values, mask, scale, scores."""

_HIDDEN = -1e4
"""A score filled with less than this weighs nothing after the softmax, in any dtype."""

CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default)
_ADDS = (aten.add.Tensor, aten.add_.Tensor)
MULS = (aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar)
DIVS = (aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar)
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill_.Scalar)
_TANHS = (aten.tanh.default, aten.tanh_.default)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)


@dataclass
class Scores:
    """What was found between softmax and product; all but the product as in `AttentionSite`."""

    product: fx.Node
    scale: float = 1.0
    softcap: float | None = None
    mask: fx.Node | None = None
    mask_kind: MaskKind = "none"
    mask_hides: bool = False
    biases: list[Bias] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    def hide(self, mask: fx.Node, fill: float | None, *, hides: bool) -> Missed | None:
        """Take a boolean mask; return why not if it cannot be."""
        if fill is None or fill * self.scale > _HIDDEN:
            return near(
                "KVC115", f"masked scores become {fill}, which is not -inf", self.product, 1
            )
        if self.softcap is not None or self.mask_kind == "bool":
            what = "capped" if self.softcap is not None else "masked once more"
            return near("KVC115", f"masked scores are {what}", self.product, 1)
        if self.mask is not None:  # an additive one, which says more: what is padding
            self.biases.append(Bias(mask, hides=hides))
        else:
            self.mask, self.mask_kind, self.mask_hides = mask, "bool", hides
        return None

    def add(self, bias: fx.Node, factor: float, *, joined: bool) -> Missed | None:
        """Take what is added to the scores; return why not if it cannot be.

        Args:
            bias: What is added.
            factor: What it is multiplied by.
            joined: Whether batch and heads are one dimension there.
        """
        if self.softcap is not None or self.factors:
            return near("KVC114", "what is added to the scores is capped or scaled", bias, 1)
        if self.mask is None and factor == self.scale == 1.0 and not joined:
            self.mask, self.mask_kind = bias, "additive"
        else:
            self.biases.append(Bias(bias, factor * self.scale, joined))
        return None

    def multiply(self, factor: fx.node.Argument, *, divide: bool) -> Missed | None:
        """Take a factor of the scores; return why not if it cannot be."""
        known = number(factor)
        if known is not None:
            if not known or not math.isfinite(known):
                return near("KVC104", f"the scores are scaled by {known}", self.product, 2)
            self.scale *= 1.0 / known if divide else known
            return None
        val = value(factor)
        if val is None or val.dim() > 4 or (val.dim() and val.shape[-1] != 1):
            return near("KVC104", "the scale differs between keys", self.product, 2)
        self.factors.append(Factor(the_node(factor), divide))
        return None


def read(node: fx.Node) -> Scores | Missed:
    """Walk from what a softmax is given back to the product of q and k."""
    found = Scores(node)
    while not is_call(found.product, *PRODUCTS):
        before = _step(found)
        if isinstance(before, Missed):
            return before
        found.product = before
    if is_call(found.product, aten.baddbmm.default):
        how = found.product.kwargs
        beta, alpha = number(how.get("beta", 1)), number(how.get("alpha", 1))
        if beta is None or not alpha:
            return near("KVC104", "the scores are scaled by a tensor", found.product, 2)
        bias = the_node(found.product.args[0])
        if (
            beta
            and not is_call(bias, aten.zeros.default)
            and (refused := found.add(bias, beta, joined=True)) is not None
        ):
            return refused
        found.scale *= alpha
    return found


def _step(found: Scores) -> fx.Node | Missed:
    """Take in one operator; return what it works on."""
    node = through_views(found.product)
    if node is not found.product or is_call(node, *PRODUCTS):
        return node
    refused: Missed | None
    scores: fx.node.Argument
    if is_call(node, *_ADDS):
        scores, other = _sides(node.args[0], node.args[1])
        factor = number(node.kwargs.get("alpha", 1))
        if value(other) is None or factor is None:
            return near("KVC114", "a number is added to the scores", node, 1)
        if scores is node.args[1] and factor != 1:
            return near("KVC114", f"scores are added with {dict(node.kwargs)}", node, 1)
        refused = found.add(the_node(other), factor, joined=node.meta["val"].dim() == 3)
    elif is_call(node, *_FILLS):
        scores = node.args[0]
        refused = found.hide(the_node(node.args[1]), number(node.args[2]), hides=True)
    elif is_call(node, aten.where.ScalarOther, aten.where.self):
        scores = node.args[1]
        refused = found.hide(the_node(node.args[0]), _filled(node.args[2]), hides=False)
    elif is_call(node, aten.where.ScalarSelf):
        scores = node.args[2]
        refused = found.hide(the_node(node.args[0]), _filled(node.args[1]), hides=True)
    elif is_call(node, *MULS, *DIVS):
        divide = is_call(node, *DIVS)
        scores, factor_node = node.args[0], node.args[1]
        if not divide:
            scores, factor_node = _sides(scores, factor_node)
        if number(factor_node) is None and found.softcap is None and _caps(scores):
            return near("KVC116", "the cap of the scores is a tensor", node, 1)
        refused = found.multiply(factor_node, divide=divide)
    elif is_call(node, *_TANHS):
        scores = node.args[0]
        refused = _cap(found, node)
    else:
        return near("KVC112", f"{node.target} stands between scores and softmax", node, 2)
    return refused or the_node(scores)


def _cap(found: Scores, node: fx.Node) -> Missed | None:
    """Take in a tanh: A tanh(B x) bounds the scores A B x by |A|."""
    if found.softcap is not None or found.factors:
        return near("KVC116", "the scores are capped twice, or the cap is scaled", node, 1)
    found.softcap = abs(found.scale)
    return None


def _caps(node: fx.node.Argument) -> bool:
    return isinstance(node, fx.Node) and is_call(through_views(node), *_TANHS)


def _sides(left: fx.node.Argument, right: fx.node.Argument) -> tuple[fx.Node, fx.node.Argument]:
    """Return which of two operands comes from the product, and the other."""
    if isinstance(right, fx.Node) and not (isinstance(left, fx.Node) and _has_product(left)):
        return right, left
    return the_node(left), right


def _has_product(node: fx.Node) -> bool:
    """Whether a product of matrices is what a node was made of, seen along first operands."""
    seen = 0
    while not is_call(node, *PRODUCTS):
        source = next((a for a in node.args if isinstance(a, fx.Node)), None)
        if is_call(node, aten.where.ScalarOther, aten.where.self):
            source = the_node(node.args[1])
        if source is None or node.op != "call_function" or seen > 16:
            return False
        node, seen = source, seen + 1
    return True


def _filled(node: fx.node.Argument) -> float | None:
    """Return a number, or the one that a tensor is filled with, or None."""
    if is_call(node, aten.full.default, aten.full_like.default):
        return number(the_node(node).args[1])
    if is_call(node, aten.scalar_tensor.default):
        return number(the_node(node).args[0])
    while is_call(node, aten.lift_fresh_copy.default, aten.detach_.default, *CASTS):
        node = the_node(node).args[0]
    if isinstance(node, fx.Node) and node.op == "get_attr":
        assert node.graph.owning_module is not None
        constant = getattr(node.graph.owning_module, str(node.target))
        return float(constant) if constant.numel() == 1 else None
    return number(node)


def through_casts(arg: fx.node.Argument) -> fx.Node:
    """Walk back over casts and identities: the kernels accumulate in fp32 whatever the cast."""
    node = peel(the_node(arg))
    while is_call(node, *CASTS):
        node = peel(the_node(node.args[0]))
    return node


def through_views(arg: fx.node.Argument) -> fx.Node:
    """Walk back over casts, and over the views that split or join batch and heads."""
    node = through_casts(arg)
    while is_call(node, *VIEWS):
        mine, its = value(node), value(node.args[0])
        if mine is None or its is None or {mine.dim(), its.dim()} != {3, 4}:
            break
        node = through_casts(node.args[0])
    return node


def near(code: str, reason: str, node: fx.Node | None, matched: int) -> Missed:
    """Return a miss of the pattern that matched so many of its parts."""
    return Missed(
        code,
        reason,
        node,
        hint='build the model with attn_implementation="sdpa" if it offers that',
        near_miss=f"softmax attention, {matched} of {STEPS} parts",
    )
