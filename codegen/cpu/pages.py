"""Where things lie in a store, in C++: pages, records, and the words inside a record.

The torch twin of these texts is `codegen/formats`; the tests hold the two together bit by bit.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import packed_text
from kvcompile.codegen.cpu.isa import ISAS, Isa
from kvcompile.codegen.cpu.rope import rope_line
from kvcompile.codegen.cpu.scalars import CTYPE, scalar_text
from kvcompile.codegen.cpu.text import comment, join_sections, render
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import TILE, Role, get_format, padded_channels
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout, Window
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec

INCLUDES = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
"""

STORE = """
// ---- the store: int64 state[8] ---------------------------------------------------------------
struct Store {
  const int64_t* slab_table;   // [slabs] addresses
  const int32_t* block_table;  // [B][row_stride] page ids
  int64_t row_stride;
  const int32_t* starts;       // [B] tokens of left padding, which own no page
  int64_t slab_shift;          // log2(pages per slab)
  int64_t page_bytes;
  int64_t batch;

  explicit Store(const int64_t* state)
      : slab_table((const int64_t*)state[0]), block_table((const int32_t*)state[1]),
        row_stride(state[2]), starts((const int32_t*)state[3]), slab_shift(state[4]),
        page_bytes(state[5]), batch(state[6]) {}

  // the record of KV head `head` in the `page`-th page of row `b`
  uint8_t* record(int64_t b, int64_t page, int64_t head) const {
    const int64_t id = block_table[b * row_stride + page];
    const int64_t in_slab = id & ((int64_t(1) << slab_shift) - 1);
    return (uint8_t*)slab_table[id >> slab_shift] + in_slab * page_bytes + head * $record_bytes;
  }
};
"""

QUANTIZED_STORE = """
// ---- the store: int64 state[16] --------------------------------------------------------------
struct Pages {
  const int64_t* slab_table;   // [slabs] addresses
  const int32_t* block_table;  // [B][row_stride] page ids
  int64_t row_stride;
  int64_t slab_shift;          // log2(pages per slab)
  int64_t page_bytes;

  Pages(int64_t slabs, int64_t blocks, int64_t stride, int64_t shift, int64_t bytes)
      : slab_table((const int64_t*)slabs), block_table((const int32_t*)blocks),
        row_stride(stride), slab_shift(shift), page_bytes(bytes) {}

  // the `page`-th page of row `b`
  uint8_t* at(int64_t b, int64_t page) const {
    const int64_t id = block_table[b * row_stride + page];
    const int64_t in_slab = id & ((int64_t(1) << slab_shift) - 1);
    return (uint8_t*)slab_table[id >> slab_shift] + in_slab * page_bytes;
  }
};
// The first $sinks tokens of a row, the sinks, lie in exact pages; the next ones, $page_size times
// quantized[b], in quantized pages; the last ones, the ring, in exact pages again.
struct Store {
  Pages pages;                 // quantized, of $page_size tokens
  Pages exact;                 // of $tile tokens: first those of the sinks, then those of the ring
  const int32_t* starts;       // [B] tokens of left padding, which own no page
  const int32_t* quantized;    // [B] quantized pages
  const int32_t* ring_from;    // [B] the ring has slots from this quantized page on
  int64_t batch;
$rotary
  explicit Store(const int64_t* state)
      : pages(state[0], state[1], state[2], state[4], state[5]),
        exact(state[8], state[9], state[10], state[11], state[12]),
        starts((const int32_t*)state[3]), quantized((const int32_t*)state[13]),
        ring_from((const int32_t*)state[14]), batch(state[6])$rotary_init {}

  // the record of KV head `head` in the `page`-th quantized page of row `b`
  uint8_t* record(int64_t b, int64_t page, int64_t head) const {
    return pages.at(b, page) + head * $record_bytes;
  }
  // the same in the `page`-th exact page
  uint8_t* exact_record(int64_t b, int64_t page, int64_t head) const {
    return exact.at(b, page) + head * $exact_record_bytes;
  }
  // the first token of row `b` behind its quantized pages
  int64_t ring_token(int64_t b) const { return $sinks + int64_t(quantized[b]) * $page_size; }
  // the slot of token `i` of row `b` in its exact pages, counted from the first of them
  int64_t exact_slot(int64_t b, int64_t i) const {
    return i < $sinks ? i : $ring_slot + i - int64_t(ring_from[b]) * $page_size;
  }
};
"""

ROTARY_FIELD = """  const float* rotary;         // the angles that K turns by
"""

INDEX_K = """
// ${where}K part, $ctype [$tiles tiles][$groups][16 tokens]$pair
static inline int ${prefix}k_index(int slot, int channel) {
  return slot / 16 * $tile_words + channel / $w * $group_words + slot % 16 * $w + channel % $w;
}
"""

