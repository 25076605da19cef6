"""The one table from (target, op) to the generator that prints it."""

from __future__ import annotations

from typing import Any

from kvcompile.codegen.cpu.append import AppendGenerator
from kvcompile.codegen.cpu.attend import AttendGenerator
from kvcompile.codegen.cpu.gather import GatherGenerator
from kvcompile.codegen.cpu.linear import LinearGenerator
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.gpu import append as gpu_append
from kvcompile.codegen.gpu import attend as gpu_attend
from kvcompile.codegen.gpu import gather as gpu_gather
from kvcompile.codegen.gpu.latent import LatentGenerator
from kvcompile.codegen.gpu.merge import MergeGenerator
from kvcompile.codegen.source import Generator, KernelSource, Unsupported
from kvcompile.codegen.spec import Spec

registry: dict[tuple[str, str], Generator[Any]] = {
    ("cpu", "append"): AppendGenerator(),
    ("cpu", "attend"): AttendGenerator(),
    ("cpu", "gather"): GatherGenerator(),
    ("cpu", "linear"): LinearGenerator(),
    ("gpu", "append"): gpu_append.AppendGenerator(),
    ("gpu", "attend"): gpu_attend.AttendGenerator(),
    ("gpu", "attend_latent"): LatentGenerator(),
    ("gpu", "gather"): gpu_gather.GatherGenerator(),
    ("gpu", "merge_splits"): MergeGenerator(),
}


def generate(spec: Spec) -> KernelSource:
    """Print the kernel of `spec`; equal specs give equal text.

    Raises:
        UnsupportedKernelError: No generator prints this spec; the message has reason and hint.
    """
    generator = registry.get((spec.target, spec.op))
    if generator is None:
        raise UnsupportedKernelError(f"nothing prints {spec.op!r} for target {spec.target!r}")
    answer = generator.supports(spec)
    if isinstance(answer, Unsupported):
        raise UnsupportedKernelError(f"{spec.symbol}: {answer.reason}. {answer.hint}")
    return generator.generate(spec)
