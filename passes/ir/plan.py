"""How each stream is stored: the decision of `plan-formats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvcompile.codegen.layout import RecordLayout


@dataclass(frozen=True)
class StreamPlan:
    """Storage of one stream.

    Attributes:
        site: Index of the site.
        dtype: Dtype of the model's K and V, and of what the handle stands for.
        num_kv_heads: Records per page.
        layout: Formats, head dims and page size: the bytes of one record.
    """

    site: int
    dtype: torch.dtype
    num_kv_heads: int
    layout: RecordLayout

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `page_size` tokens of all KV heads."""
        return self.num_kv_heads * self.layout.record_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token of one sequence takes in this layer, when pages are full."""
        return self.page_bytes / self.layout.page_size
