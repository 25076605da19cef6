"""attend kernels that multiply integers, against two float64 references.

One knows how the mode rounds queries, and its bound is narrow: it sees a wrong kernel. The other is
the reference of every mode, and its bound says what the mode costs at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kvcompile.codegen.cpu.compile import Kernel, load, load_source
from kvcompile.codegen.cpu.isa import has_integer_dot
from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.source import KernelSource
from kvcompile.codegen.spec import KernelSpec
from tests.support.integer_bound import IntegerAttention, levels
from tests.support.numerics import OUTPUT_UNIT, SMALLEST, Problem, run_attend
from tests.support.quantized_case import QuantizedCase
from tests.support.quantized_store import QuantizedFakeStore

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not has_integer_dot("avx512"), reason="needs AVX-512 VNNI"),
]

PLAIN = QuantizedCase(dtype="fp32", compute="int8")
CASES = [
    PLAIN,
    QuantizedCase(k_format="int8", v_format="int8", group=4, dims=(128, 128), compute="int8"),
    QuantizedCase(
        dtype="fp32",
        k_format="int3",
        v_format="int2",
        dims=(80, 72),
        group=7,
        page_size=32,
        q_group_size=32,
        mask="additive",
        mask_dtype="fp32",
        sinks=20,
        compute="int8",
    ),
    QuantizedCase(
        dtype="fp16",
        k_format="int2",
        v_format="int3",
        dims=(24, 256),
        kv_heads=1,
        group=1,
        page_size=128,
        q_group_size=96,
        mask="bool",
        sinks=0,
        compute="int8",
    ),
    QuantizedCase(
        dtype="fp32",
        k_format="int1",
        v_format="int1",
        dims=(64, 16),
        group=2,
        page_size=32,
        chunk=96,
        mask="bool",
        queries="few",
        compute="int8",
    ),
    QuantizedCase(
        dtype="fp32",
        k_format="int8",
        dims=(16, 48),
        page_size=16,
        chunk=16,
        q_group_size=16,
        group=13,
        compute="int8",
    ),
    QuantizedCase(
        dtype="fp32",
        dims=(64, 64),
        group=7,
        mask="additive",
        mask_dtype="fp32",
        compute="int8",
        rotary=Rotary(64),
    ),
    replace(PLAIN, softcap=2.0, group=2),
]
"""Every format as K and as V; blocks of one to six rows; odd numbers of vectors everywhere."""


RESIDUAL = 20
"""Most recent tokens that are not quantized."""


@dataclass(frozen=True)
class Attention:
    """One call: q [1, H, S, D] over all tokens of k, v [1, K, T, D]."""

    case: QuantizedCase
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    mask: torch.Tensor | None
    seed: int = 0

    @property
    def problem(self) -> Problem:
        store = self.case.quantized_store(self.k, self.v, residual=RESIDUAL, seed=self.seed)
        return Problem(store, self.q, self.k.shape[2], self.mask, softcap=self.case.softcap)

    def run(self, kernel: Kernel[KernelSpec] | None = None, threads: int = 1) -> torch.Tensor:
        kernel = kernel or load(self.case.spec("avx512", "attend"))
        return run_attend(kernel, self.problem, threads=threads)

    def integers(self) -> IntegerAttention:
        """Return the same for the bound: [K, G * S rows, ...], quantized tokens first."""
        case, given, layout = self.case, self.problem, self.case.layout()
        assert isinstance(given.store, QuantizedFakeStore)
        pages, first = int(given.store.quantized[0]), case.sinks
        count = pages * case.page_size
        k, v = (
            x[0, :, first : first + count].unflatten(1, (pages, case.page_size))
            for x in (self.k, self.v)
        )
        table = given.store.rotary_table
        records = layout.pack(k, v, table)
        exact = [*range(min(first, given.kv_len)), *range(first + count, given.kv_len)]
        order = [*range(first, first + count), *exact]
        exact_k = given.store.stored("k", given.kv_len)[0, :, exact]
        exact_v = given.store.stored("v", given.kv_len)[0, :, exact]
        factor = torch.tensor(given.scale / math.log(2), dtype=torch.float32)
        bias = given.bias().expand(1, self.q.shape[1], -1, -1)[0, ..., order] / math.log(2)
        return IntegerAttention(
            q=self._rows(self.q[0].float() * factor),
            k=levels(layout, "k", records, table),
            v=levels(layout, "v", records),
            bias=self._rows(bias),
            page_size=case.page_size,
            chunk=case.chunk,
            exact=(exact_k.double(), exact_v.double()),
            softcap=None if case.softcap is None else case.softcap / math.log(2),
        )

    def excess(self, out: torch.Tensor, *, rounded: bool) -> float:
        """Return by how much an output is beyond its bound."""
        integers = self.integers()
        expected, bound = integers.output(rounded=rounded), integers.bound(rounded=rounded)
        bound = bound + OUTPUT_UNIT[out.dtype] * (expected.abs() + bound) + SMALLEST[out.dtype]
        return float(((self._rows(out[0]).double() - expected).abs() - bound).max())

    def check(self) -> None:
        out = self.run()
        assert not out.isnan().any()
        for rounded in (True, False):
            assert self.excess(out, rounded=rounded) <= 0

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [H, S, ...] as [K, G * S, ...]."""
        heads = self.case.kv_heads
        return x.reshape(heads, -1, *x.shape[2:])


