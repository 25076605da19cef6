"""append to a store with quantized pages: exact slots, and pages quantized as a whole."""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import signature_text
from kvcompile.codegen.cpu.encode import encode_text
from kvcompile.codegen.cpu.grouped import part_channels
from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.cpu.rope import KEYS_OF_ROW
from kvcompile.codegen.cpu.rotary import separate_text
from kvcompile.codegen.cpu.scalars import CTYPE, widen
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.formats import TILE, Role
from kvcompile.codegen.spec import KernelSpec

TOKENS = """
// new tokens of one row and KV head; null if there are none
struct Tokens {
  const $ctype* first;
  int64_t stride;
  const $ctype* at(int64_t s) const { return first + s * stride; }
};
"""

QUANTIZE_PAGE = """
// the tokens of a page, from new tokens (token `first` of the row is the first of them) and from
// the ring, quantized into its record
static void quantize_page_$role(
    const Store& store, int64_t b, int64_t h, int64_t page, const $fresh& fresh, int64_t first) {
  alignas(64) float x[$page_size * $channels]$zeros;
  for (int t = 0; t < $page_size; ++t) {
    const int64_t i = $sinks + page * $page_size + t;
    float* row = x + t * $channels;
    if (i >= first) {
$token
      for (int c = 0; c < $head_dim; ++c) row[c] = $widened_token;
    } else {
      const int64_t slot = store.exact_slot(b, i);
      const $ctype* part = ($ctype*)(store.exact_record(b, slot / $tile, h)$exact_offset);
      const int in_page = int(slot % $tile);
      for (int c = 0; c < $head_dim; ++c) row[c] = $widened_slot;
    }
  }
$separate  encode_$role(x, store.record(b, page, h)$offset);
}
"""

TOKEN = """
      const $ctype* token = fresh.at(i - first);
"""

TURNED_TOKEN = """
      $ctype token[$head_dim];
      fresh.turn(i - first, token);
"""

TOKENS_OF_ROW = """    const Tokens k{k_BKSD ? k_BKSD + b * k_sb + h * k_sh : nullptr, k_st};
"""

WRITE_K = """
      if (k.first) write_exact_k(($ctype*)record, in_page, k.at(s));
"""

WRITE_TURNED_K = """
      if (k.first) {
        $ctype turned[$head_dim];
        k.turn(s, turned);
        write_exact_k(($ctype*)record, in_page, turned);
      }
"""

MAIN = """
// Tokens past_len .. past_len + new_len - 1 of every row; k or v may be null. Strides in elements.
// Sinks and tokens of the ring are copied to their exact slots. The pages from ring_from[b] to
// quantized[b] - 1 are quantized; those of their tokens that are not new are in the ring.
$signature
  if (new_len < 0 || num_kv_heads < 1) return 1;
  const Store store(state);
  int64_t pages = 0;
  for (int64_t b = 0; b < store.batch; ++b) {
    if (store.quantized[b] <= store.ring_from[b]) continue;
    const int64_t past = past_len - store.starts[b], end = store.ring_token(b);
    if (end > past + new_len || (end > past && !(k_BKSD && v_BKSD))) return 1;
    pages = std::max(pages, int64_t(store.quantized[b] - store.ring_from[b]));
  }
  const int64_t heads = num_kv_heads, units = std::max((new_len + 63) / 64, pages);
  const int64_t items = store.batch * heads * units;
#pragma omp parallel for schedule(static) num_threads(int(threads)) \\
    if (threads > 1 && store.batch * heads * (new_len + pages * $page_size) >= 1024)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t b = item / units / heads, h = item / units % heads, unit = item % units;
    const int64_t past = past_len - store.starts[b], ring = store.ring_token(b);
$keys    const Tokens v{v_BKSD ? v_BKSD + b * v_sb + h * v_sh : nullptr, v_st};
    const int64_t end = std::min(new_len, unit * 64 + 64);
    for (int64_t s = std::max(unit * 64, -past); s < end; ++s) {
      if (past + s >= $sinks && past + s < ring) continue;
      const int64_t slot = store.exact_slot(b, past + s);
      uint8_t* record = store.exact_record(b, slot / $tile, h);
      const int in_page = int(slot % $tile);
$write_k
      if (v.first) write_exact_v(($ctype*)(record + $exact_v_offset), in_page, v.at(s));
    }
    const int64_t page = store.ring_from[b] + unit;
    if (page < store.quantized[b]) {
      quantize_page_k(store, b, h, page, k, past);
      quantize_page_v(store, b, h, page, v, past);
    }
  }
  return 0;
}
"""


def quantized_append_text(spec: KernelSpec) -> str:
    """Print what an append kernel of a quantized layout needs behind `write_exact_k` and `_v`."""
    layout = record_layout(spec)
    main = render(
        MAIN,
        signature=signature_text(spec),
        keys=TOKENS_OF_ROW if spec.rope is None else KEYS_OF_ROW,
        write_k=render(
            WRITE_K if spec.rope is None else WRITE_TURNED_K,
            ctype=CTYPE[spec.dtype],
            head_dim=spec.head_dim_qk,
        ),
        ctype=CTYPE[spec.dtype],
        page_size=spec.page_size,
        sinks=spec.num_sink_tokens,
        tile=TILE,
        exact_v_offset=layout.exact.v_offset,
    )
    return join_sections(
        encode_text(spec),
        separate_text(layout),
        render(TOKENS, ctype=CTYPE[spec.dtype]),
        _quantize_page_text(spec, "k"),
        _quantize_page_text(spec, "v"),
        main,
    )


def _quantize_page_text(spec: KernelSpec, role: Role) -> str:
    layout = record_layout(spec)
    head_dim, channels = layout.head_dim(role), part_channels(spec, role)
    separate = ""
    if role == "k" and layout.rotary is not None:
        means = f"store.record(b, page, h) + {layout.mean_offset}"
        separate = f"  separate_mean(x, store.rotary, {means});\n"
    turns = role == "k" and spec.rope is not None
    return render(
        QUANTIZE_PAGE,
        fresh="Keys" if turns else "Tokens",
        token=render(TURNED_TOKEN if turns else TOKEN, ctype=CTYPE[spec.dtype], head_dim=head_dim),
        separate=separate,
        role=role,
        ctype=CTYPE[spec.dtype],
        page_size=spec.page_size,
        channels=channels,
        zeros=" = {}" if channels > head_dim else "",
        sinks=spec.num_sink_tokens,
        head_dim=head_dim,
        tile=TILE,
        widened_token=widen(spec.dtype, "token[c]"),
        widened_slot=widen(spec.dtype, f"part[exact_{role}_index(in_page, c)]"),
        exact_offset="" if role == "k" else f" + {layout.exact.v_offset}",
        offset="" if role == "k" else f" + {layout.v_offset}",
    )
