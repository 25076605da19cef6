"""attend kernels over quantized pages against the float64 reference on the dequantized cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcompile.codegen.cpu.compile import Kernel, load, load_source
from kvcompile.codegen.cpu.isa import available_isas, detect_isa
from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.source import KernelSource
from kvcompile.codegen.spec import IsaName, KernelSpec
from tests.support.float8 import FLOAT8, finite_numbers
from tests.support.numerics import DTYPES, OUTPUT_UNIT, Problem, run_attend
from tests.support.quantized_case import QuantizedCase

pytestmark = pytest.mark.compiler

ISAS = available_isas()

PLAIN = QuantizedCase()
FEW = QuantizedCase(
    k_format="int8", v_format="int2", group=2, page_size=32, queries="few", mask="bool", sinks=20
)
ADDITIVE = QuantizedCase(
    dtype="fp32",
    k_format="fp8_e5m2",
    v_format="fp8",
    dims=(32, 32),
    group=1,
    mask="additive",
    mask_dtype="fp32",
    q_group_size=16,
    page_size=16,
)

TURNING = QuantizedCase(dims=(128, 128), group=7, rotary=Rotary(128))
CAPPED = replace(FEW, k_format="int4", v_format="int8", dtype="fp32", softcap=1.5)
SINKING = QuantizedCase(dtype="fp32", sink_dtype="fp32", group=2, dims=(32, 32))

CASES = [
    PLAIN,
    FEW,
    ADDITIVE,
    QuantizedCase(k_format="int3", v_format="int8", dims=(56, 80), group=5, sinks=0),
    QuantizedCase(
        dtype="fp16",
        k_format="int2",
        v_format="int3",
        dims=(128, 128),
        group=7,
        page_size=128,
        mask="additive",
        mask_dtype="fp16",
    ),
    QuantizedCase(
        dtype="fp32",
        k_format="int1",
        v_format="int1",
        dims=(80, 96),
        page_size=32,
        q_group_size=32,
        group=1,
        queries="few",
        sinks=2,
    ),
    QuantizedCase(k_format="bf16", dims=(96, 56), group=4, sinks=16, q_group_size=32),
    QuantizedCase(
        dtype="fp32",
        v_format="fp16",
        dims=(256, 40),
        kv_heads=1,
        page_size=32,
        chunk=64,
        sinks=70,
    ),
    QuantizedCase(
        k_format="int8", dims=(24, 24), group=1, page_size=16, sinks=0, mask="causal", queries="few"
    ),
    TURNING,
    QuantizedCase(
        dtype="fp32",
        k_format="fp8",
        v_format="fp8_e5m2",
        dims=(80, 24),
        group=2,
        page_size=32,
        queries="few",
        rotary=Rotary(32, interleaved=True),
    ),
    QuantizedCase(k_format="int2", v_format="fp16", dtype="fp16", dims=(24, 24), rotary=Rotary(6)),
    CAPPED,
    SINKING,
]
"""Every format as K and as V, and no two neighbours with the same numbers."""


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> IsaName:
    name: IsaName = request.param
    return name


def attend_kernel(case: QuantizedCase, isa: IsaName) -> Kernel[KernelSpec]:
    return load(case.spec(isa, "attend"))


def random_mask(case: QuantizedCase, batch: int, queries: int, kv_len: int) -> torch.Tensor | None:
    """Return a mask of the kind of the case, poisoned behind its last column."""
    if case.mask not in ("bool", "additive"):
        return None
    visible = torch.rand(batch, 1, queries, kv_len + 3) > 0.4
    if case.mask == "bool":
        return visible
    assert case.mask_dtype is not None
    mask = torch.randn(visible.shape).masked_fill(~visible, -math.inf)
    mask[..., kv_len:] = math.nan
    return mask.to(DTYPES[case.mask_dtype])


def problem(
    case: QuantizedCase,
    stored: int,
    starts: tuple[int, ...] = (0,),
    queries: int = 1,
    *,
    kv_len: int | None = None,
    residual: int = 0,
    pending: int = 0,
    seed: int = 0,
) -> Problem:
    """Return the same problem, with a mask, for the same sizes; `seed` only moves the pages."""
    given = case.problem(
        stored,
        starts,
        queries,
        kv_len=kv_len,
        residual=residual,
        pending=pending,
        seed=seed,
    )
    return replace(given, mask=random_mask(case, len(starts), queries, given.kv_len))


def check(case: QuantizedCase, isa: IsaName, given: Problem) -> None:
    """Hold a kernel to the derived bound, and to twice what rounding its 16-bit output costs."""
    out = run_attend(attend_kernel(case, isa), given)
    given.check(out, case.chunk)
    if out.dtype != torch.float32:
        reference = given.reference()
        largest = reference.abs().amax(-1, keepdim=True)
        error = (out.double() - reference).abs()
        assert bool((error <= 2 * OUTPUT_UNIT[out.dtype] * largest).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_is_within_the_derived_bound(case: QuantizedCase, isa: IsaName) -> None:
    sinks, page, chunk = case.sinks, case.page_size, case.chunk
    stored = [1, max(sinks, 1), sinks + 1]
    stored += [sinks + tokens + extra for tokens in (page, chunk) for extra in (-1, 0, 1)]
    stored.append(sinks + 2 * chunk + page + 3)
    for number, tokens in enumerate(stored):
        queries = 1 if case.queries == "one" else [1, 2, 16, 5][number % 4]
        # A row is whole, one is shorter by half a page, one is empty.
        starts = (0, min(page // 2 + 1, tokens), tokens)
        check(case, isa, problem(case, tokens, starts, queries))


@pytest.mark.parametrize("case", [PLAIN, FEW, ADDITIVE], ids=str)
def test_rings_of_any_length(case: QuantizedCase, isa: IsaName) -> None:
    """From none to more than a chunk; one that has not given back what was quantized."""
    stored, queries = case.sinks + 400, 3 if case.queries == "few" else 1
    for residual, pending in ((1, 0), (33, 1), (200, 2), (300, 0), (900, 0)):
        given = problem(case, stored, (0, 90), queries, residual=residual, pending=pending)
        check(case, isa, given)


def test_lengths_below_what_is_stored(isa: IsaName) -> None:
    """The last tokens are hidden: those of the ring, then of quantized pages, then the sinks."""
    for case in (PLAIN, FEW):
        queries = 2 if case.queries == "few" else 1
        for kv_len in (330, 324, 300, 257, 130, 67, 21, 4, 3):
            given = problem(case, 340, (0, 17), queries, kv_len=kv_len, residual=16)
            check(case, isa, given)


@pytest.mark.parametrize("case", [PLAIN, FEW, ADDITIVE, TURNING], ids=str)
def test_tokens_before_column_0_are_not_seen(case: QuantizedCase, isa: IsaName) -> None:
    """A sliding window has left them behind: sinks, some tokens of a page, and whole pages."""
    kernel = load(replace(case.spec(isa, "attend"), slides=True))
    queries = 3 if case.queries == "few" else 1
    stored = case.sinks + 2 * case.chunk + 50
    for hidden in (1, case.sinks, case.sinks + case.page_size + 5, stored - 9):
        given = problem(case, stored, (0, 3, stored), queries, residual=30, pending=1)
        given = replace(given, hidden=hidden)
        given.check(run_attend(kernel, given), case.chunk)


def test_neither_threads_nor_places_change_a_bit(isa: IsaName) -> None:
    for case in (PLAIN, FEW):
        kernel = attend_kernel(case, isa)
        queries = 1 if case.queries == "one" else 7
        first = run_attend(kernel, problem(case, 1000, (0, 300), queries, residual=50))
        for seed, threads, pending in ((0, 2, 0), (0, 3, 0), (1, 1, 0), (2, 2, 3)):
            given = problem(case, 1000, (0, 300), queries, residual=50, seed=seed, pending=pending)
            assert torch.equal(run_attend(kernel, given, threads=threads), first)


def test_pages_beyond_two_gibibytes(isa: IsaName) -> None:
    torch.manual_seed(0)
    k, v = PLAIN.new_tokens(1, 200)
    q = PLAIN.new_queries(1, 1)
    kernel = attend_kernel(PLAIN, isa)
    near, far = (
        run_attend(kernel, Problem(PLAIN.quantized_store(k, v, first_byte=first), q, 200))
        for first in (0, 5 * 2**31)
    )
    assert torch.equal(near, far)


def test_hidden_tokens_and_empty_rows_give_zeros(isa: IsaName) -> None:
    plain = problem(FEW, 300, (0, 300), 3)
    assert plain.mask is not None
    mask = plain.mask.clone()
    mask[:, :, 0] = False
    given = replace(plain, mask=mask)
    out = run_attend(attend_kernel(FEW, isa), given)
    given.check(out)
    assert not out[:, :, 0].any()
    assert not out[1].any()
    assert out[0, :, 1:].any()
    assert not run_attend(attend_kernel(FEW, isa), replace(plain, kv_len=0)).any()


@pytest.mark.parametrize("kind", ["outliers", "biased", "constant", "large", "small"])
def test_adversarial_scales(kind: str, isa: IsaName) -> None:
    for case in (ADDITIVE, replace(PLAIN, dtype="fp32")):
        k, v = case.new_tokens(1, 300)
        q = case.new_queries(1, 1)
        if kind == "outliers":
            k[..., ::5] *= 30
            v[..., ::7] *= 1000
            v[:, :, ::9] *= 100
        elif kind == "biased":
            k += 300 * torch.randn(k.shape[-1])
            v += 300 * torch.randn(v.shape[-1])
        elif kind == "constant":
            k, v = torch.full_like(k, -0.7), torch.full_like(v, 1e-3)
        elif kind == "large":
            k, v, q = k * 1e25, v * 1e30, q * 1e-25
        else:
            k, v, q = k * 1e-25, v * 1e-30, q * 1e25
        check(
            case,
            isa,
            Problem(case.quantized_store(k, v, residual=20), q, 300, random_mask(case, 1, 1, 300)),
        )


def test_no_scale_is_ignored(isa: IsaName) -> None:
    """Twice the elements have the same codes: only the scales tell one from the other."""
    for case in (PLAIN, ADDITIVE):
        k, v = case.new_tokens(1, 200)
        q, mask = case.new_queries(1, 1), random_mask(case, 1, 1, 200)
        outs = []
        for k_factor, v_factor in ((1, 1), (2, 1), (1, 2)):
            store = case.quantized_store(k * k_factor, v * v_factor)
            given = Problem(store, q, 200, mask)
            outs.append(run_attend(attend_kernel(case, isa), given))
            given.check(outs[-1], case.chunk)
        assert not torch.allclose(outs[0].float(), outs[1].float(), rtol=0.05)
        assert torch.equal(outs[2], 2 * outs[0])


CODED = [
    case
    for case in CASES
    if case.v_format != "fp16" and case.mask != "causal"
    if case.softcap is None and case.sink_dtype is None
]


@pytest.mark.parametrize("case", CODED, ids=str)
def test_every_code_of_v_is_decoded_exactly(case: QuantizedCase, isa: IsaName) -> None:
    """With one token that outweighs all others the output is that token of V."""
    name, tokens, channels = case.v_format, case.sinks + case.page_size, case.dims[1]
    if name in FLOAT8:
        numbers = finite_numbers(FLOAT8[name])
        levels = torch.cat([numbers, -numbers])
    else:
        levels = torch.arange(2 ** int(name[3:])).float()
    count = tokens * case.kv_heads * channels
    v = levels.repeat(-(-count // len(levels)))[:count].view(1, case.kv_heads, tokens, channels)
    # Both ends are in every group, so that the scale is 1 and the codes are the levels.
    v[..., :: case.q_group_size] = levels.min()
    v[..., 1 :: case.q_group_size] = levels.max()
    kernel = attend_kernel(case, isa)
    q = case.new_queries(1, 1).zero_()
    q[..., 0] = 30000
    mask = None
    if case.mask in ("bool", "additive"):
        mask = torch.zeros(1, 1, 1, tokens, dtype=DTYPES.get(case.mask_dtype or ""))
        mask = mask == 0 if case.mask == "bool" else mask
    for token in range(case.sinks, tokens, 3):
        k = torch.zeros(1, case.kv_heads, tokens, case.dims[0])
        k[:, :, token, 0] = 1
        store = case.quantized_store(k.to(q.dtype), v.to(q.dtype))
        assert store.quantized.tolist() == [1]
        expected = store.stored("v", tokens)[:, :, token]
        if name != "int1":
            assert torch.equal(expected, v[:, :, token])
        out = run_attend(kernel, Problem(store, q, tokens, mask))[:, :, 0]
        assert torch.equal(out, expected.repeat_interleave(case.group, 1).to(q.dtype))


def test_a_soft_cap_bites(isa: IsaName) -> None:
    """In quantized pages, in sinks and in the ring."""
    given = problem(CAPPED, 300, (0, 90), 3, residual=33)
    out = run_attend(attend_kernel(CAPPED, isa), given)
    given.check(out)
    with pytest.raises(AssertionError, match="bound"):
        replace(given, softcap=None).check(out)


MUTATIONS = {
    "empty slots not buried": ("if (!quantized) bury(chunk, count, work.s);", ""),
    "ring begins with the sinks": ("(sink ? 0 : skipped)", "0"),
    "ring counted from the sinks": ("(sink ? 0 : row.sinks + row.quantized)", "0"),
    "quantized counted from zero": ("chunk.first[i] = 20 + first", "chunk.first[i] = first"),
    "offset of K forgotten": ("add(sum[r][0], splat(offset[r]))", "sum[r][0]"),
    "minimum of V forgotten": ("weights.offset[r] = reduce_add(sum[r])", "weights.offset[r] = 0"),
    "weights of absent tokens": ("t < tokens ? load(p + at) : zero()", "load(p + at)"),
}


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_the_check_notices(name: str | None) -> None:
    source = generate(FEW.spec(detect_isa(), "attend"))
    text, mutated = MUTATIONS[name] if name else ("", "")
    assert text in source.text
    kernel = load_source(KernelSource(source.spec, source.text.replace(text, mutated)))
    given = problem(FEW, 600, (0, 290), 4, residual=20, kv_len=599, pending=1)
    hidden = problem(FEW, 600, (0, 290), 4, residual=20, kv_len=310, pending=1)
    if name is None:
        _check_both(kernel, given, hidden)
        return
    with pytest.raises(AssertionError, match=r"bound|NaN"):
        _check_both(kernel, given, hidden)


MEAN_MUTATIONS = {
    "mean forgotten": (
        "quantized::panel_mean_scores(call.store.rotary, chunk, count, work.q, work.s);",
        "",
    ),
    "turns the other way": ("b * mean.first - a * mean.second", "a * mean.second - b * mean.first"),
    "angles of another pair": ("cos[n] = angles(rotary, mean.pair)", "cos[n] = angles(rotary, n)"),
    "sines of another token": ("load(cos[n] + 64 + t)", "load(cos[n] + 64)"),
    "second channel is the next": ("return pair + 64;", "return pair + 1;"),
}


@pytest.mark.parametrize("name", MEAN_MUTATIONS)
def test_the_check_notices_a_wrong_mean(name: str) -> None:
    source = generate(TURNING.spec(detect_isa(), "attend"))
    text, mutated = MEAN_MUTATIONS[name]
    assert text in source.text
    kernel = load_source(KernelSource(source.spec, source.text.replace(text, mutated)))
    given = problem(TURNING, 300)
    with pytest.raises(AssertionError, match=r"bound|NaN"):
        given.check(run_attend(kernel, given))


def _check_both(kernel: Kernel[KernelSpec], *problems: Problem) -> None:
    for given in problems:
        given.check(run_attend(kernel, given))
