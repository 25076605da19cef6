"""append and gather kernels against the torch twin of the layout, bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.cpu.isa import available_isas
from kvcompile.codegen.spec import IsaName
from kvcompile.runtime import torch_path
from tests.support.fake_store import POISON, FakeStore, Role
from tests.support.numerics import Case

pytestmark = pytest.mark.compiler

CASES = [
    Case(),
    Case(dims=(12, 13), page_size=16),
    Case(dtype="fp32", dims=(96, 40), page_size=64),
    Case(dtype="fp16", dims=(7, 128), page_size=128),
    Case(dtype="fp32", store="bf16"),
    Case(dtype="fp32", store="fp16", dims=(20, 20)),
    Case(dtype="bf16", store="fp16", dims=(16, 8)),
]


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> IsaName:
    name: IsaName = request.param
    return name


def strides(x: torch.Tensor | None) -> list[int]:
    return [0] * 4 if x is None else [x.data_ptr(), *x.stride()[:3]]


def append(
    case: Case,
    isa: IsaName,
    store: FakeStore,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    past_len: int,
    *,
    threads: int = 1,
) -> None:
    new = k if k is not None else v
    assert new is not None
    kernel = load(case.spec(isa, "append"))
    words = [store.state.data_ptr(), *strides(k), *strides(v)]
    assert kernel.call(*words, store.num_kv_heads, past_len, new.shape[2], threads) == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_way_to_append_gives_the_same_bytes(case: Case, isa: IsaName) -> None:
    starts, tokens = (0, 3, 2 * case.page_size + 1), 3 * case.page_size + 5
    k, v = case.new_tokens(3, tokens)
    expected = case.empty_store(tokens, starts)
    torch_path.append(expected, k, v, 0)
    used = written(case, expected, tokens)
    cuts = {
        "one shot": [0, tokens],
        "chunks": [0, case.page_size - 1, 2 * case.page_size, tokens],
        "token by token": list(range(tokens + 1)),
    }
    for way, ends in cuts.items():
        store = case.empty_store(tokens, starts)
        for first, end in itertools.pairwise(ends):
            append(case, isa, store, k[:, :, first:end], v[:, :, first:end], first)
        for role in ("k", "v"):
            same = torch.equal(store.stored(role, tokens), expected.stored(role, tokens))
            assert same, f"{way}: {role}"
        assert torch.equal(store.records()[used], expected.records()[used]), way
        assert (store.records()[~used] == POISON).all(), f"{way}: wrote beside the new tokens"


def written(case: Case, store: FakeStore, tokens: int) -> torch.Tensor:
    """Return which bytes of `store.records()` belong to tokens, their pad channels included."""
    k_dim, v_dim = (-(-dim // 8) * 8 for dim in case.dims)
    whole = replace(case, dims=(k_dim, v_dim))
    marked = whole.empty_store(tokens, store.starts.tolist())
    marked.memory.zero_()
    k, v = whole.new_tokens(store.batch, tokens)
    torch_path.append(marked, torch.ones_like(k), torch.ones_like(v), 0)
    word = torch.int32 if (case.store or case.dtype) == "fp32" else torch.int16
    return (marked.records().view(word) != 0).repeat_interleave(word.itemsize, -1)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_one_part_alone_and_strided_inputs(case: Case, isa: IsaName) -> None:
    k, v = case.new_tokens(2, 50)
    expected = case.empty_store(50, (0, 4))
    torch_path.append(expected, k, v, 0)
    store = case.empty_store(50, (0, 4))
    k_view = k.transpose(1, 2).contiguous().transpose(1, 2)
    v_view = torch.cat([v, v], dim=-1)[..., : case.dims[1]]
    append(case, isa, store, k_view, None, 0, threads=3)
    assert (store.records()[..., case.layout().v_offset :] == POISON).all()
    append(case, isa, store, None, v_view, 0, threads=2)
    for role in ("k", "v"):
        assert torch.equal(store.stored(role, 50), expected.stored(role, 50))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_returns_what_was_appended(case: Case, isa: IsaName) -> None:
    starts, tokens = (0, 5, 80), 77
    store = case.filled_store(tokens, starts)
    kernel = load(case.spec(isa, "gather"))
    for first, end in ((0, tokens), (30, 61), (8, 8)):
        out = [
            torch.full((3, end - first, case.kv_heads, dim), torch.nan, dtype=case.torch_dtype)
            for dim in case.dims
        ]
        k, v = (x.transpose(1, 2) for x in out)
        words = [store.state.data_ptr(), *strides(k), *strides(v)]
        assert kernel.call(*words, case.kv_heads, first, end, 2) == 0
        dense_of: dict[Role, torch.Tensor] = {"k": k, "v": v}
        for role, dense in dense_of.items():
            expected = store.stored(role, tokens)[:, :, first:end].to(case.torch_dtype)
            assert torch.equal(dense, expected)
            assert torch.equal(torch_path.gather(store, role, first, end), expected)


def test_halves_are_rounded_as_torch_does(isa: IsaName) -> None:
    case = Case(dtype="fp32", store="fp16", dims=(20, 20))
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 1e-8, -0.0])
    steps = torch.logspace(-9, 5, 192).repeat_interleave(2) * torch.tensor([1, -1]).repeat(192)
    values = torch.cat([edges, -edges, steps, edges * (1 + 2.0**-11)])[:400]
    values = torch.cat([values, torch.zeros(400 - len(values))]).view(1, 1, 20, 20)
    k = values.expand(1, 2, 20, 20).contiguous()
    store = case.empty_store(20)
    append(case, isa, store, k, k, 0)
    assert torch.equal(store.stored("k", 20), k.half())
