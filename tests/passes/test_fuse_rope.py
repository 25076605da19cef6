"""Rotary embedding folded into append_attend: every spelling, and what only looks like one."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.program import Program
from tests.support.programs import Pair, capture, past

FUSING = PassOptions(isa="avx512", fuse_rope=True)
HEADS, KV_HEADS, DIM = 4, 2, 8

Found = Literal["half", "negative indices", "operands swapped", "interleaved", "viewed"]
Missing = Literal[
    "none",
    "minus",
    "other sign",
    "halves swapped",
    "of another tensor",
    "not the same half",
    "in fp32",
    "per head",
    "per token",
    "one token's",
    "three halves",
]
FOUND: tuple[Found, ...] = get_args(Found)
MISSING: tuple[Missing, ...] = get_args(Missing)
REASONS: dict[Missing, str] = {
    "none": "query: aten.neg.default where",
    "minus": "query: aten.sub.Tensor where",
    "other sign": "no x * cos + rotate(x) * sin",
    "halves swapped": "no x * cos + rotate(x) * sin",
    "of another tensor": "no x * cos + rotate(x) * sin",
    "not the same half": "no x * cos + rotate(x) * sin",
    "in fp32": "several dtypes: bfloat16, float32",
    "per head": "q and k turn by different cosines",
    "per token": "cosines are not one per token and channel",
    "one token's": "cosines are not one per token and channel",
    "three halves": "a sum of something else than two products",
}


def turn(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Return x [.., R], turned in one of the spellings, or something that only looks like it."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    across = torch.cat((-second, first), -1)
    match style:
        case "none":
            return -x
        case "negative indices":
            across = torch.cat((-x[..., -half:], x[..., :-half]), -1)
        case "operands swapped":
            return sin * across + cos * x
        case "interleaved":
            across = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        case "viewed":
            across = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
        case "minus":
            return x * cos - across * sin
        case "other sign":
            across = torch.cat((second, -first), -1)
        case "halves swapped":
            across = torch.cat((-first, second), -1)
        case "of another tensor":
            across = across.exp()
        case "not the same half":
            across = torch.cat((-second, x[..., 1 : half + 1]), -1)
        case "in fp32":
            wide = x.float()
            wide_across = torch.cat((-wide[..., half:], wide[..., :half]), -1)
            return (wide * cos.float() + wide_across * sin.float()).to(x.dtype)
        case "per head":
            cos = cos.expand(*x.shape[:-1], -1)
        case "per token":
            cos = cos[..., :1]
        case "one token's":
            cos = cos[..., :1, :]
        case "three halves":
            return x * cos + across * sin + x
    return x * cos + across * sin


class Turning(nn.Module):
    """Attention with a growing cache, whose q and k turn first.

    Args:
        style: How they turn.
        rotates: Channels that turn; those behind them stand still.
        tokens_first: Whether q and k turn as [B, S, H, D].
    """

    def __init__(self, style: str, *, rotates: int = DIM, tokens_first: bool = False) -> None:
        super().__init__()
        self.style, self.rotates, self.tokens_first = style, rotates, tokens_first

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * 2
        if self.tokens_first:
            x, cos, sin = (y.transpose(1, 2) for y in (x, cos, sin))
            cos, sin = cos.repeat_interleave(1, -1), sin.repeat_interleave(1, -1)
        if self.rotates == x.shape[-1]:
            x = turn(x, cos, sin, self.style)
        else:
            still = x[..., self.rotates :]
            x = torch.cat((turn(x[..., : self.rotates], cos, sin, self.style), still), -1)
        return x.transpose(1, 2) if self.tokens_first else x

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], -v], 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), k, v


def program_of(
    model: nn.Module,
    *,
    rotates: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
    options: PassOptions = FUSING,
) -> Program:
    """Return the program of a decode step of two tokens."""
    q, k, v = (torch.randn(2, h, 2, DIM).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    cos, sin = torch.randn(1, 1, 2, rotates).to(dtype), torch.randn(1, 1, 2, rotates).to(dtype)
    dense = tuple(x.to(dtype) for x in past(7))
    for x in dense:
        torch._dynamo.maybe_mark_dynamic(x, 2)
    return capture(model.eval(), q, k, v, dense, cos, sin, options=options)[0]


def said(program: Program) -> list[str]:
    return [str(remark) for remark in program.remarks if remark.code == "KVC406"]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("rotates", [DIM, 4])
@pytest.mark.parametrize("style", FOUND)
def test_spellings(style: Found, rotates: int, tokens_first: bool) -> None:
    model = Turning(style, rotates=rotates, tokens_first=tokens_first)
    program = program_of(model, rotates=rotates)
    rotary = Rotary(rotates, style in ("interleaved", "viewed"))
    assert program.ropes == {0: rotary}
    assert [use.spec.rope for use in program.kernels if use.role != "linear"] == [rotary] * 2  # type: ignore[union-attr]
    (remark,) = said(program)
    assert remark.startswith("passed")
    assert f"{rotates} of {DIM} channels" in remark
    (call,) = (n for n in program.graph.nodes if "append_attend" in str(n.target))
    for position, heads in enumerate((HEADS, KV_HEADS)):
        assert call.args[position].meta["val"].shape == (2, heads, 2, DIM)
    cos, sin, interleaved = call.args[10:]
    assert cos.meta["val"].shape == sin.meta["val"].shape == (1, 1, 2, rotates)
    assert interleaved == rotary.interleaved
    left = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not left & {"aten.add.Tensor", "aten.cat.default", "aten.stack.default"}


@pytest.mark.parametrize("style", MISSING)
def test_what_only_looks_like_it(style: Missing) -> None:
    program = program_of(Turning(style))
    (remark,) = said(program)
    assert remark.startswith("missed")
    assert REASONS[style] in remark
    assert program.ropes == {}
    (call,) = (n for n in program.graph.nodes if "append_attend" in str(n.target))
    assert len(call.args) == 10


class TwoAngles(Turning):
    """q and k that turn by different angles, or in different ways."""

    def __init__(self, what: str) -> None:
        super().__init__("half")
        self.what = what

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self.turned(q, cos, sin)
        if self.what == "cosines":
            cos = cos * 1.5
        if self.what == "sines":
            sin = sin * 1.5
        if self.what == "ways":
            self.style = "interleaved"
        k = self.turned(k, cos, sin)
        self.style = "half"
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], -v], 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), k, v


@pytest.mark.parametrize("what", ["cosines", "sines", "ways"])
def test_q_and_k_must_turn_alike(what: str) -> None:
    (remark,) = said(program_of(TwoAngles(what)))
    assert remark.startswith("missed")
    assert what in remark


class OtherChannels(Turning):
    """Channels behind those that turn that come from elsewhere."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * 2
        return torch.cat((turn(x[..., :4], cos, sin, "half"), x[..., :4]), -1)


