"""The Dynamo backend: a captured graph goes down through the passes and comes back a callable."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo import register_backend
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext

from kvcompile import auto_compile, wrappers
from kvcompile.codegen.cpu.isa import detect_isa, has_integer_dot
from kvcompile.codegen.errors import KvcompileError
from kvcompile.codegen.gpu.compile import gpu_isa
from kvcompile.options import CacheOptions, parse_options
from kvcompile.passes.base import PassOptions
from kvcompile.passes.canonicalize import plain_inputs
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.remarks import Remark, emit
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.pipeline import run_pipeline
from kvcompile.reports import CompilationReport, publish
from kvcompile.runtime import launch
from kvcompile.runtime.as_written import with_dense_inputs
from kvcompile.runtime.budget import Budget
from kvcompile.runtime.executor import Executor
from kvcompile.runtime.fused import FusedBoundary
from kvcompile.runtime.targets import gpu_devices

Compiled = Callable[..., Any]

EXPECTED_COMPILATIONS = 2
"""Prefill and decode; every further compilation of a function is explained by a remark."""

HARMLESS = frozenset({"KVC101", "KVC201", "KVC406"})
"""Misses that `strict` lets pass: no attention at all, one whose K and V nobody keeps, q and k that
turn as the model wrote it."""

UNLOGGED = frozenset({"KVC406"})
"""Misses that the report alone tells: the cache is in pages all the same."""


class UnmatchedError(KvcompileError):
    """Under `strict`: an attention or a cache was not rewritten; the message is its remark."""


def kvcompile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one captured graph.

    Args:
        gm: Dynamo's graph of torch operators.
        example_inputs: What it was captured with.
        mode: Inductor's mode (`torch.compile(mode=...)`), passed on to it.
        options: See `kvcompile.options.CacheOptions`.

    Raises:
        OptionError: An option is unknown or has a bad value.
        UnmatchedError: Under `strict`, something was not rewritten.
    """
    auto_compile.install(kvcompile)  # transformers may have come after this module
    parsed = parse_options(options)
    mode = mode or parsed.mode
    if torch.is_grad_enabled() and _requires_grad(gm):
        emit(
            Remark(
                "note",
                "KVC001",
                "backend",
                "",
                "",
                "an input requires grad: the graph is compiled as it is, with a dense cache",
                hint="generate under torch.no_grad(), or call model.requires_grad_(False)",
            ),
            once="requires-grad",
        )
        return _as_written(gm, parsed, mode)
    start = time.perf_counter()
    program = Program(gm, Stage.CAPTURED)
    try:
        run_pipeline(program, pass_options(parsed), verify_each=parsed.verify)
    except Exception as error:
        if parsed.strict:
            raise
        emit(
            Remark(
                "failed",
                "KVC002",
                "backend",
                "",
                "",
                f"{error}; the graph is compiled as it is",
                hint="set strict=True to see the exception, and report it",
            )
        )
        return _as_written(gm, parsed, mode)
    passes_seconds = time.perf_counter() - start
    _explain_compilation(program)
    publish(CompilationReport.of(program, passes_seconds))
    _log(program)
    if parsed.strict:
        _raise_first_miss(program)
    if not program.plans:
        return _as_written(gm, parsed, mode)
    # g++ and Inductor run side by side: one is a subprocess, the other Python.
    with ThreadPoolExecutor(max_workers=1) as pool:
        kernels = pool.submit(_prepare, program)
        fakes = [n.meta["val"] for n in program.placeholders]
        on_gpu = any(plan.layout.order == "gpu16" for plan in program.plans.values())
        inner = _inner(program.module, fakes, parsed, mode, records=not on_gpu)
        kernels_found = kernels.result()
    records = kernels_found and _mode_options(mode).get(RECORDS, False)
    budget = Budget.of(options, parsed.memory_limit())
    executor = Executor(program, inner, records=records, budget=budget)
    return FusedBoundary(program.fused, executor) if program.fused else executor


def compile(model: nn.Module, **options: Any) -> Any:
    """Return `torch.compile(model, backend="kvcompile", options=options)`.

    Args:
        model: A decoder; left as it is.
        **options: See `kvcompile.options.CacheOptions`.

    Raises:
        OptionError: An option is unknown or has a bad value; raised at once, not at the first call.
        HeadSplitError: Tensor parallelism would cut a KV head in pieces.
    """
    parse_options(options)
    wrappers.refuse_split_heads(model)
    return torch.compile(model, backend="kvcompile", options=options)


