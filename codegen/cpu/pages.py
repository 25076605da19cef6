"""Where things lie in a store, in C++: pages, records, and the words inside a record.

The torch twin of these texts is `codegen/formats`; the tests hold the two together bit by bit.
"""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import packed_text
from kvcompile.codegen.cpu.isa import ISAS, Isa
from kvcompile.codegen.cpu.scalars import CTYPE, scalar_text
from kvcompile.codegen.cpu.text import comment, join_sections, render
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import Role, get_format, padded_channels
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout
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

INDEX_K = """
// K part, $ctype [$tiles tiles][$groups][16 tokens]$pair
static inline int k_index(int slot, int channel) {
  return slot / 16 * $tile_words + channel / $w * $group_words + slot % 16 * $w + channel % $w;
}
"""

INDEX_V = """
// V part, $ctype [$rows][$channels channels]$pair
static inline int v_index(int slot, int channel) {
  return slot / $w * $row_words + channel * $w + slot % $w;
}
"""


def record_layout(spec: KernelSpec) -> RecordLayout:
    """Return the layout of the records that `spec` reads or writes."""
    return RecordLayout(
        spec.k_format, spec.v_format, spec.head_dim_qk, spec.head_dim_vo, spec.page_size
    )


def part_format(spec: KernelSpec, role: Role) -> str:
    """Return the name of the format of one part."""
    return spec.k_format if role == "k" else spec.v_format


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
    return Supported()


def interleave(format_name: str) -> int:
    """Return how many neighbours a format stores together: 2 for bf16, else 1."""
    return 2 if format_name == "bf16" else 1


def store_text(spec: KernelSpec) -> str:
    """Print the store and the addresses of its records."""
    return render(STORE, record_bytes=record_layout(spec).record_bytes)


def index_text(spec: KernelSpec, role: Role) -> str:
    """Print where a word of one part lies."""
    name = part_format(spec, role)
    w = interleave(name)
    channels = padded_channels(spec.head_dim_qk if role == "k" else spec.head_dim_vo)
    if role == "k":
        return render(
            INDEX_K,
            ctype=CTYPE[name],
            tiles=spec.page_size // 16,
            groups=f"{channels // w} pairs of channels" if w == 2 else f"{channels} channels",
            pair="[2]" if w == 2 else "",
            tile_words=channels * 16,
            group_words=16 * w,
            w=w,
        )
    return render(
        INDEX_V,
        ctype=CTYPE[name],
        rows=f"{spec.page_size // w} pairs of tokens" if w == 2 else f"{spec.page_size} tokens",
        channels=channels,
        pair="[2]" if w == 2 else "",
        row_words=channels * w,
        w=w,
    )


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


def load_page_text(spec: KernelSpec, isa: Isa) -> str:
    """Print the fragment load_page: words of a record as fp32 vectors."""
    loads = {"fp32": "load", "fp16": "load_fp16"}
    k, v = spec.k_format, spec.v_format
    texts = [
        render(LOAD_K_PAIRS, lanes=isa.lanes)
        if k == "bf16"
        else render(LOAD_K_WORDS, lanes=isa.lanes, ctype=CTYPE[k], load=loads[k])
    ]
    channels = padded_channels(spec.head_dim_vo)
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
                    load=loads[v],
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
        ]
    )
    words = {spec.dtype, spec.k_format, spec.v_format}
    f16c = ISAS[spec.isa].f16c
    converts = len(words) > 1
    text = join_sections(
        glossary,
        INCLUDES,
        "#include <immintrin.h>" if converts and f16c and "fp16" in words else "",
        scalar_text(words, f16c=f16c) if converts else "",
        store_text(spec),
        index_text(spec, "k"),
        index_text(spec, "v"),
        *parts,
        packed_text(spec),
    )
    return KernelSource(spec, text)
