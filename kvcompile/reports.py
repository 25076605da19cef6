"""What each compilation did: for `explain`, tests and whoever subscribes."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.remarks import Remark
    from kvcompile.passes.ir.site import AttentionSite


@dataclass(frozen=True)
class SiteReport:
    """One attention site of one graph, in words and numbers.

    Attributes:
        name: Module path.
        where: The user's source line.
        rewritten: Whether its cache is paged in this graph.
        pattern: Spelling that matched.
        mask: Kind of mask.
        num_q_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim_qk: Channels of a key.
        head_dim_vo: Channels of a value.
        state: How the graph updates the cache, or "".
        format: Formats of K and V, or "".
        bytes_per_token: Bytes of one token of one sequence in this layer, or 0.
        kernels: Kernel symbols.
        reason: Why it was not rewritten, or "".
    """

    name: str
    where: str
    rewritten: bool
    pattern: str
    mask: str
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    state: str
    format: str
    bytes_per_token: float
    kernels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CompilationReport:
    """One graph that went through the passes.

    Attributes:
        sites: Every attention that matched.
        remarks: Everything the passes said.
        pass_seconds: Time of each pass.
        seconds: Time of all passes together.
        has_past: Whether the graph is given an earlier state (a decode graph).
    """

    sites: tuple[SiteReport, ...]
    remarks: tuple[Remark, ...]
    pass_seconds: dict[str, float]
    seconds: float
    has_past: bool

    @classmethod
    def of(cls, program: Program, seconds: float) -> CompilationReport:
        """Return the report of a program that went through the pipeline."""
        return cls(
            sites=tuple(_site(program, site) for site in program.sites),
            remarks=tuple(program.remarks),
            pass_seconds=dict(program.seconds),
            seconds=seconds,
            has_past=any(s.has_past for s in program.streams.values()),
        )


def _site(program: Program, site: AttentionSite) -> SiteReport:
    plan = program.plans.get(site.index)
    stream = program.streams.get(site.index)
    misses = [r.reason for r in program.remarks if r.site == site.name and r.kind != "passed"]
    return SiteReport(
        name=site.name,
        where=site.where,
        rewritten=plan is not None,
        pattern=site.pattern,
        mask=site.mask_kind,
        num_q_heads=site.num_q_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim_qk=site.head_dim_qk,
        head_dim_vo=site.head_dim_vo,
        state=stream.k.kind if stream else "",
        format=f"{plan.layout.k_format}/{plan.layout.v_format}" if plan else "",
        bytes_per_token=plan.bytes_per_token if plan else 0.0,
        kernels=tuple(u.spec.symbol for u in program.kernels if u.site == site.index),
        reason="" if plan else (misses[0] if misses else ""),
    )


_listeners = threading.local()


def publish(report: CompilationReport) -> None:
    """Hand a report to whoever collects in this thread."""
    for collected in getattr(_listeners, "stack", ()):
        collected.append(report)


@contextlib.contextmanager
def collect() -> Iterator[list[CompilationReport]]:
    """Collect the reports of compilations that this thread makes inside the block."""
    collected: list[CompilationReport] = []
    stack = _listeners.__dict__.setdefault("stack", [])
    stack.append(collected)
    try:
        yield collected
    finally:
        stack.remove(collected)
