"""A CUDA graph without CUDA: operators and launches of a step, done again on the same tensors.

What a graph would not see is not done again: the host's code runs while a step is recorded, and
never after. A value that depends on the inputs and is read by the host stops the recording, as a
wait for the device stops that of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcompile.codegen.gpu.compile import load
from kvcompile.runtime import gpu_launch, gpu_steps, ops
from kvcompile.runtime.recorder import Run

aten = torch.ops.aten
READS = (
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
)
OURS: dict[object, Callable[..., Any]] = {
    torch.ops.kvcompile.append.default: ops._append,
    torch.ops.kvcompile.append_attend.default: ops._append_attend,
}

_recording: list[EmulatedGraph] = []


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class EmulatedGraph(TorchDispatchMode):
    """A recorded step; see `recorder.Recorded`."""

    def __init__(self, on_device: list[Any]) -> None:
        """Take the tensors that change from step to step, as a device's tensors do."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Callable[[], object]] = []
        self._changing = _tensors(on_device)
        self._on_device = {_memory(x) for x in self._changing}
        self._kept: list[Any] = []
        self.launches = 0
        self.replays = 0
        self._outputs: tuple[Any, ...] = ()

    def record(self, run: Run, states: Sequence[torch.Tensor]) -> None:
        """Record a step, given the states of its stores.

        Raises:
            RuntimeError: It reads a tensor of the device.
        """
        before = [x.clone() for x in self._changing]
        _recording.append(self)
        try:
            with self:
                self._outputs = run(states)
        except RuntimeError:
            # CUDA executes nothing while it records.
            for x, old in zip(self._changing, before, strict=True):
                x.copy_(old)
            raise
        finally:
            _recording.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OURS:
            with self:
                return OURS[func](*args, **kwargs)
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if not any(_memory(x) in self._on_device for x in given):
            return result
        if func in READS:
            raise RuntimeError(f"{func} reads a tensor of the device while a step is recorded")
        self._kept.append((args, kwargs, result))
        mine = {_memory(x) for x in given}
        made = [x for x in _tensors(result) if _memory(x) not in mine]
        self._on_device |= {_memory(x) for x in (*made, *given)}

        def again() -> None:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if _memory(old) not in mine:
                    old.copy_(new)

        self._steps.append(again)
        return result

    def launched(self, launch: Callable[[], object], arguments: Sequence[object]) -> None:
        """Note a kernel that has been launched."""
        self.launches += 1
        self._kept.append(arguments)
        self._on_device |= {_memory(x) for x in _tensors(list(arguments))}
        self._steps.append(launch)

    def replay(self, states: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Do everything again, except right after the recording, which has done it."""
        del states
        if self.replays:
            for step in self._steps:
                step()
        self.replays += 1
        return self._outputs


class _Kernel:
    """A Triton function that tells the graph under recording of its launches."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            def again() -> None:
                self._function[grid](*arguments, **options)

            # The interpreter's own arithmetic is not part of a graph.
            with torch.utils._python_dispatch._disable_current_modes():
                again()
            for graph in _recording:
                graph.launched(again, arguments)

        return launch


@contextmanager
def emulated_graphs(monkeypatch: Any) -> Iterator[list[EmulatedGraph]]:
    """Record and replay steps on a CPU; give the graphs that were made."""
    monkeypatch.setattr(gpu_launch, "load", lambda spec: _Kernel(load(spec)))
    tables: list[Any] = []
    make_slot = gpu_steps._Slot.__init__

    def remember(slot: Any, *arguments: Any) -> None:
        make_slot(slot, *arguments)
        tables.append(slot)

    made: list[EmulatedGraph] = []

    def record(run: Run, states: Sequence[torch.Tensor], device: torch.device) -> EmulatedGraph:
        del device
        slots = [
            [slot.tables._numbers, slot.tables._counts._device, slot.tables._addresses._device]
            + [buffer.own for buffer in slot._buffers.values()]
            for slot in tables
        ]
        graph = EmulatedGraph(slots)
        made.append(graph)
        graph.record(run, states)
        return graph

    monkeypatch.setattr(gpu_steps._Slot, "__init__", remember)
    monkeypatch.setattr(gpu_steps, "record", record)
    yield made
