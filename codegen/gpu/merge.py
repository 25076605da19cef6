"""merge_splits: joins the partial outputs that the splits of a row leave."""

from __future__ import annotations

from kvcompile.codegen.gpu.fragments import LOG2E
from kvcompile.codegen.gpu.shape import LOWEST_LSE, TRITON_TYPE
from kvcompile.codegen.gpu.text import Writer, jit
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import MergeSpec

MOST_SPLITS = 256

SINK_LINE = "sinks_H    {}, a logit per query head: a partial output of zeros, whose sum is 2^sink"
SINK = f"sink = tl.load(sinks_H + head).to(tl.float32) * {LOG2E!r}"


class MergeGenerator:
    """Prints merge_splits kernels."""

    def supports(self, spec: MergeSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        if spec.most_splits > MOST_SPLITS:
            return Unsupported(f"{spec.most_splits} splits", f"At most {MOST_SPLITS} are merged.")
        return Supported()

    def generate(self, spec: MergeSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        w = Writer()
        group, dim = spec.q_heads_per_kv_head, spec.head_dim_vo
        width = 1 << (dim - 1).bit_length()
        highest = "tl.maximum(tl.max(lse, 0), sink)" if spec.sink_dtype else "tl.max(lse, 0)"
        w(
            f'"""{spec.symbol}',
            "out = sum of 2^(lse - max) partial / sum of 2^(lse - max), over splits",
            "",
            "out_RND    fp32, one row per query head and token, one partial output per split",
            "lse_RN     fp32; -inf for a split without tokens, whose partial output is not read;",
            f"           {LOWEST_LSE} times its sum of weights for one of lowest scores alone",
            f"out_BHSD   {spec.dtype}; strides in elements, the last one is 1",
            f"rows       of a KV head: {group} query heads of each query token",
            *([SINK_LINE.format(spec.sink_dtype)] if spec.sink_dtype else []),
            "grid       R, rows of all KV heads of all rows of the batch",
            '"""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "",
            jit(["splits", "rows"]),
            f"def {spec.symbol}(",
            "    out_RND, lse_RN, splits,",
            "    out_BHSD, o_sb, o_sh, o_ss,",
            "    num_kv_heads, rows,",
            *(["    sinks_H,"] if spec.sink_dtype else []),
        )
        inside = f" & (d < {dim})[None, :]" if width != dim else ""
        with w.block("):"):
            w(
                "row = tl.program_id(0).to(tl.int64)",
                "r = row % rows",
                "h = row // rows % num_kv_heads",
                "b = row // rows // num_kv_heads",
                f"n = tl.arange(0, {spec.most_splits})",
                f"d = tl.arange(0, {width})",
                'lse = tl.load(lse_RN + row * splits + n, mask=n < splits, other=-float("inf"))',
                f"head = h * {group} + r % {group}",
                *([SINK] if spec.sink_dtype else []),
                f"m = tl.maximum({highest}, {LOWEST_LSE / 10})",
                f'lowest = tl.where(lse > -float("inf"), lse * {1 / LOWEST_LSE}, 0.0)',
                f"weight = tl.where(m > {LOWEST_LSE / 10}, tl.exp2(lse - m), lowest)",
                f"some = (weight > 0)[:, None]{inside}",
                f"at = (row * splits + n)[:, None] * {dim} + d[None, :]",
                "partial = tl.load(out_RND + at, mask=some, other=0.0)",
                f"total = tl.sum(weight, 0){' + tl.exp2(sink - m)' if spec.sink_dtype else ''}",
                "out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0, total, 1.0)",
                f"at = b * o_sb + head * o_sh + r // {group} * o_ss + d",
                f"tl.store(out_BHSD + at, out.to({TRITON_TYPE[spec.dtype]})"
                f"{f', mask=d < {dim}' if width != dim else ''})",
            )
        return KernelSource(spec, w.text)
