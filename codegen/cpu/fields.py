"""Packing codes into the fields of bytes and taking them out again, in C++.

The torch twins are `pack_fields` and `unpack_fields` of `codegen/formats/grouped.py`.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.grouped import GroupedPart, Plane
from kvcompile.codegen.cpu.text import render

PACK_K = """
// byte b of a token: the fields f are $bits bits of its channels b + f * $width;
// 4 bytes of 16 tokens lie side by side
static inline void pack_k_$bits(const uint8_t* codes /* [P][$channels] */, uint8_t* plane) {
  for (int t = 0; t < $page_size; ++t) {
    alignas(64) uint8_t bytes[$width] = {};
    for (int f = 0; f < $fields; ++f)
      for (int b = 0; b < $width; ++b)
        bytes[b] |= uint8_t(($taken) << f * $bits);
    uint8_t* out = plane + t / 16 * $tile_bytes + t % 16 * 4;
    for (int b = 0; b < $width; b += 4) memcpy(out + b * 16, bytes + b, 4);
  }
}
"""

PACK_V = """
// byte j of word i of a channel: the fields f are $bits bits of its tokens 4i + j + f * $tokens
static inline void pack_v_$bits(const uint8_t* codes /* [P][$channels] */, uint8_t* plane) {
  for (int i = 0; i < $quads; ++i) {
    alignas(64) uint32_t words[$channels] = {};
    for (int f = 0; f < $fields; ++f)
      for (int j = 0; j < 4; ++j) {
        const uint8_t* row = codes + (4 * i + j + f * $tokens) * $channels;
        for (int c = 0; c < $channels; ++c)
          words[c] |= uint32_t($taken) << (8 * j + f * $bits);
      }
    memcpy(plane + i * sizeof words, words, sizeof words);
  }
}
"""

UNPACK_K = """
// $bits bits of the codes of a token, see pack_k
static inline void unpack_k_$bits(const uint8_t* plane, int slot, uint8_t* codes) {
  alignas(64) uint8_t bytes[$width];
  const uint8_t* in = plane + slot / 16 * $tile_bytes + slot % 16 * 4;
  for (int b = 0; b < $width; b += 4) memcpy(bytes + b, in + b * 16, 4);
  for (int f = 0; f < $fields; ++f)
    for (int b = 0; b < $width; ++b)
      codes[f * $width + b] $put;
}
"""

UNPACK_V = """
// $bits bits of the codes of a token, see pack_v
static inline void unpack_v_$bits(const uint8_t* plane, int slot, uint8_t* codes) {
  alignas(64) uint32_t words[$channels];
  memcpy(words, plane + slot % $tokens / 4 * sizeof words, sizeof words);
  const int shift = slot % 4 * 8 + slot / $tokens * $bits;
  for (int c = 0; c < $channels; ++c) codes[c] $put;
}
"""


def _literals(part: GroupedPart, plane: Plane) -> dict[str, int]:
    width = part.channels // plane.fields
    return {
        "bits": plane.bits,
        "fields": plane.fields,
        "channels": part.channels,
        "page_size": part.shape.page_size,
        "width": width,
        "tile_bytes": 16 * width,
        "tokens": part.shape.page_size // plane.fields,
        "quads": part.shape.page_size // plane.fields // 4,
    }


def pack_text(part: GroupedPart, plane: Plane) -> str:
    """Print the function that packs one plane of the codes of a page."""
    k = part.shape.role == "k"
    taken = "codes[t * $channels + f * $width + b]" if k else "row[c]"
    if plane.bits < part.format.bits:
        shifted = f"{taken} >> {plane.low}" if plane.low else taken
        taken = f"{shifted} & {(1 << plane.bits) - 1}"
    literals = _literals(part, plane)
    return render(PACK_K if k else PACK_V, taken=render(taken, **literals), **literals)


def unpack_text(part: GroupedPart, plane: Plane) -> str:
    """Print the function that takes one plane of the codes of a token out of its page."""
    k = part.shape.role == "k"
    mask = (1 << plane.bits) - 1
    field = f"bytes[b] >> f * {plane.bits} & {mask}" if k else f"words[c] >> shift & {mask}"
    put = f"|= uint8_t(({field}) << {plane.low})" if plane.low else f"= uint8_t({field})"
    return render(UNPACK_K if k else UNPACK_V, put=put, **_literals(part, plane))
