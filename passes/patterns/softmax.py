"""matmul(softmax(mask + bias + scores), v) => attention; what scores are, see `patterns.scores`.

With a sink logit per head (gpt-oss) one more column joins the softmax and is dropped behind it:
matmul(softmax(cat([scores, sinks]))[..., :-1], v).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from kvcompile.passes.ir.result import Missed
from kvcompile.passes.patterns.candidate import Candidate
from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    number,
    peel,
    same_size,
    strip_repeat_kv,
    the_dim,
    the_node,
    value,
)
from kvcompile.passes.patterns.scores import (
    CASTS,
    DIVS,
    MULS,
    VIEWS,
    Scores,
    near,
    read,
    through_casts,
    through_views,
)

aten = torch.ops.aten


def is_anchor(node: fx.Node) -> bool:
    """Whether matching starts at this node: a softmax over the last of four dimensions."""
    if not is_call(node, aten.softmax.int, aten._softmax.default):
        return False
    val = value(node)
    return val is not None and val.dim() == 4 and the_dim(node, 1) == 3


def match(node: fx.Node) -> Candidate | Missed:
    """Match around one softmax."""
    scores, column = _without_column(_without_maximum(through_casts(node.args[0])))
    weights, product = node, _only_consumer(node)
    if column is not None:
        if not _drops_last(product):
            return near("KVC117", "a column joins the softmax and stays", product, 1)
        weights, product = the_node(product), _only_consumer(the_node(product))
    if not is_call(product, aten.matmul.default, aten.bmm.default):
        return near("KVC111", "the probabilities are not multiplied with values", product, 0)
    assert isinstance(product, fx.Node)
    first = product.args[0]
    if not isinstance(first, fx.Node) or through_views(first) is not through_views(weights):
        return near("KVC111", "the probabilities are the second factor", product, 0)
    found = read(scores)
    if isinstance(found, Missed):
        return found
    sinks = None if column is None else _one_per_head(column, scores)
    if column is not None and sinks is None:
        return near("KVC117", "what joins the softmax is not one number per head", column, 1)
    return _candidate(found, product, sinks)


def _candidate(found: Scores, out: fx.Node, sinks: fx.Node | None) -> Candidate | Missed:
    """Take the products of queries with keys and of weights with values apart."""
    q, k_transposed = (the_node(arg) for arg in found.product.args[-2:])
    outer, k_transposed = _unscaled(peel(k_transposed))
    if not _swaps_last_two(k_transposed):
        reason = "the second factor of the scores is not transposed"
        return near("KVC113", reason, found.product, 3)
    inner, k = _unscaled(peel(the_node(k_transposed.args[0])))
    parts = [q, k, the_node(out.args[1])]
    apart = [x if x.meta["val"].dim() == 4 else _heads_apart(x) for x in parts]
    result = out if out.meta["val"].dim() == 4 else _apart_again(out)
    if result is None or any(part is None for part in apart):
        return near("KVC113", "batch and heads are one dimension, and stay so", found.product, 3)
    q, k, v = (the_node(part) for part in apart)
    last, k = _unscaled(strip_repeat_kv(k))
    return Candidate(
        out=result,
        q=q,
        k=strip_repeat_kv(k),
        v=strip_repeat_kv(v),
        mask=found.mask,
        mask_kind=found.mask_kind,
        mask_hides=found.mask_hides,
        scale=found.scale * outer * inner * last,
        softcap=found.softcap,
        sinks=sinks,
        biases=tuple(found.biases),
        factors=tuple(found.factors),
    )


def _unscaled(node: fx.Node) -> tuple[float, fx.Node]:
    """Return the number that keys are multiplied by for this attention alone, and what by."""
    factor = number(node.args[1]) if is_call(node, *MULS, *DIVS) else None
    if not factor or len(node.users) != 1:
        return 1.0, node
    return 1.0 / factor if is_call(node, *DIVS) else factor, peel(the_node(node.args[0]))


def _without_maximum(node: fx.Node) -> fx.Node:
    """Walk back over the subtraction of each row's largest score, which changes no weight."""
    if not is_call(node, aten.sub.Tensor) or node.kwargs:
        return node
    highest = the_node(node.args[1])
    shape = highest.meta["val"].shape
    if is_call(highest, operator.getitem) and highest.args[1] == 0:
        highest = the_node(highest.args[0])
    if not is_call(highest, aten.max.dim, aten.amax.default):
        return node
    of_rows = highest.args[1] in (-1, 3, [-1], [3]) and len(shape) == 4
    same = through_casts(highest.args[0]) is through_casts(node.args[0])
    return through_casts(node.args[0]) if of_rows and same else node


