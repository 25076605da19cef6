"""The quantized formats in plain torch: error bounds, bytes, and where every code lies."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.formats import FORMATS, PartShape, Role, decode, encode
from kvcompile.codegen.formats.grouped import bf16_down, bf16_up, pack_fields, unpack_fields
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.layout import RecordLayout, Window
from tests.support.float8 import FLOAT8, finite_numbers

GROUPED = [name for name, format_ in FORMATS.items() if format_.is_grouped]
EVEN = ["int2", "int3", "int4", "int8"]
KINDS = ["normal", "outliers", "constant", "biased", "tiny", "huge", "one", "zero"]
ROLES: list[Role] = ["k", "v"]
WINDOW = Window("bf16", 4, 64)


def data(kind: str, tokens: int, channels: int) -> torch.Tensor:
    """Return [P, D] of one adversarial kind."""
    x = torch.randn(tokens, channels)
    if kind == "outliers":
        x[:, :: max(channels // 3, 1)] *= 1000
        x[tokens // 2] *= 50
    elif kind == "constant":
        x = torch.full_like(x, -0.7)
    elif kind == "biased":
        x += 300 * torch.randn(channels)
    elif kind == "tiny":
        x *= 1e-30
    elif kind == "huge":
        x *= 1e30
    elif kind == "one":
        x[1:] = x[0]
    elif kind == "zero":
        x = torch.zeros_like(x)
    return x


def group_of(shape: PartShape, x: torch.Tensor, reduce: str) -> torch.Tensor:
    """Return per element an extreme of its group, computed without the formats' own code."""
    pick = getattr(torch, reduce)
    if shape.role == "k":
        extreme: torch.Tensor = pick(x, dim=0, keepdim=True)
        return extreme.expand_as(x)
    size = shape.group_size
    parts = [x[:, c : c + size] for c in range(0, x.shape[1], size)]
    return torch.cat([pick(p, dim=1, keepdim=True).expand_as(p) for p in parts], dim=1)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVEN)
def test_no_element_is_further_than_half_a_step_from_its_level(
    name: str, kind: str, role: Role
) -> None:
    """Half a step of the exact range, widened by what rounding the ends to bf16 adds."""
    format_ = FORMATS[name]
    shape = PartShape(role, 64, 80, 64)
    x = data(kind, 64, 80)
    back = decode(format_, shape, encode(format_, shape, x))
    lowest, highest = (group_of(shape, x, reduce).double() for reduce in ("amin", "amax"))
    levels = 2**format_.bits - 1
    reach = highest - lowest + lowest.abs() / 128
    step = reach / levels * (1 + 1 / 128)
    assert bool(((back.double() - x.double()).abs() <= step / 2 * (1 + 1e-5)).all())
    assert bool((back.double() >= lowest - lowest.abs() / 128 - step * 1e-5).all())


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_bit_keeps_the_nearer_of_two_levels(kind: str, role: Role) -> None:
    format_ = FORMATS["int1"]
    shape = PartShape(role, 32, 64, 64)
    x = data(kind, 32, 64)
    back = decode(format_, shape, encode(format_, shape, x)).double()
    low, high = group_of(shape, back, "amin"), group_of(shape, back, "amax")
    best = torch.minimum((x - low).abs(), (x - high).abs())
    slack = (x.abs().max() + back.abs().max()) * 1e-6
    assert bool(((back - x).abs() <= best + slack).all())
    # The levels are the mean -+ the mean absolute deviation.
    dim = 0 if role == "k" else 1
    mean, spread = x.double().mean(dim), None
    spread = (x.double() - mean.unsqueeze(dim)).abs().mean(dim)
    ends = torch.stack([mean - spread, mean + spread]).abs().amax(0) / 60 + 1e-38
    if kind != "constant":
        assert bool(((low.amin(dim) - (mean - spread)).abs() <= ends + mean.abs() / 60).all())


@pytest.mark.parametrize("name", FLOAT8)
def test_the_types_of_8_bits_are_those_of_torch(name: str) -> None:
    format_, numbers = FLOAT8[name], finite_numbers(FLOAT8[name])
    assert float(numbers.max()) == format_.largest
    assert float(numbers[1]) == 2.0 ** (1 - format_.bias - format_.mantissa_bits)
    assert format_.bias << format_.mantissa_bits == numbers.tolist().index(1.0)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FLOAT8)
