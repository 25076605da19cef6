"""Find every attention of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.site import AttentionSite
from kvcompile.passes.ir.source import module_path, where
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.patterns import sdpa, softmax
from kvcompile.passes.patterns.layout import fixed, same_size, value

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import Bias
    from kvcompile.passes.patterns.candidate import Candidate

PATTERNS = (("sdpa", sdpa), ("softmax", softmax))

_MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16)


class MatchAttention:
    """Match each attention operator or softmax against the known spellings."""

    name = "match-attention"
    needs = Stage.CANONICAL
    gives = Stage.MATCHED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.sites`; the graph is left as it is."""
        sites: list[AttentionSite] = []
        anchors = 0
        for node in program.graph.nodes:
            for pattern, rule in PATTERNS:
                if not rule.is_anchor(node):
                    continue
                anchors += 1
                found = rule.match(node)
                if not isinstance(found, Missed):
                    found = _check(found)
                if isinstance(found, Missed):
                    program.remarks.append(self._miss(node, found, anchors - 1))
                    continue
                site = _site(len(sites), pattern, found)
                sites.append(site)
                reason = (
                    f"{pattern} attention, {site.num_q_heads} query and {site.num_kv_heads} KV "
                    f"heads, mask {site.mask_kind}{_beside(site)}"
                )
                program.remarks.append(passed(self.name, "KVC100", site, reason))
        if not anchors:
            note = Missed("KVC101", "the graph holds no attention")
            program.remarks.append(missed(self.name, None, note))
        program.sites = tuple(sites)

    def _miss(self, node: fx.Node, miss: Missed, index: int) -> Remark:
        """Name the site of a miss by its own anchor, also where matching stopped elsewhere."""
        return Remark(
            "missed",
            miss.code,
            self.name,
            module_path(node) or f"attention_{index}",
            where(miss.node or node) or where(node),
            miss.reason,
            miss.hint,
            miss.near_miss,
        )


def _beside(site: AttentionSite) -> str:
    """Say what the attention does beside scaling and masking."""
    cap = "" if site.softcap is None else f", scores capped at {site.softcap:g}"
    sinks = "" if site.sinks is None else ", sink logits"
    return cap + sinks + (", a bias on the scores" if site.biases else "")


def _site(index: int, pattern: str, found: Candidate) -> AttentionSite:
    return AttentionSite(
        index=index,
        name=module_path(found.out) or f"attention_{index}",
        where=where(found.out),
        pattern="sdpa" if pattern == "sdpa" else "softmax",
        out=found.out,
        q=found.q,
        k=found.k,
        v=found.v,
        mask=found.mask,
        mask_kind=found.mask_kind,
        mask_hides=found.mask_hides,
        scale=found.scale,
        softcap=found.softcap,
        sinks=found.sinks,
        biases=found.biases,
        factors=found.factors,
    )


def _check(found: Candidate) -> Candidate | Missed:
    """Refuse operands the kernels could not read: ranks, head counts, mask shapes."""
    q, k, v = value(found.q), value(found.k), value(found.v)
    for name, val in (("query", q), ("keys", k), ("values", v)):
        if val is None or val.dim() != 4:
            rank = "unknown" if val is None else str(val.dim())
            return Missed("KVC103", f"the {name} have {rank} dimensions, not 4", found.out)
    assert q is not None
    assert k is not None
    assert v is not None
    sizes = (q.shape[1], k.shape[1], v.shape[1], k.shape[3], v.shape[3], q.shape[3])
    if any(fixed(size) is None for size in sizes):
        return Missed("KVC106", "the number of heads or the head dimension is symbolic", found.out)
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        shapes = f"query {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        return Missed("KVC107", f"head counts or dimensions do not fit: {shapes}", found.out)
    if not (same_size(q.shape[0], k.shape[0]) and same_size(q.shape[0], v.shape[0])):
        shapes = f"query {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        return Missed("KVC107", f"the batches differ: {shapes}", found.out)
    out = value(found.out)
    if out is None or not same_size(out.shape[1], q.shape[1]):
        return Missed("KVC107", "the heads of query and result differ", found.out)
    mask = value(found.mask)
    if found.mask is not None and (mask is None or not 2 <= mask.dim() <= 4):
        return Missed("KVC108", "the mask is not a tensor of 2 to 4 dimensions", found.out)
    if mask is not None and mask.dtype not in _MASK_DTYPES:
        return Missed("KVC108", f"the mask has dtype {mask.dtype}", found.out)
    for bias in found.biases:
        val = value(bias.node)
        fits = val is not None and 1 <= val.dim() <= 4
        if not fits or bias.node.meta["val"].dtype not in _dtypes_of(bias):
            reason = "what is added to the scores is no tensor of floating-point numbers"
            return Missed("KVC108", reason, bias.node)
    return found


def _dtypes_of(bias: Bias) -> tuple[torch.dtype, ...]:
    return _MASK_DTYPES[1:] if bias.hides is None else (torch.bool,)