INDEX_V = """
// ${where}V part, $ctype [$rows][$channels channels]$pair
static inline int ${prefix}v_index(int slot, int channel) {
  return slot / $w * $row_words + channel * $w + slot % $w;
}
"""


def record_layout(spec: KernelSpec) -> RecordLayout:
    """Return the layout of the records that `spec` reads or writes; grouped ones have a window."""
    names, dims = (spec.k_format, spec.v_format), (spec.head_dim_qk, spec.head_dim_vo)
    if not spec.is_grouped:
        return RecordLayout(*names, *dims, spec.page_size)
    assert spec.q_group_size is not None
    assert spec.num_sink_tokens is not None
    # How much is quantized is read from the state, so the residual length has no say here.
    window = Window(spec.dtype, spec.num_sink_tokens, 0)
    sizes = (*dims, spec.page_size, spec.q_group_size)
    return RecordLayout(*names, *sizes, window, spec.rotary)


def part_format(spec: KernelSpec, role: Role) -> str:
    """Return the name of the format of one part."""
    return spec.k_format if role == "k" else spec.v_format


def is_exact(name: str) -> bool:
    """Return whether a format stores plain words."""
    return not get_format(name).is_grouped


def supports_pages(spec: KernelSpec) -> Supported | Unsupported:
    """Say whether the records of `spec` can be printed."""
    try:
        get_format(spec.k_format)
        get_format(spec.v_format)
    except UnsupportedKernelError as error:
        return Unsupported(str(error), "Choose one of these formats.")
    if spec.page_size not in PAGE_SIZES:
        return Unsupported(f"page_size {spec.page_size}", f"Choose one of {PAGE_SIZES}.")
    for name in ("head_dim_qk", "head_dim_vo"):
        if not 1 <= getattr(spec, name) <= 1024:
            return Unsupported(f"{name} {getattr(spec, name)}", "1 to 1024 channels are printed.")
    try:
        record_layout(spec)
    except ValueError as error:
        return Unsupported(str(error), "Choose sizes that go with the formats.")
    return Supported()


def interleave(format_name: str) -> int:
    """Return how many neighbours a format stores together: 2 for bf16, else 1."""
    return 2 if format_name == "bf16" else 1


def store_text(spec: KernelSpec) -> str:
    """Print the store and the addresses of its records."""
    layout = record_layout(spec)
    if layout.window is None:
        return render(STORE, record_bytes=layout.record_bytes)
    sinks = layout.window.num_sink_tokens
    return render(
        QUANTIZED_STORE,
        sinks=sinks,
        page_size=spec.page_size,
        tile=TILE,
        record_bytes=layout.record_bytes,
        exact_record_bytes=layout.exact.record_bytes,
        ring_slot=layout.window.sink_pages * TILE - sinks,
        rotary="" if spec.rotary is None else ROTARY_FIELD,
        rotary_init="" if spec.rotary is None else ", rotary((const float*)state[15])",
    )


def index_text(spec: KernelSpec, role: Role, prefix: str = "") -> str:
    """Print where a word of one part lies.

    Args:
        spec: The kernel.
        role: K or V.
        prefix: "exact_" for the exact pages beside quantized ones.
    """
    name = spec.dtype if prefix else part_format(spec, role)
    page_size = TILE if prefix else spec.page_size
    w = interleave(name)
    channels = padded_channels(spec.head_dim_qk if role == "k" else spec.head_dim_vo)
    if role == "k":
        return render(
            INDEX_K,
            prefix=prefix,
            where="exact page: " if prefix else "",
            ctype=CTYPE[name],
            tiles=page_size // 16,
            groups=f"{channels // w} pairs of channels" if w == 2 else f"{channels} channels",
            pair="[2]" if w == 2 else "",
            tile_words=channels * 16,
            group_words=16 * w,
            w=w,
        )
    return render(
        INDEX_V,
        prefix=prefix,
        where="exact page: " if prefix else "",
        ctype=CTYPE[name],
        rows=f"{page_size // w} pairs of tokens" if w == 2 else f"{page_size} tokens",
        channels=channels,
        pair="[2]" if w == 2 else "",
        row_words=channels * w,
        w=w,
    )


LOADS = {"fp32": "load", "fp16": "load_fp16"}
"""The vocabulary's name for one vector of words."""

LOAD_K_PAIRS = """
// load_page: channels c and c + 1 (c even) of $lanes tokens; k points at the first token's word
static inline void load_k(const uint16_t* k, int c, vec& first, vec& second) {
  load_pairs_bf16(k + c * 16, first, second);
}
"""