def _without_column(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Split off a column that was put behind the scores, if one was."""
    if not is_call(node, aten.cat.default) or the_dim(node, 1) != 3:
        return node, None
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    if len(parts) != 2 or fixed(the_node(parts[1]).meta["val"].shape[3]) != 1:
        return node, None
    return through_casts(parts[0]), the_node(parts[1])


def _drops_last(node: fx.Node | None) -> bool:
    """Whether a node is `x[..., :-1]`."""
    if not is_call(node, aten.slice.Tensor):
        return False
    assert node is not None
    whole, rest = (n.meta["val"].shape[3] for n in (the_node(node.args[0]), node))
    begins = number(node.args[2]) == 0 if len(node.args) > 2 else True
    return the_dim(node, 1) == 3 and begins and same_size(rest, whole - 1)


def _one_per_head(column: fx.Node, scores: fx.Node) -> fx.Node | None:
    """Return the tensor [H] that a column [B, H, S, 1] repeats, or None."""
    heads = scores.meta["val"].shape[1]
    node = column
    while is_call(node, aten.expand.default, aten.unsqueeze.default, *VIEWS, *CASTS):
        shape = node.meta["val"].shape
        if not is_call(node, aten.expand.default) and not _counts_heads(shape, heads):
            return None
        node = the_node(node.args[0])
        if node.meta["val"].dim() == 1:
            return node if same_size(node.meta["val"].shape[0], heads) else None
    return None


def _counts_heads(shape: torch.Size, heads: int) -> bool:
    """Whether a tensor has one number per head, where heads are counted in [B, H, S, T]."""
    sizes = [1, 1, 1, *shape][-4:]
    return same_size(sizes[1], heads) and all(same_size(sizes[d], 1) for d in (0, 2, 3))


def _heads_apart(node: fx.Node) -> fx.Node | None:
    """Return the tensor [B, H, S, D] whose batch and heads a node joins, or None."""
    node = peel(node)
    if not is_call(node, *VIEWS):
        return None
    apart = the_node(node.args[0])
    mine, its = node.meta["val"].shape, apart.meta["val"].shape
    joins = len(its) == 4 and all(same_size(mine[d], its[d + 1]) for d in (1, 2))
    return apart if joins else None


def _apart_again(out: fx.Node) -> fx.Node | None:
    """Return the view [B, H, S, D] that alone is taken of an output [B * H, S, D], or None."""
    if len(out.users) != 1:
        return None
    (view,) = out.users
    val = value(view)
    if not is_call(view, *VIEWS) or val is None or val.dim() != 4:
        return None
    return (
        view if all(same_size(val.shape[d + 1], out.meta["val"].shape[d]) for d in (1, 2)) else None
    )


def _only_consumer(node: fx.Node) -> fx.Node | None:
    """Follow casts, inactive dropout and the joining of batch and heads to the real consumer."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not (is_call(user, *CASTS) or through_views(user) is through_views(node)):
            return user
        node = user
    return None


def _swaps_last_two(node: fx.Node) -> bool:
    if is_call(node, aten.mT.default):
        return True
    rank = node.meta["val"].dim()
    if is_call(node, aten.transpose.int):
        return {the_dim(node, 1), the_dim(node, 2)} == {rank - 2, rank - 1}
    return is_call(node, aten.permute.default) and node.args[1] == [
        *range(rank - 2),
        rank - 1,
        rank - 2,
    ]
