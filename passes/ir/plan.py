"""How each stream is stored: the decision of `plan-formats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import fx

    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.codegen.spec import Compute


@dataclass(frozen=True)
class StreamPlan:
    """Storage of one stream.

    Attributes:
        site: Index of the site.
        dtype: Dtype of the model's K and V, and of what the handle stands for.
        device: Where K and V are, and their pages.
        num_kv_heads: Records per page.
        layout: Formats, head dims and page size: the bytes of one record.
        compute: How attention multiplies quantized K and V; None if both are exact.
        frequencies: The input that holds the rotary frequencies, if the layout keeps the turning
            mean of K.
    """

    site: int
    dtype: torch.dtype
    device: torch.device
    num_kv_heads: int
    layout: RecordLayout
    compute: Compute | None = None
    frequencies: fx.Node | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `page_size` tokens of all KV heads."""
        return self.num_kv_heads * self.layout.record_bytes

    @property
    def exact_page_bytes(self) -> int:
        """Bytes of one exact page of all KV heads, beside quantized pages."""
        return self.num_kv_heads * self.layout.exact.record_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token of one sequence takes in this layer, when pages are full."""
        return self.page_bytes / self.layout.page_size
