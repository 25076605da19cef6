"""How far the integer mode of attend may be from the float64 reference on the dequantized cache.

Letters: R rows (query tokens of query heads of one KV head), T tokens, D channels, P tokens of a
page; any leading dimensions. u = 2^-24. Scores are in units of log2: a weight is 2^score.

The mode rounds on purpose: queries to int8, weights to 16 bits. `IntegerAttention.output` with
`rounded` knows the first rounding bit by bit, so that the bound around it is narrow enough to see
a wrong kernel; without it is the reference of every mode, and the bound says what the mode costs at
most. Both bounds look at the data, are rigorous in these roundings and of first order in u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcompile.codegen.formats import Role, decode
from kvcompile.codegen.formats.grouped import pack_scales, unpack_scales
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import MEANS, add_means
from tests.support.numerics import TANH_ERROR
from tests.support.rotary import mean_sizes

UNIT = 2.0**-24
SMALLEST = 2.0**-110
"""Queries and weights, times their scales, count as zero if the largest of a group is below."""


@dataclass(frozen=True)
class Levels:
    """K or V of quantized tokens, scale * codes + minimum + mean, all float64 [..., T, D].

    Attributes:
        codes: Integers from 0 to 2^bits - 1.
        scale: The scale of each element.
        minimum: The minimum of each element.
        mean: The turning mean of K; zeros if there is none.
        mean_size: |first| + |second| of the mean at each element.
        bits: Bits of a code.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    mean: torch.Tensor
    mean_size: torch.Tensor
    bits: int

    @property
    def values(self) -> torch.Tensor:
        """What the codes stand for."""
        return self.scale * self.codes + self.minimum + self.mean


def levels(
    layout: RecordLayout,
    role: Role,
    records: torch.Tensor,
    rotary_table: torch.Tensor | None = None,
) -> Levels:
    """Return one part of records uint8[..., N, record_bytes] as the levels of N * P tokens."""
    format_, shape = layout.format(role), layout.part(role)
    assert isinstance(format_, IntegerFormat)
    stored = records[..., : layout.v_offset] if role == "k" else records[..., layout.v_offset :]
    channels, size = format_.channels(shape), format_.code_bytes(shape)
    groups = unpack_scales(shape, channels, stored[..., size:], 2)
    # With the scale 1 and the minimum 0, a code stands for itself.
    plain = [[torch.ones_like(scale), torch.zeros_like(low)] for scale, low in groups]
    only_codes = torch.cat([stored[..., :size], pack_scales(shape, channels, plain)], dim=-1)
    codes = decode(format_, shape, only_codes)

    def spread(which: int) -> torch.Tensor:
        """Return the scales (0) or minima (1) of all elements."""
        if role == "k":
            return groups[0][which].unsqueeze(-2).expand_as(codes)
        return torch.cat(
            [
                group[which].unsqueeze(-1).expand(*group[which].shape, len(members))
                for group, members in zip(groups, shape.channel_groups(), strict=True)
            ],
            dim=-1,
        )

    mean, mean_size = torch.zeros_like(codes), torch.zeros_like(codes)
    if role == "k" and layout.rotary is not None:
        assert rotary_table is not None
        packed = stored[..., layout.mean_offset :]
        mean = add_means(layout.rotary, rotary_table, packed, mean)
        mean_size = mean_sizes(layout, records)
    tensors = (codes, spread(0), spread(1), mean, mean_size)
    codes, scale, minimum, mean, mean_size = (x.double().flatten(-3, -2) for x in tensors)
    return Levels(codes, scale, minimum, mean, mean_size, format_.bits)


