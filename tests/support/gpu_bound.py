"""How far GPU attention may be from the float64 reference on what is stored.

Letters: B rows, H query heads, S query tokens, T cached tokens, D channels. u = 2^-24 and h = 2^-11
are the unit roundoffs of fp32 and fp16. Scores are in units of log2: a weight is 2^score.

With fp16 products the kernels round the scaled query and the weights on purpose: relatively by h
each, and what is small beside the largest of its row or page absolutely, by 2^-25 of its unit. A
score of size X is off by up to X h, which sharp scores show. The bound looks at the data, is
rigorous in these roundings and of first order in u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcompile.codegen.formats import Coded, Role
from kvcompile.codegen.formats.float8 import Float8Format
from kvcompile.codegen.gpu.helpers import raw_place
from kvcompile.codegen.gpu.quantized import query_bits
from kvcompile.codegen.gpu.shape import GpuShape
from tests.support.gpu_pages import GpuPages, bias_of
from tests.support.numerics import OUTPUT_UNIT, SMALLEST, UNIT

HALF = 2.0**-11
FLOOR = 2.0**-25
"""Half of the smallest fp16 number."""

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Terms:
    """K or V as scale * codes + minimum, float64 [B, K, T, D]; exact tokens have the scale 1.

    Attributes:
        codes: Sizes of codes, or of the numbers of exact tokens.
        scale: The scale of each element.
        minimum: Sizes of minima.
        unit: The power of two by which scales of the page are divided; 0 for exact tokens.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    unit: torch.Tensor

    @property
    def size(self) -> torch.Tensor:
        """The sum of the sizes of both terms."""
        return self.scale * self.codes + self.minimum


def terms(pages: GpuPages, role: Role) -> Terms:
    """Take the records of quantized pages apart."""
    dense = pages.k if role == "k" else pages.v
    codes, scale = dense.abs(), torch.ones_like(dense)
    minimum, unit = torch.zeros_like(dense), torch.zeros_like(dense[..., :1])
    layout = pages.layout
    format_, shape = layout.format(role), layout.part(role)
    found = Terms(codes, scale, minimum, unit)
    if layout.window is None or not format_.is_grouped:
        return found
    one_code = 1
    if isinstance(format_, Float8Format):
        one_code = int(torch.tensor(1.0).to(format_.word).view(torch.uint8))
    for row, start in enumerate(pages.starts.tolist()):
        for number in range(int(pages.quantized[row])):
            first = start + layout.window.num_sink_tokens + number * layout.page_size
            at = (row, slice(None), slice(first, first + layout.page_size))
            record = pages.pages[row, number]
            stored = record[:, : layout.v_offset] if role == "k" else record[:, layout.v_offset :]
            coded = format_.split(shape, stored)
            plain = [[torch.ones_like(g[0]), *map(torch.zeros_like, g[1:])] for g in coded.scales]
            bare = [[g[0], *map(torch.zeros_like, g[1:])] for g in coded.scales]
            zeros, ones = torch.zeros_like(coded.codes), torch.full_like(coded.codes, one_code)
            for target, numbers, scales in (
                (codes, coded.codes, plain),
                (scale, ones, bare),
                (minimum, zeros, coded.scales),
            ):
                target[at] = format_.dequantize(shape, Coded(numbers, scales)).double().abs()
            exponent = stored[:, :4].contiguous().view(torch.int32).double()
            unit[at] = torch.exp2(exponent - 127)[..., None]
    return found


