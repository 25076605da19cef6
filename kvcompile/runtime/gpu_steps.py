"""Decode steps on a GPU: no wait for the device, and one recording for all steps if asked for.

A recorded step is launched as a whole, without the host's code for each kernel. Everything that
differs among steps and caches lies in tensors that keep their places: small inputs are copied into
buffers, and what kernels must know of the stores is in `StepTables`. So one recording serves all
steps of all static caches of a size. Before a replay the host reserves pages and reports errors, as
it does before a step that is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo.utils import counters

from kvcompile.codegen.spec import MOST_QUERIES
from kvcompile.passes.ir.program import Program, StateBinding
from kvcompile.passes.ir.remarks import emit
from kvcompile.passes.patterns.layout import fixed
from kvcompile.runtime.mask_watch import MaskWatch
from kvcompile.runtime.positions import FirstPositions
from kvcompile.runtime.recordable import NotRecorded, Recording, not_recorded, recording_of
from kvcompile.runtime.recorder import Recorded, record
from kvcompile.runtime.step import Step
from kvcompile.runtime.step_tables import StepTables
from kvcompile.runtime.store import PagedStore

Inner = Callable[..., Any]

MOST_SLOTS = 8
"""Sizes of inputs and caches that are kept recorded at a time, those used last."""


EVER_NEW = NotRecorded(
    f"inputs or caches come in more than {MOST_SLOTS} sizes, and only the last ones are kept",
    "pad masks to the capacity of the cache, as generate does for a static one",
)


class _Buffer:
    """A copy of an input that keeps its place; where an input repeats numbers, so does the copy."""

    def __init__(self, given: torch.Tensor) -> None:
        own = _unexpanded(given)
        self.own = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
        self.whole = self.own.expand(given.shape)


def _unexpanded(x: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that has a memory of its own."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _sizes(x: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return size and stride of each dimension; one of size 1 has none."""
    strides = zip(x.shape, x.stride(), strict=True)
    return tuple((size, stride if size > 1 else 0) for size, stride in strides)


class _Slot:
    """The recording for inputs and stores of some sizes."""

    def __init__(
        self, inputs: Sequence[Any], plan: Recording, stores: Sequence[PagedStore], new_len: int
    ) -> None:
        self.tables = StepTables(stores, new_len)
        self._fixed = plan.fixed
        self._written = [i for i in plan.varying if i in plan.written]
        self._buffers = {i: _Buffer(inputs[i]) for i in plan.varying}
        self.recorded: Recorded | None = None
        self.places: tuple[int, ...] | None = None

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with buffers in the place of what is copied."""
        given = list(inputs)
        for i, buffer in self._buffers.items():
            given[i] = buffer.whole
        return given

    def copy_in(self, inputs: Sequence[Any]) -> None:
        """Copy what differs from step to step into the buffers."""
        if self._buffers:
            buffers = [buffer.own for buffer in self._buffers.values()]
            torch._foreach_copy_(buffers, [_unexpanded(inputs[i]) for i in self._buffers])

    def copy_back(self, inputs: Sequence[Any]) -> None:
        """Copy what the graph has written back to its inputs."""
        if self._written:
            sources = [self._buffers[i].own for i in self._written]
            torch._foreach_copy_([_unexpanded(inputs[i]) for i in self._written], sources)

    def places_of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return where the tensors are that are not copied."""
        return tuple(inputs[i].data_ptr() for i in self._fixed)


