"""From a spec to a Triton function: the printed module on disk, imported.

Triton reads the source of what it compiles, so a module has to be a file; it lies in the cache of
kernels, where a reader, a debugger and a profiler find it. Triton itself is imported here and
nowhere else, and only when a kernel is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from typing import Any

import torch

from kvcompile.codegen.artifacts import artifact_directory, write_source
from kvcompile.codegen.registry import generate
from kvcompile.codegen.spec import IsaName, Spec


def gpu_isa() -> IsaName:
    """Return what kernels may use beyond Triton: inline PTX, where NVIDIA runs them.

    Triton's interpreter and AMD's compiler know no PTX.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if interpreted or torch.version.hip else "ptx"


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
