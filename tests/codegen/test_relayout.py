"""Records in the order of GPUs: the same numbers, where the documentation says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.formats import FORMATS, Coded, Role
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout, Window, relayout
from kvcompile.codegen.rotary import MEAN_BYTES, Rotary

SCALES = torch.tensor([0.0, 2.0**-133, 2.0**-126, 1e-20, 0.37, 1.0, 448.0, 1e20, 3.3e38])
SCALES = SCALES.to(torch.bfloat16).float()


@st.composite
def layouts(draw: st.DrawFn) -> RecordLayout:
    k, v = draw(st.sampled_from(sorted(FORMATS))), draw(st.sampled_from(sorted(FORMATS)))
    smallest = max(FORMATS[name].smallest_page for name in (k, v))
    grouped = any(FORMATS[name].is_grouped for name in (k, v))
    return RecordLayout(
        k,
        v,
        draw(st.integers(2, 272)),
        draw(st.integers(1, 272)),
        draw(st.sampled_from([size for size in PAGE_SIZES if size >= smallest])),
        draw(st.integers(1, 8)) * 16,
        Window("bf16", 4, 64) if grouped else None,
        Rotary(2) if FORMATS[k].is_grouped and draw(st.booleans()) else None,
    )


def random_part(layout: RecordLayout, role: Role, heads: int) -> torch.Tensor:
    """Return a part of a record: any codes, those of pad channels too, and scales of any size."""
    format_, shape = layout.format(role), layout.part(role)
    size = format_.part_bytes(shape)
    if not format_.is_grouped:
        words = torch.randint(0, 1 << 8, (heads, shape.page_size, shape.head_dim, 4)).byte()
        words = words[..., : format_.dtype.itemsize].contiguous().view(format_.dtype)[..., 0]
        return format_.join(shape, Coded(words, []))
    channels = format_.channels(shape)
    codes = torch.randint(0, 1 << format_.bits, (heads, shape.page_size, channels))
    length = shape.head_dim if role == "k" else shape.page_size
    groups = len(shape.channel_groups()) if role == "v" else 1
    scales = []
    for _ in range(groups):
        group = [SCALES[torch.randint(0, len(SCALES), (heads, length))]]
        if format_.has_minimum:
            signs = torch.randint(0, 2, (heads, length)) * 2 - 1
            group.append(SCALES[torch.randint(0, len(SCALES), (heads, length))] * signs)
        scales.append(group)
    part = format_.join(shape, Coded(codes.int(), scales))
    assert part.shape[-1] == size
    return part


def random_record(layout: RecordLayout, heads: int) -> torch.Tensor:
    mean = torch.randint(0, 256, (heads, 0 if layout.rotary is None else MEAN_BYTES)).byte()
    parts = [random_part(layout, "k", heads), mean, random_part(layout, "v", heads)]
    record = torch.cat(parts, -1)
    assert record.shape == (heads, layout.record_bytes)
    return record


def bits_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as integers, and words as their bytes, in which NaNs are equal to themselves."""
    if not codes.is_floating_point():
        return codes.long()
    return codes.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@given(layouts(), st.integers(1, 3))
