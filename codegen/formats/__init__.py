"""Cache formats: how one tensor of K or V is stored in a page."""

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats.base import (
    TILE,
    Coded,
    Format,
    Order,
    PartShape,
    Role,
    decode,
    encode,
    padded_channels,
)
from kvcompile.codegen.formats.exact import BF16, FP16, FP32
from kvcompile.codegen.formats.float8 import FP8, FP8_E5M2
from kvcompile.codegen.formats.integer import INT1, INT2, INT3, INT4, INT8

FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (FP32, BF16, FP16, FP8, FP8_E5M2, INT8, INT4, INT3, INT2, INT1)
}
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


__all__ = [
    "FORMATS",
    "TILE",
    "Coded",
    "Format",
    "Order",
    "PartShape",
    "Role",
    "decode",
    "encode",
    "get_format",
    "padded_channels",
]
