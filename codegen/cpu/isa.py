"""Instruction sets: their flags, their vector vocabulary, and which of them this CPU has."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvcompile.codegen.cpu import vector_avx2, vector_avx512, vector_portable
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.spec import IsaName, Spec

EXP2_FRACTION = """
// 2^r for |r| <= 1/2: minimax polynomial, relative error 1.6e-8 before rounding
static inline vec exp2_fraction(vec r) {
  vec p = splat(1.5353362e-4f);
  p = fma(p, r, splat(1.33988739e-3f));
  p = fma(p, r, splat(9.61843692e-3f));
  p = fma(p, r, splat(5.55033237e-2f));
  p = fma(p, r, splat(2.40226477e-1f));
  p = fma(p, r, splat(6.93147182e-1f));
  return fma(p, r, splat(1.0f));
}
"""


@dataclass(frozen=True)
class Isa:
    """One instruction set that kernels can be printed for.

    Attributes:
        name: Name used in specs.
        lanes: fp32 lanes of a vector; divides the tile of 16 tokens.
        accumulators: Vector registers a fragment may fill with running sums.
        most_rows: Rows up to which a `linear` goes to the kernel: docs/decisions/0007. More than 4
            were measured with AVX2 alone.
        flags: Compiler flags.
        cpu_flags: What /proc/cpuinfo must list.
        vocabulary: The module with the C++ text of the vector functions.
    """

    name: IsaName
    lanes: int
    accumulators: int
    most_rows: int
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    vocabulary: ModuleType

    @property
    def f16c(self) -> bool:
        """Whether halves are converted by one instruction."""
        return "f16c" in self.cpu_flags

    def vector_text(self, storage: set[str], *, masked: bool, half: bool, exp2: bool = True) -> str:
        """Print the vocabulary for stores of the dtypes `storage`.

        Args:
            storage: Types of the words that are loaded into vectors.
            masked: Whether scores are masked.
            half: Whether rows end in half a vector.
            exp2: Whether powers are taken.
        """
        words = self.vocabulary
        texts = [words.VECTOR, *([EXP2_FRACTION, words.EXP2] if exp2 else [])]
        if masked:
            texts.append(words.MASKED)
        texts += [getattr(words, f"LOAD_{name.upper()}") for name in sorted(storage - {"fp32"})]
        if half:
            suffixes = {"fp32": "", "bf16": "_BF16", "fp16": "_FP16"}
            texts += [getattr(words, "HALF_LOAD" + suffixes[dtype]) for dtype in sorted(storage)]
        return "\n".join(text.strip("\n") for text in texts)


ISAS: dict[IsaName, Isa] = {
    "avx512": Isa(
        name="avx512",
        lanes=16,
        accumulators=24,
        most_rows=4,
        flags=("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        cpu_flags=frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
        vocabulary=vector_avx512,
    ),
    "avx2": Isa(
        name="avx2",
        lanes=8,
        accumulators=12,
        most_rows=12,
        flags=("-mavx2", "-mfma", "-mf16c"),
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        vocabulary=vector_avx2,
    ),
    "portable": Isa(
        name="portable",
        lanes=4,
        accumulators=12,
        most_rows=4,
        flags=(),
        cpu_flags=frozenset(),
        vocabulary=vector_portable,
    ),
}
"""Best first: `detect_isa` takes the first that the CPU has."""

INTEGER_DOT = "avx512_vnni"
"""What /proc/cpuinfo calls the dot product of bytes, which compute="int8" is made of."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the features of this CPU; empty where they cannot be read."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def available_isas() -> tuple[IsaName, ...]:
    """Return the instruction sets this CPU has, best first; "portable" is always among them."""
    return tuple(name for name, isa in ISAS.items() if isa.cpu_flags <= cpu_flags())


def detect_isa() -> IsaName:
    """Return the instruction set to compile for: $KVCOMPILE_ISA, else the best one.

    Raises:
        UnsupportedKernelError: $KVCOMPILE_ISA names none, or one that this CPU lacks.
    """
    asked = os.environ.get("KVCOMPILE_ISA")
    if not asked:
        return available_isas()[0]
    return require_isa(asked)


def require_isa(name: str) -> IsaName:
    """Return `name` if this CPU has it.

    Raises:
        UnsupportedKernelError: There is no such instruction set, or this CPU lacks it.
    """
    for known, isa in ISAS.items():
        if known == name:
            missing = sorted(isa.cpu_flags - cpu_flags())
            if missing:
                raise UnsupportedKernelError(
                    f"instruction set {name!r} needs {', '.join(missing)}, which this CPU lacks"
                )
            return known
    raise UnsupportedKernelError(f"unknown instruction set {name!r}; known: {', '.join(ISAS)}")


def has_integer_dot(isa: IsaName) -> bool:
    """Return whether attend kernels for `isa` may use compute="int8" on this CPU."""
    return isa == "avx512" and INTEGER_DOT in cpu_flags()


def compiler_flags(spec: Spec) -> tuple[str, ...]:
    """Return the compiler flags for the instructions that `spec` uses."""
    return ISAS[spec.isa].flags + (("-mavx512vnni",) if spec.compute == "int8" else ())


def require_cpu(spec: Spec) -> None:
    """Check that this CPU can run the kernel of `spec`.

    Raises:
        UnsupportedKernelError: It lacks the instruction set, or the dot product of bytes.
    """
    require_isa(spec.isa)
    if spec.compute == "int8" and not has_integer_dot(spec.isa):
        raise UnsupportedKernelError(f"compute int8 needs {INTEGER_DOT}, which this CPU lacks")
