"""Whether the steps of a graph can be recorded, and what stays in its place while they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.patterns.layout import value, writer

STATIC_INPUT = "_dynamo_static_input_type"
"""How Dynamo marks parameters and buffers of modules among a graph's inputs."""


@dataclass(frozen=True)
class Recording:
    """What is known about recording the steps of a graph.

    Attributes:
        fixed: Positions among the kept inputs of tensors that stay where they are, as parameters
            do; a step is recorded anew if one of them moves.
        varying: Positions of all other tensors.
        written: Positions of those that the graph writes to.
        numbers: Positions of numbers that the graph calculates with. A size or stride that comes
            along with a tensor is known from the tensor.
    """

    fixed: tuple[int, ...]
    varying: tuple[int, ...]
    written: frozenset[int]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class NotRecorded:
    """Why the steps of a graph cannot be recorded."""

    reason: str
    hint: str = ""


def recording_of(program: Program, device: torch.device) -> Recording | NotRecorded:
    """Return how the decode steps of a lowered program are recorded, or why they cannot be."""
    binding = program.binding
    assert binding is not None
    if any(state.only_read for state in binding.states):
        return NotRecorded("the graph reads caches that it does not append to")
    if any(state.capacity is None for state in binding.states):
        return NotRecorded(
            "the cache grows, and with it the sizes in the graph",
            'generate with cache_implementation="static", or give the model a StaticCache',
        )
    if any(state.position is None for state in binding.states):
        return NotRecorded("where new tokens go is computed in the graph from more than a counter")
    inputs = program.placeholders[: len(binding.kept_inputs)]
    tensors = {i: n for i, n in enumerate(inputs) if value(n) is not None}
    elsewhere = next((n for n in tensors.values() if n.meta["val"].device != device), None)
    if elsewhere is not None:
        return NotRecorded(f"the input {elsewhere.name} is not on {device}")
    written = frozenset(i for i, n in tensors.items() if writer(n) is not None)
    memories = Counter(_memory(n) for n in tensors.values())
    shared = next(
        (n for i, n in tensors.items() if i in written and memories[_memory(n)] > 1), None
    )
    if shared is not None:
        return NotRecorded(f"the graph writes to {shared.name}, which shares memory with an input")
    fixed = tuple(i for i, n in tensors.items() if _is_fixed(n) and i not in written)
    return Recording(
        fixed=fixed,
        varying=tuple(i for i in tensors if i not in fixed),
        written=written,
        numbers=tuple(i for i, n in enumerate(inputs) if i not in tensors and n.users),
    )


def _memory(node: fx.Node) -> int:
    """Return what names the memory of a fake tensor."""
    return int(node.meta["val"].untyped_storage()._cdata)


def _is_fixed(node: fx.Node) -> bool:
    return bool((node.meta.get("tensor_dict") or {}).get(STATIC_INPUT))


def not_recorded(why: NotRecorded) -> Remark:
    """Return the remark that kernels are launched one by one although the mode asks for more."""
    return Remark(
        kind="missed",
        code="KVC506",
        origin="launch",
        site="",
        where="",
        reason=f"decode steps are not recorded, each kernel is launched by itself: {why.reason}",
        hint=why.hint,
    )
