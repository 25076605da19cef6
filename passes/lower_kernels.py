"""Give every `kvcompile::` operator the kernels that serve it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import fx

from kvcompile.codegen.spec import KernelSpec
from kvcompile.passes.base import PassOptions, passed
from kvcompile.passes.ir.program import KernelUse, Program
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.plan_formats import EXACT_FORMATS

if TYPE_CHECKING:
    from kvcompile.codegen.rotary import Rotary
    from kvcompile.codegen.spec import DTypeName
    from kvcompile.passes.ir.plan import StreamPlan
    from kvcompile.passes.ir.site import AttentionSite

KEPT_META = ("val", "stack_trace", "nn_module_stack", "tensor_dict")
"""Metadata that goes on to the inner compiler; the rest holds nodes of other graphs or handles,
which would make its cache key unpicklable and every process start cold."""


class LowerKernels:
    """Specify the kernels, and clean the metadata for the inner compiler."""

    name = "lower-kernels"
    needs = Stage.REWRITTEN
    gives = Stage.LOWERED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.kernels`."""
        uses: list[KernelUse] = []
        for site in program.sites:
            plan = program.plans.get(site.index)
            if plan is None:
                continue
            rope = program.ropes.get(site.index)
            stream = program.streams[site.index]
            mine = []
            if not stream.only_read:
                mine.append(KernelUse(site.index, "append", _append_spec(plan, rope, options)))
            if stream.has_past:
                spec = _attend_spec(site, plan, rope, options)
                mine.append(KernelUse(site.index, "attend", spec))
            uses += mine
            symbols = ", ".join(u.spec.symbol for u in mine)
            program.remarks.append(passed(self.name, "KVC500", site, symbols))
        program.kernels += tuple(uses)
        for node in program.graph.nodes:
            node.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
        # The re-trace left its shape environment on the module, which cannot be pickled either.
        program.module = fx.GraphModule(program.module, program.graph)


def _append_spec(plan: StreamPlan, rope: Rotary | None, options: PassOptions) -> KernelSpec:
    on_gpu = plan.layout.order == "gpu16"
    return KernelSpec(
        op="append",
        target="gpu" if on_gpu else "cpu",
        isa=options.gpu_isa if on_gpu else options.isa,
        dtype=EXACT_FORMATS[plan.dtype],
        **plan.layout.spec_fields(),
        rope=rope,
    )


def _attend_spec(
    site: AttentionSite, plan: StreamPlan, rope: Rotary | None, options: PassOptions
) -> KernelSpec:
    one = site.q.meta["val"].shape[2] == 1
    additive = site.mask.meta["val"].dtype if site.mask_kind == "additive" else None  # type: ignore[union-attr]
    return dataclasses.replace(
        _append_spec(plan, rope, options),
        op="attend",
        q_heads_per_kv_head=site.num_q_heads // site.num_kv_heads,
        mask=site.mask_kind,
        mask_dtype=EXACT_FORMATS[additive] if additive is not None else None,
        queries="one" if one else "few",
        compute=plan.compute,
        softcap=site.softcap,
        sink_dtype=_sink_dtype(site),
    )


def _sink_dtype(site: AttentionSite) -> DTypeName | None:
    """Return the type that sink logits have in the kernel: that of the query, or fp32."""
    if site.sinks is None:
        return None
    mine, its = (node.meta["val"].dtype for node in (site.sinks, site.q))
    return EXACT_FORMATS[its] if mine == its else "fp32"
