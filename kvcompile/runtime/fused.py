"""Calling a graph in which K and V were set apart with tensors of both, as the model has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcompile.passes.ir.fused import FusedState
from kvcompile.runtime.as_written import INPUT
from kvcompile.runtime.handle import KVTensor


class FusedBoundary:
    """Takes fused states apart before a graph runs, and joins those that it returns."""

    def __init__(
        self, states: tuple[FusedState, ...], inner: Callable[..., tuple[Any, ...]]
    ) -> None:
        """Wrap a graph.

        Args:
            states: The fused states of the graph.
            inner: Takes K and V behind the other inputs, and returns them behind the others.
        """
        self._states = states
        self._inner = inner
        self._num_outputs = min(state.k_output for state in states)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run one step."""
        parts = [_apart(s, args[s.input]) for s in self._states if s.input is not None]
        results = self._inner(*args, *[half for pair in parts for half in pair])
        outputs = list(results[: self._num_outputs])
        for state in self._states:
            for position in state.outputs:
                k, v = results[state.k_output], results[state.v_output]
                outputs[position] = _joined(state, k, v)
        return tuple(outputs)


def _apart(state: FusedState, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a past: handles of its store if it is one and was not written."""
    dense = past
    if isinstance(past, KVTensor):
        store = past.store
        if store is not None and _lies_as_in(state, past) and not past.is_written:
            where = past.length, past.begin
            return KVTensor.of(store, "k", *where), KVTensor.of(store, "v", *where)
        dense = past.read(INPUT)
    k = state.layout.part(dense, True, state.k_size)
    v = state.layout.part(dense, False, state.v_size)
    return k.contiguous(), v.contiguous()


def _lies_as_in(state: FusedState, past: KVTensor) -> bool:
    """Whether a handle shows K and V in the places where the graph has them."""
    store, sizes = past.store, (state.k_size, state.v_size)
    if store is None or past.role != "kv" or store.fused != state.layout:
        return False
    return store.part_sizes(state.layout) == sizes


def _joined(state: FusedState, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return K and V as the model's own tensor: a handle, if both are handles of one store."""
    if isinstance(k, KVTensor) and isinstance(v, KVTensor) and k.store is v.store:
        store = k.store
        assert store is not None
        store.fuse(state.layout)
        return KVTensor.of(store, "kv", k.length, k.begin)
    return state.layout.join(k, v)
