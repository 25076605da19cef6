"""append and gather of quantized pages against the layout in plain torch, byte by byte."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.cpu.isa import available_isas
from kvcompile.codegen.formats import Role
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import DTypeName, IsaName, KernelSpec, Op
from tests.support.float8 import FLOAT8, hard_numbers
from tests.support.numerics import DTYPES
from tests.support.quantized_pages import QuantizedPages
from tests.support.rotary import angles, turning

pytestmark = pytest.mark.compiler

KV_HEADS = 2
SMALL = {"fp32": 1e-43, "bf16": 1e-39, "fp16": 1e-6}
"""Takes numbers around 1 to the subnormal ones, where even dividing by a power of two rounds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One quantized layout and the model it serves."""

    k: str
    v: str
    dtype: DTypeName = "bf16"
    dims: tuple[int, int] = (64, 64)
    page_size: int = 32
    group_size: int = 64
    sinks: int = 4
    residual: int = 24
    rotary: Rotary | None = None

    def __str__(self) -> str:
        return self.spec("portable", "append").symbol.removeprefix("append_portable_")

    def spec(self, isa: IsaName, op: Op) -> KernelSpec:
        """Return the spec of one of its kernels."""
        return KernelSpec(
            op=op,
            isa=isa,
            dtype=self.dtype,
            k_format=self.k,
            v_format=self.v,
            head_dim_qk=self.dims[0],
            head_dim_vo=self.dims[1],
            page_size=self.page_size,
            q_group_size=self.group_size,
            num_sink_tokens=self.sinks,
            rotary=self.rotary,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of new K and V."""
        return DTYPES[self.dtype]

    def layout(self) -> RecordLayout:
        """Return the layout of its records."""
        window = Window(self.dtype, self.sinks, self.residual)
        sizes = (*self.dims, self.page_size, self.group_size)
        return RecordLayout(self.k, self.v, *sizes, window, self.rotary)

    def store(self, starts: tuple[int, ...], tokens: int, seed: int = 0) -> QuantizedPages:
        """Return a store of poison."""
        return QuantizedPages(
            self.layout(),
            num_kv_heads=KV_HEADS,
            dtype=self.torch_dtype,
            tokens=tokens,
            starts=starts,
            seed=seed,
            rotary_table=angles(self.rotary, self.page_size),
        )

    def new_tokens(self, batch: int, tokens: int) -> list[torch.Tensor]:
        """Return k and v [B, K, T, D]: outliers, biases, ties, zeros of both signs, subnormals."""
        random_ = torch.Generator().manual_seed(tokens)
        out = []
        for dim in self.dims:
            x = torch.randn(batch, KV_HEADS, tokens, dim, generator=random_)
            x[..., ::5] *= 100
            x[..., 1::5] += 30
            x[..., 2::5] = (x[..., 2::5] * 8).round()  # levels are hit exactly, and halfway
            x[..., 3::5] = x[..., 3::5].sign() * 0.0
            x[:, :, 3::7] *= 1e-3
            x[:, :, 5::7] = x[:, :, 5::7].round()
            x[:, :, 6::7] = -0.0
            x[2:] = x[2:].relu() * SMALL[self.dtype]
            if dim == self.dims[0] and self.rotary is not None:
                x[:2] += 200 * turning(self.rotary, tokens, dim)
            out.append(x.to(self.torch_dtype))
        return out


