"""How keys rotate and whether they have a bias, read off the graph."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcompile.codegen.rotary import Rotary
from kvcompile.passes.base import PassOptions
from kvcompile.passes.layer_dtypes import LayerDtypes
from tests.support.programs import Pair, capture, past

DIM, HEADS = 16, 2
Style = Literal["half", "interleaved", "table", "none"]


class Attention(nn.Module):
    """Projections, rotary embedding in one of its spellings, a growing cache, attention."""

    def __init__(self, style: Style, *, bias: bool = True, rotates: int = DIM) -> None:
        super().__init__()
        self.style = style
        self.qkv = nn.Linear(32, 3 * HEADS * DIM, bias=bias)
        self.norm = nn.Parameter(torch.ones(DIM))
        self.rotates = rotates
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, rotates, 2) / rotates))
        angles = torch.outer(torch.arange(64.0), self.inv_freq)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        if self.style == "none":
            return x
        x, rest = x[..., : self.rotates], x[..., self.rotates :]
        if self.style == "table":
            cos, sin = self.cos[position], self.sin[position]
        else:
            angles = position[:, None] * self.inv_freq
            if self.style == "half":
                angles = torch.cat([angles, angles], -1)
            else:
                angles = angles.repeat_interleave(2, -1)
            cos, sin = angles.cos(), angles.sin()
        if self.style == "interleaved":
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            half = self.rotates // 2
            turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return torch.cat([x * cos + turned * sin, rest], -1)

    def forward(self, x: Tensor, position: Tensor, pair: Pair) -> Any:
        q, k, v = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = (self.rotate(F.rms_norm(y, (DIM,), self.norm), position) for y in (q, k))
        k, v = torch.cat([pair[0], k], 2), torch.cat([pair[1], v], 2)
        return F.scaled_dot_product_attention(q, k, v), k, v


def plan(model: Attention, dtype: str = "int4", **options: Any) -> tuple[Any, str]:
    """Return the plan of the one attention, and what the remark says of it."""
    x, pair = torch.randn(2, 1, 32), past(7, kv_heads=HEADS, dim=DIM)
    given = PassOptions(isa="avx512", dtypes=LayerDtypes(dtype), **options)
    program, _ = capture(model.requires_grad_(False), x, torch.tensor([7]), pair, options=given)
    (said,) = [r.reason for r in program.remarks if r.code == "KVC300"]
    return program.plans[0], said


@pytest.mark.parametrize(
    ("style", "rotates", "expected"),
    [
        ("half", DIM, Rotary(DIM)),
        ("half", 4, Rotary(4)),
        ("interleaved", DIM, Rotary(DIM, interleaved=True)),
        ("interleaved", 8, Rotary(8, interleaved=True)),
    ],
)
def test_channels_that_turn_together(style: Style, rotates: int, expected: Rotary) -> None:
    found, said = plan(Attention(style, rotates=rotates))
    assert found.layout.rotary == expected
    assert found.frequencies.meta["val"].shape == (rotates // 2,)
    assert f"turns in {rotates} channels" in said


@pytest.mark.parametrize("style", ["table", "none"])
def test_keys_without_frequencies_are_quantized_as_they_are(style: Style) -> None:
    found, said = plan(Attention(style))
    assert found.layout.rotary is None
    assert "no input holds rotary frequencies" in said


def test_keys_without_a_bias_and_exact_keys_have_no_mean() -> None:
    cases: list[tuple[Attention, str, dict[str, Any]]] = [
        (Attention("half", bias=False), "int4", {}),
        (Attention("half"), "auto", {}),
        (Attention("half"), "int4", {"separate_k_bias": False}),
    ]
    for model, dtype, options in cases:
        found, said = plan(model, dtype, **options)
        assert found.layout.rotary is None
        assert found.frequencies is None
        assert "bias" not in said
