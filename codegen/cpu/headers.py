"""The headers of vector kernels, parsed once: a precompiled header beside the kernels in the cache.

GCC's `<immintrin.h>` declares every instruction set there is. Parsing it, and the standard headers,
takes 0.6 s of the 1.5 s that an attend kernel takes. The printed text stays whole: the compiler
includes the same headers once more before it, precompiled, and skips the text's own lines. What
comes out is the same library bit by bit, so its key says nothing of this.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from kvcompile.codegen import artifacts
from kvcompile.codegen.cpu.toolchain import Compiler, compile_header, compile_shared
from kvcompile.codegen.errors import KernelCompilationError

SLOW_TO_PARSE = "#include <immintrin.h>"
"""Texts with this line are compiled with the precompiled header; for others it gains too little."""

KERNELS_BEFORE = 2
"""Kernels a process compiles before it makes the header, which takes as long as it saves on two.

Most users compile no more; one that is in the cache is used at once.
"""

HEADERS = f"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
{SLOW_TO_PARSE}
"""

_headers: dict[Path, Path | None] = {}
_compiled_without: Counter[Path] = Counter()


def compile_kernel(compiler: Compiler, source: Path, library: Path, flags: tuple[str, ...]) -> None:
    """Compile a printed text; a precompiled header that is of no use never fails it.

    Raises:
        KernelCompilationError: The compiler refused the text by itself, crashed or took too long.
    """
    key = (HEADERS, platform.machine(), *compiler.key, *flags)
    directory = artifacts.artifact_directory("headers", *key)
    headers = None
    if SLOW_TO_PARSE in source.read_text():
        headers = _precompiled(directory, compiler, flags)
    if headers is not None:
        try:
            compile_shared(compiler, source, library, (*flags, "-include", str(headers)))
            return
        except KernelCompilationError:
            # Deleted meanwhile, or refused by this compiler: one that is not GCC, or has changed.
            _headers[directory] = None
    compile_shared(compiler, source, library, flags)


def _precompiled(directory: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path | None:
    """Return the header to include, its precompiled form beside it; None to do without."""
    if directory not in _headers:
        found = artifacts.try_load(directory, artifacts.HEADER_FILES) is not None
        if not found and _compiled_without[directory] < KERNELS_BEFORE:
            _compiled_without[directory] += 1
            return None
        _headers[directory] = _found_or_built(directory, compiler, flags)
    return _headers[directory]


def _found_or_built(directory: Path, compiler: Compiler, flags: tuple[str, ...]) -> Path | None:
    def build(source: Path, output: Path) -> None:
        compile_header(compiler, source, output, flags)

    try:
        output = artifacts.load_or_build(directory, HEADERS, build, files=artifacts.HEADER_FILES)
    except KernelCompilationError:
        return None
    return output.with_name(artifacts.HEADER_FILES.source)