CASES = [
    Case(k="int4", v="int4", page_size=64),
    Case(k="int8", v="int8", group_size=32),
    Case(k="int3", v="int3", dtype="fp32", dims=(20, 56), group_size=16, sinks=0),
    Case(k="int2", v="int2", dtype="fp16", dims=(80, 80), sinks=5, page_size=64),
    Case(k="int1", v="int1", dtype="fp32", dims=(56, 80), group_size=32, residual=0),
    Case(k="fp8", v="fp8", dims=(80, 20), sinks=20, page_size=16),
    Case(k="int8", v="int4", dtype="fp32", page_size=64, residual=64),
    Case(k="bf16", v="int4", dims=(20, 20)),
    Case(k="int4", v="bf16", dtype="fp32", dims=(56, 13)),
    Case(k="int2", v="fp16", dtype="fp16", dims=(7, 80), sinks=16),
    Case(k="int1", v="int8", dtype="fp16", dims=(13, 24), page_size=128, group_size=16),
    Case(k="fp8_e5m2", v="int1", dtype="fp32", dims=(128, 20), group_size=48),
    Case(k="int8", v="fp8", dtype="fp16", dims=(64, 144), group_size=128, page_size=16),
    Case(k="fp32", v="int3", dims=(8, 128), page_size=64, residual=1),
    Case(k="int3", v="int1", dtype="fp32", dims=(64, 57), group_size=48),
    Case(k="int4", v="int4", page_size=64, rotary=Rotary(64)),
    Case(k="int8", v="int4", dtype="fp16", dims=(80, 20), rotary=Rotary(32, interleaved=True)),
    Case(k="fp8", v="fp8_e5m2", dtype="fp32", dims=(20, 24), rotary=Rotary(6)),
    Case(k="int1", v="bf16", dims=(128, 24), page_size=128, rotary=Rotary(128)),
]
STARTS = (0, 3, 37)


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> IsaName:
    name: IsaName = request.param
    return name


def strides(x: torch.Tensor | None) -> list[int]:
    return [0] * 4 if x is None else [x.data_ptr(), *x.stride()[:3]]


def append(
    case: Case,
    isa: IsaName,
    store: QuantizedPages,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    past_len: int,
    threads: int = 1,
) -> int:
    """Run the kernel alone; k and v are [B, K, S, D]."""
    new = k if k is not None else v
    words = [store.state.data_ptr(), *strides(k), *strides(v)]
    sizes = (past_len, 0 if new is None else new.shape[2], threads)
    return load(case.spec(isa, "append")).call(*words, store.num_kv_heads, *sizes)


def grow(
    case: Case,
    isa: IsaName,
    store: QuantizedPages,
    tensors: list[torch.Tensor],
    ends: list[int],
    *,
    flush: bool = False,
    threads: int = 1,
) -> QuantizedPages:
    """Append the tokens between neighbouring `ends`.

    Args:
        case: The layout.
        isa: Instruction set.
        store: What grows.
        tensors: k and v [B, K, T, D].
        ends: Lengths, the first of them the length of the store.
        flush: Append to the ring, K and V in calls of their own, and quantize by a third one,
            instead of all at once.
        threads: Threads of the kernel.
    """
    for first, end in itertools.pairwise(ends):
        k, v = (x[:, :, first:end] for x in tensors)
        if flush:
            store.reserve(end)
            assert append(case, isa, store, k, None, first, threads) == 0
            assert append(case, isa, store, None, v, first, threads) == 0
            store.advance(end)
            assert append(case, isa, store, None, None, end, threads) == 0
        else:
            store.advance(end)
            store.reserve(end)
            assert append(case, isa, store, k, v, first, threads) == 0
        store.settle()
    return store


def assert_holds(
    store: QuantizedPages, tensors: list[torch.Tensor], length: int, way: str = ""
) -> None:
    """Assert every byte of both memories."""
    k, v = tensors
    pages, exact = store.expected(k, v, length)
    assert torch.equal(store.pages.memory, pages), f"quantized pages {way}"
    assert torch.equal(store.exact.memory, exact), f"exact pages {way}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_way_to_append_gives_the_bytes_of_the_layout(case: Case, isa: IsaName) -> None:
    tokens = 3 * case.page_size + 75
    tensors = case.new_tokens(len(STARTS), tokens)
    cuts = sorted(random.Random(tokens).sample(range(1, tokens), 4))
    ways = {
        "one shot": [0, tokens],
        "pieces": [0, *cuts, tokens],
        "token by token": [0, cuts[1], *range(tokens - case.page_size - 1, tokens + 1)],
    }
    for way, ends in ways.items():
        for flush in (False, True):
            store = grow(case, isa, case.store(STARTS, tokens), tensors, ends, flush=flush)
            assert int(store.quantized.min()) >= 1, "no page is quantized: nothing is tested"
            assert_holds(store, tensors, tokens, way)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_rounds_the_decoded_values_once(case: Case, isa: IsaName) -> None:
    tokens = 2 * case.page_size + 60
    tensors = case.new_tokens(len(STARTS), tokens)
    k, v = tensors
    store = grow(case, isa, case.store(STARTS, tokens), tensors, [0, case.page_size])
    store.advance(tokens)
    store.reserve(tokens)
    last = [x[:, :, case.page_size :] for x in tensors]
    assert append(case, isa, store, last[0], last[1], case.page_size) == 0
    expected = [x.to(case.torch_dtype) for x in store.decoded(k, v)]
    kernel = load(case.spec(isa, "gather"))
    for settled in (False, True):
        if settled:
            store.settle()
        for first, end in ((0, tokens), (case.page_size - 5, tokens - 20), (8, 8)):
            out = [
                torch.full((3, end - first, KV_HEADS, dim), torch.nan, dtype=case.torch_dtype)
                for dim in case.dims
            ]
            dense = [x.transpose(1, 2) for x in out]
            words = [store.state.data_ptr(), *strides(dense[0]), *strides(dense[1])]
            assert kernel.call(*words, KV_HEADS, first, end, 2) == 0
            for x, right in zip(dense, expected, strict=True):
                assert torch.equal(x, right[:, :, first:end]), f"settled: {settled}"


