"""The smallest store with quantized pages, filled with dense tensors as if they were appended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile.codegen.formats import Role
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import MEANS
from kvcompile.codegen.spec import Compute
from tests.support.quantized_pages import QuantizedPages
from tests.support.rotary import mean_sizes

ROLES: tuple[Role, Role] = ("k", "v")


class QuantizedFakeStore(QuantizedPages):
    """Quantized pages, sinks and ring of one layer that hold given tokens.

    Attributes:
        compute: How launched kernels multiply.
    """

    extra_roundings = 3
    """A scale is multiplied in, a minimum added, and the dense element is their rounded sum."""

    MEAN_ROUNDINGS = 2 * MEANS + 3
    """A query times a mean is rounded three times, and added with a cosine and a sine per mean."""

    def __init__(
        self,
        layout: RecordLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        starts: Sequence[int],
        pending: int = 0,
        seed: int = 0,
        first_byte: int = 0,
        rotary_table: torch.Tensor | None = None,
    ) -> None:
        """Store k, v [B, K, T, D].

        Args:
            layout: Layout of the records.
            k: Keys, of the dtype of the model.
            v: Values.
            starts: Left-padding tokens per row.
            pending: Last quantized pages whose exact pages have entries in the table, and no page.
            seed: Decides where the pages lie.
            first_byte: How many bytes of each kind of pages come before those of this store.
            rotary_table: The angles that K turns by, if its turning mean is kept.
        """
        tokens = k.shape[2]
        super().__init__(
            layout,
            num_kv_heads=k.shape[1],
            dtype=k.dtype,
            tokens=tokens,
            starts=starts,
            seed=seed,
            first_byte=first_byte,
            rotary_table=rotary_table,
        )
        if rotary_table is not None:
            self.extra_roundings += self.MEAN_ROUNDINGS
        self.compute: Compute | None = "fp32"
        self.advance(tokens)
        self.ring_from.copy_((self.quantized - pending).clamp(min=0))
        self.reserve(tokens)
        for pool, held in zip((self.pages, self.exact), self.expected(k, v, tokens), strict=True):
            pool.memory.copy_(held)
        self._dense = dict(zip(ROLES, self.decoded(k, v), strict=True))
        self._terms = {role: dense.abs() for role, dense in self._dense.items()}
        for row, page, place in self.quantized_pages():
            sizes = self._sizes(self.pages.memory[self.pages.index(row, page)])
            for role, size in sizes.items():
                self._terms[role][row, :, place] = size

    def stored(self, role: Role, tokens: int) -> torch.Tensor:
        """Return the tokens below `tokens` as they are stored, [B, K, T, D], padding as zeros."""
        return self._dense[role][:, :, :tokens]

    def terms(self, role: Role, tokens: int) -> torch.Tensor:
        """Return |scale * code| + |minimum| of each element, or |x| if it is exact."""
        return self._terms[role][:, :, :tokens]

    def _sizes(self, record: torch.Tensor) -> dict[Role, torch.Tensor]:
        """Return what `terms` says of the elements of a record whose format is grouped."""
        decoded = self.layout.unpack(record, self.rotary_table)
        lowest = self.layout.unpack(_without_codes(self.layout, record), self.rotary_table)
        sizes = {
            role: (x.float() - minimum).abs() + minimum.abs()
            for role, x, minimum in zip(ROLES, decoded, lowest, strict=True)
            if self.layout.format(role).is_grouped
        }
        if "k" in sizes:
            sizes["k"] += 2 * mean_sizes(self.layout, record)
        return sizes


def _without_codes(layout: RecordLayout, record: torch.Tensor) -> torch.Tensor:
    """Return a record whose grouped parts hold code 0 everywhere: it decodes to the minima."""
    record = record.clone()
    for role in ROLES:
        format_, shape = layout.format(role), layout.part(role)
        if format_.is_grouped:
            begin = layout.v_offset if role == "v" else 0
            codes = shape.page_size * format_.channels(shape) * format_.bits // 8
            # 8-bit codes of V are stored as c - 128.
            flipped = format_.name == "int8" and role == "v"
            record[..., begin : begin + codes] = 128 if flipped else 0
    return record
