"""Cache formats: how one tensor of K or V is stored in a page."""

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats.base import TILE, Format, Role, padded_channels
from kvcompile.codegen.formats.exact import BF16, FP16, FP32

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in (FP32, BF16, FP16)}
"""Every format by name; a new format is one file and one entry."""


def get_format(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        UnsupportedKernelError: There is no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(FORMATS)
        raise UnsupportedKernelError(f"unknown cache format {name!r}; known: {known}") from None


__all__ = ["FORMATS", "TILE", "Format", "Role", "get_format", "padded_channels"]
