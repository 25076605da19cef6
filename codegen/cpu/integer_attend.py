"""The integer mode of attend: quantized K and V multiplied as bytes, with AVX-512 VNNI.

Scores. A code of K stands for scale * code + minimum, both per channel and page. With the centre of
the codes, (2^bits - 1) / 2, and what it stands for, middle = minimum + centre * scale,

    q . k = sum of q * scale * (code - centre) + sum of q * middle

over the channels. The second sum is fp32. In the first, q' = q * scale is rounded to int8 with one
delta per row and page, delta = max |q'| / 127; its error meets the centred codes. Because

    sum of q8 * (code - centre) = sum of q8 * code - centre * sum of q8,

unsigned codes are multiplied as they are stored, and the rest is added once per row and page.

Values. A code of V stands for scale * code + minimum, both per token and group of channels. The
weights p' = p * scale are rounded to 16 bits with one step per row, chunk and group,
step = max p' / 65535; codes are multiplied by their low and their high bytes, and p * minimum is
summed in fp32. The bytes of 8-bit V are code - 128, and their minimum is minimum + 128 * scale.

Sums fit 32 bits: those of q8 * code are below 2^24 up to 518 channels, and those of a byte of the
weights below 2^31 up to 33025 tokens, because high and low bytes are put together in fp32.

What the kernel around these texts has to provide:

* q: fp32, rows of `AttendShape.q_stride`, times scale * log2(e), zeros in pad channels;
* p: fp32 >= 0, rows of `AttendShape.chunk`; zeros from the last token to the end of its 16 tokens.
  What lies behind is not read. A row without a visible token may hold anything;
* chunk: `pages` >= 1 records of which every byte was encoded, `tokens` > 0 in them, the last one
  in the last page; as many readable entries in `ahead`, whose addresses are only prefetched.

panel_scores writes the scores of all tokens, and garbage up to the end of the last page at most;
panel_accumulate writes every stored channel of o.

The mode is for processors with AVX512_VNNI, compiled with -mavx512vnni.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.integer_accumulate import accumulate_text
from kvcompile.codegen.cpu.integer_scores import scores_text

__all__ = ["accumulate_text", "scores_text"]
