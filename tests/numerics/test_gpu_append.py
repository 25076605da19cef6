"""GPU append kernels in Triton's interpreter: all the bytes that `codegen.formats` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu.compile import load
from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.spec import DTypeName, IsaName, KernelSpec
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.numerics import DTYPES
from tests.support.quantized_pages import QuantizedPages

SINKS, RESIDUAL = 4, 16


def layout_of(
    k: str, v: str, dims: tuple[int, int], page_size: int, dtype: DTypeName, sinks: int = SINKS
) -> RecordLayout:
    window = Window(dtype, sinks, RESIDUAL)
    return RecordLayout(k, v, *dims, page_size, window=window, order="gpu16")


def spec_of(layout: RecordLayout, dtype: DTypeName, isa: IsaName = "triton") -> KernelSpec:
    return KernelSpec(op="append", target="gpu", isa=isa, dtype=dtype, **layout.spec_fields())


def addresses(pages: QuantizedPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of addresses of quantized and of exact pages."""
    found = []
    for pool in (pages.pages, pages.exact):
        page_bytes = pool.words[-1]
        in_memory = pool.table.long() - pool.table[0, 0] + pool.index(0, 0)
        found.append(pool.memory.data_ptr() + in_memory * page_bytes)
    return found[0], found[1]


def append(
    pages: QuantizedPages, dtype: DTypeName, k: torch.Tensor, v: torch.Tensor, past_len: int
) -> None:
    """Append k, v [B, K, S, D] as a runtime has to."""
    length = past_len + k.shape[2]
    pages.advance(length)
    pages.reserve(length)
    table, exact = addresses(pages)
    programs = -(-k.shape[2] // TILE)
    todo = int((pages.quantized - pages.ring_from).max())
    spec = spec_of(pages.layout, dtype)
    arguments: list[object] = []
    for x in (k, v):
        arguments += [x, *x.stride()[:3], x.shape[2]]
    arguments += [table, table.stride(0), pages.starts, torch.tensor([past_len])]
    arguments += [pages.quantized, pages.ring_from, exact, exact.stride(0), programs]
    load(spec)[(programs + todo, pages.num_kv_heads, pages.batch)](*arguments)
    pages.settle()


def check(
    layout: RecordLayout,
    dtype: DTypeName = "bf16",
    *,
    length: int,
    steps: Sequence[int],
    starts: Sequence[int] = (0, 5),
) -> None:
    """Append tokens in steps and compare every byte, poison included."""
    heads, torch_dtype = 2, DTYPES[dtype]
    pages = QuantizedPages(
        layout, num_kv_heads=heads, dtype=torch_dtype, tokens=length, starts=starts
    )
    dims = (layout.head_dim_qk, layout.head_dim_vo)
    k, v = (
        (torch.randn(len(starts), heads, length, dim) * torch.logspace(-3, 3, dim)).to(torch_dtype)
        for dim in dims
    )
    k[:, :, :, 0] = 1.5  # a constant channel
    v[:, :, 3::7] = 0.0
    past_len = 0
    for step in steps:
        new = slice(past_len, past_len + step)
        append(pages, dtype, k[:, :, new], v[:, :, new], past_len)
        past_len += step
    quantized, exact = pages.expected(k, v, past_len)
    assert pages.quantized.min() > 0, "nothing was quantized"
    assert torch.equal(pages.pages.memory, quantized)
    assert torch.equal(pages.exact.memory, exact)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4", "int3", "int2", "int1"])
def test_every_byte_of_a_format(name: str) -> None:
    check(layout_of(name, name, (64, 64), 64, "bf16"), length=200, steps=[150, 1, 49])


@pytest.mark.parametrize(("k", "v"), [("int8", "int4"), ("bf16", "int2"), ("int4", "fp16")])
def test_mixed_formats(k: str, v: str) -> None:
    check(layout_of(k, v, (64, 32), 32, "bf16"), length=90, steps=[70, 20])


@pytest.mark.parametrize("dims", [(56, 80), (96, 40), (128, 72)])
@pytest.mark.parametrize("name", ["int4", "int1", "fp8"])
def test_head_dims(name: str, dims: tuple[int, int]) -> None:
    check(layout_of(name, name, dims, 128, "bf16"), length=160, steps=[160], starts=(3,))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_dtypes(dtype: DTypeName) -> None:
    layout = replace(layout_of("int4", "int8", (64, 64), 32, dtype), q_group_size=32)
    check(layout, dtype, length=100, steps=[60, 40])


def test_token_by_token_gives_the_bytes_of_one_append() -> None:
    layout = layout_of("int4", "int4", (32, 32), 16, "bf16")
    check(layout, length=70, steps=[1] * 70, starts=(0, 2))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dims", [(64, 64), (30, 56)])
def test_exact_pages(name: DTypeName, dims: tuple[int, int]) -> None:
    layout = RecordLayout(name, name, *dims, 32, order="gpu16")
    shape = GpuShape(spec_of(layout, name))
    assert shape.layout.record_bytes == layout.record_bytes
    length, starts, heads = 50, (0, 7), 2
    k, v = (torch.randn(2, heads, length, dim).to(DTYPES[name]) for dim in dims)
    memory = torch.full((2, 3, heads, layout.record_bytes), 0xFF).byte()
    table = memory.data_ptr() + torch.arange(6).view(2, 3) * memory[0, 0].numel()
    past_len = 0
    for step in (33, 1, 16):
        new = slice(past_len, past_len + step)
        arguments: list[object] = []
        for x in (k[:, :, new], v[:, :, new]):
            arguments += [x, *x.stride()[:3], step]
        arguments += [table, table.stride(0), torch.tensor(starts), torch.tensor([past_len])]
        load(spec_of(layout, name))[(-(-step // TILE), heads, 2)](*arguments)
        past_len += step
    for row, start in enumerate(starts):
        stored = layout.unpack(memory[row])
        for dense, back in zip((k, v), stored, strict=True):
            back = back.transpose(0, 1).flatten(1, 2)
            assert torch.equal(back[:, : length - start], dense[row, :, start:])
            assert back[:, length - start :].isnan().all()
