"""Angles that q and new K turn by on their way into the kernels, and turning in plain torch."""

from __future__ import annotations

import torch

from kvcompile.codegen.rotary import Rotary


class Rope:
    """Rotary embedding of the tokens of one call (RoFormer, https://arxiv.org/abs/2104.09864).

    The layers of a step turn by the same angles, so whatever follows from these is kept with them.

    Attributes:
        cos: [B or 1, 1, S, R], cosines of the R channels that turn, side by side.
        sin: The same of the sines.
        interleaved: Whether pair j is the channels 2j and 2j + 1, instead of j and j + R / 2.
        key: R and `interleaved`: what a kernel is chosen by.
        strides: Strides of rows and of tokens, of the cosines and then of the sines.
        words: Addresses and strides as a CPU's kernels take them.
    """

    __slots__ = ("_rows", "_tokens", "cos", "interleaved", "key", "sin", "strides", "words")

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
        """Take angles of any strides.

        Raises:
            ValueError: Cosines and sines do not go together.
        """
        rows, one, tokens, dim = cos.shape
        if one != 1 or sin.shape != cos.shape or sin.dtype != cos.dtype:
            raise ValueError(f"cosines {_described(cos)} do not go with sines {_described(sin)}")
        self.cos = cos if cos.stride(3) == 1 else cos.contiguous()
        self.sin = sin if sin.stride(3) == 1 else sin.contiguous()
        self.interleaved = interleaved
        self.key = dim, interleaved
        self._rows, self._tokens = rows, tokens
        of_cos, of_sin = (
            (x.stride(0) if rows != 1 else 0, x.stride(2)) for x in (self.cos, self.sin)
        )
        self.strides = of_cos, of_sin
        self.words = (self.cos.data_ptr(), *of_cos, self.sin.data_ptr(), *of_sin)

    @property
    def rotary(self) -> Rotary:
        """The channels that turn together."""
        return Rotary(*self.key)

    def check(self, x: torch.Tensor) -> None:
        """Check that these are the angles of x [B, H, S, D].

        Raises:
            ValueError: They are those of other tokens, or of another dtype.
        """
        batch, _, tokens, channels = x.shape
        fits = self._rows in (1, batch) and self._tokens == tokens and self.key[0] <= channels
        if not fits or x.dtype != self.cos.dtype:
            raise ValueError(f"angles {_described(self.cos)} are not those of {_described(x)}")


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


_last: list[tuple[torch.Tensor, torch.Tensor, Rope]] = []


def rope_of(cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Rope:
    """Return `Rope(cos, sin, interleaved)`, made once for the layers that share the tensors."""
    if _last:
        its_cos, its_sin, rope = _last[0]
        if its_cos is cos and its_sin is sin and rope.interleaved == interleaved:
            return rope
    rope = Rope(cos, sin, interleaved)
    if rope.cos is cos and rope.sin is sin:  # of a copy, nobody would know that it is out of date
        _last[:] = [(cos, sin, rope)]
    return rope


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
