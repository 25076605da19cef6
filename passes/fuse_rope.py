"""Fold rotary embedding of q and new K into the operator that appends and attends."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.canonicalize import is_impure
from kvcompile.passes.ir.ops import APPEND_ATTEND
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.patterns.layout import fixed, the_node, writer
from kvcompile.passes.patterns.rope import CODE, Rotation, angles_fit, match, same_values

if TYPE_CHECKING:
    from kvcompile.codegen.rotary import Rotary
    from kvcompile.passes.ir.plan import StreamPlan
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite

aten = torch.ops.aten


class FuseRope:
    """Give `append_attend` the unrotated q and k, and the cosines and sines that they turn by."""

    name = "fuse-rope"
    needs = Stage.REWRITTEN
    gives = Stage.REWRITTEN

    def run(self, program: Program, options: PassOptions) -> None:
        """Rewrite calls in place; fill `program.ropes`."""
        sites = _sites_by_state(program)
        for call in program.graph.find_nodes(op="call_function", target=APPEND_ATTEND):
            site = sites[the_node(call.args[3])]
            if not _is_wanted(program.plans[site.index], options):
                continue
            found = _match(call)
            if isinstance(found, Missed):
                program.remarks.append(missed(self.name, site, found))
                continue
            q, k = found
            _fuse(call, q, k)
            program.ropes[site.index] = q.rotary
            program.remarks.append(passed(self.name, CODE, site, _found(q.rotary, site)))
        program.graph.eliminate_dead_code(is_impure)
        program.module.recompile()


def _sites_by_state(program: Program) -> dict[fx.Node, AttentionSite]:
    binding = program.binding
    assert binding is not None
    sites = {site.index: site for site in program.sites}
    states = program.placeholders[len(binding.kept_inputs) :]
    return {node: sites[s.site] for node, s in zip(states, binding.states, strict=True)}


def _is_wanted(plan: StreamPlan, options: PassOptions) -> bool:
    if options.fuse_rope is not None:
        return options.fuse_rope
    return plan.layout.order == "gpu16"


def _found(rotary: Rotary, site: AttentionSite) -> str:
    spelling = "interleaved" if rotary.interleaved else "half-split"
    channels = f"{rotary.dim} of {site.head_dim_qk} channels"
    return f"q and k turn in append and attend: {spelling}, {channels}"


def _match(call: fx.Node) -> tuple[Rotation, Rotation] | Missed:
    """Match the rotations of q and k of one call, which must be by the same angles."""
    q, k = (the_node(arg) for arg in call.args[:2])
    found = []
    for name, node in (("query", q), ("keys", k)):
        rotation = match(node)
        if isinstance(rotation, Missed):
            return Missed(
                CODE, f"{name}: {rotation.reason}", rotation.node, near_miss=rotation.near_miss
            )
        found.append(rotation)
    of_q, of_k = found
    near = "q and k both turn"
    if (of_q.rotary, of_q.tokens_first) != (of_k.rotary, of_k.tokens_first):
        return Missed(CODE, "q and k turn in different ways", k, near_miss=near)
    for name, mine, its in (("cosines", of_q.cos, of_k.cos), ("sines", of_q.sin, of_k.sin)):
        if not same_values(mine, its):
            return Missed(CODE, f"q and k turn by different {name}", its, near_miss=near)
        if not angles_fit(mine, of_q, q) or not angles_fit(its, of_k, k):
            return Missed(CODE, f"{name} are not one per token and channel", mine, near_miss=near)
    for node in (of_q.x, of_k.x, of_q.cos, of_k.cos, of_q.sin, of_k.sin):
        # What is read later, where the attention is, must still be there.
        if _is_written(node):
            return Missed(CODE, "what turns is written to", node, near_miss=near)
    return of_q, of_k


def _is_written(node: fx.Node) -> bool:
    """Whether an operator writes to a node, or to what it is a view of."""
    while writer(node) is None:
        if node.op != "call_function" or not _may_alias(node):
            return False
        node = the_node(node.args[0])
    return True


def _may_alias(node: fx.Node) -> bool:
    """Whether the result of a call may be a view of its first argument."""
    if node.target is operator.getitem:
        return True
    assert isinstance(node.target, torch._ops.OpOverload)
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _fuse(call: fx.Node, q: Rotation, k: Rotation) -> None:
    with call.graph.inserting_before(call):
        unrotated = [
            _unrotated(rotation, the_node(arg))
            for rotation, arg in zip((q, k), call.args[:2], strict=True)
        ]
        angles = [_angles(node, q) for node in (q.cos, q.sin)]
    call.args = (*unrotated, *call.args[2:], *angles, q.rotary.interleaved)


def _unrotated(rotation: Rotation, turned: fx.Node) -> fx.Node:
    """Return q or k [B, H, S, D] as it is before it turns."""
    node = rotation.x
    width, dim = (fixed(n.meta["val"].shape[-1]) for n in (node, turned))
    assert dim is not None
    if width != dim:
        node = _view(node, aten.slice.Tensor, 3, rotation.first, rotation.first + dim)
    return _view(node, aten.transpose.int, 1, 2) if rotation.tokens_first else node


def _angles(node: fx.Node, rotation: Rotation) -> fx.Node:
    """Return cosines or sines as [B or 1, 1, S, R]."""
    while node.meta["val"].dim() < 4:
        node = _view(node, aten.unsqueeze.default, 0)
    return _view(node, aten.transpose.int, 1, 2) if rotation.tokens_first else node


def _view(node: fx.Node, target: torch._ops.OpOverload, *args: int) -> fx.Node:
    view = node.graph.call_function(target, (node, *args))
    view.meta["val"] = target(node.meta["val"], *args)
    return view
