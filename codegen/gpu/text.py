"""Printing Python: lines with indentation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


def jit(varying: Sequence[str]) -> str:
    """Return the decorator of a kernel.

    Args:
        varying: Parameters that change from call to call: Triton compiles a kernel anew for a
            number that is 1 or a multiple of 16, unless it is told not to.
    """
    return f"@triton.jit(do_not_specialize={list(varying)!r})".replace("'", '"')


class Writer:
    """Collects lines of a module."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, *lines: str) -> None:
        """Add lines at the current depth; an empty one stays empty."""
        for line in lines:
            self._lines.append("    " * self._depth + line if line else "")

    @contextlib.contextmanager
    def block(self, line: str) -> Iterator[None]:
        """Add a line and indent what follows."""
        self(line)
        self._depth += 1
        yield
        self._depth -= 1

    @property
    def text(self) -> str:
        """The module."""
        return "\n".join(self._lines) + "\n"
