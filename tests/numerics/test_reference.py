"""The oracle itself against torch's attention, where the two define the same thing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcompile.reference.attention import attention


def test_the_reference_is_scaled_dot_product_attention() -> None:
    q = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, dim, dtype=torch.float64) for dim in (8, 3))
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    bias = torch.randn(1, 6, 5, 9, dtype=torch.float64)
    rules: list[tuple[torch.Tensor | None, bool]]
    rules = [(None, False), (mask, False), (bias, False), (None, True)]
    for given, causal in rules:
        expected = F.scaled_dot_product_attention(
            q, k, v, attn_mask=given, is_causal=causal, scale=0.3, enable_gqa=True
        )
        out = attention(q, k, v, mask=given, causal=causal, scale=0.3)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[False] * 3, [True] * 3])
    out = attention(q, k, k, mask=mask)
    assert not out[0, 0, 0].any()
    assert out[0, 0, 1].all()
    assert not attention(q, k[:, :, :0], k[:, :, :0]).any()