LOAD_K_WORDS = """
// load_page: channels c and c + 1 of $lanes tokens; k points at the first token's word
static inline void load_k(const $ctype* k, int c, vec& first, vec& second) {
  first = $load(k + c * 16);
  second = $load(k + c * 16 + 16);
}
"""

LOAD_V_PAIRS = """
// load_page: $count channels from c on, of tokens t and t + 1 (t even)
static inline void ${half}load_v(const uint16_t* v, int t, int c, vec& first, vec& second) {
  ${half}load_pairs_bf16(v + t * $channels + c * 2, first, second);
}
// the same when t + 1 is not stored: its words may be anything
static inline vec ${half}load_last_v(const uint16_t* v, int t, int c) {
  vec first, unused;
  ${half}load_pairs_bf16(v + t * $channels + c * 2, first, unused);
  return first;
}
"""

LOAD_V_WORDS = """
// load_page: $count channels from c on, of tokens t and t + 1
static inline void ${half}load_v(const $ctype* v, int t, int c, vec& first, vec& second) {
  first = $half$load(v + t * $channels + c);
  second = $half$load(v + (t + 1) * $channels + c);
}
// the same when t + 1 is not stored
static inline vec ${half}load_last_v(const $ctype* v, int t, int c) {
  return $half$load(v + t * $channels + c);
}
"""


def load_page_text(layout: RecordLayout, isa: Isa) -> str:
    """Print the fragment load_page: words of the exact parts of a record as fp32 vectors."""
    texts = []
    if not layout.format("k").is_grouped:
        texts.append(_load_k_text(layout, isa))
    if not layout.format("v").is_grouped:
        texts.append(_load_v_text(layout, isa))
    return "\n\n".join(texts)


def _load_k_text(layout: RecordLayout, isa: Isa) -> str:
    k = layout.k_format
    if k == "bf16":
        return render(LOAD_K_PAIRS, lanes=isa.lanes)
    return render(LOAD_K_WORDS, lanes=isa.lanes, ctype=CTYPE[k], load=LOADS[k])


def _load_v_text(layout: RecordLayout, isa: Isa) -> str:
    v, channels = layout.v_format, padded_channels(layout.head_dim_vo)
    texts = []
    counts = {"": isa.lanes} if channels >= isa.lanes else {}
    if channels % isa.lanes:
        counts["half_"] = isa.lanes // 2
    for half, count in counts.items():
        if v == "bf16":
            texts.append(render(LOAD_V_PAIRS, half=half, count=count, channels=channels))
        else:
            texts.append(
                render(
                    LOAD_V_WORDS,
                    half=half,
                    count=count,
                    channels=channels,
                    ctype=CTYPE[v],
                    load=LOADS[v],
                )
            )
    return "\n\n".join(texts)


def bytes_per_token(spec: KernelSpec) -> str:
    """Say how many bytes a cached token costs per KV head."""
    layout = record_layout(spec)
    k, v = layout.k_bytes / spec.page_size, layout.v_bytes / spec.page_size
    return f"{k:g} (K) + {v:g} (V) = {k + v:g} bytes per cached token and KV head"


def copy_kernel(spec: KernelSpec, title: str, tensors: str, *parts: str) -> KernelSource:
    """Assemble a kernel that moves words between dense tensors and records.

    Args:
        spec: What to print.
        title: One line that says what the kernel does.
        tensors: Names of the dense tensors.
        *parts: The functions that are special to it.
    """
    glossary = comment(
        [
            spec.symbol,
            title,
            "",
            "B rows   K KV heads   S, T tokens   "
            f"Dk {spec.head_dim_qk}   Dv {spec.head_dim_vo}   P {spec.page_size}",
            f"{tensors}  {spec.dtype}; strides in elements, the last one is 1",
            f"record  K {spec.k_format}, V {spec.v_format}: {bytes_per_token(spec)}",
            *([f"exact pages of {TILE} tokens: K, V {spec.dtype}"] if spec.is_grouped else []),
            *rope_line(spec),
        ]
    )
    parts_of: dict[Role, str] = {"k": spec.k_format, "v": spec.v_format}
    indexed = {role: name for role, name in parts_of.items() if is_exact(name)}
    words = {spec.dtype, *indexed.values()}
    if spec.is_grouped:
        words.add("bf16")  # the scales
    f16c = ISAS[spec.isa].f16c
    converts = spec.is_grouped or len(words) > 1 or spec.rope is not None
    text = join_sections(
        glossary,
        INCLUDES,
        "#include <immintrin.h>" if converts and f16c and "fp16" in words else "",
        scalar_text(words, f16c=f16c) if converts else "",
        store_text(spec),
        *(index_text(spec, role) for role in indexed),
        *((index_text(spec, role, "exact_") for role in parts_of) if spec.is_grouped else ()),
        *parts,
        packed_text(spec),
    )
    return KernelSource(spec, text)
