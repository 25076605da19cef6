"""Integer codes in AVX-512 registers: 64 bytes of a record as operands of the byte dot product.

VPDPBUSD adds to each 32-bit lane four products of unsigned and signed bytes. The four bytes of a
lane are a *quad*: 4 channels of a token of K, 4 tokens of a channel of V. The layout stores quads
side by side, so that a register needs no shuffle: field f of packed register i is shifted down and
masked, and that is a register of codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.codegen.cpu.grouped import GroupedPart, Plane, grouped_part
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats import TILE, Role

QUAD = 4
VECTOR = 64


@dataclass(frozen=True)
class IntegerPart:
    """Where the codes and scales of K or V lie in a record.

    Attributes:
        part: The part; its format is an integer format.
        offset: Its first byte in the record.
    """

    part: GroupedPart
    offset: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.part.format.bits

    @property
    def scales(self) -> int:
        """First byte of the scales in the record."""
        return self.offset + self.part.code_bytes

    @property
    def fields(self) -> int:
        """F, the registers of codes in a register of the narrowest plane."""
        return max(plane.fields for plane in self.part.planes())

    @property
    def field_elements(self) -> int:
        """Elements between the first of one field and of the next: channels of K, tokens of V."""
        is_k = self.part.shape.role == "k"
        return (self.part.channels if is_k else self.part.shape.page_size) // self.fields

    @property
    def quads(self) -> int:
        """Quads of a field."""
        return self.field_elements // QUAD

    @property
    def packed_registers(self) -> int:
        """Registers that hold the codes of all fields."""
        return sum(plane.bits * self.fields // 8 for plane in self.part.planes())

    def address(self, plane: Plane, row: str) -> str:
        """Print the address of a packed register of `record`.

        Args:
            plane: Which packed part of the codes.
            row: C++ for the number of its quad in a field, of channels of K or tokens of V.
        """
        begin, channels = self.offset + plane.begin, self.part.channels
        record = f"record + {begin}" if begin else "record"
        if self.part.shape.role == "k":
            return f"{record} + tile * {TILE * channels // plane.fields} + {row} * {VECTOR}"
        return f"{record} + ({row} * {channels} + c) * {QUAD}"


def integer_part(shape: AttendShape, role: Role) -> IntegerPart:
    """Return one part of the records of `shape`, whose format is an integer format."""
    part = grouped_part(shape.spec, role)
    assert part is not None
    assert not part.is_float
    return IntegerPart(part, shape.layout.k_offset if role == "k" else shape.layout.v_offset)


def bytes_ahead(shape: AttendShape) -> int:
    """Return the bytes of a record that are fetched a chunk ahead, by accumulate.

    Scores take about 2/5 of the time of both loops, and fetch as much of the page they work on: its
    end, which is needed after them. Lines come at one pace then; processors drop what is asked for
    faster than the memory delivers.
    """
    layout = shape.layout
    return max(layout.k_bytes, layout.record_bytes * 3 // 5 // VECTOR * VECTOR)


QUADS = """
// ---- integers -------------------------------------------------------------------------------
// quads: a lane holds 4 bytes, of 4 channels of a token of K or of 4 tokens of a channel of V
typedef __m512i quads;
static inline quads splat_quad(const uint8_t* p) {
  int32_t quad;
  memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
// sum[lane] + the dot product of unsigned bytes u and signed bytes s. The intrinsic would do, but
// GCC keeps two registers for each sum of a loop then, and spills. Taken and returned by value: a
// sum whose address is taken by assembly stays in memory.
static inline quads dot(quads sum, quads u, quads s) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
  return sum;
}
static inline vec to_float(quads x) { return _mm512_cvtepi32_ps(x); }
static inline quads round_nearest(vec x) { return _mm512_cvtps_epi32(x); }
// packing leaves the quads of 4 lanes of 128 bits transposed: this puts them in order
static inline quads ordered(quads x) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}
// 16 neighbouring bf16 words
static inline vec load_scales(const uint8_t* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
// levels / most, the factor that takes 0..most to 0..levels; 0 where that could overflow
static inline __m128 inverse_step(__m128 most, float levels) {
  const __m128 usable = _mm_cmpgt_ps(most, _mm_set1_ps(0x1p-110f));
  return _mm_and_ps(usable, _mm_div_ps(_mm_set1_ps(levels), most));
}
// rows r to r + 3 of a block; those that it does not have repeat its last one
#define OF_4(x, r) x[r], x[std::min(r + 1, ROWS - 1)], x[std::min(r + 2, ROWS - 1)], \\
                   x[std::min(r + 3, ROWS - 1)]
"""

REDUCE = """
// the $what of each of 4 vectors
static inline __m128 $name(vec a, vec b, vec c, vec d) {
  const vec ab = $op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const vec cd = $op(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const vec low = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
  const vec all = $op(low, _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_${intrinsic}(_mm512_castps512_ps256(all),
                                    _mm512_extractf32x8_ps(all, 1));
  return _mm_${intrinsic}(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
"""

K_HEAD = """
// load_page: channels f * $field + 4 i to + 3 of the 16 tokens of a tile of K, $bits
static inline quads k_codes(const uint8_t* record, int tile, int i, int f) {
"""

V_HEAD = """
// load_page: tokens f * $field + 4 i to + 3 of 16 channels of V from c on, $bits
static inline quads v_codes(const uint8_t* record, int c, int i, int f) {
"""

WHOLE = """
  (void)f;
  return _mm512_loadu_si512($packed);
"""

FIELDS = """
  const quads packed = _mm512_loadu_si512($packed);
  return _mm512_and_si512(_mm512_srli_epi16(packed, f * $bits), _mm512_set1_epi8($mask));
"""

PLANES = """
  const quads low = _mm512_loadu_si512($low);
  const quads high = _mm512_loadu_si512($high);
  const quads up = f < 2 ? _mm512_slli_epi16(high, 2 - f) : _mm512_srli_epi16(high, f - 2);
  // bits 0 and 1 from the plane of 2-bit fields, bit 2 from that of 1-bit fields
  const quads both = _mm512_ternarylogic_epi32(
      _mm512_set1_epi8(3), _mm512_srli_epi16(low, f / 2 * 2), up, 0xca);
  return _mm512_and_si512(both, _mm512_set1_epi8(7));
"""


def integer_vocabulary() -> str:
    """Print the vector functions of the integer mode."""
    sums = render(REDUCE, what="sum", name="sums", op="add", intrinsic="add_ps")
    maxima = render(REDUCE, what="maximum", name="maxima", op="maximum", intrinsic="max_ps")
    return "\n".join([QUADS.strip("\n"), sums, maxima])


def codes_text(part: IntegerPart) -> str:
    """Print how a register of codes is taken out of a record."""
    head = render(
        K_HEAD if part.part.shape.role == "k" else V_HEAD,
        field=part.field_elements,
        bits=f"{part.bits} bits, minus 128" if part.part.flipped else f"{part.bits} bits",
    )
    planes = part.part.planes()
    if len(planes) == 2:
        # Two fields of the 1-bit plane fill one of the 2-bit plane.
        low = part.address(planes[0], f"(i + f % 2 * {part.quads})")
        body = render(PLANES, low=low, high=part.address(planes[1], "i"))
    elif part.fields == 1:
        body = render(WHOLE, packed=part.address(planes[0], "i"))
    else:
        mask = part.part.largest
        body = render(FIELDS, packed=part.address(planes[0], "i"), bits=part.bits, mask=mask)
    return f"{head}\n{body}\n}}"