class GpuSteps:
    """Runs the decode steps of one graph.

    `torch._dynamo.utils.counters["kvcompile"]["recorded steps"]` counts recordings.

    Attributes:
        positions: Where the new tokens of each stream begin, as the host knows it.
    """

    def __init__(
        self,
        inner: Inner,
        states: Sequence[StateBinding],
        device: torch.device,
        new_len: int,
        recording: Recording | None,
    ) -> None:
        """Take a compiled graph.

        Args:
            inner: Kept inputs, then states, give the kept outputs.
            states: Its streams.
            device: Where it runs.
            new_len: Tokens that a step appends.
            recording: How its steps are recorded, or None if they are not.
        """
        self._inner = inner
        self._device = device
        self._new_len = new_len
        self._recording = recording
        self.positions = FirstPositions([state.position for state in states])
        self._watch = MaskWatch(device)
        self._slots: dict[object, _Slot] = {}
        # Threads take turns with the buffers: on the host, and on their streams.
        self._lock = threading.Lock()
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def run(
        self, args: Sequence[Any], inputs: Sequence[Any], stores: Sequence[PagedStore]
    ) -> tuple[Any, ...]:
        """Run one step; the lengths of the stores are left to be committed.

        Args:
            args: The captured graph's inputs.
            inputs: Those that were kept, without handles.
            stores: The store of each stream, claimed.

        Raises:
            CacheGapError, CacheFullError: Pages cannot be reserved, or an earlier mask showed
                what is not stored.
        """
        # Streams, events and launches are those of the current device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._run(args, inputs, stores)

    def _run(
        self, args: Sequence[Any], inputs: Sequence[Any], stores: Sequence[PagedStore]
    ) -> tuple[Any, ...]:
        self._watch.begin()
        lengths = [store.length for store in stores]
        positions = self.positions.of(args, self._new_len, lengths)
        first = [position for position in positions if position is not None]
        try:
            if self._recording is not None and len(first) == len(stores) and all(first):
                with self._lock:
                    if self._done is not None:
                        self._done.wait()
                    results = self._replay(self._recording, inputs, stores, first)
                    if self._done is not None:
                        self._done.record()
            else:
                for store, position in zip(stores, positions, strict=True):
                    store.step = Step(self._watch, position)
                results = self._inner(*inputs, *[store.state for store in stores])
        finally:
            for store in stores:
                store.step = None
        self.positions.advanced(args, self._new_len, positions)
        self._watch.send()
        return results

    def _replay(
        self,
        recording: Recording,
        inputs: Sequence[Any],
        stores: Sequence[PagedStore],
        positions: Sequence[int],
    ) -> tuple[Any, ...]:
        """Run a step that is or will be recorded: the first one of a size as it is, to compile."""
        slot, is_first = self._slot(recording, inputs, stores)
        for store, position in zip(stores, positions, strict=True):
            store.prepare(position, self._new_len)
        reach = [
            (position, max(position + self._new_len, store.length))
            for store, position in zip(stores, positions, strict=True)
        ]
        slot.tables.load(stores, reach)
        for store, position, tables in zip(stores, positions, slot.tables.streams, strict=True):
            store.step = Step(self._watch, position, tables)
        slot.copy_in(inputs)

        def run(states: Sequence[torch.Tensor]) -> tuple[Any, ...]:
            return tuple(self._inner(*slot.given(inputs), *states))

        states = [store.state for store in stores]
        results = run(states) if is_first else self._recorded(slot, inputs, run, states)
        slot.copy_back(inputs)
        for store, position in zip(stores, positions, strict=True):
            store.appended = position + self._new_len
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in results)

    def _slot(
        self, recording: Recording, inputs: Sequence[Any], stores: Sequence[PagedStore]
    ) -> tuple[_Slot, bool]:
        """Return what is recorded for these sizes, and whether nothing was run for them yet."""
        sizes = [_sizes(inputs[i]) for i in recording.varying]
        numbers = [inputs[i] for i in recording.numbers]
        caches = [(store.batch, store.capacity, store.is_padded, store.compute) for store in stores]
        key = (*sizes, *numbers, *caches)
        slot = self._slots.pop(key, None)
        is_new = slot is None
        if slot is None:
            slot = _Slot(inputs, recording, stores, self._new_len)
            if len(self._slots) == MOST_SLOTS:
                del self._slots[next(iter(self._slots))]
                emit(not_recorded(EVER_NEW), once=EVER_NEW.reason)
        self._slots[key] = slot  # the last one
        return slot, is_new

    def _recorded(
        self,
        slot: _Slot,
        inputs: Sequence[Any],
        run: Callable[[Sequence[torch.Tensor]], tuple[Any, ...]],
        states: Sequence[torch.Tensor],
    ) -> tuple[Any, ...]:
        """Replay a step, recorded first where that was not done yet or a parameter has moved."""
        places = slot.places_of(inputs)
        if slot.recorded is None or slot.places != places:
            slot.recorded = None  # its memory is free for the next one
            try:
                slot.recorded = record(run, states, self._device)
            except RuntimeError as error:
                self._recording = None
                emit(not_recorded(NotRecorded(f"recording failed: {error}")), once="failed")
                return run(states)
            slot.places = places
            counters["kvcompile"]["recorded steps"] += 1
        return slot.recorded.replay(states)


def gpu_steps_of(program: Program, inner: Inner, *, records: bool) -> GpuSteps | None:
    """Return what runs the steps of a decode graph on a GPU; None for any other graph.

    Args:
        program: At stage `LOWERED`.
        inner: Its compiled graph.
        records: Whether steps are recorded where they can be; a remark says why not.
    """
    binding = program.binding
    assert binding is not None
    sites = [state.site for state in binding.states]
    devices = {p.device for site in sites if (p := program.plans[site]).layout.order == "gpu16"}
    # A step that looks at the last of its tokens only has fewer queries than new tokens.
    streams = [program.streams[site] for site in sites]
    news = [stream.k for stream in streams if not stream.only_read]
    new_lens = {fixed(new.new.meta["val"].shape[new.token_dim]) for new in news}
    new_lens |= {fixed(program.sites[site].q.meta["val"].shape[2]) for site in sites}
    new_len = new_lens.pop() if len(new_lens) == 1 else None
    is_decode = all(program.streams[site].has_past for site in sites)
    if len(devices) != 1 or new_len is None or new_len > MOST_QUERIES or not is_decode:
        return None
    device = devices.pop()
    recording = None
    if records:
        found = recording_of(program, device)
        if isinstance(found, Recording):
            recording = found
        else:
            emit(not_recorded(found), once=found.reason)
    return GpuSteps(inner, binding.states, device, new_len, recording)
