"""Counters that a graph moves on by itself: a step that fails sets them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.passes.ir.program import Program
from kvcompile.passes.patterns.layout import writer


class Counters:
    """The whole numbers among the inputs of a graph that it writes to, on whatever device."""

    def __init__(self, program: Program, kept_inputs: Sequence[int]) -> None:
        """Find them.

        Args:
            program: At stage `LOWERED`.
            kept_inputs: The captured graph's input for each placeholder of the rewritten one.
        """
        groups = defaultdict(list)
        for i, node in enumerate(program.placeholders):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
                continue
            if value.numel() == 1 and writer(node) is not None:
                groups[value.device, value.dim()].append(kept_inputs[i])
        self._groups = list(groups.values())

    def copies(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return copies of what they show; no device is waited for."""
        return [torch.stack([args[i] for i in group]) for group in self._groups]

    def set_back(self, args: Sequence[Any], copies: Sequence[torch.Tensor]) -> None:
        """Let them show again what they showed when `copies` was called."""
        for group, numbers in zip(self._groups, copies, strict=True):
            for i, number in zip(group, numbers, strict=True):
                args[i].copy_(number)
