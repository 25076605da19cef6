"""A dense cache that returns what a quantized one would: the oracle of whole generations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.spec import MOST_QUERIES


class EmulatedCache(DynamicCache):
    """Keeps K and V exactly, and shows attention the pages that are old enough decoded.

    A prefill sees its own tokens exactly, as it does under kvcompile, and so does a later chunk of
    a prompt, which sees the tokens before it as they were.
    """

    def __init__(
        self,
        config: Any,
        layout: RecordLayout,
        starts: list[int] | None = None,
        rotary_table: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layout = layout
        self.rotary_table = rotary_table
        self.starts = starts

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V [B, K, S, D]; return all of them with old pages decoded."""
        past = self.get_seq_length(layer_idx)
        k, v = super().update(key_states, value_states, layer_idx, *args, **kw)
        return self._decoded(k, v, past if key_states.shape[2] > MOST_QUERIES else k.shape[2])

    def _decoded(
        self, k: torch.Tensor, v: torch.Tensor, stored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the pages that `stored` tokens have made old enough."""
        window, size = self.layout.window, self.layout.page_size
        assert window is not None
        k, v = k.clone(), v.clone()
        for row, start in enumerate(self.starts or [0] * k.shape[0]):
            for page in range(window.full_pages(stored - start, size)):
                first = start + window.num_sink_tokens + page * size
                part = (row, slice(None), slice(first, first + size))
                record = self.layout.pack(k[part], v[part], self.rotary_table)
                k[part], v[part] = self.layout.unpack(record, self.rotary_table)
        return k, v


def layout_of(
    config: Any, k_format: str, v_format: str, exact: str = "fp32", **window: int
) -> RecordLayout:
    """Return the layout that the backend's default options give a model.

    Args:
        config: Of a transformers decoder.
        k_format: Format of K.
        v_format: Format of V.
        exact: Format of the model's dtype.
        **window: `num_sink_tokens`, `residual_length`, where they are not the defaults.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"num_sink_tokens": 4, "residual_length": 64} | window
    return RecordLayout(k_format, v_format, head_dim, head_dim, 64, 64, Window(exact, **sizes))
