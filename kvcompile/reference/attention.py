"""Attention as the papers write it: softmax(q K^T * scale + mask) V."""

from __future__ import annotations

import math

import torch


def attention(
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention in the precision of its inputs; float64 inputs give the oracle.

    Letters: B batch, S query tokens, T key tokens, H query heads, K KV heads, D head dimension
    (that of values may differ). Query head h reads KV head h // (H // K).

    Args:
        q_BHSD: Queries.
        k_BKTD: Keys.
        v_BKTD: Values.
        mask: Broadcasts to [B, H, S, T]; bool (True is visible) or added to the scores.
        causal: Query token s sees the tokens t <= s.
        scale: Factor of the scores, 1 / sqrt(D) by default.

    Returns:
        [B, H, S, D of values]; zeros where a query token sees no token.

    Raises:
        ValueError: H is not a multiple of K.
    """
    num_q_heads, num_kv_heads = q_BHSD.shape[1], k_BKTD.shape[1]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    group = num_q_heads // num_kv_heads
    k_BHTD = k_BKTD.repeat_interleave(group, dim=1)
    v_BHTD = v_BKTD.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale

    scores_BHST = q_BHSD @ k_BHTD.transpose(-2, -1) * scale
    if causal:
        visible_ST = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool).tril()
        scores_BHST = scores_BHST.masked_fill(~visible_ST, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores_BHST = scores_BHST.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores_BHST = scores_BHST + mask.to(scores_BHST.dtype)

    highest_BHS1 = scores_BHST.amax(dim=-1, keepdim=True) if k_BKTD.shape[2] else 0
    weights_BHST = torch.exp(scores_BHST - highest_BHS1)
    weights_BHST = weights_BHST.masked_fill(scores_BHST == -math.inf, 0)
    total_BHS1 = weights_BHST.sum(dim=-1, keepdim=True)
    return weights_BHST @ v_BHTD / total_BHS1.masked_fill(total_BHS1 == 0, 1)
