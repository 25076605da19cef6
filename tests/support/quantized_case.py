"""Kernels over quantized pages, and problems for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import Compute, IsaName, KernelSpec, Op
from tests.support.numerics import Case, Problem
from tests.support.quantized_store import QuantizedFakeStore
from tests.support.rotary import angles, turning


@dataclass(frozen=True, kw_only=True)
class QuantizedCase(Case):
    """One kernel over quantized pages and the model it serves."""

    k_format: str = "int4"
    v_format: str = "int4"
    page_size: int = 64
    q_group_size: int = 64
    sinks: int = 4
    compute: Compute = "fp32"
    rotary: Rotary | None = None

    def __str__(self) -> str:
        return super().__str__()

    def spec(self, isa: IsaName, op: Op) -> KernelSpec:
        """Return the spec of one of its kernels."""
        return replace(
            super().spec(isa, op),
            k_format=self.k_format,
            v_format=self.v_format,
            q_group_size=self.q_group_size,
            num_sink_tokens=self.sinks,
            compute=self.compute if op == "attend" else None,
            rotary=self.rotary,
        )

    def layout(self, residual: int = 0) -> RecordLayout:
        """Return the layout of its records."""
        return RecordLayout(
            self.k_format,
            self.v_format,
            *self.dims,
            self.page_size,
            self.q_group_size,
            Window(self.dtype, self.sinks, residual),
            self.rotary,
        )

    def quantized_store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: Sequence[int] = (0,),
        *,
        residual: int = 0,
        pending: int = 0,
        seed: int = 0,
        first_byte: int = 0,
    ) -> QuantizedFakeStore:
        """Return a store of k, v [B, K, T, D].

        Args:
            k: Keys.
            v: Values.
            starts: Left-padding tokens per row.
            residual: Most recent tokens that are not quantized.
            pending: Last quantized pages whose exact pages still have entries in the table.
            seed: Decides where the pages lie.
            first_byte: How many bytes of each kind of pages come before those of this store.
        """
        return QuantizedFakeStore(
            self.layout(residual),
            k,
            v,
            starts=starts,
            pending=pending,
            seed=seed,
            first_byte=first_byte,
            rotary_table=angles(self.rotary, self.page_size),
        )

    def new_tokens(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random k and v [B, K, T, D]; k has a bias that turns if it rotates."""
        k, v = super().new_tokens(batch, tokens)
        if self.rotary is not None:
            k = (k + 20 * turning(self.rotary, tokens, self.dims[0])).to(k.dtype)
        return k, v

    def problem(
        self,
        stored: int,
        starts: Sequence[int] = (0,),
        queries: int = 1,
        *,
        kv_len: int | None = None,
        mask: torch.Tensor | None = None,
        residual: int = 0,
        pending: int = 0,
        seed: int = 0,
    ) -> Problem:
        """Return the same problem for the same sizes; `seed` only moves the pages."""
        torch.manual_seed(stored)
        store = self.quantized_store(
            *self.new_tokens(len(starts), stored),
            starts,
            residual=residual,
            pending=pending,
            seed=seed,
        )
        q = self.new_queries(len(starts), queries)
        kv_len = stored if kv_len is None else kv_len
        causal = self.mask == "causal"
        more = {"softcap": self.softcap, "sinks": self.new_sinks()}
        return Problem(store, q, kv_len, mask, causal=causal, **more)  # type: ignore[arg-type]
