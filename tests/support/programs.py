"""Programs for tests of passes: captured by Dynamo, never compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from kvcompile.codegen.layout import RecordLayout
from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.printer import print_program
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.pipeline import run_pipeline
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.store import PagedStore

OPTIONS = PassOptions(isa="avx512")

Pair = tuple[torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def capture(
    function: Callable[..., Any], *inputs: Any, options: PassOptions = OPTIONS
) -> tuple[Program, list[Any]]:
    """Return the one graph that Dynamo makes of a call, and the inputs it would be called with."""
    found: list[tuple[Program, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        program = Program(gm, Stage.CAPTURED)

        def run(*args: Any) -> Any:
            found.append((program, list(args)))
            return gm(*args)

        # The passes need the tracing context that Dynamo opens around the backend.
        run_pipeline(program, options, verify_each=True, observe=observers[-1])
        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    assert len(found) == 1
    return found[0]


observers: list[Callable[[Program], None] | None] = [None]
"""The last one is told about every stage of the programs captured meanwhile."""


def qkv(tokens: int = 3, *, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> Tensors:
    """Return new q, k, v for a batch of two."""
    shapes = ((2, h, tokens, dim) for h in (heads, kv_heads, kv_heads))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


def past(tokens: int, *, kv_heads: int = 2, dim: int = 8) -> Pair:
    """Return a dense past with a growing dimension that Dynamo keeps symbolic."""
    pair = torch.randn(2, kv_heads, tokens, dim), torch.randn(2, kv_heads, tokens, dim)
    for tensor in pair:
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    return pair


def codes(program: Program) -> list[str]:
    """Return the codes of all remarks in order."""
    return [remark.code for remark in program.remarks]


def calls(program: Program) -> list[str]:
    """Return the names of the operators that the graph calls, in order."""
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def handles(
    tokens: int, capacity: int | None = None, *, kv_heads: int = 2, dim: int = 8
) -> tuple[KVTensor, KVTensor]:
    """Return handles of a cache, static or not, that holds some tokens of a batch of two."""
    layout = RecordLayout("fp32", "fp32", dim, dim, 32)
    store = PagedStore(
        layout,
        kv_heads,
        torch.float32,
        "cpu",
        Arena(layout.page_bytes(kv_heads)),
        batch=2,
        capacity=capacity,
    )
    store.append(torch.randn(2, kv_heads, tokens, dim), torch.randn(2, kv_heads, tokens, dim), 0)
    store.commit(tokens)
    return KVTensor.of(store, "k"), KVTensor.of(store, "v")


def static_handles(tokens: int, capacity: int, *, kv_heads: int = 2, dim: int = 8) -> Pair:
    """Return handles of a static cache that holds some tokens of a batch of two."""
    return handles(tokens, capacity, kv_heads=kv_heads, dim=dim)


def every_stage(function: Callable[..., Any], *inputs: Any) -> list[tuple[Program, str]]:
    """Return copies of the program at every stage, each with its printed text."""
    stages: list[tuple[Program, str]] = []

    def observe(program: Program) -> None:
        graph = fx.GraphModule(program.module, program.graph)
        stages.append((dataclasses.replace(program, module=graph), print_program(program)))

    observers.append(observe)
    try:
        capture(function, *inputs)
    finally:
        observers.pop()
    return stages


def printed(function: Callable[..., Any], *inputs: Any) -> list[str]:
    """Return the printed text of every stage after canonicalization that changed the program."""
    texts = [text for _, text in every_stage(function, *inputs)[1:]]
    changed = [texts[0]]
    for before, after in pairwise(texts):
        if before.split('"""', 2)[2] != after.split('"""', 2)[2]:
            changed.append(after)
    return changed
