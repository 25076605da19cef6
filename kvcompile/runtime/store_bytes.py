"""The bytes of a store, by part."""

from __future__ import annotations

from dataclasses import dataclass


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
