"""K and V of one attention in one tensor: how they lie in it, and where it enters and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FusedLayout:
    """Where K and V lie in the one tensor that is cached.

    Attributes:
        dim: The dimension that tells them apart, from 0 on: of size 2 and theirs alone, as in
            `[2, B, K, T, D]`, or one in which they follow each other, as in `[B, K, T, 2D]`.
        is_stacked: Whether the dimension is theirs alone.
        k_first: Whether K comes before V.
    """

    dim: int
    is_stacked: bool
    k_first: bool = True

    def __post_init__(self) -> None:
        """Check the numbers, which may come from a file.

        Raises:
            ValueError: There is no such layout.
        """
        # In the first dimension of four they would be rows.
        if self.dim not in (range(5) if self.is_stacked else range(1, 4)):
            raise ValueError(f"K and V in one tensor along dimension {self.dim}")

    def outer(self, dim: int) -> int:
        """Return which dimension of the fused tensor is dimension `dim` of K and of V."""
        return dim + (self.is_stacked and dim >= self.dim)

    def inner(self, dim: int) -> int:
        """Return which dimension of K and V is dimension `dim` of the fused tensor."""
        return dim - (self.is_stacked and dim > self.dim)

    def shape(self, k: Sequence[int], v: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the fused tensor of a K and a V."""
        if self.is_stacked:
            return (*k[: self.dim], 2, *k[self.dim :])
        return (*k[: self.dim], k[self.dim] + v[self.dim], *k[self.dim + 1 :])

    def join(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return K and V in one tensor."""
        both = (k, v) if self.k_first else (v, k)
        return torch.stack(both, self.dim) if self.is_stacked else torch.cat(both, self.dim)

    def part(self, fused: torch.Tensor, is_k: bool, size: int) -> torch.Tensor:
        """Return K or V as a view.

        Args:
            fused: K and V in one tensor.
            is_k: Whether K is asked for.
            size: Extent of K or V, whichever is asked for, in the dimension `dim`.
        """
        comes_first = is_k == self.k_first
        if self.is_stacked:
            return fused.select(self.dim, 0 if comes_first else 1)
        start = 0 if comes_first else fused.shape[self.dim] - size
        return fused.narrow(self.dim, start, size)


@dataclass(frozen=True)
class FusedState:
    """One fused state of a graph in which K and V were set apart.

    K and V follow the captured graph's inputs and outputs as inputs and outputs of their own.

    Attributes:
        layout: How K and V lie in the state.
        input: Position of the past among the inputs, or None.
        outputs: Positions of the state among the outputs.
        k_output: Position of K.
        v_output: Position of V.
        k_size: Extent of K in the layout's dimension, if they are not stacked there.
        v_size: The same of V.
    """

    layout: FusedLayout
    input: int | None
    outputs: tuple[int, ...]
    k_output: int
    v_output: int
    k_size: int
    v_size: int