def pass_options(options: CacheOptions) -> PassOptions:
    """Return what passes decide by on this processor."""
    isa = detect_isa()
    return PassOptions(
        isa=isa,
        gpu_isa=gpu_isa(),
        gpu_devices=gpu_devices(),
        has_integer_dot=has_integer_dot(isa),
        dtypes=options.dtypes(),
        page_size=options.page_size,
        q_group_size=options.q_group_size,
        residual_length=options.residual_length,
        num_sink_tokens=options.num_sink_tokens,
        compute_dtype=options.compute_dtype,
        gemv=options.gemv,
        fuse_rope=options.fuse_rope,
        separate_k_bias=options.separate_k_bias,
    )


def _requires_grad(gm: fx.GraphModule) -> bool:
    """Whether an input of the graph requires grad."""
    inputs = (n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder")
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)


def _prepare(program: Program) -> bool:
    """Compile the kernels that the program needs, each once; return whether all can be had."""
    found = [launch.prepare(spec) for spec in dict.fromkeys(use.spec for use in program.kernels)]
    return all(found)


def _as_written(gm: fx.GraphModule, options: CacheOptions, mode: str | None) -> Compiled:
    """Compile a graph that is not rewritten."""
    inputs, _ = plain_inputs(gm)
    return with_dense_inputs(gm, _inner(gm, inputs, options, mode))


RECORDS = "triton.cudagraphs"
"""Inductor's name for recording CUDA graphs, as its modes give it."""


def _mode_options(mode: str | None) -> dict[str, Any]:
    """Return what a mode of Inductor's stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode else {}


def _inner(
    gm: fx.GraphModule,
    inputs: list[Any],
    options: CacheOptions,
    mode: str | None,
    *,
    records: bool = True,
) -> Compiled:
    """Compile what is left of the graph with the inner backend.

    Args:
        gm: The graph.
        inputs: What it is compiled for.
        options: They name the backend.
        mode: Inductor's mode.
        records: Whether Inductor may record CUDA graphs; those of a rewritten graph are ours,
            because its states change on the host.
    """
    if options.inner_backend == "eager":
        return gm.forward
    if options.inner_backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        patches = _mode_options(mode) | ({} if records else {RECORDS: False})
        return cast("Compiled", compile_fx(gm, inputs, config_patches=patches or None))
    return lookup_backend(options.inner_backend)(gm, inputs)


def _explain_compilation(program: Program) -> None:
    """Say why a function is compiled once more, after its first prefill and its first decode."""
    compilation = CompileContext.current_compile_id()
    number = 0 if compilation is None else compilation.frame_compile_id or 0
    if number < EXPECTED_COMPILATIONS:
        return
    kind = "decode" if any(s.has_past for s in program.streams.values()) else "prefill"
    # What TORCH_LOGS="recompiles" prints; there is no public name for it.
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    emit(
        Remark(
            "note",
            "KVC003",
            "backend",
            "",
            "",
            f"compilation {number + 1} of one function, a {kind} graph: {reason}",
            hint="another batch size, prompts of one token, another grad mode or a second prompt "
            "length cost one compilation each, once per process",
        )
    )


def _raise_first_miss(program: Program) -> None:
    for remark in program.remarks:
        if remark.kind != "passed" and remark.code not in HARMLESS:
            raise UnmatchedError(str(remark))


def _log(program: Program) -> None:
    """Say each miss once per place, however often Dynamo compiles."""
    for remark in program.remarks:
        if remark.kind != "passed" and remark.code not in UNLOGGED:
            emit(remark, once=f"{remark.site} {remark.where} {remark.reason}")


def _register() -> None:
    """Make the string "kvcompile" known where no installed entry point does.

    Dynamo registers what an entry point loads, and refuses a name that is registered already.
    """
    if not entry_points(group="torch_dynamo_backends", name="kvcompile"):
        register_backend(kvcompile, name="kvcompile")


_register()
wrappers.install(kvcompile)
auto_compile.install(kvcompile)
