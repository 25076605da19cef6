"""attend kernels of every instruction set against the float64 reference on the stored cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcompile.codegen.cpu.compile import Kernel, load
from kvcompile.codegen.cpu.isa import available_isas
from kvcompile.codegen.spec import IsaName, KernelSpec
from kvcompile.runtime import torch_path
from tests.support.numerics import DTYPES, Case, Problem, run_attend

pytestmark = pytest.mark.compiler

ISAS = available_isas()

PLAIN = Case()
FEW = Case(queries="few", mask="bool", group=2)
ADDITIVE = Case(mask="additive", mask_dtype="fp32", dtype="fp32", dims=(32, 32), group=1)
CAPPED = Case(
    softcap=1.5, mask="additive", mask_dtype="fp32", dtype="fp32", dims=(32, 32), queries="few"
)
SINKING = Case(sink_dtype="bf16", group=6, dims=(40, 24))

CASES = [
    PLAIN,
    FEW,
    ADDITIVE,
    Case(dtype="fp32", dims=(12, 12), group=5, page_size=16, mask="causal", queries="few"),
    Case(dtype="fp16", dims=(56, 56), group=6, page_size=64, mask="additive", mask_dtype="fp16"),
    Case(dims=(80, 80), group=7, mask="additive", mask_dtype="fp32", queries="few"),
    Case(dtype="fp32", dims=(96, 64), group=9, page_size=128),
    Case(dtype="fp16", dims=(128, 128), group=8, kv_heads=1, mask="bool", queries="few"),
    Case(dims=(192, 128), group=1, queries="few"),
    Case(dims=(256, 256), page_size=64, mask="bool"),
    Case(dtype="fp32", group=32, kv_heads=1),
    Case(dtype="fp32", store="bf16", group=4, mask="additive", mask_dtype="fp32"),
    Case(dims=(5, 8), group=6, mask="bool", page_size=16),
    Case(dtype="fp16", dims=(64, 40), group=9, queries="few"),
    Case(dtype="fp32", store="fp16", dims=(32, 24), group=2, mask="causal", queries="few"),
    CAPPED,
    SINKING,
    Case(sink_dtype="fp32", softcap=4.0, group=5, mask="bool", queries="few", dims=(32, 32)),
    Case(softcap=30.0, group=2, mask="causal", queries="few", page_size=16),
]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> IsaName:
    name: IsaName = request.param
    return name


def attend_kernel(case: Case, isa: IsaName) -> Kernel[KernelSpec]:
    return load(case.spec(isa, "attend"))


def random_mask(case: Case, batch: int, queries: int, kv_len: int) -> torch.Tensor | None:
    """Return a mask of the kind of the case, poisoned behind its last column."""
    if case.mask == "bool":
        return torch.rand(batch, 1, queries, kv_len + 3) > 0.4
    if case.mask == "additive":
        assert case.mask_dtype is not None
        mask = torch.randn(batch, 1, queries, kv_len + 3).masked_fill(
            torch.rand(batch, 1, queries, kv_len + 3) > 0.8, -math.inf
        )
        mask[..., kv_len:] = math.nan
        return mask.to(DTYPES[case.mask_dtype])
    return None


def problem(
    case: Case, kv_len: int, starts: tuple[int, ...] = (0,), queries: int = 1, *, seed: int = 0
) -> Problem:
    """Return the same problem for the same sizes; `seed` only moves the pages."""
    torch.manual_seed(kv_len)
    return Problem(
        case.filled_store(kv_len, starts, seed=seed),
        case.new_queries(len(starts), queries),
        kv_len,
        random_mask(case, len(starts), queries, kv_len),
        causal=case.mask == "causal",
        softcap=case.softcap,
        sinks=case.new_sinks(),
    )


def lengths(case: Case) -> list[int]:
    """Return lengths around every boundary, and one of several chunks."""
    page, chunk = case.page_size, case.chunk
    return [1, page - 1, page, page + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + page + 3]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_is_within_the_derived_bound(case: Case, isa: IsaName) -> None:
    kernel = attend_kernel(case, isa)
    for number, kv_len in enumerate(lengths(case)):
        queries = 1 if case.queries == "one" else [1, 2, 16, 5][number % 4]
        given = problem(case, kv_len, (0, kv_len // 2, min(5, kv_len)), queries)
        given.check(run_attend(kernel, given), case.chunk)


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_tokens_before_column_0_are_not_seen(case: Case, isa: IsaName) -> None:
    """A sliding window has left them behind: some, whole pages, whole chunks; rows with padding."""
    kernel = load(replace(case.spec(isa, "attend"), slides=True))
    length = 2 * case.chunk + case.page_size + 3
    for hidden in (0, 1, case.page_size + 5, case.chunk + 1):
        queries = 1 if case.queries == "one" else 5
        given = problem(case, length, (0, 3, hidden + 7), queries)
        given = replace(given, hidden=hidden)
        given.check(run_attend(kernel, given), case.chunk)


def test_neither_threads_nor_places_change_a_bit(isa: IsaName) -> None:
    for case in (PLAIN, FEW):
        kernel = attend_kernel(case, isa)
        queries = 1 if case.queries == "one" else 7
        first = run_attend(kernel, problem(case, 1000, (0, 300), queries))
        for seed, threads in ((0, 2), (0, 3), (1, 1), (2, 3)):
            given = problem(case, 1000, (0, 300), queries, seed=seed)
            assert torch.equal(run_attend(kernel, given, threads=threads), first)


def test_another_chunk_size_stays_within_the_bound(isa: IsaName) -> None:
    case = Case(chunk=64)
    given = problem(case, 777, (0, 20))
    given.check(run_attend(attend_kernel(case, isa), given), case.chunk)


def test_a_query_without_a_visible_token_gives_zeros(isa: IsaName) -> None:
    for case, dead in ((FEW, False), (ADDITIVE, -math.inf)):
        queries = 3 if case.queries == "few" else 1
        plain = problem(case, 300, (0, 300), queries)
        assert plain.mask is not None
        mask = plain.mask.clone()
        mask[:, :, 0] = dead
        given = Problem(plain.store, plain.q, plain.kv_len, mask)
        out = run_attend(attend_kernel(case, isa), given)
        given.check(out)
        assert not out[:, :, 0].any()  # the mask hides all
        assert not out[1].any()  # the row is nothing but padding
        assert out[0, :, 1:].any() or queries == 1


def test_lowest_finite_masks_average_as_eager_attention_does(isa: IsaName) -> None:
    for name in ("fp32", "bf16"):
        dtype = DTYPES[name]
        case = Case(mask="additive", mask_dtype=name, dtype=name)
        plain = problem(case, 300)
        mask = torch.full((1, 1, 1, 300), torch.finfo(dtype).min, dtype=dtype)
        given = Problem(plain.store, plain.q, 300, mask)
        out = run_attend(attend_kernel(case, isa), given)
        given.check(out)
        average = plain.store.stored("v", 300).double().mean(2).repeat_interleave(3, 1)
        torch.testing.assert_close(out[:, :, 0].double(), average, atol=2e-3, rtol=0)


def test_masks_broadcast_by_strides(isa: IsaName) -> None:
    case = FEW
    kernel = attend_kernel(case, isa)
    plain = problem(case, 70, (0, 9), 4)
    for shape in ((1, 1, 1, 70), (2, 1, 1, 70), (1, 4, 1, 70), (2, 4, 4, 70), (2, 1, 4, 1)):
        mask = torch.rand(shape) > 0.3
        given = Problem(plain.store, plain.q, 70, mask)
        given.check(run_attend(kernel, given))
    wide = (torch.rand(2, 1, 4, 140) > 0.3)[..., ::2]
    given = Problem(plain.store, plain.q, 70, wide)
    given.check(run_attend(kernel, given))


def test_mask_columns_of_left_padding_are_not_read(isa: IsaName) -> None:
    plain = problem(ADDITIVE, 90, (7, 33))
    assert plain.mask is not None
    poisoned = plain.mask.clone()
    for row, start in enumerate((7, 33)):
        poisoned[row, :, :, :start] = math.nan
    kernel = attend_kernel(ADDITIVE, isa)
    clean = run_attend(kernel, plain)
    again = run_attend(kernel, Problem(plain.store, plain.q, 90, poisoned))
    assert torch.equal(clean, again)


@pytest.mark.parametrize("slab_shift", [2, 40], ids=["many slabs", "one slab"])
def test_pages_beyond_two_gibibytes(isa: IsaName, slab_shift: int) -> None:
    page_bytes = PLAIN.layout().page_bytes(PLAIN.kv_heads)
    first_page = 5 * 2**31 // page_bytes
    torch.manual_seed(100)
    store = PLAIN.filled_store(100, first_page=first_page, slab_shift=slab_shift)
    near = problem(PLAIN, 100)
    kernel = attend_kernel(PLAIN, isa)
    far = Problem(store, near.q, 100)
    assert torch.equal(run_attend(kernel, far), run_attend(kernel, near))


def test_a_soft_cap_bites(isa: IsaName) -> None:
    """Without it, and with one of another height, the outputs would be others."""
    given = problem(CAPPED, 300, (0, 7), 3)
    out = run_attend(attend_kernel(CAPPED, isa), given)
    given.check(out)
    for other in (None, 1.6):
        with pytest.raises(AssertionError, match="bound"):
            replace(given, softcap=other).check(out)


def test_scores_beyond_any_cap_become_the_cap(isa: IsaName) -> None:
    """Scores of 1e30, and of infinity, weigh as much as the cap says."""
    plain = problem(CAPPED, 20, (0,), 1)
    kernel = attend_kernel(CAPPED, isa)
    for size in (1e30, 1e38):
        given = replace(plain, q=plain.q * size)
        given.check(run_attend(kernel, given))


def test_a_soft_cap_hides_no_nan(isa: IsaName) -> None:
    k, v = CAPPED.new_tokens(1, 20)
    k[:, :, 3] = math.nan
    store = CAPPED.empty_store(20)
    torch_path.append(store, k, v, 0)
    given = Problem(store, CAPPED.new_queries(1, 1), 20, torch.zeros(1, 1, 1, 20), softcap=1.5)
    assert run_attend(attend_kernel(CAPPED, isa), given).isnan().all()


def test_sink_logits_take_their_share(isa: IsaName) -> None:
    """Of one chunk and of several; without them, and with those of other heads, all differs."""
    kernel = attend_kernel(SINKING, isa)
    for kv_len in (3, 700):
        given = problem(SINKING, kv_len, (0, 1))
        out = run_attend(kernel, given)
        given.check(out)
        assert given.sinks is not None
        for other in (None, given.sinks.flip(0)):
            with pytest.raises(AssertionError, match="bound"):
                replace(given, sinks=other).check(out)


def test_who_sees_nothing_but_its_sink_gets_zeros(isa: IsaName) -> None:
    """Whether tokens are hidden by -inf, by the lowest finite number, or not there."""
    case = replace(SINKING, dtype="fp32", sink_dtype="fp32", mask="additive", mask_dtype="fp32")
    plain = problem(case, 300, (0, 300))
    for hidden in (-math.inf, torch.finfo(torch.float32).min):
        given = replace(plain, mask=torch.full((1, 1, 1, 300), hidden))
        assert not run_attend(attend_kernel(case, isa), given).any()


@pytest.mark.parametrize("sink", [-math.inf, 1e30, -1e30])
def test_sink_logits_of_any_size(sink: float, isa: IsaName) -> None:
    given = problem(SINKING, 300)
    assert given.sinks is not None
    given = replace(given, sinks=torch.full_like(given.sinks, sink))
    given.check(run_attend(attend_kernel(SINKING, isa), given))


def test_senseless_arguments_are_refused(isa: IsaName) -> None:
    few, one = attend_kernel(FEW, isa), attend_kernel(PLAIN, isa)
    assert few.call(*[0] * 15, 17, *[0] * 4) == 1
    assert one.call(*[0] * 15, 2, *[0] * 4) == 1
