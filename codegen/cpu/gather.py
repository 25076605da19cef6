"""gather: copies stored K and V out of their pages into dense tensors."""

from __future__ import annotations

from kvcompile.codegen.cpu.abi import signature_text
from kvcompile.codegen.cpu.decode import decode_text
from kvcompile.codegen.cpu.grouped import float8_formats, grouped_part
from kvcompile.codegen.cpu.pages import (
    copy_kernel,
    is_exact,
    part_format,
    record_layout,
    supports_pages,
)
from kvcompile.codegen.cpu.quantized_gather import quantized_token_text
from kvcompile.codegen.cpu.rounding import widen_text
from kvcompile.codegen.cpu.scalars import CTYPE, convert
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.formats import Role
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec

READ = """
static inline void read_$name(const $word* part, int slot, $ctype* x /* [$head_dim] */) {
  for (int c = 0; c < $head_dim; ++c) x[c] = $converted;
}
"""

MAIN = """
// Tokens from .. to - 1 of every row; either output may be null; left padding gives zeros.
$signature
  if (to < from || num_kv_heads < 1) return 1;
  const Store store(state);
  const int64_t tokens = to - from, runs = (tokens + 63) / 64, heads = num_kv_heads;
  const int64_t items = store.batch * heads * runs;
#pragma omp parallel for schedule(static) num_threads(int(threads)) \\
    if (threads > 1 && store.batch * heads * tokens >= 1024)
  for (int64_t item = 0; item < items; ++item) {
    const int64_t b = item / runs / heads, h = item / runs % heads, run = item % runs * 64;
    const int64_t start = store.starts[b]$ring;
    const int64_t end = std::min(tokens, run + 64);
    for (int64_t t = run; t < end; ++t) {
      $ctype* k = k_BKTD ? k_BKTD + b * k_sb + h * k_sh + t * k_st : nullptr;
      $ctype* v = v_BKTD ? v_BKTD + b * v_sb + h * v_sh + t * v_st : nullptr;
$token
    }
  }
  return 0;
}
"""

TOKEN = """
      const int64_t index = from + t - start;
      if (index < 0) {
        if (k) std::fill_n(k, $head_dim_qk, $ctype(0));
        if (v) std::fill_n(v, $head_dim_vo, $ctype(0));
        continue;
      }
      const uint8_t* record = store.record(b, index / $page_size, h);
      const int slot = int(index % $page_size);
      if (k) read_k((const $k_word*)record, slot, k);
      if (v) read_v((const $v_word*)(record + $v_offset), slot, v);
"""


def _read_text(spec: KernelSpec, role: Role, prefix: str = "") -> str:
    name = prefix + role
    stored = spec.dtype if prefix else part_format(spec, role)
    if not is_exact(stored):
        return decode_text(spec, role)
    return render(
        READ,
        name=name,
        word=CTYPE[stored],
        ctype=CTYPE[spec.dtype],
        head_dim=spec.head_dim_qk if role == "k" else spec.head_dim_vo,
        converted=convert(stored, spec.dtype, f"part[{name}_index(slot, c)]"),
    )


def _token_text(spec: KernelSpec) -> str:
    return render(
        TOKEN,
        ctype=CTYPE[spec.dtype],
        k_word=CTYPE[spec.k_format],
        v_word=CTYPE[spec.v_format],
        page_size=spec.page_size,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        v_offset=record_layout(spec).v_offset,
    )


def _main_text(spec: KernelSpec) -> str:
    return render(
        MAIN,
        signature=signature_text(spec),
        ctype=CTYPE[spec.dtype],
        ring=", ring = store.ring_token(b)" if spec.is_grouped else "",
        token=quantized_token_text(spec) if spec.is_grouped else _token_text(spec),
    )


class GatherGenerator:
    """Prints gather kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        return supports_pages(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        parts = [_read_text(spec, "k"), _read_text(spec, "v")]
        if spec.is_grouped:
            coded = float8_formats(grouped_part(spec, "k"), grouped_part(spec, "v"))
            parts[:0] = [widen_text(format_) for format_ in coded]
            parts += [_read_text(spec, "k", "exact_"), _read_text(spec, "v", "exact_")]
        parts.append(_main_text(spec))
        return copy_kernel(spec, "stored K and V as dense tensors", "k_BKTD, v_BKTD", *parts)
