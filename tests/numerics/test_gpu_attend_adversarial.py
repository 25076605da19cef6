"""GPU attend kernels on data that rounds badly, in Triton's interpreter.

Every output is within a derived bound; what does not round badly is within two roundings, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.spec import DTypeName, IsaName, MaskKind, Queries
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.gpu_bound import GpuBound
from tests.support.gpu_pages import (
    MOST_ERROR,
    GpuCase,
    GpuPages,
    attend,
    case_dtype,
    expected,
    worst_error,
)

Change = Callable[[torch.Tensor], torch.Tensor]
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Recipe:
    """How K, V and queries differ from normal numbers.

    Attributes:
        k: Of K [B, K, T, D].
        v: Of V.
        q: Of the queries [B, H, S, D].
        is_sharp: Whether its scores or cancelling values amplify roundings of fp16.
    """

    k: Change = lambda x: x
    v: Change = lambda x: x
    q: Change = lambda x: x
    is_sharp: bool = False


def times(factor: float) -> Change:
    return lambda x: x * factor


def channel(index: int, factor: float) -> Change:
    return lambda x: torch.where(torch.arange(x.shape[-1]) == index, x * factor, x)


def token(index: int, factor: float) -> Change:
    place = torch.arange
    return lambda x: torch.where((place(x.shape[-2]) == index)[:, None], x * factor, x)


def biased(x: torch.Tensor) -> torch.Tensor:
    return x + 100 * torch.randn(x.shape[-1])


def random_scales(x: torch.Tensor) -> torch.Tensor:
    return x * torch.exp2(torch.randint(-30, 1, x.shape[-1:]))


def first_half(factor: float) -> Change:
    return lambda x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, x * factor, x)


RECIPES = {
    "a channel of K is huge": Recipe(k=channel(5, 4096), is_sharp=True),
    "keys have a bias": Recipe(k=biased, is_sharp=True),
    "values have a bias": Recipe(v=biased),
    "groups are constant": Recipe(k=torch.ones_like, v=torch.ones_like),
    "K is zero": Recipe(k=torch.zeros_like),
    "V is zero": Recipe(v=torch.zeros_like),
    "keys are equal": Recipe(k=lambda x: x[:, :, :1].expand_as(x)),
    "all is tiny": Recipe(k=times(1e-20), v=times(1e-20)),
    "K is tiny, q and V are huge": Recipe(k=times(1e-20), v=times(1e20), q=times(1e20)),
    "K is huge, q is tiny": Recipe(k=times(1e20), q=times(1e-20)),
    "V is subnormal": Recipe(v=times(1e-37)),
    "a token of V is huge": Recipe(v=token(40, 1e4)),
    "a token of V is small": Recipe(v=token(40, 1e-4)),
    "a channel of V is huge": Recipe(v=channel(40, 1e4), is_sharp=True),
    "a channel of q is huge": Recipe(q=channel(5, 300), is_sharp=True),
    "one token takes all": Recipe(q=times(30), is_sharp=True),
    "small scales meet large queries": Recipe(k=first_half(2.0**-16), q=first_half(2.0**16)),
    "channels have any scale": Recipe(k=random_scales, q=random_scales),
}
RUNS = settings(max_examples=60, deadline=None)
KERNELS: list[tuple[str, IsaName]] = [
    *((name, "ptx") for name in ("bf16", "fp8", "fp8_e5m2", "int8", "int4", "int2")),
    *((name, "triton") for name in ("fp8", "int2")),
]


def check(
    case: GpuCase,
    recipe: Recipe,
    *,
    length: int = 150,
    starts: tuple[int, ...] = (0, 13),
    queries: int = 1,
    splits: int = 3,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to what the recipe makes, hold the output against the bound and return it."""
    dtype, heads = case_dtype(case), case.group * case.kv_heads
    k, v = (torch.randn(len(starts), case.kv_heads, length, dim) for dim in case.dims)
    q = torch.randn(len(starts), queries, heads, case.dims[0]).transpose(1, 2)
    pages = GpuPages(case, recipe.k(k).to(dtype), recipe.v(v).to(dtype), starts)
    q = recipe.q(q).to(dtype)
    out = attend(pages, q, splits=splits, mask=mask)
    reference = expected(pages, q, mask=mask)
    assert reference.isfinite().all()
    assert not out.isnan().any(), f"{case}: NaN from a place that must not be read"
    excess = ((out.double() - reference).abs() / GpuBound(pages, q, mask).bound()).max()
    assert excess <= 1, f"{case}: {excess:.2f} of the bound"
    if case.dtype != "fp32" and not recipe.is_sharp:
        error = worst_error(out, reference)
        assert error < MOST_ERROR, f"{case}: {error:.2f} roundings"
    return out


