"""From a spec to a callable: print, compile or find in the cache, load."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvcompile.codegen import artifacts
from kvcompile.codegen.cpu import toolchain
from kvcompile.codegen.cpu.abi import packed_arguments
from kvcompile.codegen.cpu.headers import compile_kernel
from kvcompile.codegen.cpu.isa import compiler_flags, require_cpu
from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.codegen.registry import generate
from kvcompile.codegen.source import KernelSource
from kvcompile.codegen.spec import Spec

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Kernel(Generic[S]):
    """A loaded kernel.

    Attributes:
        spec: What it computes.
        library: The shared library it lives in.
        pack: Packs the arguments: addresses, strides and sizes as integers, see `abi`.
        enter: Runs the kernel on packed arguments and returns a status: 0, or positive if the
            arguments make no sense. `enter(pack(...))` is the cheapest call there is.
        scratch_bytes: attend only: (batch, num_kv_heads, query_len, kv_len) -> bytes.
    """

    spec: S
    library: Path
    pack: Callable[..., bytes]
    enter: Callable[[bytes], int]
    scratch_bytes: Callable[[int, int, int, int], int] | None

    def call(self, *arguments: float) -> int:
        """Run the kernel and return its status."""
        return self.enter(self.pack(*arguments))


_kernels: dict[Spec, Kernel[Any]] = {}
_lock = threading.Lock()


def load(spec: S) -> Kernel[S]:
    """Return the kernel of `spec`, compiled at most once per cache and loaded once per process.

    Raises:
        UnsupportedKernelError: No printer prints it, or this CPU lacks its instructions.
        CompilerNotFoundError: It has to be compiled and there is no compiler.
        KernelCompilationError: The compiler failed, or its output cannot be loaded.
    """
    kernel = _kernels.get(spec)
    if kernel is None:
        require_cpu(spec)
        with _lock:
            kernel = _kernels.get(spec)
            if kernel is None:
                kernel = _kernels[spec] = load_source(generate(spec))
    return kernel


def forget_loaded() -> None:
    """Forget the loaded kernels, so that the next `load` looks at the disk again."""
    _kernels.clear()


def load_source(source: KernelSource) -> Kernel[Any]:
    """Compile and load a printed text, without the memory of `load`.

    Raises:
        CompilerNotFoundError: It has to be compiled and there is no compiler.
        KernelCompilationError: The compiler failed, or its output cannot be loaded.
    """
    spec = source.spec
    flags = compiler_flags(spec)
    try:
        return _open(spec, compile_text(spec.symbol, source.text, flags))
    except _UnloadableError:
        # Whole, and of no use here: damaged together with its fingerprint, or of another machine.
        return _open(spec, compile_text(spec.symbol, source.text, flags, anew=True))


class _UnloadableError(KernelCompilationError):
    """A library cannot be loaded."""


def compile_text(name: str, text: str, flags: tuple[str, ...], *, anew: bool = False) -> Path:
    """Return the shared library of a C++ text, from the cache or compiled now.

    Args:
        name: What the folder in the cache begins with.
        text: The source.
        flags: Of the compiler, beside those of every kernel.
        anew: Compile it even if the cache has it.

    Raises:
        CompilerNotFoundError: There is no compiler.
        KernelCompilationError: The compiler failed, or the cache cannot be written.
    """
    compiler = toolchain.find_compiler()
    key = (text, platform.machine(), *compiler.key, *flags)

    def build(source: Path, library: Path) -> None:
        compile_kernel(compiler, source, library, flags)

    return artifacts.load_or_build(artifacts.artifact_directory(name, *key), text, build, anew=anew)


def _open(spec: S, library: Path) -> Kernel[S]:
    try:
        loaded = ctypes.CDLL(str(library))
        enter = loaded[f"{spec.symbol}_packed"]
        scratch_bytes = loaded[f"{spec.symbol}_scratch_bytes"] if spec.op == "attend" else None
    except (OSError, AttributeError) as error:
        raise _UnloadableError(f"{library} cannot be loaded: {error}") from error
    enter.argtypes, enter.restype = [ctypes.c_char_p], ctypes.c_int64
    if scratch_bytes is not None:
        scratch_bytes.argtypes, scratch_bytes.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    return Kernel(spec, library, packed_arguments(spec).pack, enter, scratch_bytes)
