"""Choose how each stream is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvcompile.codegen.formats import get_format
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.gpu.shape import fills_tiles
from kvcompile.codegen.layout import PAGE_SIZES, RecordLayout, Window
from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.ir.plan import StreamPlan
from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.patterns.rotary import has_bias, rotating_keys

if TYPE_CHECKING:
    from torch import fx

    from kvcompile.codegen.formats import Format
    from kvcompile.codegen.rotary import Rotary
    from kvcompile.codegen.spec import Compute, DTypeName
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite

EXACT_FORMATS: dict[torch.dtype, DTypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""Format that stores a dtype as it is."""

EXACT_PAGE_SIZE = 32
QUANTIZED_PAGE_SIZE = 64
"""Default tokens per page: a page of a quantized format is the group of a scale of K."""

MAX_HEAD_DIM = 512
"""Largest head dimension the kernels' scratch is laid out for."""


class PlanFormats:
    """Give every stream a format, a page layout and its bytes."""

    name = "plan-formats"
    needs = Stage.INFERRED
    gives = Stage.PLANNED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.plans`."""
        count = len(program.sites)
        if count and (unknown := options.dtypes.unknown(count)):
            program.remarks.append(_no_such_layers(self.name, unknown, count))
        for site in program.sites:
            if site.index not in program.streams:
                continue
            keys = program.streams[site.index].k.new
            plan = _plan(site, keys, count, options)
            if isinstance(plan, Missed):
                program.remarks.append(missed(self.name, site, plan))
                continue
            program.plans[site.index] = plan
            layout = plan.layout
            reason = (
                f"{layout.k_format}/{layout.v_format} pages of {layout.page_size} "
                f"tokens, {plan.bytes_per_token:.0f} bytes per token"
            )
            if layout.window is not None:
                reason += (
                    f"; the first {layout.window.num_sink_tokens} and the last "
                    f"{layout.window.residual_length} tokens exact, computed in {plan.compute}"
                )
            if _is_separable(keys, layout, options):
                reason += "; " + _about_bias(layout.rotary)
            program.remarks.append(passed(self.name, "KVC300", site, reason))


def _plan(
    site: AttentionSite, keys: fx.Node, sites: int, options: PassOptions
) -> StreamPlan | Missed:
    k, v = site.k.meta["val"], site.v.meta["val"]
    if k.dtype != v.dtype:
        return Missed("KVC301", f"keys are {k.dtype} and values {v.dtype}", site.k)
    q, out = site.q.meta["val"], site.out.meta["val"]
    if not q.dtype == k.dtype == out.dtype:
        reason = f"the query is {q.dtype}, the keys are {k.dtype} and the result is {out.dtype}"
        return Missed("KVC301", reason, site.out)
    if k.dtype not in EXACT_FORMATS:
        known = ", ".join(str(d) for d in EXACT_FORMATS)
        return Missed("KVC302", f"no exact format stores {k.dtype} (there are: {known})", site.k)
    on_gpu = k.device.type in options.gpu_devices
    if k.device.type != "cpu" and not on_gpu:
        return Missed("KVC303", f"there are no kernels for {k.device.type} devices", site.k)
    if max(site.head_dim_qk, site.head_dim_vo) > MAX_HEAD_DIM:
        reason = f"head dimension {max(site.head_dim_qk, site.head_dim_vo)} exceeds {MAX_HEAD_DIM}"
        return Missed("KVC304", reason, site.k)
    dims = (site.head_dim_qk, site.head_dim_vo)
    layout = plan_layout(options.dtypes.of(site.index, sites), k.dtype, dims, options)
    compute: Compute | Missed | None = None
    if on_gpu:
        layout = _gpu_layout(layout, options)
        compute = _gpu_compute(layout, k.dtype, options)
    elif layout.window is not None:
        compute = _compute((layout.format("k"), layout.format("v")), options)
    if isinstance(compute, Missed):
        return compute
    separable = not on_gpu and _is_separable(keys, layout, options)
    turning = rotating_keys(keys) if separable else None
    if turning is not None:
        layout = replace(layout, rotary=turning.rotary)
    frequencies = None if turning is None else turning.frequencies
    heads = site.num_kv_heads
    return StreamPlan(site.index, k.dtype, k.device, heads, layout, compute, frequencies)


def _is_separable(keys: fx.Node, layout: RecordLayout, options: PassOptions) -> bool:
    """Whether K is to be freed of what its bias becomes under rotary embedding."""
    return options.separate_k_bias and layout.format("k").is_grouped and has_bias(keys)


def _about_bias(rotary: Rotary | None) -> str:
    if rotary is None:
        return (
            "K has a bias; its first channels are not seen to rotate by frequencies that are an "
            "input: quantized as it is"
        )
    return (
        f"K has a bias: its mean, which turns in {rotary.dim} channels, is kept apart where that "
        "makes a page finer"
    )


def plan_layout(
    dtypes: tuple[str, str], model_dtype: torch.dtype, dims: tuple[int, int], options: PassOptions
) -> RecordLayout:
    """Return how K and V of one attention are stored.

    Args:
        dtypes: Formats of K and V; `auto` is the model's dtype.
        model_dtype: A key of `EXACT_FORMATS`.
        dims: Channels of a key and of a value.
        options: Page size, group size and what stays exact.
    """
    exact = EXACT_FORMATS[model_dtype]
    k_format, v_format = (exact if name == "auto" else name for name in dtypes)
    window = None
    if get_format(k_format).is_grouped or get_format(v_format).is_grouped:
        window = Window(exact, options.num_sink_tokens, options.residual_length)
    return RecordLayout(
        k_format=k_format,
        v_format=v_format,
        head_dim_qk=dims[0],
        head_dim_vo=dims[1],
        page_size=options.page_size or (EXACT_PAGE_SIZE if window is None else QUANTIZED_PAGE_SIZE),
        q_group_size=options.q_group_size,
        window=window,
    )


def _no_such_layers(origin: str, layers: list[int], count: int) -> Remark:
    named = ", ".join(map(str, layers))
    reason = f"the options name layer {named}, but the graph has {count} attentions"
    hint = f"layers are {-count} to {count - 1}; a graph break starts a new count"
    return Remark("failed", "KVC306", origin, "", "", reason, hint=hint)


def _gpu_layout(layout: RecordLayout, options: PassOptions) -> RecordLayout:
    """Return how a GPU's records lie; pages that were left open have tokens for tensor cores."""
    layout = layout.reordered("gpu16")
    if options.page_size is None and not fills_tiles(layout):
        return replace(layout, page_size=PAGE_SIZES[-1])
    return layout


def _gpu_compute(
    layout: RecordLayout, dtype: torch.dtype, options: PassOptions
) -> Compute | Missed | None:
    """Choose between decoding in registers and products of fp16 numbers."""
    if options.compute_dtype == "int8":
        reason = "compute_dtype int8 multiplies integers, which only CPU kernels do"
        return Missed("KVC305", reason, None, hint="compute_dtype='auto' runs everywhere")
    if layout.window is None:
        return None
    return "fp32" if options.compute_dtype == "fp32" or dtype is torch.float32 else "fp16"


def _compute(formats: tuple[Format, Format], options: PassOptions) -> Compute | Missed:
    """Choose between decoding in registers and integer products."""
    integers = all(isinstance(format_, IntegerFormat) for format_ in formats)
    possible = integers and options.has_integer_dot
    if options.compute_dtype == "int8" and not possible:
        reason = (
            "compute_dtype int8 needs a processor that multiplies bytes (AVX-512 VNNI)"
            if integers
            else f"compute_dtype int8 multiplies integers only, not {formats[0].name} keys with "
            f"{formats[1].name} values"
        )
        return Missed("KVC305", reason, None, hint="compute_dtype='fp32' runs everywhere")
    return "int8" if possible and options.compute_dtype != "fp32" else "fp32"
