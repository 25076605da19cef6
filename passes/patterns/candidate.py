"""What a pattern returns when it matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from kvcompile.passes.ir.site import Bias, Factor, MaskKind


@dataclass(frozen=True, eq=False)
class Candidate:
    """Operands of an attention, before it has a name; fields as in `AttentionSite`."""

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    mask_kind: MaskKind
    mask_hides: bool
    scale: float
    softcap: float | None = None
    sinks: fx.Node | None = None
    biases: tuple[Bias, ...] = ()
    factors: tuple[Factor, ...] = ()
