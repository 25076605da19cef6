"""What 8-bit floating-point formats hold, and what is hard to round to them."""

from __future__ import annotations

import torch

from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.formats.float8 import Float8Format

FLOAT8 = {name: format_ for name, format_ in FORMATS.items() if isinstance(format_, Float8Format)}


def finite_numbers(format_: Float8Format) -> torch.Tensor:
    """Return the finite numbers that are not below 0, in order, as fp32."""
    numbers = torch.arange(0x80, dtype=torch.uint8).view(format_.word).float()
    return numbers[numbers.isfinite()]


def hard_numbers(format_: Float8Format) -> torch.Tensor:
    """Return fp32 numbers of both signs, none beyond the largest of the format.

    They are its own, the points half-way between them, every power of two of fp32, subnormal ones
    included, what is half-way to the next power, and the neighbours of all.
    """
    own = finite_numbers(format_)
    powers = torch.exp2(torch.arange(-149, 16).double()).float()
    exact = torch.cat([own, (own[1:] + own[:-1]) / 2, powers, powers * 1.5])
    near = [exact.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    found = torch.cat([exact, *near])
    found = found[found.abs() <= own.max()]
    return torch.cat([found, -found])
