"""What a pass is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.ir.source import where

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
        kv_cache_dtype: Format of K and V; `auto` stores the model's dtype exactly.
        page_size: Tokens per page.
        isa: Instruction set the kernels are printed for.
    """

    kv_cache_dtype: str
    page_size: int
    isa: IsaName


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
