"""What a pass is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.ir.source import where
from kvcompile.passes.layer_dtypes import LayerDtypes

if TYPE_CHECKING:
    from kvcompile.codegen.spec import IsaName
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.result import Missed
    from kvcompile.passes.ir.site import AttentionSite
    from kvcompile.passes.ir.stage import Stage


@dataclass(frozen=True)
class PassOptions:
    """What passes may decide by; the backend fills it from the user's options.

    Attributes:
        isa: Instruction set of the processor, which kernels for it are printed for.
        gpu_isa: What GPU kernels may use beyond Triton.
        gpu_devices: Types of the devices whose caches GPU kernels serve.
        has_integer_dot: Whether the processor multiplies vectors of bytes.
        dtypes: Formats of K and V by layer.
        page_size: Tokens per page; None for the default of the formats.
        q_group_size: Channels of V that share a scale.
        residual_length: Most recent tokens that stay exact in a quantized cache.
        num_sink_tokens: First tokens that stay exact in a quantized cache.
        compute_dtype: How quantized K and V are multiplied: `fp32`, `int8`, or `auto`.
        gemv: Whether linears of few rows get a kernel of their own.
        fuse_rope: Whether q and new K turn inside append and attend; None: in a GPU's kernels.
        separate_k_bias: Whether quantized K whose projection has a bias keeps its turning mean
            apart.
    """

    isa: IsaName
    gpu_isa: IsaName = "triton"
    gpu_devices: tuple[str, ...] = ()
    has_integer_dot: bool = False
    dtypes: LayerDtypes = field(default_factory=LayerDtypes)
    page_size: int | None = None
    q_group_size: int = 64
    residual_length: int = 64
    num_sink_tokens: int = 4
    compute_dtype: str = "auto"
    gemv: bool = True
    fuse_rope: bool | None = None
    separate_k_bias: bool = True


class Pass(Protocol):
    """One step of the pipeline: takes a program at stage `needs`, gives it at stage `gives`.

    Passes hold no state between calls, read no globals and print nothing; what they have to say
    goes to `program.remarks`, exactly one remark per site they consider.
    """

    name: str
    needs: Stage
    gives: Stage

    def run(self, program: Program, options: PassOptions) -> None:
        """Change the program in place."""


def passed(origin: str, code: str, site: AttentionSite, reason: str) -> Remark:
    """Return the remark that says a pass applied at a site."""
    return Remark("passed", code, origin, site.name, site.where, reason)


def missed(origin: str, site: AttentionSite | None, miss: Missed) -> Remark:
    """Return the remark that says why a pass did not apply."""
    line = where(miss.node) if miss.node is not None else ""
    return Remark(
        "missed",
        miss.code,
        origin,
        site.name if site else "",
        line or (site.where if site else ""),
        miss.reason,
        miss.hint,
        miss.near_miss,
    )
