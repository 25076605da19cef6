"""append: writes new K and V into their pages."""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import signature_text
from kvcompile.codegen.cpu.pages import (
    copy_kernel,
    part_format,
    record_layout,
    supports_pages,
)
from kvcompile.codegen.cpu.quantized_append import quantized_append_text
from kvcompile.codegen.cpu.rope import KEYS_OF_ROW, keys_text
from kvcompile.codegen.cpu.scalars import CTYPE, convert
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats import Role, padded_channels
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec

WRITE = """
static inline void write_$name($word* part, int slot, const $ctype* x /* [$head_dim] */) {
  for (int c = 0; c < $head_dim; ++c) part[${name}_index(slot, c)] = $converted;
$pad}
"""

PAD = """  for (int c = $head_dim; c < $channels; ++c) part[${name}_index(slot, c)] = 0;
"""

WRITE_K = """
      if (k_BKSD) write_k(($k_word*)record, slot, k_BKSD + b * k_sb + h * k_sh + s * k_st);
"""

WRITE_TURNED_K = """
      if (k.first) {
        $ctype turned[$head_dim];
        k.turn(s, turned);
        write_k(($k_word*)record, slot, turned);
      }
"""

MAIN = """
// Tokens past_len .. past_len + new_len - 1 of every row; k or v may be null. Strides in elements.
$signature
  if (new_len < 0 || num_kv_heads < 1) return 1;
  const Store store(state);
  const int64_t runs = (new_len + 63) / 64, heads = num_kv_heads;
  const int64_t items = store.batch * heads * runs;
#pragma omp parallel for schedule(static) num_threads(int(threads)) \\
    if (threads > 1 && store.batch * heads * new_len >= 1024)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t b = item / runs / heads, h = item / runs % heads, run = item % runs * 64;
    const int64_t start = store.starts[b];
    const int64_t end = std::min(new_len, run + 64);
$keys    for (int64_t s = std::max(run, start - past_len); s < end; ++s) {
      const int64_t index = past_len + s - start;
      uint8_t* record = store.record(b, index / $page_size, h);
      const int slot = int(index % $page_size);
$write_k
      if (v_BKSD)
        write_v(($v_word*)(record + $v_offset), slot, v_BKSD + b * v_sb + h * v_sh + s * v_st);
    }
  }
  return 0;
}
"""


def _write_text(spec: KernelSpec, role: Role, prefix: str = "") -> str:
    head_dim = spec.head_dim_qk if role == "k" else spec.head_dim_vo
    channels, name = padded_channels(head_dim), prefix + role
    stored = spec.dtype if prefix else part_format(spec, role)
    pad = ""
    if channels > head_dim:
        pad = render(PAD, name=name, head_dim=head_dim, channels=channels) + "\n"
    return render(
        WRITE,
        name=name,
        word=CTYPE[stored],
        ctype=CTYPE[spec.dtype],
        head_dim=head_dim,
        converted=convert(spec.dtype, stored, "x[c]"),
        pad=pad,
    )


def _main_text(spec: KernelSpec) -> str:
    write_k = render(
        WRITE_K if spec.rope is None else WRITE_TURNED_K,
        ctype=CTYPE[spec.dtype],
        head_dim=spec.head_dim_qk,
        k_word=CTYPE[spec.k_format],
    )
    return render(
        MAIN,
        signature=signature_text(spec),
        keys="" if spec.rope is None else KEYS_OF_ROW,
        write_k=write_k,
        v_word=CTYPE[spec.v_format],
        page_size=spec.page_size,
        v_offset=record_layout(spec).v_offset,
    )


class AppendGenerator:
    """Prints append kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        return supports_pages(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        prefix = "exact_" if spec.is_grouped else ""
        main = quantized_append_text(spec) if spec.is_grouped else _main_text(spec)
        writes = (_write_text(spec, "k", prefix), _write_text(spec, "v", prefix))
        return copy_kernel(
            spec, "new K and V into their pages", "k_BKSD, v_BKSD", keys_text(spec), *writes, main
        )
