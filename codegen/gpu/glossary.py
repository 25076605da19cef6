"""The docstring of a generated module: its letters, shapes and bytes."""

from __future__ import annotations

from kvcompile.codegen.formats import TILE
from kvcompile.codegen.gpu.rope import rope_line
from kvcompile.codegen.gpu.shape import GpuShape


def append_glossary(shape: GpuShape) -> list[str]:
    """Return the lines of the docstring of an append module."""
    spec = shape.spec
    lines = [
        f'"""{spec.symbol}',
        "writes new K and V into their pages",
        "",
        "B rows   K KV heads   S new tokens   "
        f"Dk {spec.head_dim_qk}   Dv {spec.head_dim_vo}   P {spec.page_size}",
        f"k_BKSD, v_BKSD  {spec.dtype}; strides in elements, the last one is 1; k_len and v_len "
        "tokens, one of them may be 0",
        "page_BN    int64 addresses of pages; a page is a record of each KV head",
        "starts_B   int32, tokens of left padding, which own no page",
        "past_len   int64, one number: tokens before the new ones",
        *rope_line(spec),
        record_line(shape),
    ]
    programs = f"runs of {TILE} new tokens"
    if spec.is_grouped:
        lines += window_lines(shape)
        programs = f"exact_programs ({programs}), then pages to quantize"
    return [*lines, f"grid       {programs}; KV heads; B", '"""']


def latent_glossary(shape: GpuShape) -> list[str]:
    """Return the lines of the docstring of an attend_latent module."""
    spec = shape.spec
    lines = glossary(shape)
    at = next(i for i, line in enumerate(lines) if line.startswith("B rows"))
    lines[1] = "out = softmax((q_latent C^T + q_rope R^T) * scale + mask) C, C and R in pages"
    lines[at : at + 2] = [
        f"B rows   one KV head   H {shape.group} query heads   S query tokens   T kv_len tokens",
        f"C latents of {spec.head_dim_qk} channels, stored as K   "
        f"R rotating keys of {spec.head_dim_vo}, stored as V   P {spec.page_size}",
        "q_BHSD     begins with the channels of the latent, those that rotate follow",
    ]
    return lines


def gather_glossary(shape: GpuShape) -> list[str]:
    """Return the lines of the docstring of a gather module."""
    spec = shape.spec
    return [
        f'"""{spec.symbol}',
        "copies stored K and V out of their pages",
        "",
        "B rows   K KV heads   T tokens from begin on   "
        f"Dk {spec.head_dim_qk}   Dv {spec.head_dim_vo}   P {spec.page_size}",
        "k_BKTD, v_BKTD  of any type; strides in elements, the last one is 1; the tokens up to "
        "k_end and v_end",
        "page_BN    int64 addresses of pages; a page is a record of each KV head",
        "starts_B   int32, tokens of left padding, which own no page and are zeros",
        record_line(shape),
        *(window_lines(shape) if spec.is_grouped else []),
        f"grid       runs of {TILE} tokens; KV heads; B",
        '"""',
    ]


def record_line(shape: GpuShape) -> str:
    """Say what a record holds, and its bytes."""
    spec, layout = shape.spec, shape.layout
    k, v = layout.k_bytes / spec.page_size, layout.v_bytes / spec.page_size
    return (
        f"record     K {spec.k_format}, V {spec.v_format}: {k:g} (K) + {v:g} (V) = {k + v:g} "
        "bytes per cached token and KV head"
    )


def window_lines(shape: GpuShape) -> list[str]:
    """Say where the tokens lie that are not quantized."""
    spec = shape.spec
    return [
        "quantized_B, ring_from_B  int32, quantized pages, and the one that the ring begins at",
        f"exact_BN   int64 addresses of exact pages: {TILE} tokens of K and V {spec.dtype}; "
        f"{spec.num_sink_tokens} sinks, then the ring",
    ]


def glossary(shape: GpuShape) -> list[str]:
    """Return the lines of the docstring of an attend module."""
    spec = shape.spec
    queries = {"one": "1", "few": "1..16", "many": "any number of", None: ""}[spec.queries]
    masks = {
        "none": "none: every stored token is visible",
        "causal": "query token s sees the tokens t <= s",
        "bool": "mask_BHST int8, not 0 = visible",
        "additive": f"mask_BHST {spec.mask_dtype}, added to the scores, -inf = not visible",
    }
    assert spec.mask is not None
    lines = [
        f'"""{spec.symbol}',
        "out = softmax(q K^T * scale + mask) V, K and V in pages",
        "",
        f"B rows   K KV heads   G {shape.group} query heads per KV head   H = K * G",
        f"S {queries} query tokens   T kv_len tokens   "
        f"Dk {spec.head_dim_qk}   Dv {spec.head_dim_vo}   P {spec.page_size}",
        f"q_BHSD     {spec.dtype}; strides in elements, the last one is 1",
        "page_BN    int64 addresses of pages; a page is a record of each KV head",
        "starts_B   int32, tokens of left padding, which own no page; kv_len int64, one number",
        *rope_line(spec),
        f"mask       {masks[spec.mask]}",
        record_line(shape),
    ]
    if spec.is_grouped:
        lines += [*window_lines(shape), f"products   {spec.compute}"]
    if spec.softcap is not None:
        lines.append(f"softcap    {spec.softcap:g}: scores are cap * tanh(score / cap)")
    if spec.sink_dtype is not None:
        lines.append("sinks      a logit per query head joins when partial outputs are merged")
    if spec.sliding_window is not None:
        lines.append(f"window     a query sees the last {spec.sliding_window} tokens up to its own")
    if spec.slides:
        lines.append("slides     rows may begin with tokens before column 0, which nothing sees")
    return [
        *lines,
        f"grid       splits, KV heads{' x blocks of rows' if shape.has_blocks else ''}, B",
        "out_RND    fp32, one row per query head and token, one partial output per split",
        "lse_RN     fp32, log2 of the sum of 2^score of a partial output",
        '"""',
    ]
