"""Attentions in many spellings, one module each, with and without a past.

Letters: B batch, S new tokens, T all tokens, H query heads, K KV heads, D head dim.
Every module takes new `q [B, H, S, D]`, `k` and `v [B, K, S, D]`, and the past where it has one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


def repeat(x: Tensor, times: int) -> Tensor:
    """Give every query head a KV head, by expand and reshape."""
    b, k, t, d = x.shape
    return x[:, :, None].expand(b, k, times, t, d).reshape(b, k * times, t, d)


class Sdpa(nn.Module):
    """The operator, with a mask or not, heads repeated by `enable_gqa`, expand or interleave."""

    def __init__(self, repeating: str = "gqa") -> None:
        super().__init__()
        self.repeating = repeating

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        times = q.shape[1] // k.shape[1]
        if self.repeating == "expand":
            k, v = repeat(k, times), repeat(v, times)
        if self.repeating == "interleave":
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        gqa = self.repeating == "gqa"
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = -k, -v  # stands for the projections: Dynamo drops outputs that are inputs
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=2)
        return self.attend(q, k, v, mask), k, v


class Softmax(Sdpa):
    """Matmul and softmax, with the mask in one of several spellings."""

    def __init__(self, masking: str = "add", scaling: str = "mul") -> None:
        super().__init__("expand")
        self.masking, self.scaling = masking, scaling

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        times = q.shape[1] // k.shape[1]
        k, v = repeat(k, times), repeat(v, times)
        scores = self.scale(q, k)
        if mask is not None:
            scores = self.mask(scores, mask)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return F.dropout(weights, 0.1, training=self.training) @ v

    def scale(self, q: Tensor, k: Tensor) -> Tensor:
        root = math.sqrt(q.shape[-1])
        if self.scaling == "div":
            return torch.matmul(q, k.transpose(2, 3)) / root
        if self.scaling == "query":
            return torch.matmul(q * (1 / root), k.permute(0, 1, 3, 2))
        return torch.matmul(q, k.transpose(-1, -2)) * (1 / root)

    def mask(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.masking == "masked_fill":
            return scores.masked_fill(~mask, float("-inf"))
        if self.masking == "where":
            return torch.where(mask, scores, torch.finfo(scores.dtype).min)
        if self.masking == "sigmoid":
            return torch.sigmoid(scores)
        return scores + torch.where(mask, 0.0, torch.finfo(scores.dtype).min)


class TokensFirst(Sdpa):
    """Caches `[B, T, K, D]`, as models do that never transpose what they keep."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = -k.transpose(1, 2), -v.transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        return self.attend(q, k.transpose(1, 2), v.transpose(1, 2), mask), k, v


class Window(Sdpa):
    """Keeps the last tokens only: a slice after the concatenation."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = -k, -v  # stands for the projections: Dynamo drops outputs that are inputs
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=2)
        return self.attend(q, k, v, mask), k[:, :, -8:], v[:, :, -8:]


class Forgetful(Sdpa):
    """Returns no K and V."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, k, v = super().forward(q, k, v, past, mask)
        return out, k.sum(), v.sum()


class Static(Sdpa):
    """Writes into buffers given from outside."""

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, buffers: Pair, position: Tensor, mask: Tensor
    ) -> Tensor:
        buffers[0].index_copy_(2, position, k)
        buffers[1].index_copy_(2, position, v)
        return self.attend(q, buffers[0], buffers[1], mask)


class Cross(Sdpa):
    """Only reads K and V that were cached before, as attention to an encoder does."""

    def forward(  # type: ignore[override]
        self, q: Tensor, cache: Pair, mask: Tensor | None = None
    ) -> Tensor:
        return self.attend(q, cache[0], cache[1], mask)
