"""attend_latent in Triton's interpreter: absorbed attention over latents, against float64.

Every page slot and partial output that must not be read is NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.spec import MaskKind
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.gpu_pages import (
    MOST_ERROR,
    GpuCase,
    GpuPages,
    attend,
    case_dtype,
    expected,
    worst_error,
)


@pytest.mark.parametrize(
    ("dims", "heads", "queries", "mask"),
    [
        ((512, 64), 16, 1, "none"),
        ((64, 32), 8, 1, "bool"),
        ((64, 32), 128, 1, "none"),
        ((96, 16), 5, 4, "bool"),
        ((256, 32), 40, 3, "none"),
    ],
)
def test_latents(dims: tuple[int, int], heads: int, queries: int, mask: MaskKind) -> None:
    case = GpuCase(
        dims=dims,
        group=heads,
        kv_heads=1,
        page_size=64,
        mask=mask,
        queries="one" if queries == 1 else "few",
        latent=True,
    )
    length, starts = 150, (0, 21)
    k, v = (torch.randn(2, 1, length, dim).to(case_dtype(case)) for dim in dims)
    pages = GpuPages(case, k, v, starts)
    q = torch.randn(2, heads, queries, sum(dims)).to(case_dtype(case))
    given = torch.rand(2, 1, queries, length) > 0.3 if mask == "bool" else None
    out = attend(pages, q, splits=3, mask=given)
    assert out.shape == (2, heads, queries, dims[0])
    assert worst_error(out, expected(pages, q, mask=given)) < MOST_ERROR


def test_absorbed_attention_is_expanded_attention() -> None:
    """Keys and values of heads are linear in the latent: what is absorbed gives the same output."""
    heads, rank, rotating, nope, v_dim, length = 4, 64, 16, 24, 20, 70
    case = GpuCase(
        dims=(rank, rotating),
        group=heads,
        kv_heads=1,
        page_size=64,
        latent=True,
        dtype="fp32",
        k="fp32",
    )
    latent, rope = torch.randn(1, 1, length, rank), torch.randn(1, 1, length, rotating)
    w_uk, w_uv = torch.randn(heads, nope, rank) / 8, torch.randn(heads, v_dim, rank) / 8
    q_nope, q_rope = torch.randn(1, heads, 1, nope), torch.randn(1, heads, 1, rotating)
    keys = torch.cat([latent @ w_uk.mT, rope.expand(-1, heads, -1, -1)], -1)
    values = latent @ w_uv.mT
    q = torch.cat([q_nope @ w_uk, q_rope], -1)
    # The kernel's scale is that of its query; the model's is that of the expanded one.
    factor = ((rank + rotating) / (nope + rotating)) ** 0.5
    out = attend(GpuPages(case, latent, rope, (0,)), q * factor, splits=2) @ w_uv.mT
    wanted = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([q_nope, q_rope], -1).double(), keys.double(), values.double()
    )
    # fp32: products of 80 channels, sums of 70 tokens, and the projection of 64 channels.
    assert (out - wanted).abs().max() < 256 * 2.0**-24 * wanted.abs().max()
