"""Decoders that cache K and V in one tensor, in the spellings that are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, WEIGHT_STD

TakenBy = Literal["unbind", "select", "chunk", "split", "slice"]


@dataclass(frozen=True)
class Spelling:
    """How a model caches K and V in one tensor.

    Attributes:
        dim: Dimension that tells K and V apart.
        token_dim: Dimension of K and V that counts tokens.
        taken_by: Operator that gives K and V; the first two have a dimension of their own for it.
        grows_apart: Whether K and V grow each from its own part and are joined to be returned;
            otherwise the one tensor grows, and K and V are taken from it.
        v_first: Whether V comes first.
        order: Of the dimensions of the tensor that is taken apart, if it is permuted before that.
        as_one: Whether K and V of new tokens are one view of a projection, never joined.
    """

    dim: int
    token_dim: int = 2
    taken_by: TakenBy = "unbind"
    grows_apart: bool = False
    v_first: bool = False
    order: tuple[int, ...] | None = None
    as_one: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the dimension is that of K and V alone."""
        return self.taken_by in ("unbind", "select")

    @property
    def grown_dim(self) -> int:
        """Dimension of the one tensor that counts tokens."""
        return self.token_dim + (self.is_stacked and self.dim <= self.token_dim)

    @property
    def batch_dim(self) -> int:
        """Dimension of the one tensor that counts rows."""
        return int(self.is_stacked and self.dim == 0)

    def join(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return K and V in one tensor."""
        both = (v, k) if self.v_first else (k, v)
        return torch.stack(both, self.dim) if self.is_stacked else torch.cat(both, self.dim)

    def view(self, projected: torch.Tensor) -> torch.Tensor:
        """Return new K and V, stacked, as a view of their projection [B, S, C]."""
        dims = [0, 1, 3, 4] if self.token_dim == 1 else [0, 3, 1, 4]
        dims.insert(self.dim, 2)
        apart: torch.Tensor = projected.unflatten(-1, (2, 2, 16))
        return apart.permute(dims)

    def part(self, fused: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return K and V; of the extents `sizes` in the dimension, if they are not stacked."""
        dim = self.dim
        if self.order is not None:
            fused, dim = fused.permute(self.order), self.order.index(dim)
        if self.taken_by == "unbind":
            both = fused.unbind(dim)
        elif self.taken_by == "select":
            both = fused.select(dim, 0), fused.select(dim, 1)
        elif self.taken_by == "chunk":
            both = fused.chunk(2, dim)
        elif self.taken_by == "split":
            both = fused.split(tuple(sizes[::-1] if self.v_first else sizes), dim)
        else:
            before = (slice(None),) * dim
            end = sizes[1] if self.v_first else sizes[0]
            both = fused[(*before, slice(0, end))], fused[(*before, slice(end, None))]
        return (both[1], both[0]) if self.v_first else tuple(both)


class FusedAttention(nn.Module):
    """Grouped-query attention over K and V in one tensor."""

    def __init__(self, spelling: Spelling, value_dim: int) -> None:
        super().__init__()
        self.spelling, self.value_dim = spelling, value_dim
        self.q = nn.Linear(64, 4 * 16)
        self.kv = nn.Linear(64, 2 * (16 + value_dim))
        self.out = nn.Linear(4 * value_dim, 64)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result [B, S, C] and the grown tensor of K and V."""
        how, (rows, tokens, _) = self.spelling, x.shape
        q = self.q(x).view(rows, tokens, 4, 16).transpose(1, 2)
        dims = (16, self.value_dim)
        k, v = (
            part.unflatten(-1, (2, dim))
            for part, dim in zip(self.kv(x).split([2 * d for d in dims], -1), dims, strict=True)
        )
        if how.token_dim == 2:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        sizes = dims if how.dim == 3 else (2, 2)
        if how.grows_apart:
            if past is not None:
                old = how.part(past, sizes)
                k, v = (torch.cat(p, how.token_dim) for p in zip(old, (k, v), strict=True))
            present = how.join(k, v)
        else:
            present = how.view(self.kv(x)) if how.as_one else how.join(k, v)
            if past is not None:
                present = torch.cat([past, present], how.grown_dim)
            k, v = how.part(present, sizes)
        if how.token_dim == 1 and how.order is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), present


class FusedDecoder(nn.Module):
    """A decoder that takes and returns one tensor of K and V per layer."""

    def __init__(self, spelling: Spelling, value_dim: int) -> None:
        super().__init__()
        self.spelling = spelling
        self.tokens = nn.Embedding(VOCAB_SIZE, 64)
        self.places = nn.Embedding(MAX_POSITIONS, 64)
        self.layers = nn.ModuleList(FusedAttention(spelling, value_dim) for _ in range(2))
        self.head = nn.Linear(64, VOCAB_SIZE)

    def forward(
        self, ids: torch.Tensor, past: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return logits [B, S, vocabulary] and the grown cache."""
        start = past[0].shape[self.spelling.grown_dim] if past is not None else 0
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        presents = []
        for i, layer in enumerate(self.layers):
            y, present = layer(x, None if past is None else past[i])
            x = x + y
            presents.append(present)
        return self.head(x), tuple(presents)


def fused_decoder(spelling: Spelling, *, value_dim: int = 16) -> FusedDecoder:
    """Return a decoder with random weights."""
    torch.manual_seed(0)
    model = FusedDecoder(spelling, value_dim).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=WEIGHT_STD)
    return model


@torch.no_grad()
def go_on(
    model: Any, ids: torch.Tensor, past: Sequence[torch.Tensor] | None, new_tokens: int
) -> tuple[list[list[int]], tuple[torch.Tensor, ...]]:
    """Decode greedily; return the new tokens of each row, and the cache."""
    found, step = [], ids.contiguous()
    for _ in range(new_tokens):
        logits, past = model(step, past)
        step = logits[:, -1:].argmax(-1)
        found.append(step)
    assert past is not None
    return torch.cat(found, 1).tolist(), tuple(past)
