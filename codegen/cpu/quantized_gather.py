"""gather from a store with quantized pages."""

from __future__ import annotations

from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.cpu.scalars import CTYPE
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats import TILE
from kvcompile.codegen.spec import KernelSpec

TOKEN = """
      const int64_t i = from + t - start;
      if (i < 0) {
        if (k) std::fill_n(k, $head_dim_qk, $ctype(0));
        if (v) std::fill_n(v, $head_dim_vo, $ctype(0));
      } else if (i >= $sinks && i < ring) {
        const uint8_t* record = store.record(b, (i - $sinks) / $page_size, h);
        const int slot = int((i - $sinks) % $page_size);
        if (k) read_k((const $k_word*)record, slot, k$rotary);
        if (v) read_v((const $v_word*)(record + $v_offset), slot, v);
      } else {
        const int64_t position = store.exact_slot(b, i);
        const uint8_t* record = store.exact_record(b, position / $tile, h);
        const int slot = int(position % $tile);
        if (k) read_exact_k((const $ctype*)record, slot, k);
        if (v) read_exact_v((const $ctype*)(record + $exact_v_offset), slot, v);
      }
"""


def quantized_token_text(spec: KernelSpec) -> str:
    """Print how a gather kernel of a quantized layout reads one token."""
    layout = record_layout(spec)
    return render(
        TOKEN,
        ctype=CTYPE[spec.dtype],
        k_word=CTYPE.get(spec.k_format, "uint8_t"),
        v_word=CTYPE.get(spec.v_format, "uint8_t"),
        page_size=spec.page_size,
        sinks=spec.num_sink_tokens,
        rotary="" if spec.rotary is None else ", store.rotary",
        tile=TILE,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        v_offset=layout.v_offset,
        exact_v_offset=layout.exact.v_offset,
    )
