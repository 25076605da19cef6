"""Hand-written decoders that keep K and V in buffers of their own, in several spellings.

B batch, S new tokens, T tokens of a buffer, H heads, D head dimension, C = H * D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvcompile
from tests.support.tiny_models import VOCAB_SIZE, WEIGHT_STD

Spelling = Literal["index_put", "index_copy", "scatter", "slice", "prefix"]
Layout = Literal["BHTD", "BTHD"]


class BufferedAttention(nn.Module):
    """Writes new tokens into its buffers, and attends to the whole of them under a mask.

    Args:
        spelling: How tokens are written; `prefix` writes a slice, and attends to what is filled
            and no more, as a decoder does that keeps no mask for it.
        layout: How the buffers lie.
        size: Batch, KV heads and tokens of the buffers.
        q_heads: Query heads.
        dim: Channels of a head.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(
        self, spelling: Spelling, layout: Layout, size: tuple[int, int, int], q_heads: int, dim: int
    ) -> None:
        super().__init__()
        batch, heads, tokens = size
        self.spelling, self.layout, self.heads = spelling, layout, (q_heads, heads, heads)
        self.dim = dim
        self.time = 2 if layout == "BHTD" else 1
        shape = (batch, heads, tokens, dim) if self.time == 2 else (batch, tokens, heads, dim)
        self.qkv = nn.Linear(q_heads * dim, (q_heads + 2 * heads) * dim, bias=False)
        self.out = nn.Linear(q_heads * dim, q_heads * dim, bias=False)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, cache: Tensor, new: Tensor, pos: Tensor, start: int) -> Tensor:
        """Write tokens; return what is to be attended to."""
        end = start + new.shape[self.time]
        if self.spelling == "index_copy":
            return cache.index_copy_(self.time, pos, new)
        if self.spelling == "scatter":
            index = pos[None, None, :, None] if self.time == 2 else pos[None, :, None, None]
            return cache.scatter_(self.time, index.expand_as(new), new)
        if self.spelling == "index_put":
            if self.time == 2:
                cache[:, :, pos] = new
            else:
                cache[:, pos] = new
            return cache
        batch = new.shape[0]
        if self.time == 2:
            cache[:batch, :, start:end] = new
        else:
            cache[:batch, start:end] = new
        if self.spelling == "slice":
            return cache
        return cache[:batch, :, :end] if self.time == 2 else cache[:batch, :end]

    def forward(self, x: Tensor, pos: Tensor, start: int, mask: Tensor) -> Tensor:
        """Return the output [B, S, C]."""
        batch, new_len, _ = x.shape
        parts = self.qkv(x).split([h * self.dim for h in self.heads], dim=-1)
        q, k, v = (
            p.view(batch, new_len, h, self.dim) for p, h in zip(parts, self.heads, strict=True)
        )
        q = q.transpose(1, 2)
        if self.time == 2:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k = self.update(self.k_cache, k, pos, start)
        v = self.update(self.v_cache, v, pos, start)
        if self.time == 1:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.seen(mask, start, new_len), enable_gqa=True
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, new_len, -1))
        return out

    def seen(self, mask: Tensor, start: int, new_len: int) -> Tensor | None:
        """Return the mask for what is attended to; one query that sees all needs none."""
        if self.spelling != "prefix":
            return mask
        return mask[..., : start + new_len] if new_len > 1 else None


class BufferedDecoder(nn.Module):
    """A decoder whose layers keep their caches; called with the new tokens and their positions."""

    causal_mask: Tensor

    def __init__(
        self,
        spelling: Spelling = "index_put",
        layout: Layout = "BHTD",
        *,
        batch: int = 1,
        tokens: int = 64,
        layers: int = 2,
        q_heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        positions: int | None = None,
    ) -> None:
        super().__init__()
        width, size = q_heads * dim, (batch, kv_heads, tokens)
        self.tokens = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Embedding(positions or tokens, width)
        self.layers = nn.ModuleList(
            BufferedAttention(spelling, layout, size, q_heads, dim) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        mask = torch.ones(positions or tokens, tokens, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, ids: Tensor, pos: Tensor, start: int) -> Tensor:
        """Return logits [B, S, vocabulary] of tokens at positions start, start + 1, ..."""
        mask = self.causal_mask[None, None, pos]
        x = self.tokens(ids) + self.positions(pos)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]), pos, start, mask)
        logits: Tensor = self.head(F.layer_norm(x, x.shape[-1:]))
        return logits

    def attentions(self) -> list[BufferedAttention]:
        """Return the layers."""
        return [layer for layer in self.layers if isinstance(layer, BufferedAttention)]

    def caches(self) -> list[Tensor]:
        """Return K and V of every layer."""
        return [cache for layer in self.attentions() for cache in (layer.k_cache, layer.v_cache)]

    def reset(self) -> None:
        """Forget every token."""
        for cache in self.caches():
            cache.zero_()

    def exact_bytes(self, stored: int) -> int:
        """Return the bytes of `stored` tokens of every row, in all layers."""
        tokens = self.causal_mask.shape[1]
        return sum(cache.numel() * cache.itemsize for cache in self.caches()) * stored // tokens


def buffered(
    spelling: Spelling = "index_put", layout: Layout = "BHTD", *, seed: int = 0, **sizes: int
) -> BufferedDecoder:
    """Return a decoder with random weights, the same ones for every spelling and layout."""
    torch.manual_seed(seed)
    model = BufferedDecoder(spelling, layout, **sizes).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WEIGHT_STD)
    return model.requires_grad_(False)


def assert_in_pages(model: BufferedDecoder, stored: int) -> None:
    """Assert that all caches lie in pages, filled with so many tokens, and nothing was dense."""
    report = kvcompile.memory_report(model)
    assert report.stored == model.exact_bytes(stored)
    assert (report.dense, report.materializations) == (0, {})


def decode(model: nn.Module, ids: Tensor, new_tokens: int, *, chunk: int | None = None) -> Tensor:
    """Decode greedily from position 0 on; return the new tokens [B, new_tokens].

    Args:
        model: A `BufferedDecoder`, or a compiled one.
        ids: Prompt, int64 [B, S].
        new_tokens: How many tokens to decode.
        chunk: Tokens of the prompt that are fed at once; by default all.
    """
    done, tokens = 0, []
    with torch.no_grad():
        for part in ids.split(chunk or ids.shape[1], dim=1):
            end = done + part.shape[1]
            logits = model(part, torch.arange(done, end), done)
            done = end
        for _ in range(new_tokens - 1):
            tokens.append(logits[:, -1:].argmax(-1))
            logits = model(tokens[-1], torch.tensor([done]), done)
            done += 1
    return torch.cat([*tokens, logits[:, -1:].argmax(-1)], dim=1)