@pytest.mark.parametrize(("name", "isa"), KERNELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_data_that_rounds_badly(recipe: str, name: str, isa: IsaName) -> None:
    case = GpuCase(k=name, isa=isa, dims=(128, 128), page_size=64, kv_heads=1)
    check(case, RECIPES[recipe])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["fp32", "fp8", "int4", "int1"])
@pytest.mark.parametrize("recipe", ["keys have a bias", "one token takes all", "K is zero"])
def test_fp32_products_follow_the_roundings_of_fp32(
    recipe: str, name: str, dtype: DTypeName
) -> None:
    case = GpuCase(k=name, dims=(32, 48), dtype=dtype, page_size=128, kv_heads=1)
    case = replace(case, compute="fp32") if case.is_grouped else case
    check(case, RECIPES[recipe], length=300)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_e5m2", "int8", "int4", "int2", "int1"])
def test_sixteen_bits(name: str, dtype: DTypeName) -> None:
    check(GpuCase(k=name, dims=(256, 64), page_size=64, dtype=dtype), Recipe())


def test_a_long_tail_of_small_weights_is_not_lost() -> None:
    """Weights of 2^-22.6 of the largest, which are all that matters: fp16 has 2 bits for them."""
    height = 22.6 * math.log(2) / 8  # of 64 channels over the root of 64

    def at_peak(x: torch.Tensor, inside: float, beside: float) -> torch.Tensor:
        peak = (torch.arange(x.shape[-2]) == 40)[:, None]
        return torch.where(peak, inside, beside).expand_as(x)

    recipe = Recipe(
        k=lambda x: at_peak(x, height, 0.0), v=lambda x: at_peak(x, 1e-6, 1.0), q=torch.ones_like
    )
    for name in ("int8", "fp8", "fp8_e5m2"):
        case = GpuCase(k="int8", v=name, page_size=64, residual=0)
        check(case, recipe, length=1540, starts=(0,), splits=2)


@pytest.mark.parametrize("name", ["bf16", "int4"])
@pytest.mark.parametrize("splits", [2, 7])
def test_lowest_finite_masks_average_as_eager_attention_does(name: str, splits: int) -> None:
    """They hide tokens from who sees others; who sees no other averages what they hide."""
    mask = torch.zeros(2, 8, 1, 150)
    mask[..., :70] = LOWEST
    mask[:, 0] = LOWEST
    mask[:, 1] = -math.inf
    mask[:, 2] = LOWEST
    mask[:, 2, :, 10:40] = -math.inf
    case = GpuCase(k=name, dims=(32, 32), mask="additive", mask_dtype="fp32")
    out = check(case, Recipe(), mask=mask, splits=splits)
    assert not out[:, 1].any()
    assert out[:, 0].any()


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_who_sees_nothing_gets_zeros(name: str) -> None:
    mask = torch.rand(2, 8, 3, 150) > 0.3
    mask[:, :, 1] = False
    case = GpuCase(k=name, dims=(32, 32), mask="bool", queries="few")
    out = check(case, Recipe(), mask=mask, queries=3, starts=(0, 150))
    assert not out[:, :, 1].any()
    assert not out[1].any()


@pytest.mark.parametrize("window", [1, 2, 40, 1000])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_sliding_windows(name: str, queries: int, window: int) -> None:
    kind: Queries = "few" if queries > 1 else "one"
    case = GpuCase(k=name, dims=(32, 32), queries=kind, sliding_window=window)
    check(case, Recipe(), queries=queries)


