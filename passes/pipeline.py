"""The compiler in one tuple, and the loop that runs it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcompile.codegen.errors import KvcompileError
from kvcompile.passes.canonicalize import Canonicalize
from kvcompile.passes.fuse_rope import FuseRope
from kvcompile.passes.infer_dataflow import InferDataflow
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.verify import verify
from kvcompile.passes.lower_kernels import LowerKernels
from kvcompile.passes.match_attention import MatchAttention
from kvcompile.passes.plan_formats import PlanFormats
from kvcompile.passes.rewrite_linear import RewriteLinear
from kvcompile.passes.rewrite_paged import RewritePaged
from kvcompile.passes.split_fused import SplitFused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcompile.passes.base import Pass, PassOptions

PIPELINE: tuple[Pass, ...] = (
    Canonicalize(),  # one spelling of everything, so that the passes after it stay small
    MatchAttention(),
    SplitFused(),  # behind it, K and V are tensors of their own
    InferDataflow(),
    PlanFormats(),
    RewritePaged(),
    FuseRope(),
    RewriteLinear(),  # once attention has its own operators, what is left are plain products
    LowerKernels(),  # last: it drops metadata that the passes before it read
)


class PassError(KvcompileError):
    """A pass raised; carries its name and the original exception as the cause."""


Observer = Callable[[Program], None]


def run_pipeline(
    program: Program,
    options: PassOptions,
    *,
    verify_each: bool = False,
    observe: Observer | None = None,
) -> Program:
    """Run every pass over the program.

    Args:
        program: At stage `CAPTURED`; changed in place and returned.
        options: What passes decide by.
        verify_each: Check the stage's invariant after every pass, not only at the end.
        observe: Called after every pass, and once before the first.

    Raises:
        PassError: A pass raised; the program is then unusable.
        InvariantError: A pass did not deliver its stage.
    """
    if observe is not None:
        observe(program)
    with _collector_paused():
        _run(program, options, verify_each=verify_each, observe=observe)
    return program


def _run(
    program: Program, options: PassOptions, *, verify_each: bool, observe: Observer | None
) -> None:
    for step in PIPELINE:
        start = time.perf_counter()
        try:
            step.run(program, options)
        except KvcompileError:
            raise
        except Exception as error:
            raise PassError(f"pass {step.name}: {type(error).__name__}: {error}") from error
        program.seconds[step.name] = time.perf_counter() - start
        program.stage, program.made_by = step.gives, step.name
        if verify_each or step is PIPELINE[-1]:
            verify(program)
        if observe is not None:
            observe(program)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Leave garbage for later, as the passes make objects by the thousand and few cycles.

    A process that holds a compiled model has close to a million objects; one full collection
    among them takes half a second, and a graph of 30 layers set off one to three.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
