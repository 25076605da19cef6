"""Recording the kernels of a step, to launch them again without running the host's code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]
"""Runs a step, given the states of its stores, in place: inputs and outputs are always the same."""

_recording = threading.Lock()
"""PyTorch records one graph at a time in a process."""


class Recorded(Protocol):
    """A recorded step."""

    def replay(self, states: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Launch its kernels again; return its outputs, which the next replay overwrites."""
        ...


class CudaGraph:
    """A step as a CUDA graph."""

    def __init__(self, run: Run, states: Sequence[torch.Tensor], device: torch.device) -> None:
        """Record, without executing anything.

        Raises:
            RuntimeError: Something in the step cannot be recorded.
        """
        self._graph = torch.cuda.CUDAGraph()
        # The stream that PyTorch records on by itself is one of whatever device came first. Other
        # threads may allocate meanwhile; by default that would fail, there and here.
        stream = torch.cuda.Stream(device)
        recording = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
        with _recording, recording:
            self._outputs = run(states)

    def replay(self, states: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Launch all kernels at once."""
        del states  # what kernels read of them is in the tables
        self._graph.replay()
        return self._outputs


class Rerun:
    """Stands in for a graph in the interpreter, where there is none: runs the step again."""

    def __init__(self, run: Run, states: Sequence[torch.Tensor]) -> None:
        """Keep the step."""
        del states
        self._run = run

    def replay(self, states: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run the step."""
        return self._run(states)


def record(run: Run, states: Sequence[torch.Tensor], device: torch.device) -> Recorded:
    """Return a recorded step.

    Raises:
        RuntimeError: Something in the step cannot be recorded.
    """
    return CudaGraph(run, states, device) if device.type == "cuda" else Rerun(run, states)
