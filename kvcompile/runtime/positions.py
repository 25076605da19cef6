"""Positions of new tokens as the host knows them, so that a step need not wait for a device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.passes.ir.program import PositionSource


class FirstPositions:
    """First positions of the new tokens of each stream of one graph.

    A counter that the graph itself moves on is read once. What it holds is known as long as nobody
    else has written to that tensor, and the store ends there. A write that leaves the tensor's
    version alone, through `.data` or by kernels of somebody's own, is noticed by the latter alone:
    who moves a counter on so appends as many tokens, and who sets one back so is not noticed. An
    instance belongs to one graph; threads that share it read more often, and never wrongly.
    """

    def __init__(self, sources: Sequence[PositionSource | None]) -> None:
        """Take where the position of each stream comes from, or None where it is not an input."""
        self._sources = tuple(sources)
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self.reads = 0
        """How often a tensor was read."""

    def of(self, args: Sequence[Any], new_len: int, lengths: Sequence[int]) -> list[int | None]:
        """Return the first position of each stream; None where only the graph can tell.

        Args:
            args: The graph's inputs.
            new_len: New tokens.
            lengths: Tokens that each stream's store holds.
        """
        found: dict[int, int | None] = {}
        for source, length in zip(self._sources, lengths, strict=True):
            if source is not None and source.input not in found:
                found[source.input] = self._first(source, args[source.input], new_len, length)
        return [None if source is None else found[source.input] for source in self._sources]

    def advanced(self, args: Sequence[Any], new_len: int, positions: Sequence[int | None]) -> None:
        """Note that the graph has run."""
        for source, position in zip(self._sources, positions, strict=True):
            if source is None or position is None or not source.advances:
                continue
            counter = args[source.input]
            if not counter.is_inference():
                now = weakref.ref(counter), counter._version, position + new_len
                self._known[source.input] = now

    def _first(
        self, source: PositionSource, counter: torch.Tensor, new_len: int, length: int
    ) -> int | None:
        # Known for one step: one that fails may have moved the counter on all the same.
        known = self._known.pop(source.input, None)
        if known is not None and not counter.is_inference():
            ref, version, position = known
            if position == length and ref() is counter and counter._version == version:
                return position
        self.reads += 1
        count = 1 if source.counts_up else new_len
        numbers = counter.flatten()[:count].tolist()
        first = int(numbers[0])
        # Positions that do not follow one another are for whoever checks them to refuse.
        return first if numbers == list(range(first, first + count)) else None