def test_fp8_is_rounded_to_the_bits_of_its_mantissa(name: str, kind: str, role: Role) -> None:
    """By 2^-1-bits of itself, or half of the smallest number in units of the scale."""
    format_, shape = FLOAT8[name], PartShape(role, 32, 48, 32)
    bits, smallest, largest = {
        "fp8": (3, 2.0**-9, 448.0),
        "fp8_e5m2": (2, 2.0**-16, 57344.0),
    }[name]
    x = data(kind, 32, 48)
    back = decode(format_, shape, encode(format_, shape, x))
    unit = group_of(shape, x.abs(), "amax").double() / largest * (1 + 1 / 128)
    allowed = (x.abs().double() / 2 ** (bits + 1)).maximum(unit * smallest / 2)
    assert bool(((back - x).abs() <= allowed * (1 + 1e-5)).all())
    assert bool((back.abs() <= largest * unit * (1 + 1e-5)).all()), "an infinity or NaN"


@pytest.mark.parametrize("name", GROUPED)
def test_bytes_per_token(name: str) -> None:
    """Codes, and per 64 tokens or channels 2 bytes for each of scale and minimum."""
    layout = RecordLayout(name, name, 64, 64, 64, window=WINDOW)
    per_group = 2 if name in FLOAT8 else 4
    assert layout.record_bytes / 64 == 2 * (8 * FORMATS[name].bits + per_group)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("head_dim", [1, 20, 64, 80])
def test_lead_dimensions_and_padding_change_nothing(name: str, role: Role, head_dim: int) -> None:
    format_, shape = FORMATS[name], PartShape(role, 32, head_dim, 64)
    x = torch.randn(2, 3, 32, head_dim)
    stored = encode(format_, shape, x)
    assert stored.shape == (2, 3, format_.part_bytes(shape))
    assert torch.equal(stored[1, 2], encode(format_, shape, x[1, 2]))
    assert torch.equal(decode(format_, shape, stored)[1, 2], decode(format_, shape, stored[1, 2]))
    assert decode(format_, shape, stored).shape == x.shape


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("role", ROLES)
def test_every_code_lies_where_the_documentation_says(bits: int, role: Role) -> None:
    tokens, channels, fields = 64, 32, 8 // bits
    shape = PartShape(role, tokens, channels, 64)
    codes = torch.randint(0, 1 << bits, (tokens, channels))
    packed = pack_fields(shape, codes, bits)
    assert packed.shape == (tokens * channels * bits // 8,)
    for t in range(tokens):
        for c in range(channels):
            if role == "k":
                field, within = divmod(c, channels // fields)
                quad = within // 4
                at = ((t // 16 * (channels // fields // 4) + quad) * 16 + t % 16) * 4 + within % 4
            else:
                field, within = divmod(t, tokens // fields)
                at = (within // 4 * channels + c) * 4 + within % 4
            assert int(packed[at]) >> field * bits & (1 << bits) - 1 == codes[t, c]
    assert torch.equal(unpack_fields(shape, packed, channels, bits), codes.int())


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_bf16_is_rounded_outwards(value: float) -> None:
    x = torch.tensor([value])
    down = float(bf16_down(x))
    assert down <= value
    assert down == float(torch.tensor(down).bfloat16()) or math.isinf(down)
    # The next larger bf16 is above the value.
    assert down == value or abs(down - value) <= abs(value) / 128 + 1e-38 or math.isinf(down)
    if value >= 0:
        up = float(bf16_up(x))
        assert up >= value
        assert abs(up - value) <= value / 128 + 1e-38 or math.isinf(up)


def test_bit_widths_are_what_they_say() -> None:
    """A width that fell back to another one would pass every other test here."""
    x = torch.randn(64, 64)
    shape = PartShape("k", 64, 64, 64)
    errors = []
    for bits in (1, 2, 3, 4, 8):
        back = decode(IntegerFormat(bits), shape, encode(IntegerFormat(bits), shape, x))
        distinct = max(len(back[:, c].unique()) for c in range(64))
        assert min(2 ** (bits - 1), 32) < distinct <= 2**bits
        errors.append(float((back - x).abs().mean()))
    assert all(more < 0.6 * fewer for fewer, more in pairwise(errors[1:]))
