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


def test_a_sink_logit_is_a_token_without_a_value() -> None:
    q = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, dim, dtype=torch.float64) for dim in (8, 3))
    sinks = torch.randn(6, dtype=torch.float64)
    k1, v1 = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    bias = torch.zeros(1, 6, 1, 10, dtype=torch.float64)
    bias[0, :, 0, 9] = sinks
    expected = F.scaled_dot_product_attention(q, k1, v1, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, sinks_H=sinks), expected, rtol=1e-12, atol=1e-12)


def test_a_cap_bounds_scores_and_keeps_small_ones() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    plain = attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v, softcap=1e6), plain, rtol=1e-6, atol=1e-6)
    # Scores beyond the cap weigh as one, so that what has the sign of the largest is averaged.
    sign = torch.sign(q @ k.mT)
    expected = torch.softmax(2 * sign, -1) @ v
    out = attention(q * 1e9, k, v, softcap=2.0)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[False] * 3, [True] * 3])
    out = attention(q, k, k, mask=mask)
    assert not out[0, 0, 0].any()
    assert out[0, 0, 1].all()
    assert not attention(q, k[:, :, :0], k[:, :, :0]).any()
