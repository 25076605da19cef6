"""How keys rotate and whether they have a bias, read off the graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.plan import StreamPlan
from kvcompile.passes.ir.program import Program
from kvcompile.passes.layer_dtypes import LayerDtypes
from kvcompile.runtime.executor import Executor
from tests.support.programs import Pair, capture, past

DIM, HEADS = 16, 2
Style = Literal["half", "interleaved", "strided", "last", "two", "table", "none"]
STYLES: tuple[Style, ...] = get_args(Style)
Bias = Literal["linear", "added", "norm", "none", "one plus weight", "before"]


class Attention(nn.Module):
    """Projections, rotary embedding in one of its spellings, a growing cache, attention.

    Args:
        style: `half` and `interleaved` say which channels turn together; `strided` is `half`, with
            every other one of cosines that were repeated. The others are not to be found: the
            rotating channels come `last`, turn by `two` inputs or a `table`, or there are `none`.
        bias: What adds one: the projection, an addition behind it, a layer norm of each head, or
            nothing: with a norm by a weight or by one plus a weight, or behind an addition.
        rotates: Channels that rotate.
    """

    def __init__(self, style: Style, *, bias: Bias = "linear", rotates: int = DIM) -> None:
        super().__init__()
        self.style, self.bias = style, bias
        self.qkv = nn.Linear(32, 3 * HEADS * DIM, bias=bias == "linear")
        self.added = nn.Parameter(torch.randn(3 * HEADS * DIM))
        self.early = nn.Parameter(torch.randn(32))
        self.norm = nn.Parameter(torch.ones(DIM))
        self.shift = nn.Parameter(torch.randn(DIM))
        self.rotates = rotates
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, rotates, 2) / rotates))
        self.others: Tensor
        self.register_buffer("others", self.inv_freq.clone())
        angles = torch.outer(torch.arange(64.0), self.inv_freq)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        if self.style == "none":
            return x
        if self.style == "last":
            rest, x = x[..., : -self.rotates], x[..., -self.rotates :]
        else:
            x, rest = x[..., : self.rotates], x[..., self.rotates :]
        if self.style == "table":
            cos, sin = self.cos[position], self.sin[position]
        else:
            angles = position[:, None] * self.inv_freq
            if self.style in ("interleaved", "strided"):
                angles = angles.repeat_interleave(2, -1)
            else:
                angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos(), angles.sin()
        if self.style == "two":
            cos = cos * (position[:, None] * self.others).cos().repeat(1, 2)
        if self.style == "strided":
            cos, sin = (torch.cat([y[..., ::2]] * 2, -1) for y in (cos, sin))
        if self.style == "interleaved":
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            half = self.rotates // 2
            turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        turned = x * cos + turned * sin
        return torch.cat([rest, turned] if self.style == "last" else [turned, rest], -1)

    def normed(self, x: Tensor) -> Tensor:
        if self.bias == "norm":
            return F.layer_norm(x, (DIM,), self.norm, self.shift)
        if self.bias == "one plus weight":
            return F.rms_norm(x, (DIM,)) * (1 + self.norm)
        return F.rms_norm(x, (DIM,), self.norm)

    def forward(self, x: Tensor, position: Tensor, pair: Pair | None) -> Any:
        x = (x + self.early) @ self.qkv.weight.T if self.bias == "before" else self.qkv(x)
        if self.bias == "added":
            x = x + self.added
        q, k, v = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in x.chunk(3, -1))
        q, k = (self.rotate(self.normed(y), position) for y in (q, k))
        if pair is not None:
            k, v = torch.cat([pair[0], k], 2), torch.cat([pair[1], v], 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=pair is None), k, v


def planned(
    model: Attention, dtype: str = "int4", *, prefill: bool = False, **options: Any
) -> Program:
    """Return the program of one call."""
    tokens = 7 if prefill else 1
    position = torch.arange(7) if prefill else torch.tensor([7])
    pair = None if prefill else past(7, kv_heads=HEADS, dim=DIM)
    given = PassOptions(isa="avx512", dtypes=LayerDtypes(dtype), **options)
    inputs = torch.randn(2, tokens, 32), position, pair
    program, _ = capture(model.requires_grad_(False), *inputs, options=given)
    assert program.streams[0].has_past == (not prefill)
    return program


def plan(model: Attention, *given: str, **options: Any) -> tuple[StreamPlan, str]:
    """Return the plan of the one attention, and what the remark says of it."""
    program = planned(model, *given, **options)
    (said,) = [r.reason for r in program.remarks if r.code == "KVC300"]
    return program.plans[0], said


@pytest.mark.parametrize(
    ("style", "rotates", "expected"),
    [
        ("half", DIM, Rotary(DIM)),
        ("half", 4, Rotary(4)),
        ("interleaved", DIM, Rotary(DIM, interleaved=True)),
        ("interleaved", 8, Rotary(8, interleaved=True)),
        ("strided", DIM, Rotary(DIM)),
    ],
)
def test_channels_that_turn_together(style: Style, rotates: int, expected: Rotary) -> None:
    found, said = plan(Attention(style, rotates=rotates))
    assert found.layout.rotary == expected
    assert found.frequencies is not None
    assert found.frequencies.meta["val"].shape == (rotates // 2,)
    assert f"turns in {rotates} channels" in said


@pytest.mark.parametrize("style", ["table", "none", "two", "last"])
def test_keys_without_frequencies_of_their_own_are_quantized_as_they_are(style: Style) -> None:
    found, said = plan(Attention(style, rotates=8))
    assert found.layout.rotary is None
    assert "quantized as it is" in said


@pytest.mark.parametrize("style", STYLES)
def test_prefill_and_decode_agree(style: Style) -> None:
    """The decode graph reads pages that the prefill graph has begun."""
    (prefill, said), (decode, said_later) = (
        plan(Attention(style, rotates=8), prefill=prefill) for prefill in (True, False)
    )
    assert prefill.layout == decode.layout
    assert (decode.layout.rotary is None) == (style not in ("half", "interleaved", "strided"))
    assert said == said_later


@pytest.mark.parametrize("bias", ["linear", "added", "norm"])
def test_whatever_adds_a_bias_is_seen(bias: Bias) -> None:
    for prefill in (True, False):
        assert plan(Attention("half", bias=bias), prefill=prefill)[0].layout.rotary == Rotary(DIM)


def test_keys_without_a_bias_and_exact_keys_have_no_mean() -> None:
    cases: list[tuple[Attention, str, dict[str, Any]]] = [
        (Attention("half", bias="none"), "int4", {}),
        (Attention("half", bias="one plus weight"), "int4", {}),
        (Attention("half", bias="before"), "int4", {}),
        (Attention("half"), "auto", {}),
        (Attention("half"), "int4", {"separate_k_bias": False}),
    ]
    for model, dtype, options in cases:
        found, said = plan(model, dtype, **options)
        assert found.layout.rotary is None
        assert found.frequencies is None
        assert "bias" not in said


def test_an_executor_does_not_keep_the_graph_of_its_frequencies() -> None:
    program = planned(Attention("half"))
    assert program.plans[0].frequencies is not None
    graph = weakref.ref(program.graph)
    executor = Executor(program, lambda *_: ())
    del program
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None
    assert executor is not None