@settings(max_examples=120, deadline=None)
def test_there_and_back_are_the_same_bits(layout: RecordLayout, heads: int) -> None:
    """Signs of zeros, NaNs and the codes of pad channels included."""
    other = layout.reordered("gpu16")
    for source, target in ((layout, other), (other, layout)):
        record = random_record(source, heads)
        moved = relayout(record, source, target.order)
        assert moved.shape == (heads, target.record_bytes)
        assert torch.equal(relayout(moved, target, source.order), record)
        assert target.k_bytes % 16 == target.record_bytes % 16 == 0
        for role in ("k", "v"):
            there, here = (
                layout.format(role).split(
                    each.part(role),
                    bytes_[:, each.k_offset : each.mean_offset]
                    if role == "k"
                    else bytes_[:, each.v_offset :],
                )
                for each, bytes_ in ((source, record), (target, moved))
            )
            assert torch.equal(bits_of(there.codes), bits_of(here.codes))
            for one, two in zip(there.scales, here.scales, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_what_is_packed_in_one_order_is_what_is_moved_to_it(layout: RecordLayout) -> None:
    layout = replace(layout, rotary=None)
    k = torch.randn(2, layout.page_size, layout.head_dim_qk)
    v = torch.randn(2, layout.page_size, layout.head_dim_vo)
    other = layout.reordered("gpu16")
    assert torch.equal(relayout(layout.pack(k, v), layout, "gpu16"), other.pack(k, v))
    assert torch.equal(relayout(other.pack(k, v), other, "cpu16"), layout.pack(k, v))


@pytest.mark.parametrize(
    ("name", "role", "head_dim", "chunks", "across"),
    [
        # K: planes of 16 channels at least, so that the smallest chunk says how many there are.
        ("int8", "k", 96, [64, 32], 2),
        ("int4", "k", 96, [64, 32], 2),
        ("int4", "k", 64, [64], 4),
        ("int2", "k", 64, [64], 4),
        ("int1", "k", 256, [256], 16),
        ("int3", "k", 64, [64], 4),
        ("fp8", "k", 48, [32, 16], 1),
        # V: planes of 8 at least, each in one group of 48 channels: 32 from channel 32 on are not.
        ("int4", "v", 96, [64, 32], 4),
        ("int8", "v", 80, [32, 32, 16], 2),
        ("fp8_e5m2", "v", 80, [32, 32, 16], 2),
        ("int2", "v", 64, [64], 8),
        ("int3", "v", 32, [32], 4),
        ("int1", "v", 16, [16], 2),
    ],
)
def test_fields_lie_where_the_documentation_says(
    name: str, role: Role, head_dim: int, chunks: list[int], across: int
) -> None:
    page, group = 64, 48 if role == "v" else 64
    layout = RecordLayout(
        *(name, name, head_dim, head_dim, page, group), Window("bf16", 0, 0), order="gpu16"
    )
    format_, shape = layout.format(role), layout.part(role)
    assert sum(chunks) == format_.channels(shape)
    codes = torch.randint(0, 1 << format_.bits, (page, sum(chunks))).int()
    count = -(-head_dim // group) if role == "v" else 1
    length = head_dim if role == "k" else page
    per_group = 2 if format_.has_minimum else 1
    numbers = torch.arange(1, count * length * per_group + 1).float().bfloat16().float()
    numbers = numbers.view(count, per_group, length)
    stored = format_.join(shape, Coded(codes, [list(x) for x in numbers]))
    words = stored[16 : 16 + page * sum(chunks) * format_.bits // 8].view(torch.int16).tolist()
    at = low = 0
    for bits in {"int3": (2, 1)}.get(name, (format_.bits,)):
        rows = page // (16 // bits // across)
        for r in range(rows):
            first = 0
            for width in chunks:
                for j in range(width // across):
                    for field in range(16 // bits):
                        t, f = divmod(field, across)
                        code = codes[t * rows + r, first + f * (width // across) + j]
                        found = words[at] >> field * bits & (1 << bits) - 1
                        assert found == code >> low & (1 << bits) - 1
                    at += 1
                first += width
        low += bits
    assert at == len(words)
    scales = stored[16 + 2 * at :].view(torch.bfloat16).float().tolist()
    width = sum(chunks) if role == "k" else page
    for g in range(count):
        for i in range(length):
            place = (g * width + i) * per_group
            assert scales[place + per_group - 1] == numbers[g, 0, i]
            if per_group == 2:
                assert scales[place] == numbers[g, 1, i]


@pytest.mark.parametrize(
    ("scale", "minimum", "exponent"),
    [
        (1.5, 0.0, 127),
        (0.0, 0.0, 16),
        (2.0**-120, 0.0, 16),
        (2.0**-111, 0.0, 16),
        (2.0**-110, 0.0, 17),
        (3.0e38, 0.0, 253),
        (1.0, -(2.0**14), 127),
        (1.0, -(2.0**15), 128),
    ],
)
def test_exponents_are_those_of_the_largest_scale(
    scale: float, minimum: float, exponent: int
) -> None:
    """A minimum of V counts 2^-14; K's does not count."""
    layout = RecordLayout("int4", "int4", 32, 32, 32, window=Window("bf16", 0, 0), order="gpu16")
    roles: list[tuple[Role, int]] = [("v", exponent), ("k", 127 if minimum else exponent)]
    for role, expected in roles:
        format_, shape = layout.format(role), layout.part(role)
        codes = torch.zeros(32, format_.channels(shape), dtype=torch.int32)
        group = [torch.zeros(32), torch.zeros(32)]
        group[0][7], group[1][9] = scale, minimum
        header = format_.join(shape, Coded(codes, [group]))[:16].view(torch.int32)
        assert header.tolist() == [expected] * 4