@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_threads_and_strides_change_nothing(case: Case, isa: IsaName) -> None:
    tokens = 300
    tensors = case.new_tokens(2, tokens)
    k, v = tensors
    views = [
        k.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([v, v], dim=-1)[..., : case.dims[1]],
    ]
    for threads in (1, 2, 3):
        store = grow(case, isa, case.store((0, 9), tokens), views, [0, tokens], threads=threads)
        assert_holds(store, tensors, tokens)


@given(
    starts=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 199), max_size=4, unique=True),
    flush=st.booleans(),
    case=st.sampled_from(CASES[:2]),
)
@settings(max_examples=30, deadline=None)
def test_ragged_rows_grow_independently(
    starts: list[int], cuts: list[int], flush: bool, case: Case
) -> None:
    tensors = case.new_tokens(len(starts), 200)
    store = case.store(tuple(starts), 200)
    ends = [0, *sorted(cuts), 200]
    grow(case, available_isas()[0], store, tensors, ends, flush=flush)
    assert_holds(store, tensors, 200)


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("name", [*FLOAT8, "int8", "int4", "int3", "int2"])
def test_halfway_cases_go_to_the_even_code(name: str, role: Role, isa: IsaName) -> None:
    """One group whose scale is 1: every code, every half-way point and its neighbours.

    Floating-point formats get numbers of every exponent, too.
    """
    case = Case(k=name, v=name, dtype="fp32", dims=(64, 64), page_size=64, sinks=0, residual=0)
    if name in FLOAT8:
        values, largest = hard_numbers(FLOAT8[name]), FLOAT8[name].largest
    else:
        largest = 2.0 ** int(name[3:]) - 1
        words = torch.arange(largest + 1)
        halfway = (words[1:] + words[:-1]) / 2
        below, above = (halfway.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))
        values = torch.cat([words, halfway, below, above])
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    rows = len(values) // 62 + 1
    groups = values.repeat(62 // len(values) + 2)[: 62 * rows].view(rows, 62)
    ends = torch.tensor([0.0, largest]).expand(rows, 2)
    x = torch.zeros(64, 64)
    x[:rows] = torch.cat([ends, groups], 1)
    x = (x if role == "v" else x.T).expand(1, KV_HEADS, 64, 64).contiguous()
    store = grow(case, isa, case.store((0,), 64), [x, x], [0, 64])
    assert_holds(store, [x, x], 64)
    back = case.layout().unpack(store.pages.memory[store.pages.table[0, 0]])[role == "v"]
    nearest = x[0].to(FLOAT8[name].word).float() if name in FLOAT8 else x[0].round()
    assert torch.equal(back, nearest)


def test_a_nan_is_seen_in_all_that_shares_its_scale(isa: IsaName) -> None:
    for case in CASES[:6]:
        tokens = case.sinks + case.page_size + case.residual
        k, v = case.new_tokens(1, tokens)
        hit = case.sinks + 5
        k[0, 1, hit, 2] = v[0, 0, hit, 3] = torch.nan
        store = grow(case, isa, case.store((0,), tokens), [k, v], [0, tokens])
        record = store.pages.memory[store.pages.table[0, 0]]
        k_back, v_back = case.layout().unpack(record)
        seen = torch.zeros_like(k_back, dtype=torch.bool)
        seen[1, :, 2] = True
        assert torch.equal(k_back.isnan(), seen)
        seen = torch.zeros_like(v_back, dtype=torch.bool)
        seen[0, 5, : case.group_size] = True
        assert torch.equal(v_back.isnan(), seen)


def spoil(k: torch.Tensor, rotary: Rotary, first: int, page_size: int) -> torch.Tensor:
    """Put what is special into the keys [1, K, T, D] of three pages of the first head, in place.

    Returns:
        Which channels of which of the first two pages hold what is no number, bool[2, D].
    """
    largest = torch.finfo(k.dtype).max
    a, b = (int(channel) for channel in rotary.channels(torch.tensor(0)))
    pages = k[0, 0, first : first + 3 * page_size].unflatten(0, (3, page_size))
    pages[0, 5, a] = torch.nan
    pages[0, 0, -1] = -torch.inf
    pages[1, :, [a, b]] = -0.0
    pages[1, 7, -1] = torch.inf
    pages[2, :, a] = largest * (1 - torch.rand(page_size) / 64)
    pages[2, :, b] = -largest
    spoilt = torch.zeros(2, k.shape[-1], dtype=torch.bool)
    spoilt[0, a] = spoilt[:, -1] = True
    return spoilt


@pytest.mark.parametrize("case", [case for case in CASES if case.rotary is not None], ids=str)
def test_means_beside_what_is_no_number(case: Case, isa: IsaName) -> None:
    """NaNs, infinities and overflowing sums have no mean; other channels do not notice them.

    The codes of a channel with a NaN or an infinity are arbitrary. Nothing of it is finite.
    """
    assert case.rotary is not None
    layout, size, sinks = case.layout(), case.page_size, case.sinks
    tokens = sinks + 3 * size + case.residual
    k, v = case.new_tokens(1, tokens)
    spoilt = spoil(k, case.rotary, sinks, size)
    store = grow(case, isa, case.store((0,), tokens), [k, v], [0, tokens])
    pages = [x[0, :, sinks : sinks + 3 * size].unflatten(1, (3, size)) for x in (k, v)]
    right = store.record(*pages).transpose(0, 1)
    record = store.pages.memory[store.pages.table[0, :3]]
    means = slice(layout.mean_offset, layout.v_offset)
    assert torch.equal(record[..., means], right[..., means])
    assert bool(record[..., means].any(-1).all()), "the other pairs keep theirs"
    found, expected = (layout.unpack(x, store.rotary_table)[0][:, 0] for x in (record, right))
    finite = expected.isfinite()
    assert torch.equal(finite[:2], ~spoilt[:, None].expand_as(finite[:2]))
    assert torch.equal(found.isfinite(), finite)
    # Bit by bit: 0 and -0 are not the same.
    assert torch.equal(found[finite].view(torch.int32), expected[finite].view(torch.int32))
    out = torch.full((KV_HEADS, tokens, case.dims[0]), torch.nan, dtype=case.torch_dtype)
    words = [store.state.data_ptr(), *strides(out[None]), *strides(None)]
    assert load(case.spec(isa, "gather")).call(*words, KV_HEADS, 0, tokens, 1) == 0
    read = out[0, sinks : sinks + 3 * size].view(found.shape).nan_to_num(1)
    found = found.to(read.dtype).nan_to_num(1)
    assert torch.equal(read, found)
    assert torch.equal(read.signbit(), found.signbit())


def test_a_page_without_its_tokens_is_refused(isa: IsaName) -> None:
    case = CASES[0]
    k, v = case.new_tokens(1, 100)
    store = case.store((0,), 100)
    store.pages.take(0, 0)
    store.quantized[0] = 1
    untouched = store.exact.memory.clone()
    assert append(case, isa, store, k[:, :, :67], v[:, :, :67], 0) == 1
    assert append(case, isa, store, k, None, 0) == 1
    assert append(case, isa, store, None, None, 67) == 1
    assert torch.equal(store.exact.memory, untouched)
