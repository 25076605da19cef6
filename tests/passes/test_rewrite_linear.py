"""Which products of a graph get a kernel of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.ops import LINEAR
from kvcompile.passes.ir.program import Program
from tests.support.attentions import Sdpa
from tests.support.programs import Pair, calls, capture, past

OPTIONS = PassOptions(isa="avx512")
WIDE = 256
"""Channels whose square is the smallest weight that is rewritten."""


class Layer(torch.nn.Module):
    """An attention whose query is the sum of three products."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, in_order: bool = True) -> None:
        super().__init__()
        self.attention = Sdpa("expand")
        self.wide = torch.nn.Linear(WIDE, WIDE, dtype=dtype)
        self.bare = torch.nn.Linear(WIDE, WIDE, bias=False, dtype=dtype)
        self.small = torch.nn.Linear(WIDE, WIDE - 1, dtype=dtype)
        if not in_order:
            self.bare.weight = torch.nn.Parameter(self.bare.weight.detach().T.contiguous().T)

    def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pair: Pair) -> Any:
        y = self.wide(x) + self.bare(x) + self.small(x).sum()
        return self.attention(y.unflatten(-1, (4, -1)).transpose(1, 2), k, v, pair)


def step(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    x = torch.randn(rows, tokens, WIDE, dtype=dtype)
    k, v = (torch.randn(rows, 2, tokens, 64, dtype=dtype) for _ in range(2))
    pair = tuple(p[:1].repeat(rows, 1, 1, 1).to(dtype) for p in past(7, dim=64))
    for tensor in pair:
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    return x, k, v, pair


def about(program: Program) -> list[str]:
    """Return what the pass says of a graph."""
    return [remark.reason for remark in program.remarks if remark.code == "KVC410"]


def linears(model: torch.nn.Module, *inputs: Any, options: PassOptions = OPTIONS) -> list[str]:
    program, _ = capture(model.requires_grad_(False), *inputs, options=options)
    names = [name for name in calls(program) if "linear" in name]
    rewritten = names.count(str(LINEAR))
    kernels = [use.spec.symbol for use in program.kernels if use.role == "linear"]
    assert len(kernels) == bool(rewritten)
    said = [int(n) for remark in about(program) for n in re.findall(r": (\d+)", remark)]
    assert said == [] or (said[0], sum(said)) == (rewritten, len(names))
    assert bool(said) == (options.gemv and bool(program.plans))
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_a_few_rows_and_a_wide_weight(dtype: torch.dtype, rows: int, tokens: int) -> None:
    names = linears(Layer(dtype), *step(rows, tokens, dtype))
    assert names == [str(LINEAR), str(LINEAR), "aten.linear.default"]


def test_many_rows_are_left_alone() -> None:
    assert linears(Layer(), *step(1, 5)) == ["aten.linear.default"] * 3
    assert linears(Layer(), *step(5, 1)) == ["aten.linear.default"] * 3


def test_weights_in_another_order_are_left_alone() -> None:
    names = linears(Layer(in_order=False), *step(1, 1))
    assert names == [str(LINEAR), "aten.linear.default", "aten.linear.default"]


def test_autocast_is_left_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linears(Layer(), *step(1, 1)) == ["aten.linear.default"] * 3


def test_a_bias_that_broadcasts_is_left_alone() -> None:
    model = Layer()
    model.wide.bias = torch.nn.Parameter(torch.randn(1, WIDE))
    names = linears(model, *step(1, 1))
    assert names == ["aten.linear.default", str(LINEAR), "aten.linear.default"]


def test_the_reason_is_said() -> None:
    model = Layer(in_order=False).requires_grad_(False)
    program, _ = capture(model, *step(1, 1), options=OPTIONS)
    assert about(program) == [
        "linears of few rows that read their weights in order: 1; "
        "left as they are, weights that do not lie in order: 1; "
        "left as they are, weights of fewer than 65,536 numbers: 1"
    ]


def test_weights_of_symbolic_size_are_left_alone_without_a_guard() -> None:
    """The length of the past is one of them here."""

    class Scored(Layer):
        table = torch.randn(64, 1001)

        def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pair: Pair) -> Any:
            tokens = pair[0].shape[2]
            scores = torch.nn.functional.linear(x[..., :tokens], self.table[:, :tokens])
            return super().forward(x, k, v, pair), scores

    model = Scored().requires_grad_(False)
    program, _ = capture(model, *step(1, 1), options=OPTIONS)
    assert "weights of symbolic size: 1" in about(program)[0]
    (length, *_) = (
        n.meta["val"] for n in program.placeholders if isinstance(n.meta["val"], torch.SymInt)
    )
    guards = [str(guard.expr) for guard in length.node.shape_env.guards]
    assert not any("1001" in guard for guard in guards), "nothing was compared with the stride"


def test_a_graph_that_stays_as_it_is_is_left_alone() -> None:
    program, _ = capture(torch.nn.Linear(WIDE, WIDE).requires_grad_(False), torch.randn(1, WIDE))
    assert not about(program)
    assert calls(program) == ["aten.linear.default"]


def test_the_option_turns_it_off() -> None:
    options = PassOptions(isa="avx512", gemv=False)
    assert linears(Layer(), *step(1, 1), options=options) == ["aten.linear.default"] * 3
