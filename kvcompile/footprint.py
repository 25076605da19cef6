"""The bytes of a cache of transformers, in pages or not, beside those of a dense one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.report import memory_report


@dataclass(frozen=True)
class Footprint:
    """What the cache of one sequence takes.

    Attributes:
        tokens: Tokens in it.
        values: Numbers of K and V that it stands for, in all layers.
        dense: Bytes of these numbers in the model's dtype.
        stored: Bytes that are kept for them: codes, scales, exact tokens, dense tensors.
        window: Those of tokens kept exactly beside quantized pages: sinks and most recent ones.
        allocated: Bytes of everything: `stored`, free slots and pages, tables.
        states: K and V tensors of all layers.
        dense_states: Those that do not lie in pages.
        materializations: Operator -> how often it needed the dense tensor.
    """

    tokens: int
    values: int
    dense: int
    stored: int
    window: int
    allocated: int
    states: int
    dense_states: int
    materializations: Mapping[str, int]

    @property
    def bytes_per_token(self) -> float:
        """Stored bytes of one token in all layers."""
        return self.stored / self.tokens

    @property
    def bits_per_value(self) -> float:
        """Stored bits of one number of K or V, its share of scales included."""
        return 8 * self.stored / self.values

    @property
    def bits_in_pages(self) -> float:
        """The same without the exact tokens beside the pages: what a long text approaches."""
        exact_values = self.window * self.values // self.dense
        if exact_values == self.values:
            return math.nan
        return 8 * (self.stored - self.window) / (self.values - exact_values)


def footprint(cache: Any) -> Footprint:
    """Return what a cache takes.

    Args:
        cache: Has `layers`, each with `keys` and `values`, as the caches of transformers.
    """
    report = memory_report(cache)
    states = _states(cache)
    plain = sum(_bytes(state) for state in states if not isinstance(state, KVTensor))
    return Footprint(
        tokens=max((state.shape[-2] for state in states), default=0),
        values=sum(state.numel() for state in states),
        dense=sum(_bytes(state) for state in states),
        stored=report.stored + report.dense + plain,
        window=report.window,
        allocated=report.total + plain,
        states=len(states),
        dense_states=dense_states(cache),
        materializations=report.materializations,
    )


def dense_states(cache: Any) -> int:
    """Return how many K and V tensors of a cache do not lie in pages."""
    return sum(not isinstance(x, KVTensor) or x.is_written for x in _states(cache))


def _states(cache: Any) -> list[torch.Tensor]:
    held = [getattr(layer, n, None) for layer in cache.layers for n in ("keys", "values")]
    return [state for state in held if isinstance(state, torch.Tensor) and state.numel()]


def _bytes(state: torch.Tensor) -> int:
    return state.numel() * state.element_size()