def test_what_stands_still_must_be_the_rest() -> None:
    (remark,) = said(program_of(OtherChannels("half"), rotates=4))
    assert "missed" in remark
    assert "of something else" in remark


class Written(Turning):
    """What turns is overwritten before the attention."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        twice = q * 2
        view = twice.view(twice.shape)
        turned = turn(view, cos, sin, "half")
        k = self.turned(k, cos, sin)
        twice.zero_()
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], -v], 2)
        return F.scaled_dot_product_attention(turned, k, v, enable_gqa=True), k, v


def test_what_is_written_to_meanwhile_is_left_alone() -> None:
    (remark,) = said(program_of(Written("half")))
    assert "what turns is written to" in remark


@pytest.mark.parametrize("fuse", [None, False])
def test_on_a_cpu_it_has_to_be_asked_for(fuse: bool | None) -> None:
    program = program_of(Turning("half"), options=PassOptions(isa="avx512", fuse_rope=fuse))
    assert said(program) == []
    assert program.ropes == {}
    assert any(str(n.target) == "aten.cat.default" for n in program.graph.nodes)


@pytest.mark.parametrize("fuse", [None, True, False])
def test_on_a_gpu_it_is_the_default(fuse: bool | None) -> None:
    options = PassOptions(isa="avx512", gpu_devices=("cpu",), fuse_rope=fuse)
    program = program_of(Turning("half"), options=options)
    assert program.ropes == ({} if fuse is False else {0: Rotary(DIM)})
