"""Running kernels on poisoned stores, and how far they may be from the float64 reference.

Letters: B batch, S query tokens, T cached tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.codegen.cpu.compile import Kernel
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.spec import DTypeName, IsaName, KernelSpec, MaskKind, Op, Queries
from kvcompile.reference.attention import attention
from kvcompile.runtime import torch_path
from tests.support.fake_store import FakeStore
from tests.support.quantized_store import QuantizedFakeStore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = 2.0**-24
"""Unit roundoff of fp32, in which everything is accumulated."""

TANH_ERROR = 2.0**-21
"""What the tanh of the kernels is off by, relatively."""

OUTPUT_UNIT = {torch.float32: UNIT, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel and the model it serves."""

    dtype: DTypeName = "bf16"
    store: DTypeName | None = None
    dims: tuple[int, int] = (64, 64)
    group: int = 3
    kv_heads: int = 2
    page_size: int = 32
    mask: MaskKind = "none"
    mask_dtype: DTypeName | None = None
    queries: Queries = "one"
    chunk: int = 256
    softcap: float | None = None
    sink_dtype: DTypeName | None = None

    def __str__(self) -> str:
        return self.spec("portable", "attend").symbol.removeprefix("attend_portable_")

    def spec(self, isa: IsaName, op: Op) -> KernelSpec:
        """Return the spec of one of its kernels."""
        stored = self.store or self.dtype
        attend = op == "attend"
        return KernelSpec(
            op=op,
            isa=isa,
            dtype=self.dtype,
            k_format=stored,
            v_format=stored,
            head_dim_qk=self.dims[0],
            head_dim_vo=self.dims[1],
            page_size=self.page_size,
            q_heads_per_kv_head=self.group if attend else None,
            mask=self.mask if attend else None,
            mask_dtype=self.mask_dtype if attend else None,
            queries=self.queries if attend else None,
            chunk=self.chunk if attend else None,
            softcap=self.softcap if attend else None,
            sink_dtype=self.sink_dtype if attend else None,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of queries, new K and V, and outputs."""
        return DTYPES[self.dtype]

    def layout(self) -> RecordLayout:
        """Return the layout of its records."""
        stored = self.store or self.dtype
        return RecordLayout(stored, stored, *self.dims, self.page_size)

    def empty_store(
        self,
        tokens: int,
        starts: Sequence[int] = (0,),
        *,
        seed: int = 0,
        first_page: int = 0,
        slab_shift: int = 2,
    ) -> FakeStore:
        """Return a store of poison."""
        return FakeStore(
            self.layout(),
            num_kv_heads=self.kv_heads,
            dtype=self.torch_dtype,
            tokens=tokens,
            starts=starts,
            seed=seed,
            first_page=first_page,
            slab_shift=slab_shift,
        )

    def filled_store(
        self,
        tokens: int,
        starts: Sequence[int] = (0,),
        *,
        seed: int = 0,
        first_page: int = 0,
        slab_shift: int = 2,
    ) -> FakeStore:
        """Return a store of random tokens, poison everywhere else; equal but for the places."""
        store = self.empty_store(
            tokens, starts, seed=seed, first_page=first_page, slab_shift=slab_shift
        )
        k, v = self.new_tokens(len(starts), tokens)
        torch_path.append(store, k, v, 0)
        return store

    def new_tokens(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random k and v [B, K, T, D], the same for the same sizes."""
        random = torch.Generator().manual_seed(tokens)
        k, v = (
            torch.randn(batch, self.kv_heads, tokens, dim, generator=random) for dim in self.dims
        )
        return k.to(self.torch_dtype), v.to(self.torch_dtype)

    def new_sinks(self) -> torch.Tensor | None:
        """Return sink logits [H] that weigh about as much as some tokens do, if it has any."""
        if self.sink_dtype is None:
            return None
        return (2 + torch.arange(self.group * self.kv_heads) / 3).to(DTYPES[self.sink_dtype])

    def new_queries(self, batch: int, queries: int) -> torch.Tensor:
        """Return random q [B, H, S, Dk]; a strided view, as a projection leaves it."""
        heads = self.group * self.kv_heads
        q = torch.randn(batch, queries, heads, self.dims[0] + 3).to(self.torch_dtype)
        return q[..., 1:-2].transpose(1, 2)


@dataclass(frozen=True)
class Problem:
    """One call of attend; a mask is anything that broadcasts to [B, H, S, kv_len or more].

    Attributes:
        hidden: Tokens before the kernel's column 0, which no query sees. They count here, in
            `kv_len` and in the mask's columns, and the kernel is told what is left.
    """

    store: FakeStore | QuantizedFakeStore
    q: torch.Tensor
    kv_len: int
    mask: torch.Tensor | None = None
    causal: bool = False
    hidden: int = 0
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def bias(self) -> torch.Tensor:
        """Return the float64 bias [B, 1 or H, S, T] that says the same as mask and padding."""
        positions = torch.arange(self.kv_len)
        seen = (positions >= self.store.starts[:, None].clamp(min=self.hidden))[:, None, None, :]
        seen = seen.expand(-1, -1, self.q.shape[2], -1)
        if self.causal:
            seen = seen & (positions - self.hidden <= torch.arange(self.q.shape[2])[:, None])
        bias = torch.zeros((), dtype=torch.float64)
        if self.mask is not None:
            given = self.mask if self.mask.shape[-1] == 1 else self.mask[..., : self.kv_len]
            if given.dtype is torch.bool:
                seen = seen & given
            else:
                bias = given.double()
        return torch.where(seen, bias, -math.inf)

    def reference(self) -> torch.Tensor:
        """Return the float64 attention over what is stored."""
        k, v = (self.store.stored(role, self.kv_len).double() for role in ("k", "v"))
        q, bias = self.q.double(), self.bias()
        more = {"softcap": self.softcap, "scale": self.scale}
        return attention(q, k, v, mask=bias, sinks_H=self.sinks, **more)  # type: ignore[arg-type]

    def bound(self, chunk: int) -> torch.Tensor:
        """Return how far an fp32 kernel with one rounding at the end may be from the reference.

        To first order in u = 2^-24, with scores in units of log2:

        * a score is a dot product of D terms in at least two chains, of queries rounded twice
          (the factor, the product): its error is at most (D/2 + 6) u A, A the sum of |q k|;
          a bias adds its two roundings, and that of the sum. A bias beyond 1e30 swallows every
          score without a trace, in fp32 as in float64.
        * a soft cap c shrinks errors, for tanh is nowhere steeper than 1. It adds 2^-21 of the
          capped score, the error of tanh, and 4 u: two factors and their products, which move the
          argument and with it tanh by no more than their own relative error.
        * a sink logit is one more token, whose score is rounded twice and whose value is 0.
        * the weight 2^(s - m) has the relative error ln2 (error of s) + ln2 u |m - s| for the two
          subtractions (the token from its chunk, the chunk from all), and 16 u for the two powers
          of two (polynomial 2^-21 each, library 2^-23). m itself cancels. Weights below 2^-126
          are flushed.
        * a sum of n weights, or of n weighted values, over one chunk and then over all chunks has
          the relative error (n + chunks + 4) u with respect to the sum of absolute values;
          multiplication and addition may round separately, which adds u per term and is absorbed
          by counting the chunk's terms twice.
        * the quotient adds 2 u, the output its own unit roundoff.
        * a quantized element is a product and a minimum, which are summed apart: all of the above
          holds for the magnitudes of its two terms instead of its own. The product with the scale,
          the last sum, and the reference's own element round once more each.
        """
        q, bias = self.q.double(), self.bias()
        group = q.shape[1] // self.store.num_kv_heads
        k, v, k_size, v_size = (
            x.double().repeat_interleave(group, 1)
            for stored in (self.store.stored, self.store.terms)
            for x in (stored("k", self.kv_len), stored("v", self.kv_len))
        )
        extra = self.store.extra_roundings
        log2e = 1 / math.log(2)
        scores = q @ k.mT * self.scale
        cap_error = torch.zeros(())
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
            cap_error = (TANH_ERROR + 4 * UNIT) * scores.abs() * log2e
        scores = scores + bias
        size = q.abs() @ k_size.mT * self.scale * log2e
        finite = bias.masked_fill(bias.abs() > 1e30, 0).abs() * log2e
        score_error = UNIT * ((q.shape[-1] / 2 + 6 + extra) * size + 3 * finite + size + finite)
        score_error = score_error + cap_error
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
            sink_error = 2 * UNIT * log2e * sinks.abs().nan_to_num(posinf=0)
            score_error = torch.cat([score_error, sink_error], -1)
            v, v_size = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (v, v_size))

        highest = scores.amax(-1, keepdim=True)
        below = ((highest - scores) * log2e).nan_to_num(0, 0, 0)
        weight_error = math.log(2) * (score_error + UNIT * below) + 16 * UNIT
        weights = torch.softmax(scores, -1).nan_to_num(0)
        # Quantized and exact tokens make chunks of their own, of which one each may be short.
        chunks = -(-self.kv_len // chunk) + extra
        sum_error = (2 * min(chunk, self.kv_len) + chunks + 6 + extra) * UNIT

        size = weights @ v_size
        numerator = (weights * weight_error) @ v_size + sum_error * size
        denominator = (weights * weight_error).sum(-1, keepdim=True) + sum_error
        out = (weights @ v).abs()
        flushed = 2.0**-120 * v_size.amax()
        fp32 = numerator + out * denominator + 2 * UNIT * out + flushed
        unit = OUTPUT_UNIT[self.q.dtype]
        return 1.01 * (fp32 + unit * (out + fp32)) + SMALLEST[self.q.dtype]

    def check(self, out: torch.Tensor, chunk: int = 256) -> None:
        """Assert that `out` is within the bound."""
        excess = (out.double() - self.reference()).abs() - self.bound(chunk)
        assert not out.isnan().any(), "NaN from a place that must not be read"
        assert excess.max() <= 0, f"beyond the bound by {excess.max():.3e}"


def run_attend(kernel: Kernel[KernelSpec], problem: Problem, *, threads: int = 1) -> torch.Tensor:
    """Call an attend kernel with poisoned scratch and output."""
    q, store = problem.q, problem.store
    batch, heads, queries, _ = q.shape
    poison = torch.full((batch, queries, heads, kernel.spec.head_dim_vo), math.nan, dtype=q.dtype)
    out = poison.transpose(1, 2)
    assert kernel.scratch_bytes is not None
    size = kernel.scratch_bytes(batch, store.num_kv_heads, queries, problem.kv_len)
    scratch = torch.full((size // 4 + 1,), math.nan)
    mask_part = [0, 0, 0, 0, 0]
    if problem.mask is not None:
        columns = max(problem.mask.shape[-1], problem.kv_len)
        mask = problem.mask.expand(batch, heads, queries, columns)[..., problem.hidden :]
        mask_part = [mask.data_ptr(), *mask.stride()]
    sink_part = [] if problem.sinks is None else [problem.sinks.data_ptr()]
    store.starts.sub_(problem.hidden)
    status = kernel.call(
        store.state.data_ptr(),
        q.data_ptr(),
        *q.stride()[:3],
        out.data_ptr(),
        *out.stride()[:3],
        *mask_part,
        *sink_part,
        store.num_kv_heads,
        queries,
        problem.kv_len - problem.hidden,
        scratch.data_ptr(),
        threads,
        problem.scale,
    )
    store.starts.add_(problem.hidden)
    assert status == 0
    assert scratch[-1].isnan(), "scratch overrun"
    return out
