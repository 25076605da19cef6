"""What attention over pages is compared with: the same step as PyTorch's users write it.

Letters: B batch, H query heads, K KV heads, T tokens, D channels, G tokens or channels that share
a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

GROUP = 64
"""Tokens of K, and channels of V, that share a scale: what kvcompile does by default."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes q [B, H, 1, D], k and v [B, K, T, D]; returns [B, H, 1, D]."""


class Packed(NamedTuple):
    """Quantized K or V, as a program in plain PyTorch would keep it.

    Attributes:
        codes: uint8; K is [B, K, T / G, G, D], V [B, K, T, D / G, G]. Of 4 bits, the last dimension
            is half as long: the upper halves of the bytes are its second half.
        scale: Of the model's dtype, broadcasts to the codes.
        minimum: The same.
        bits: 4 or 8.
        per_channel: Whether it is K, with a scale for each channel of G tokens; V has one for
            each token of G channels (KIVI, https://arxiv.org/abs/2402.02750).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    per_channel: bool

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend over contiguous K and V as transformers does."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def cat_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Concatenate the last token to the others, then attend: a step of a DynamicCache."""
    whole_k = torch.cat([k[:, :, :-1], k[:, :, -1:]], dim=2)
    whole_v = torch.cat([v[:, :, :-1], v[:, :, -1:]], dim=2)
    return sdpa(q, whole_k, whole_v)


def new_flex() -> Attention:
    """Return flex_attention, which is compiled at its first call."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, enable_gqa=True)


def dequantized_sdpa(q: torch.Tensor, k: Packed, v: Packed) -> torch.Tensor:
    """Decode K and V, then attend."""
    return sdpa(q, dequantize(k), dequantize(v))


def quantize(x: torch.Tensor, bits: int, *, per_channel: bool) -> Packed:
    """Quantize K or V.

    Args:
        x: [B, K, T, D]. G divides T of a K; a V whose D it does not divide has one group.
        bits: 4 or 8.
        per_channel: Whether it is K.
    """
    # Head by head: the numbers in between are fp32, and a long K is as large as the memory allows.
    heads = [_quantize_heads(head, bits, per_channel) for head in x.split(1, dim=1)]
    codes, scale, minimum = (torch.cat(parts, dim=1) for parts in zip(*heads, strict=True))
    return Packed(codes, scale, minimum, bits, per_channel)


def _quantize_heads(
    x: torch.Tensor, bits: int, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if per_channel:
        grouped, dim = x.unflatten(2, (-1, GROUP)), 3
    else:
        size = GROUP if x.shape[3] % GROUP == 0 else x.shape[3]
        grouped, dim = x.unflatten(3, (-1, size)), 4
    minimum, highest = grouped.aminmax(dim=dim, keepdim=True)
    most = (1 << bits) - 1
    scale = ((highest.float() - minimum.float()) / most).to(x.dtype)
    steps = (grouped.float() - minimum.float()) / torch.where(scale == 0, 1, scale).float()
    codes = steps.round_().clamp_(0, most).to(torch.uint8)
    if bits == 4:
        first, second = codes.chunk(2, dim=-1)
        codes = first | second << 4
    return codes, scale, minimum


def dequantize(packed: Packed) -> torch.Tensor:
    """Return [B, K, T, D] of the dtype of the scales."""
    codes = packed.codes
    if packed.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    decoded = codes.to(packed.scale.dtype) * packed.scale + packed.minimum
    return decoded.flatten(2, 3) if packed.per_channel else decoded.flatten(3, 4)
