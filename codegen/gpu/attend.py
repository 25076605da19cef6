"""attend: split-KV attention of 1 to 16 query tokens over the pages of a store.

The rows of a program are the query tokens of the query heads that share a KV head; the pages of a
row of the batch are split among programs, and `merge_splits` joins what they leave
(Flash-Decoding, https://pytorch.org/blog/flash-decoding). Sinks and ring, where pages are
quantized, are one more program, the last one.
"""

from __future__ import annotations

from kvcompile.codegen.gpu import fragments, quantized, rope, words
from kvcompile.codegen.gpu.glossary import glossary
from kvcompile.codegen.gpu.helpers import (
    LOWER,
    MINIMA,
    MINIMA_PTX,
    POWER,
    SCALES,
    SCALES_PTX,
    UPPER,
    unpack_float_text,
    unpack_text,
)
from kvcompile.codegen.gpu.shape import GpuShape, supports_records
from kvcompile.codegen.gpu.text import Writer, jit
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec


class AttendGenerator:
    """Prints attend kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        records = supports_records(spec)
        if isinstance(records, Unsupported):
            return records
        if spec.is_grouped and spec.compute not in ("fp16", "fp32"):
            return Unsupported(f"compute {spec.compute}", "Choose fp16 or fp32.")
        if spec.compute == "fp16" and spec.dtype == "fp32":
            return Unsupported("fp16 products for an fp32 model", 'Choose compute "fp32".')
        return Supported()

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        shape = GpuShape(spec)
        w = Writer()
        w(*glossary(shape), "", "import triton", "import triton.language as tl", "", "")
        for text in _helpers(shape):
            w(*text.splitlines(), "", "")
        w(jit(fragments.varying(shape)), f"def {spec.symbol}(")
        w(*fragments.parameters(shape))
        with w.block("):"):
            _body(w, shape)
        return KernelSource(spec, w.text)


def _helpers(shape: GpuShape) -> list[str]:
    ptx = shape.spec.isa == "ptx"
    texts = []
    parts = [part for part in (shape.k, shape.v) if part.is_grouped]
    texts += rope.turned_text(shape.spec)
    dtype = "fp16" if shape.is_fp16 else "fp32"
    floats = dict.fromkeys(part.float8 for part in parts if part.float8 is not None)
    texts += [unpack_float_text(format_, ptx=ptx, dtype=dtype) for format_ in floats]
    unpacked = {
        (bits, part.role == "k" and shape.is_raw)
        for part in parts
        if not part.is_float
        for bits in part.widths
    }
    texts += [
        unpack_text(bits, ptx=ptx, dtype=dtype, raw=raw)
        for bits, raw in sorted(unpacked, reverse=True)
    ]
    roles = {part.role for part in parts if not part.is_float}
    is_plain = not (ptx and shape.is_fp16)
    if roles and is_plain:
        texts.append(UPPER)
    if "v" in roles or (roles and is_plain):
        texts.append(LOWER)
    if shape.is_fp16:
        texts.append(POWER)
        if roles:
            texts.append(SCALES_PTX if ptx else SCALES)
        if "k" in roles:
            texts.append(MINIMA_PTX if ptx else MINIMA)
    return texts


def _body(w: Writer, shape: GpuShape) -> None:
    fragments.rows(w, shape)
    fragments.load_query(w, shape)
    fragments.begin(w, shape)
    if not shape.spec.is_grouped:
        block = shape.block_tokens
        words.exact_pages(w, shape, lambda slots: words.attend_words(w, shape, slots, block, ""))
    else:
        with w.block("if split < splits - 1:"):
            quantized.pages(w, shape)
        with w.block("else:"):
            words.window_pages(w, shape)
    fragments.store_partial(w, shape)
