"""The state tensor: where kernels find what a store consists of, int64[16].

A graph sees of a store this one tensor; see docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_WORDS = 16


@dataclass(frozen=True)
class StateWords:
    """Places in the state tensor that describe one table."""

    slab_table: int
    block_table: int
    row_stride: int
    slab_shift: int
    page_bytes: int


PAGES = StateWords(0, 1, 2, 4, 5)
EXACT_PAGES = StateWords(8, 9, 10, 11, 12)
STARTS, BATCH, KEY, QUANTIZED, RING_FROM, ROTARY = 3, 6, 7, 13, 14, 15
