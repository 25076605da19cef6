"""Choose how each stream is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.layout import RecordLayout
from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.ir.plan import StreamPlan
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.stage import Stage

if TYPE_CHECKING:
    from kvcompile.codegen.spec import DTypeName
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite

EXACT_FORMATS: dict[torch.dtype, DTypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""Format that stores a dtype as it is."""

MAX_HEAD_DIM = 512
"""Largest head dimension the kernels' scratch is laid out for."""


class PlanFormats:
    """Give every stream a format, a page layout and its bytes."""

    name = "plan-formats"
    needs = Stage.INFERRED
    gives = Stage.PLANNED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.plans`."""
        for site in program.sites:
            if site.index not in program.streams:
                continue
            plan = _plan(site, options)
            if isinstance(plan, Missed):
                program.remarks.append(missed(self.name, site, plan))
                continue
            program.plans[site.index] = plan
            reason = (
                f"{plan.layout.k_format}/{plan.layout.v_format} pages of {options.page_size} "
                f"tokens, {plan.bytes_per_token:.0f} bytes per token"
            )
            program.remarks.append(passed(self.name, "KVC300", site, reason))


def _plan(site: AttentionSite, options: PassOptions) -> StreamPlan | Missed:
    k, v = site.k.meta["val"], site.v.meta["val"]
    if k.dtype != v.dtype:
        return Missed("KVC301", f"keys are {k.dtype} and values {v.dtype}", site.k)
    q, out = site.q.meta["val"], site.out.meta["val"]
    if not q.dtype == k.dtype == out.dtype:
        reason = f"the query is {q.dtype}, the keys are {k.dtype} and the result is {out.dtype}"
        return Missed("KVC301", reason, site.out)
    if k.dtype not in EXACT_FORMATS:
        known = ", ".join(str(d) for d in EXACT_FORMATS)
        return Missed("KVC302", f"no exact format stores {k.dtype} (there are: {known})", site.k)
    if k.device.type != "cpu":
        return Missed("KVC303", f"there are no kernels for {k.device.type} devices", site.k)
    if max(site.head_dim_qk, site.head_dim_vo) > MAX_HEAD_DIM:
        reason = f"head dimension {max(site.head_dim_qk, site.head_dim_vo)} exceeds {MAX_HEAD_DIM}"
        return Missed("KVC304", reason, site.k)
    name = EXACT_FORMATS[k.dtype]
    layout = RecordLayout(
        k_format=name,
        v_format=name,
        head_dim_qk=site.head_dim_qk,
        head_dim_vo=site.head_dim_vo,
        page_size=options.page_size,
    )
    return StreamPlan(site.index, k.dtype, site.num_kv_heads, layout)
