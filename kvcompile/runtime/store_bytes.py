"""The bytes of a store, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompile.runtime.rows import Holding


@dataclass(frozen=True)
class StoreBytes:
    """Bytes that one store holds.

    Attributes:
        codes: Tokens in pages, with their scales; a page shared inside the store counts once.
        window: Tokens that are stored exactly beside quantized pages: sinks and ring.
        slack: Slots without a token in the pages it holds.
        block_table: Page ids.
        starts: Left-padding counts.
        state: State tensor and anchors.
        dense: Dense tensors that handles were turned into.
    """

    codes: int
    window: int
    slack: int
    block_table: int
    starts: int
    state: int
    dense: int

    @classmethod
    def of(cls, held: Sequence[Holding], **beside: int) -> StoreBytes:
        """Return the bytes of pages, those with codes first, and of what lies beside them."""
        codes, *window = [holding.stored_bytes for holding in held]
        slack = sum(holding.held_bytes for holding in held) - codes - sum(window)
        return cls(codes=codes, window=sum(window), slack=slack, **beside)
