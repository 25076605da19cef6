"""gather from a store with quantized pages."""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import signature_text
from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.cpu.scalars import CTYPE
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats import TILE
from kvcompile.codegen.spec import KernelSpec

MAIN = """
// Tokens from .. to - 1 of every row; either output may be null; left padding gives zeros.
$signature
  if (from < 0 || to < from || num_kv_heads < 1) return 1;
  const Store store(state);
  const int64_t tokens = to - from, runs = (tokens + 63) / 64, heads = num_kv_heads;
  const int64_t items = store.batch * heads * runs;
#pragma omp parallel for schedule(static) num_threads(int(threads)) \\
    if (threads > 1 && store.batch * heads * tokens >= 1024)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t b = item / runs / heads, h = item / runs % heads, run = item % runs * 64;
    const int64_t start = store.starts[b], ring = store.ring_token(b);
    const int64_t end = std::min(tokens, run + 64);
    for (int64_t t = run; t < end; ++t) {
      $ctype* k = k_BKTD ? k_BKTD + b * k_sb + h * k_sh + t * k_st : nullptr;
      $ctype* v = v_BKTD ? v_BKTD + b * v_sb + h * v_sh + t * v_st : nullptr;
      const int64_t i = from + t - start;
      if (i < 0) {
        if (k) std::fill_n(k, $head_dim_qk, $ctype(0));
        if (v) std::fill_n(v, $head_dim_vo, $ctype(0));
      } else if (i >= $sinks && i < ring) {
        const uint8_t* record = store.record(b, (i - $sinks) / $page_size, h);
        const int slot = int((i - $sinks) % $page_size);
        if (k) read_k((const $k_word*)record, slot, k);
        if (v) read_v((const $v_word*)(record + $v_offset), slot, v);
      } else {
        const int64_t position = store.exact_slot(b, i);
        const uint8_t* record = store.exact_record(b, position / $tile, h);
        const int slot = int(position % $tile);
        if (k) read_exact_k((const $ctype*)record, slot, k);
        if (v) read_exact_v((const $ctype*)(record + $exact_v_offset), slot, v);
      }
    }
  }
  return 0;
}
"""


def quantized_gather_text(spec: KernelSpec) -> str:
    """Print the function of a gather kernel of a quantized layout."""
    layout = record_layout(spec)
    return render(
        MAIN,
        signature=signature_text(spec),
        ctype=CTYPE[spec.dtype],
        k_word=CTYPE.get(spec.k_format, "uint8_t"),
        v_word=CTYPE.get(spec.v_format, "uint8_t"),
        page_size=spec.page_size,
        sinks=spec.num_sink_tokens,
        tile=TILE,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        v_offset=layout.v_offset,
        exact_v_offset=layout.exact.v_offset,
    )