@dataclass(frozen=True)
class GpuBound:
    """One call of attend, and what it may be off by.

    Attributes:
        pages: What is stored.
        q: Queries [B, H, S, D].
        mask: The mask that is given, or nothing.
    """

    pages: GpuPages
    q: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def _shape(self) -> GpuShape:
        return GpuShape(self.pages.case.spec)

    def bound(self) -> torch.Tensor:
        """Return how far an output may be off, float64 [B, H, S, Dv].

        With scores off by e_t, |e_t| <= E_t, and weights rounded by r, the output is the mean of V
        under weights w_t (1 + r_t) 2^e_t, off by at most

            sum w_t ((1 + r) 2^E_t - 1) |V_t - out| / sum w_t (1 - r) 2^-E_t,

        and by at most the largest |V_t - out| of a visible token. E_t is `score_error`, and the
        roundings of what follows: score - max of the page and of all splits, the latter as a
        logarithm that has the size of the scores, and powers of two (24 u). Weights are rounded to
        the type of the product with V, absolutely below 2^-14 / 2^weight_bits, alike in the sum
        that divides and in the sum of V, where that type is that of all V; otherwise r counts for
        the sum of V alone. `value_error` and fp32 sums come on top.
        """
        case, shape = self.pages.case, self._shape
        k, v = (self._spread(terms(self.pages, role)) for role in ("k", "v"))
        values = self.pages.v.repeat_interleave(case.group, 1)
        bias = bias_of(self.pages, self.q, self.mask)
        seen = bias > -math.inf
        bias = bias.clamp(min=-1e30) * LOG2E
        scores = self._scores(bias).masked_fill(~seen, -math.inf)
        below = (scores.amax(-1, keepdim=True) - scores).nan_to_num(0, 0, 0).clamp(max=1e6)
        weights = torch.softmax(scores / LOG2E, -1).nan_to_num(0)
        sizes = scores.nan_to_num(0, 0, 0).masked_fill(scores < -1e29, 0).abs()
        finite = bias.masked_fill(~seen | (bias < -1e29), 0).abs()
        error = self.score_error(k)
        largest = torch.where(weights > 2.0**-40, sizes, 0).amax(-1, keepdim=True)
        error = error + UNIT * (sizes + 3 * finite + 2 * below + 3 * largest + 24)
        if case.softcap is not None:
            # Three roundings of y, one of 1 + e^2y, of the quotient, of 1 - it, and of the product.
            error = error + 16 * UNIT * case.softcap * LOG2E
        rounding, floor = self._weight_rounding(), 0.0
        if shape.product_type("v") == "fp16":
            floor = FLOOR * 2.0**-shape.weight_bits
        most_weight = weights.amax(-1, keepdim=True)
        out = weights @ values
        more = weights * ((1 + rounding) * 2.0**error - 1) + floor * most_weight * seen
        less = weights * (1 - (1 - rounding) * 2.0**-error) + floor * most_weight * seen
        least = 1 - less.sum(-1, keepdim=True)
        away = (values.unsqueeze(-3) - out.unsqueeze(-2)).abs()
        away = torch.where(seen.unsqueeze(-1), away, 0.0)
        moved = (more.unsqueeze(-2) @ away).squeeze(-2) / least.clamp(min=1e-300)
        moved = torch.where(least > 0, moved, math.inf)
        moved = torch.minimum(moved, away.amax(-2))

        most = (weights + more) / least.clamp(min=1e-300)
        most = torch.where(least > 0, most, 1.0).clamp(max=1.0) * seen
        size = most @ v.size
        tokens = values.shape[-2]
        # A product and a sum per token; two shrinkings per page and split, of 16 tokens at least.
        fp32 = UNIT * (tokens + 2 * (tokens // 16 + 8) + 16) * (size + out.abs() + moved)
        if not shape.has_sums:
            fp32 = fp32 + rounding.amax() * size
        total = moved + fp32 + self.value_error(v, most)
        kind = self.q.dtype
        return 1.01 * (total + OUTPUT_UNIT[kind] * (out.abs() + total)) + SMALLEST[kind]

    def score_error(self, k: Terms) -> torch.Tensor:
        """Return how far scores are off before a mask is added, float64 [B, H, S, T].

        fp32: a score is a sum of D products, of a query multiplied by scale * log2(e) behind the
        sum; an element of K is rounded twice, in the kernel and in the reference, sums of D terms
        D times, and half a dozen roundings follow: (D + 12) u of the sum of sizes. Raw fields add
        1024 to every code and take it off again.

        fp16: an element of the scaled query is qh * s, qh = q / Q below 4 and s = room * scale /
        unit, Q and unit powers of two: the product is rounded by h relatively, and by 2^-25; so
        are, below 2^-14 alone, both factors. Over the room again, which the place of a raw field
        takes part of, the floors are

            2^-25 Q (unit / room sum (1 + |qh|) codes + sum scale codes).
        """
        case, shape = self.pages.case, self._shape
        scale = LOG2E / math.sqrt(self.q.shape[-1])
        q = self.q.double().abs()
        size = q @ k.size.mT
        quantized = (k.unit > 0).mT.double()
        raw = torch.zeros(())
        if shape.is_raw:
            raw = 2 * 1024 * (q @ k.scale.mT) * quantized
        error = UNIT * (q.shape[-1] + 12) * (size + raw)
        if shape.is_fp16 and shape.k.is_grouped:
            part = shape.k
            room = 2.0 ** query_bits(part)
            if shape.is_raw:
                fields = range(part.planes.across)
                room *= 2.0 ** -max(raw_place(part.widths[0], f) for f in fields)
            exponent = torch.frexp(q.amax(-1, keepdim=True))[1].double() - 1
            over = torch.exp2(exponent.clamp(-126, 126))
            error = error + HALF * (q @ (k.scale * k.codes).mT) * quantized
            floors = k.unit.mT / room * ((1 + q / over) @ k.codes.mT)
            floors = floors + (k.scale * k.codes).sum(-1).unsqueeze(-2)
            error = error + FLOOR * over * floors * quantized
        assert case.dims[0] == q.shape[-1]
        return error * scale

    def value_error(self, v: Terms, weights: torch.Tensor) -> torch.Tensor:
        """Return what the products of weights and V add, float64 [B, H, S, Dv].

        fp32: an element of V is rounded twice, in the kernel and in the reference.

        fp16: a weight times scale / unit is rounded by h, and by 2^-25, the scale alone by 2^-25,
        minima over the unit too; the unit is the largest of the row's pages. Weights are
        2^weight_bits larger; scales of e4m3 are 2^8 larger, and its numbers smaller. Those of e5m2
        are fp16 numbers as they are.

        Args:
            v: The terms of V.
            weights: Upper bounds of the weights, float64 [B, H, S, T].
        """
        shape = self._shape
        error = 4 * UNIT * (weights @ v.size)
        if not shape.has_unit:
            return error
        quantized = v.unit > 0
        unit = v.unit.amax(-2, keepdim=True)
        error = error + HALF * (weights @ (v.scale * v.codes * quantized))
        room = 2.0**shape.v.unit_bits
        codes = v.codes * quantized
        floors = (
            2.0**-shape.weight_bits * weights.amax(-1, keepdim=True) * codes.sum(-2).unsqueeze(-2)
        )
        error = error + FLOOR * unit / room * (floors + weights @ codes)
        minima = (weights @ quantized.double()) if shape.has_minima else 0.0
        return error + FLOOR * unit * minima

    def _weight_rounding(self) -> torch.Tensor:
        """Return r of each token, float64 [B, 1, 1, T]."""
        shape = self._shape
        units = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": HALF}
        quantized = torch.zeros(len(self.pages.starts), self.pages.length, dtype=torch.bool)
        window = self.pages.layout.window
        if window is not None:
            for row, start in enumerate(self.pages.starts.tolist()):
                first = start + window.num_sink_tokens
                count = int(self.pages.quantized[row]) * self.pages.layout.page_size
                quantized[row, first : first + count] = True
        inside = units[shape.product_type("v")]
        beside = units[shape.product_type("v", exact=window is not None)]
        rounding = torch.where(quantized if window is not None else ~quantized, inside, beside)
        return rounding.double()[:, None, None]

    def _scores(self, bias: torch.Tensor) -> torch.Tensor:
        case = self.pages.case
        k = self.pages.k.repeat_interleave(case.group, 1)
        scores = self.q.double() @ k.mT / math.sqrt(self.q.shape[-1])
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        return scores * LOG2E + bias

    def _spread(self, found: Terms) -> Terms:
        """Give every query head its KV head."""
        group = self.pages.case.group
        parts = (found.codes, found.scale, found.minimum, found.unit)
        return Terms(*(x.repeat_interleave(group, 1) for x in parts))
