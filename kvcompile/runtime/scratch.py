"""Memory for the partial results of attention: one buffer per thread, reused by every call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvcompile.codegen.cpu.compile import Kernel
    from kvcompile.codegen.spec import KernelSpec


class _Scratch(threading.local):
    """One buffer per thread that only grows; kernels leave nothing in it between calls."""

    address = 0
    size = 0
    buffer: torch.Tensor | None = None


_scratch = _Scratch()
_SCRATCH_STEP = 4096
"""Sizes are asked for in steps of tokens, so that most calls find theirs in a dictionary."""


def scratch_of(kernel: Kernel[KernelSpec]) -> Callable[[int, int, int, int], int]:
    """Return a function from (batch, KV heads, queries, kv_len) to the address of a buffer."""
    sizes: dict[tuple[int, int, int, int], int] = {}
    scratch_bytes = kernel.scratch_bytes
    assert scratch_bytes is not None

    def address(batch: int, kv_heads: int, queries: int, kv_len: int) -> int:
        steps = kv_len // _SCRATCH_STEP + 1
        key = (batch, kv_heads, queries, steps)
        size = sizes.get(key)
        if size is None:
            size = sizes[key] = scratch_bytes(batch, kv_heads, queries, steps * _SCRATCH_STEP)
        if size > _scratch.size:
            _scratch.buffer = torch.empty(size, dtype=torch.uint8)
            _scratch.address, _scratch.size = _scratch.buffer.data_ptr(), size
        return _scratch.address

    return address