@dataclass(frozen=True, kw_only=True)
class IntegerAttention:
    """Attention of the rows of one KV head in the integer mode, without the rounding of the output.

    Attributes:
        q: Queries times scale * log2(e) as the kernel holds them, fp32 [..., R, D].
        k: Quantized keys [..., T, D], whole pages.
        v: Quantized values [..., T, Dv].
        bias: What is added to the scores, in units of log2, float64 [..., R, T + exact tokens];
            -inf where a token is not visible.
        page_size: P.
        chunk: Tokens per partial result.
        exact: float64 keys and values of the tokens that are not quantized. They come behind the
            others in `bias`, and leave partial results of their own.
        softcap: The bound of the scores, in units of log2.
    """

    q: torch.Tensor
    k: Levels
    v: Levels
    bias: torch.Tensor
    page_size: int
    chunk: int = 256
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    softcap: float | None = None

    def output(self, *, rounded: bool) -> torch.Tensor:
        """Return the output, float64 [..., R, Dv], with queries rounded to int8 or not."""
        return self._weights(rounded) @ self._values()

    def bound(self, *, rounded: bool) -> torch.Tensor:
        """Return how far fp32 results may be from `output(rounded=rounded)`, float64 [..., R, Dv].

        With scores off by e_t, |e_t| <= E_t, the output is the mean of V under weights w_t 2^e_t:

            |out' - out| = |sum w_t (2^e_t - 1) (V_t - out)| / sum w_t 2^e_t
                        <= sum w_t (2^E_t - 1) |V_t - out| / sum w_t 2^-E_t,

        and at most the largest |V_t - out| of a visible token. E_t is `score_error`, and the
        roundings of what follows: the bias and its sum with the score, score - max for the chunk
        and for all chunks, two powers of two (16 u relative, 24 u in units of log2). Then come the
        rounding of the weights (`weight_error`), fp32 sums of weights and of weighted values over
        a chunk and over chunks, and weights that are flushed to zero.
        """
        values, bias = self._values(), self.bias
        scores = self._scores(rounded)
        seen = scores > -math.inf
        scores, bias = (x.masked_fill(~seen, 0).abs() for x in (scores, bias))
        below = self._below(rounded).masked_fill(~seen, 0)
        error = self.score_error(rounded=rounded)
        error = error + UNIT * (scores + 3 * bias + 2 * below + 24)
        if self.softcap is not None:  # see `Problem.bound`
            error = error + (TANH_ERROR + 4 * UNIT) * (scores + bias)
        weights = self._weights(rounded)
        out = weights @ values

        # The sum of the weights, 1, may become that.
        least = 1 - (weights * (1 - 2.0**-error)).sum(-1, keepdim=True)
        away = (values.unsqueeze(-3) - out.unsqueeze(-2)).abs()
        moved = ((weights * (2.0**error - 1)).unsqueeze(-2) @ away).squeeze(-2) / least
        widest = torch.where(seen.unsqueeze(-1), away, 0.0).amax(-2)
        moved = torch.minimum(moved.nan_to_num(math.inf), widest)

        most = (weights * 2.0**error / least).nan_to_num(math.inf).clamp(max=1.0)
        stored = self.v.scale * (self.v.codes + (128 if self.v.bits == 8 else 0))
        size = stored + self.v.minimum.abs()
        if self.exact is not None:
            size = torch.cat([size, self.exact[1].abs()], -2)
        quantized = self.v.codes.shape[-2]
        chunks = -(-quantized // self.chunk) + -(-(values.shape[-2] - quantized) // self.chunk)
        sums = UNIT * (2 * self.chunk + chunks + 16)
        flushed = SMALLEST * self.chunk * (size.amax(-2, keepdim=True) + 255)
        fp32 = sums * (most @ size + out.abs() + moved) + flushed
        return 1.01 * (moved + self.weight_error(most[..., :quantized]) + fp32)

    def score_error(self, *, rounded: bool) -> torch.Tensor:
        """Return how far each score, without its bias, may be off, float64 [..., R, T].

        Rounding moves an element of q' = q * scale by at most delta / 2, delta = max |q'| / 127
        over a row and page, and by at most its own size if that is less; 127 / max is rounded
        twice and multiplied by at most 127, which adds 2^-15 delta. The element meets its centred
        code, |code - (2^bits - 1) / 2|. So D channels cost at most
        D * delta / 2 * (2^bits - 1) / 2. If max |q'| < 2^-110, q8 is zero.

        The rest is fp32: the roundings of q' and of products, and sums in 16 lanes, all of terms
        of at most |q| (2 scale * (code + centre) + |minimum|). Exact tokens: see `Problem.bound`.
        With a turning mean, |q| times its size is rounded three times, and all is added up by two
        more sums per mean; the mean itself is rounded once in the reference.
        """
        q, k = self.q.double(), self._pages()
        centre = (2**k.bits - 1) / 2
        folded = (q.unsqueeze(-3) * k.scale[..., :1, :]).abs()
        size = 2 * folded @ (k.codes + centre).mT + q.abs().unsqueeze(-3) @ k.minimum.abs().mT
        error = UNIT * (q.shape[-1] / 16 + 16) * size
        if bool(k.mean_size.any()):
            size = size + q.abs().unsqueeze(-3) @ k.mean_size.mT
            error = error + UNIT * (2 * MEANS + 4) * size
        if not rounded:
            most = folded.amax(-1, keepdim=True)
            delta = most / 127
            moved = torch.minimum(folded, delta / 2) + 2.0**-15 * delta
            moved = torch.where(most > SMALLEST, moved, folded)
            error = error + moved @ (k.codes - centre).abs().mT
        error = self._rows(error)
        if self.exact is None:
            return error
        exact = UNIT * (q.shape[-1] / 2 + 6) * (q.abs() @ self.exact[0].abs().mT)
        return torch.cat([error, exact], -1)

    def weight_error(self, weights: torch.Tensor) -> torch.Tensor:
        """Return how far sums of weights times codes may be off, float64 [..., R, Dv].

        Rounding moves p' = p * scale by at most step / 2, step = max p' / 65535 over a row, chunk
        and group of channels, and by at most its own size if that is less; 65535 / max is rounded
        twice and multiplied by at most 65535, which adds 2^-6 step. The weight meets the byte of
        its code, which is centred for 8 bits only. If max p' < 2^-110, the weights are zero.

        Args:
            weights: Upper bounds of the weights of quantized tokens, float64 [..., R, T].
        """
        bytes_ = (self.v.codes - 128).abs() if self.v.bits == 8 else self.v.codes
        error = torch.zeros((), dtype=torch.float64)
        for first in range(0, bytes_.shape[-2], self.chunk):
            span = slice(first, first + self.chunk)
            # [..., R, T, D]: the scale of a group stands at each of its channels.
            p = weights[..., span].unsqueeze(-1) * self.v.scale[..., span, :].unsqueeze(-3)
            most = p.amax(-2, keepdim=True)
            step = most / 65535
            moved = torch.minimum(p, step / 2) + 2.0**-6 * step
            moved = torch.where(most > SMALLEST, moved, p)
            error = error + (moved * bytes_[..., span, :].unsqueeze(-3)).sum(-2)
        return error

    def rounded_scores(self) -> torch.Tensor:
        """Return the scores of quantized keys with q' rounded to int8, float64 [..., R, T].

        q8 is made by the operations of the kernel, in fp32 and in their order.
        """
        k = self._pages()
        scaled = self.q.unsqueeze(-3) * k.scale[..., :1, :].float()
        most = scaled.abs().amax(-1, keepdim=True)
        inverse = torch.where(most > SMALLEST, 127 / most, 0.0)
        q8 = (scaled * inverse).round().double()
        centre = (2**k.bits - 1) / 2
        products = (most.double() / 127 * q8) @ (k.codes - centre).mT
        middle = k.minimum + centre * k.scale
        return self._rows(products + self.q.double().unsqueeze(-3) @ (middle + k.mean).mT)

    def _pages(self) -> Levels:
        """Return K as [..., N, P, D]."""
        pages = (self.k.codes.shape[-2] // self.page_size, self.page_size)
        k = self.k
        dense = (k.codes, k.scale, k.minimum, k.mean, k.mean_size)
        codes, scale, minimum, mean, mean_size = (x.unflatten(-2, pages) for x in dense)
        return Levels(codes, scale, minimum, mean, mean_size, k.bits)

    @staticmethod
    def _rows(x: torch.Tensor) -> torch.Tensor:
        """Return [..., N, R, P] as [..., R, N * P]."""
        return x.transpose(-3, -2).flatten(-2)

    def _values(self) -> torch.Tensor:
        values = self.v.values
        return values if self.exact is None else torch.cat([values, self.exact[1]], -2)

    def _scores(self, rounded: bool) -> torch.Tensor:
        q = self.q.double()
        scores = self.rounded_scores() if rounded else q @ self.k.values.mT
        if self.exact is not None:
            scores = torch.cat([scores, q @ self.exact[0].mT], -1)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores + self.bias

    def _below(self, rounded: bool) -> torch.Tensor:
        """Return how far each score is below the highest of its row; inf if it is not visible."""
        scores = self._scores(rounded)
        return scores.amax(-1, keepdim=True).nan_to_num(neginf=0) - scores

    def _weights(self, rounded: bool) -> torch.Tensor:
        weights = 2.0 ** -self._below(rounded)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