def attention(case: QuantizedCase, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> Attention:
    """Return a call with a mask of the kind of the case, if it has one."""
    mask = None
    if case.mask != "none":
        visible = torch.rand(1, 1, q.shape[2], k.shape[2]) > 0.4
        bias = torch.randn(visible.shape).masked_fill(~visible, -math.inf)
        mask = visible if case.mask == "bool" else bias
    return Attention(case, k, v, q, mask)


def random_attention(case: QuantizedCase, tokens: int) -> Attention:
    torch.manual_seed(tokens)
    queries = 5 if case.queries == "few" else 1
    return attention(case, *case.new_tokens(1, tokens), case.new_queries(1, queries))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lengths_around_pages_and_chunks(case: QuantizedCase) -> None:
    first, size = case.sinks + RESIDUAL, case.page_size
    for tokens in (1, first + size, first + 2 * size - 1, first + 257 + size, 700):
        random_attention(case, tokens).check()


def uneven(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Outlying channels of K and q, and tokens of V of very different sizes."""
    k[..., ::7] *= 50
    k[..., 3] += 300
    q[..., 5] *= 30
    k /= 20
    v *= torch.exp(5 * torch.randn(v.shape[:3])).unsqueeze(-1)


def constant(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Groups whose elements are equal, so that their scale is the smallest or zero."""
    k[..., ::2] = 1.5
    v[:, :, ::2] = -0.75
    q[..., 0] = 0


def tiny(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Scales far below and queries far above one."""
    k *= 1e-18
    v *= 1e-20
    q *= 1e17


def huge(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Scales far above and queries far below one."""
    k *= 1e15
    v *= 1e25
    q *= 1e-15


def sharp(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Weights of a few tokens only."""
    q *= 20


def zero(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> None:
    """Nothing at all."""
    k *= 0
    v *= 0


@pytest.mark.parametrize("change", [uneven, constant, tiny, huge, sharp, zero])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dtype == "fp32" and case.mask != "bool"], ids=str
)
def test_hard_data(
    case: QuantizedCase, change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
) -> None:
    torch.manual_seed(0)
    k, v = (x.float() for x in case.new_tokens(1, 400))
    q = case.new_queries(1, 1).clone()
    change(k, v, q)
    attention(case, k, v, q).check()


def test_a_rounded_query_is_within_half_a_step() -> None:
    for case in CASES[:3]:
        integers = random_attention(case, 500).integers()
        exact = integers.q.double() @ integers.k.values.mT
        bound = integers.score_error(rounded=False)[..., : exact.shape[-1]]
        assert bool(((integers.rounded_scores() - exact).abs() <= bound).all())


def test_threads_and_places_do_not_matter() -> None:
    given = random_attention(PLAIN, 900)
    out = given.run()
    assert torch.equal(given.run(threads=2), out)
    assert torch.equal(replace(given, seed=7).run(), out)


MUTATIONS = {
    "low bytes forgotten": ("low[r][j] = dot(low[r][j], l, codes[j]);", ""),
    "another centre": ("splat(folded.delta[r] * -7.5f)", "splat(folded.delta[r] * -8.0f)"),
    "queries of 7 bits": ("inverse_step(most, 127.0f)", "inverse_step(most, 126.0f)"),
    "one group of channels for all": ("+ group * ", "+ 0 * "),
    "minimum of V forgotten": ("rest[r] = fma(x, minimum, rest[r]);", ""),
    "query of another page": ("t / 16, folded[page % 3]", "t / 16, folded[0]"),
}


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_the_narrow_bound_notices(name: str | None) -> None:
    case = replace(PLAIN, q_group_size=32)
    source = generate(case.spec("avx512", "attend"))
    text, mutated = MUTATIONS[name] if name else ("", "")
    assert text in source.text
    kernel = load_source(KernelSource(source.spec, source.text.replace(text, mutated)))
    given = random_attention(case, 600)
    excess = given.excess(given.run(kernel), rounded=True)
    assert (excess > 0) == (name is not None)
