"""Attention as the papers write it: softmax(q K^T * scale + mask) V, and what models add to it.

A soft cap (Gemma 2, arXiv 2408.00118) bounds the scores before the mask. A sink logit per query
head (gpt-oss; attention sinks, arXiv 2309.17453) is one more score of every row of the softmax,
with nothing behind it: the other weights sum to less than 1. ALiBi (arXiv 2108.12409) and the
relative position biases of T5 (arXiv 1910.10683) are added to the scores, as a mask is.
"""

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
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
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
        softcap: Bound of the scaled scores, softcap * tanh(score / softcap).
        sinks_H: A logit per query head that joins the softmax and is dropped afterwards.

    Returns:
        [B, H, S, D of values]; zeros where a query token sees no token.

    Raises:
        ValueError: H is not a multiple of K, or there are not H sink logits.
    """
    num_q_heads, num_kv_heads = q_BHSD.shape[1], k_BKTD.shape[1]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if sinks_H is not None and sinks_H.shape != (num_q_heads,):
        raise ValueError(f"{tuple(sinks_H.shape)} sink logits for {num_q_heads} query heads")
    group = num_q_heads // num_kv_heads
    k_BHTD = k_BKTD.repeat_interleave(group, dim=1)
    v_BHTD = v_BKTD.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale

    scores_BHST = q_BHSD @ k_BHTD.transpose(-2, -1) * scale
    if softcap is not None:
        scores_BHST = softcap * torch.tanh(scores_BHST / softcap)
    if causal:
        visible_ST = torch.ones_like(scores_BHST[0, 0], dtype=torch.bool).tril()
        scores_BHST = scores_BHST.masked_fill(~visible_ST, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores_BHST = scores_BHST.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores_BHST = scores_BHST + mask.to(scores_BHST.dtype)

    if sinks_H is not None:
        sinks_BHS1 = sinks_H.to(scores_BHST.dtype)[:, None, None].expand(*scores_BHST.shape[:3], 1)
        scores_BHST = torch.cat([scores_BHST, sinks_BHS1], dim=-1)

    highest_BHS1 = scores_BHST.amax(dim=-1, keepdim=True) if scores_BHST.shape[3] else 0
    weights_BHST = torch.exp(scores_BHST - highest_BHS1)
    weights_BHST = weights_BHST.masked_fill(scores_BHST == -math.inf, 0)
    total_BHS1 = weights_BHST.sum(dim=-1, keepdim=True)
    weights_BHST = weights_BHST[..., : k_BKTD.shape[2]]
    return weights_BHST @ v_BHTD / total_BHS1.masked_fill(total_BHS1 == 0, 1)
