"""What the dense tensors look like that a store stands for: K, V, or both in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.registry import Role, anchor_for

if TYPE_CHECKING:
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.passes.ir.fused import FusedLayout


class DenseShapes:
    """Shapes of the handles of a store, by role.

    Attributes:
        layout: How a record stores tokens.
        num_kv_heads: K.
        batch: B.
        capacity: Tokens of a static buffer, or None for a cache that grows.
        token_dim: Dimension of the dense K and V that counts tokens: 2 in [B, K, T, D], 1 in
            [B, T, K, D]. Kernels always see [B, K, S, D].
        fused: How K and V lie in one tensor, if the model caches them so; handles of the role "kv"
            are that tensor.
        key: Registry key.
        anchors: Per role the anchor int64[1] of its handles.
    """

    layout: RecordLayout
    num_kv_heads: int
    batch: int
    capacity: int | None
    token_dim: int
    fused: FusedLayout | None = None
    key: int
    anchors: dict[Role, torch.Tensor]

    def fuse(self, fused: FusedLayout | None) -> None:
        """Let the store stand for a tensor of K and V, too."""
        if fused is not None and fused != self.fused:
            self.fused = fused
            self.anchors["kv"] = anchor_for(self.key, "kv")

    def shape(self, role: Role, length: int) -> tuple[int, ...]:
        """Return the dense shape; the tokens of a static store are its capacity."""
        if role == "kv":
            assert self.fused is not None
            return self.fused.shape(self.shape("k", length), self.shape("v", length))
        dim = self.layout.head_dim_qk if role == "k" else self.layout.head_dim_vo
        tokens = length if self.capacity is None else self.capacity
        if self.token_dim == 1:
            return (self.batch, tokens, self.num_kv_heads, dim)
        return (self.batch, self.num_kv_heads, tokens, dim)

    def token_dim_of(self, role: Role) -> int:
        """Return the dimension of a handle that counts tokens."""
        if role != "kv" or self.fused is None:
            return self.token_dim
        return self.fused.outer(self.token_dim)

    def batch_dim_of(self, role: Role) -> int:
        """Return the dimension of a handle that counts rows."""
        return 0 if role != "kv" or self.fused is None else self.fused.outer(0)

    def parts_of(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a dense tensor of both, as views."""
        layout = self.fused
        assert layout is not None
        k_size, v_size = self.part_sizes(layout)
        return layout.part(fused, True, k_size), layout.part(fused, False, v_size)

    def part_sizes(self, layout: FusedLayout) -> tuple[int, int]:
        """Return the extents of K and V in the dimension that tells them apart; 1 if stacked."""
        if layout.is_stacked:
            return 1, 1
        return self.shape("k", 0)[layout.dim], self.shape("v", 0)[layout.dim]

    def role_at(self, start: int, length: int | None = None) -> Role | None:
        """Return whether K or V lies there in the dimension that tells them apart.

        Args:
            start: Where in the dimension it begins.
            length: How far it reaches; None for an index into a dimension that is theirs alone.
        """
        layout = self.fused
        if layout is None or layout.is_stacked is not (length is None):
            return None
        roles: tuple[Role, Role] = ("k", "v") if layout.k_first else ("v", "k")
        if length is None:
            return roles[start]
        sizes = self.part_sizes(layout)[:: 1 if layout.k_first else -1]
        places = [(0, sizes[0]), (sizes[0], sizes[1])]
        return roles[places.index((start, length))] if (start, length) in places else None

    def heads_first(self, dense: torch.Tensor) -> torch.Tensor:
        """Return a dense K or V, laid out like the handles, as [B, K, T, D]."""
        return dense.transpose(1, 2) if self.token_dim == 1 else dense
