"""The comment at the head of a generated attend kernel: its letters, shapes and bytes."""

from __future__ import annotations

from kvcompile.codegen.cpu.pages import bytes_per_token
from kvcompile.codegen.cpu.rope import rope_line
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import comment
from kvcompile.codegen.cpu.variants import variant_lines


def glossary(shape: AttendShape) -> str:
    """Return the comment that heads the kernel."""
    spec = shape.spec
    queries = "1" if spec.queries == "one" else "1..16"
    masks = {
        "none": "none: every stored token is visible",
        "causal": "query token s sees the tokens t <= s",
        "bool": "mask_BHST uint8, 1 = visible",
        "additive": f"mask_BHST {spec.mask_dtype}, added to the scores, -inf = not visible",
    }
    assert spec.mask is not None
    slides = ["slides  rows may begin with tokens before column 0, which nothing sees"]
    slides = slides if spec.slides else []
    quantized = []
    if spec.is_grouped:
        quantized = [
            f"tokens  {spec.num_sink_tokens} sinks in exact pages, then quantized pages, "
            "then the ring in exact pages",
            f"exact   K and V {spec.dtype}, pages of 16 tokens",
            "compute fp32: codes become numbers in registers"
            if spec.compute == "fp32"
            else "compute int8: q rounded to 8 bits, weights to 16 bits, products of integers",
        ]
    return comment(
        [
            spec.symbol,
            "out = softmax(q K^T * scale + mask) V, K and V in pages",
            "",
            f"B rows   K KV heads   G {shape.group} query heads per KV head   H = K * G",
            f"S {queries} query tokens   T kv_len tokens   "
            f"Dk {spec.head_dim_qk}   Dv {spec.head_dim_vo}   P {spec.page_size}",
            f"q_BHSD, out_BHSD  {spec.dtype}; strides in elements, the last one is 1",
            f"mask    {masks[spec.mask]}",
            *variant_lines(spec),
            *slides,
            *rope_line(spec),
            f"record  K {spec.k_format}, V {spec.v_format}: {bytes_per_token(spec)}",
            *quantized,
            "row     one query token of one query head, number s * G + head in its KV head",
            f"chunk   {shape.chunk} stored tokens; each leaves a partial (m, l, O) per row, merged",
            "        in order: neither threads nor the place of a page change one bit",
        ]
    )
