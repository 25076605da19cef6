"""What a generator is and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcompile.codegen.spec import Spec

S_contra = TypeVar("S_contra", bound=Spec, contravariant=True)


@dataclass(frozen=True)
class KernelSource:
    """The printed text of one kernel."""

    spec: Spec
    text: str


@dataclass(frozen=True)
class Supported:
    """A generator can print the spec."""


@dataclass(frozen=True)
class Unsupported:
    """A generator cannot print the spec; both sentences go into the remark as they are."""

    reason: str
    hint: str


class Generator(Protocol, Generic[S_contra]):
    """Prints the kernels of one (target, op)."""

    def supports(self, spec: S_contra) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        ...

    def generate(self, spec: S_contra) -> KernelSource:
        """Print a supported spec: pure, no device, no torch state, no clock."""
        ...
