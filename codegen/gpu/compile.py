"""From a spec to a Triton function, and to machine code: the printed module on disk, imported.

Triton reads the source of what it compiles, so a module has to be a file; it lies in the cache of
kernels, where a reader, a debugger and a profiler find it. Triton itself is imported here and
nowhere else, and only when a kernel is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvcompile.codegen.artifacts import artifact_directory, write_source
from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.codegen.gpu.schedule import Schedule
from kvcompile.codegen.gpu.signature import multiples_of_16, parameter_types
from kvcompile.codegen.registry import generate
from kvcompile.codegen.spec import IsaName, KernelSpec, Spec


def gpu_isa() -> IsaName:
    """Return what kernels may use beyond Triton: inline PTX, where NVIDIA runs them.

    Triton's interpreter and AMD's compiler know no PTX.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if interpreted or torch.version.hip else "ptx"


def out_of_room() -> type[Exception]:
    """Return what a launch raises that takes more registers or shared memory than there are."""
    from triton.runtime.errors import OutOfResources

    found: type[Exception] = OutOfResources
    return found


@cache
def load(spec: Spec) -> Any:
    """Return the Triton function of `spec`.

    Raises:
        UnsupportedKernelError: No generator prints this spec.
        ImportError: Triton is not installed.
    """
    source = generate(spec)
    directory = artifact_directory(spec.symbol, source.text)
    path = write_source(directory, "kernel.py", source.text)
    name = f"kvcompile_{directory.name.replace('-', '_')}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return getattr(module, spec.symbol)


def compile_ahead(spec: KernelSpec, target: str, schedule: Schedule) -> Any:
    """Return what Triton compiles an attend kernel to; no GPU is needed.

    Args:
        spec: A spec of attend.
        target: A GPU by its architecture: "sm_90" and the like, or "gfx942".
        schedule: How to compile it.

    Raises:
        KernelCompilationError: Functions are interpreted in this process (TRITON_INTERPRET).
        UnsupportedKernelError: No generator prints this spec.
        ImportError: Triton is not installed.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load(spec)
    if not isinstance(function, triton.JITFunction):
        raise KernelCompilationError("TRITON_INTERPRET is set: there is no machine code")
    types = parameter_types(spec)
    aligned = [function.arg_names.index(name) for name in multiples_of_16(types)]
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs={},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    is_nvidia = target.startswith("sm_")
    gpu = (
        GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        if is_nvidia
        else GPUTarget("hip", target, 64)
    )
    options = {"num_warps": schedule.num_warps, "num_stages": schedule.num_stages}
    # Said, not left to a default that differs among versions of Triton.
    return triton.compile(source, target=gpu, options={**options, "enable_fp_fusion": True})


def disassembler() -> Path:
    """Return the program that prints NVIDIA's machine code; it comes with Triton.

    Raises:
        ImportError: Triton is not installed.
    """
    from triton.backends import nvidia

    return Path(nvidia.__file__).parent / "bin" / "cuobjdump"
