"""Angles that q and new K turn by on their way into the kernels, and turning in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.codegen.rotary import Rotary


class Rope(NamedTuple):
    """Rotary embedding of the tokens of one call (RoFormer, https://arxiv.org/abs/2104.09864).

    Attributes:
        cos: [B or 1, 1, S, R], cosines of the R channels that turn, in the dtype of q and K.
        sin: The same of the sines.
        interleaved: Whether pair j is the channels 2j and 2j + 1, instead of j and j + R / 2.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    @property
    def key(self) -> tuple[int, bool]:
        """What a kernel is chosen by."""
        return self.cos.shape[3], self.interleaved

    @property
    def rotary(self) -> Rotary:
        """The channels that turn together."""
        return Rotary(*self.key)

    def fitting(self, x: torch.Tensor) -> Rope:
        """Return the angles of x [B, H, S, D], their channels side by side.

        Raises:
            ValueError: These are the angles of other tokens, or of another dtype.
        """
        cos, sin, interleaved = self
        rows, one, count, dim = cos.shape
        batch, _, tokens, channels = x.shape
        fits = rows in (1, batch) and one == 1 and count == tokens and sin.shape == cos.shape
        if not (fits and dim <= channels and cos.dtype == sin.dtype == x.dtype):
            raise ValueError(
                f"cosines {cos.dtype} {tuple(cos.shape)} and sines {sin.dtype} {tuple(sin.shape)} "
                f"are not those of {x.dtype} {tuple(x.shape)}"
            )
        if dim != 1 and (cos.stride(3) != 1 or sin.stride(3) != 1):
            return Rope(cos.contiguous(), sin.contiguous(), interleaved)
        return self

    def words(self) -> tuple[int, int, int, int, int, int]:
        """Return addresses and strides as a CPU's kernels take them."""
        cos, sin = self.steps()
        return (self.cos.data_ptr(), *cos, self.sin.data_ptr(), *sin)

    def steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the strides of rows and of tokens, of the cosines and of the sines."""
        shared = self.cos.shape[0] == 1
        (cos_row, _, cos_step, _), (sin_row, _, sin_step, _) = self.cos.stride(), self.sin.stride()
        return (0 if shared else cos_row, cos_step), (0 if shared else sin_row, sin_step)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return q or K [B, H, S, D], its first R channels turned in fp32 and rounded once."""
    dim = rope.cos.shape[3]
    turning = x[..., :dim].to(torch.float32)
    if rope.interleaved:
        partner = torch.stack([-turning[..., 1::2], turning[..., ::2]], -1).flatten(-2)
    else:
        partner = torch.cat([-turning[..., dim // 2 :], turning[..., : dim // 2]], -1)
    turned = turning * rope.cos + partner * rope.sin
    return torch.cat([turned.to(x.dtype), x[..., dim:]], -1)
