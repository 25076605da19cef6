"""What some attentions do to scores beside scaling and masking them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcompile.reference.attention import attention


class Variant(NamedTuple):
    """What an attention does beyond softmax(q K^T * scale + mask) V; see `reference.attention`.

    Attributes:
        softcap: Bound of the scaled scores.
        sinks: [H], a logit per query head that joins the softmax and is dropped behind it.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def key(self) -> object:
        """What decides about the kernel."""
        return self.softcap, None if self.sinks is None else self.sinks.dtype

    def sinks_as(self, dtype: torch.dtype, heads: int) -> torch.Tensor:
        """Return the sink logits as a kernel reads them.

        Args:
            dtype: Their type there.
            heads: Query heads.

        Raises:
            ValueError: They are not one per query head.
        """
        assert self.sinks is not None
        if self.sinks.shape != (heads,):
            raise ValueError(f"{tuple(self.sinks.shape)} sink logits for {heads} query heads")
        return self.sinks.to(dtype).contiguous()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Return attention over dense K and V in plain torch, [B, H, S, Dv] of q's dtype.

        Args:
            q: Queries [B, H, S, Dk].
            k: [B, K, T, Dk].
            v: [B, K, T, Dv].
            mask: Broadcasts to [B, H, S, T]; bool (True is visible) or additive.
            causal: Query token s sees the tokens t <= s.
            scale: Factor of the scores.
        """
        compute = torch.promote_types(q.dtype, torch.float32)
        out = attention(
            q.to(compute),
            k.to(compute),
            v.to(compute),
            mask=mask,
            causal=causal,
            scale=scale,
            softcap=self.softcap,
            sinks_H=self.sinks,
        ).to(q.dtype)
        return out.transpose(1, 2).contiguous().transpose(1, 2)


PLAIN = Variant()
"""An attention that does no more than that."""