@pytest.mark.parametrize("hidden", [1, 4, 70, 140])
@pytest.mark.parametrize("mask", ["none", "bool", "causal"])
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_tokens_before_column_0_are_not_seen(name: str, mask: MaskKind, hidden: int) -> None:
    kind: Queries = "one" if mask == "none" else "few"
    case = GpuCase(k=name, dims=(32, 32), queries=kind, mask=mask, hidden=hidden)
    queries = 1 if mask == "none" else 3
    given = torch.rand(2, 1, queries, 150) > 0.3 if mask == "bool" else None
    check(case, Recipe(), queries=queries, mask=given)


@pytest.mark.parametrize("mask", ["none", "additive"])
@pytest.mark.parametrize("name", ["bf16", "int8", "fp8"])
def test_capped_scores(name: str, mask: str) -> None:
    given = torch.randn(2, 1, 3, 150) if mask == "additive" else None
    case = GpuCase(
        k=name,
        dims=(32, 32),
        queries="few",
        softcap=5.0,
        mask="additive" if mask == "additive" else "none",
        mask_dtype="fp32" if mask == "additive" else None,
    )
    check(case, Recipe(q=times(8)), queries=3, mask=given)


@pytest.mark.parametrize("sinks", [0, 1, 4, 17])
@pytest.mark.parametrize("length", [1, 17, 64, 113])
def test_sinks_and_rows_of_any_length(sinks: int, length: int) -> None:
    """Rows of one token, splits without pages, and tables that end with the last page."""
    for residual in (0, 32):
        case = GpuCase(k="int4", v="fp8", dims=(32, 32), sinks=sinks, residual=residual)
        check(case, Recipe(), length=length, starts=(0, length - 1), splits=6)


@st.composite
def cases(draw: st.DrawFn) -> GpuCase:
    names, dims = st.sampled_from(sorted(FORMATS)), st.integers(1, 100)
    masks: list[MaskKind] = ["none", "causal", "bool", "additive"]
    types: list[DTypeName] = ["fp32", "bf16", "fp16"]
    mask, dtypes = draw(st.sampled_from(masks)), st.sampled_from(types)
    case = GpuCase(
        k=draw(names),
        v=draw(names),
        dtype=draw(dtypes),
        isa=draw(st.sampled_from(["ptx", "triton"])),
        dims=(draw(dims), draw(dims)),
        group=draw(st.integers(1, 9)),
        kv_heads=draw(st.integers(1, 2)),
        page_size=draw(st.sampled_from([16, 32, 64])),
        mask=mask,
        mask_dtype=draw(dtypes) if mask == "additive" else None,
        queries=draw(st.sampled_from(["one", "few"])),
        q_group_size=16 * draw(st.integers(1, 4)),
        sinks=draw(st.integers(0, 20)),
        residual=draw(st.integers(0, 40)),
        softcap=draw(st.none() | st.floats(1, 50)),
        sliding_window=draw(st.none() | st.integers(1, 100)),
    )
    wide = case.is_grouped and draw(st.booleans())
    case = replace(case, compute="fp32") if wide else case
    assume(FORMATS[case.k].smallest_page <= case.page_size)
    assume(FORMATS[case.v or case.k].smallest_page <= case.page_size)
    return case


@given(cases(), st.data())
@RUNS
def test_whatever_is_printed_runs(case: GpuCase, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 150))
    queries = 1 if case.queries == "one" else data.draw(st.integers(1, min(16, length)))
    mask = torch.rand(2, case.group * case.kv_heads, queries, length) > 0.3
    if case.mask_dtype is not None:
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
        mask = mask.to(case_dtype(replace(case, dtype=case.mask_dtype)))
    starts = (0, data.draw(st.integers(0, length)))
    splits = data.draw(st.integers(2 if case.is_grouped else 1, 9))
    check(
        case,
        Recipe(is_sharp=True),
        length=length,
        starts=starts,
        queries=queries,
        splits=splits,
        mask=mask if case.mask in ("bool", "additive") else None,
    )
