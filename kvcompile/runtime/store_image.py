"""All that a store is: a description in names and numbers, and the bytes of its pages.

Whatever leaves a process (`pickling`, `cache_files`) or moves to another arena (`joining`) goes
this way, and comes back byte for byte: nothing is decoded, and nothing is quantized again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvcompile.codegen.cpu.isa import detect_isa, has_integer_dot
from kvcompile.codegen.errors import KvcompileError
from kvcompile.codegen.formats import Order
from kvcompile.codegen.layout import RecordLayout, Window, relayout
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import Compute
from kvcompile.passes.ir.fused import FusedLayout
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheFileError
from kvcompile.runtime.page_table import PageTable
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore
from kvcompile.runtime.targets import native_order

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class StoreImage:
    """What a store is, apart from the bytes of its pages.

    Attributes:
        layout: How a record stores tokens.
        num_kv_heads: K.
        dtype: Name of the dtype of the dense K and V.
        token_dim: Dimension of the dense K and V that counts tokens.
        capacity: Tokens of a static buffer, or None.
        compute: How attention multiplies quantized K and V.
        k_len: Tokens of K.
        v_len: Tokens of V.
        starts: The column of the first stored token of each row; below 0 behind a sliding window.
        origin: The token in column 0, counted from the first one ever stored.
        quantized: Quantized pages of each row; None if K and V are exact.
        tables: The pages of each row, by number: those of the layout, and with a window the
            exact ones beside them.
        fused: How K and V lie in one tensor, if the model caches them so.
    """

    layout: RecordLayout
    num_kv_heads: int
    dtype: str
    token_dim: int
    capacity: int | None
    compute: Compute | None
    k_len: int
    v_len: int
    starts: list[int]
    quantized: list[int] | None
    tables: list[list[list[int]]]
    fused: FusedLayout | None = None
    origin: int = 0

    def as_fields(self) -> dict[str, Any]:
        """Return it as numbers, strings, lists and dictionaries."""
        return asdict(self)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> StoreImage:
        """Return what `as_fields` gave.

        Raises:
            CacheFileError: It was not that.
        """
        try:
            layout = dict(fields["layout"])
            window, rotary = layout["window"], layout["rotary"]
            layout["window"] = None if window is None else Window(**window)
            layout["rotary"] = None if rotary is None else Rotary(**rotary)
            fused = fields.get("fused")
            fused = None if fused is None else FusedLayout(**fused)
            image = cls(**{**fields, "layout": RecordLayout(**layout), "fused": fused})
            image.check()
        except (AttributeError, KeyError, TypeError, ValueError, KvcompileError) as error:
            raise CacheFileError(
                f"the description of a saved cache cannot be read: {error!r}; it is damaged, or "
                "was written by another version of kvcompile"
            ) from error
        return image

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each table."""
        return [layout.page_bytes(self.num_kv_heads) for layout in self.layouts]

    @property
    def layouts(self) -> list[RecordLayout]:
        """Layout of the pages of each table."""
        return [self.layout, *([] if self.layout.window is None else [self.layout.exact])]

    def for_device(self, device: torch.device) -> StoreImage:
        """Return the image as the kernels of a device read records and multiply them.

        Raises:
            CacheFileError: They cannot.
        """
        order = native_order(device)
        if order == "gpu16" and self.layout.rotary is not None:
            raise CacheFileError(
                "the keys of a saved cache are freed of their bias, which GPU kernels cannot read; "
                "compile the model that makes the cache with separate_k_bias=False"
            )
        compute = self.compute
        other_kernels = order != self.layout.order
        lacks_integers = compute == "int8" and not has_integer_dot(detect_isa())
        if compute is not None and (other_kernels or lacks_integers):
            compute = "fp32"
        return replace(self, layout=self.layout.reordered(order), compute=compute)

    def check(self) -> None:
        """Check that every row has the pages that its length asks for.

        Raises:
            ValueError: It has not, or a number is out of range.
        """
        longest, window, size = (
            max(self.k_len, self.v_len),
            self.layout.window,
            self.layout.page_size,
        )
        if self.dtype not in DTYPES or self.token_dim not in (1, 2) or self.num_kv_heads < 1:
            raise ValueError(f"{self.num_kv_heads} heads of {self.dtype}")
        if min(self.k_len, self.v_len, self.origin) < 0 or max(0, *self.starts) > longest:
            raise ValueError(f"rows of {self.k_len} and {self.v_len} tokens begin at {self.starts}")
        if self.compute not in (None, "fp32", "fp16", "int8"):
            raise ValueError(f"compute {self.compute}")
        if self.capacity is not None and longest > self.capacity:
            raise ValueError(f"{longest} tokens in a buffer of {self.capacity}")
        stored = [longest - start for start in self.starts]
        expected = [[-(-tokens // size) for tokens in stored]]
        if window is not None:
            full = list(self.quantized or [])
            rows = list(zip(stored, full, strict=True))
            if any(f > max(n - window.num_sink_tokens, 0) // size for n, f in rows):
                raise ValueError(f"{full} quantized pages in rows of {stored} tokens")
            expected = [full, [window.exact_pages(n, f, size) for n, f in rows]]
        if [[len(row) for row in table] for table in self.tables] != expected:
            raise ValueError(f"the pages of {longest} tokens are not there")


def in_order(pages: torch.Tensor, layout: RecordLayout, order: Order) -> torch.Tensor:
    """Return pages uint8[pages, page_bytes] whose records lie in another order, bit for bit."""
    if layout.order == order or not len(pages):
        return pages
    records = pages.view(len(pages), -1, layout.record_bytes)
    return relayout(records, layout, order).view(len(pages), -1)


class PageNumbers:
    """Pages of one arena, numbered in the order in which they are first asked for."""

    def __init__(self, arena: Arena) -> None:
        """Begin without any."""
        self.arena = arena
        self._numbers: dict[int, int] = {}

    def of(self, pages: Sequence[int]) -> list[int]:
        """Return the numbers of pages; one that several rows share has one number."""
        return [self._numbers.setdefault(page, len(self._numbers)) for page in pages]

    def content(self) -> list[torch.Tensor]:
        """Return the bytes of each page, uint8[page_bytes], as views."""
        return [self.arena.page(page) for page in self._numbers]

    def stacked(self) -> torch.Tensor:
        """Return a copy of the bytes, uint8[pages, page_bytes]."""
        if not self._numbers:
            return torch.empty(0, self.arena.page_bytes, dtype=torch.uint8)
        return torch.stack(self.content())


def page_tables(store: PagedStore) -> list[PageTable]:
    """Return the page tables of a store: one, or those of quantized and of exact pages."""
    return [store.pages, store.exact] if isinstance(store, QuantizedStore) else [store.pages]


def numbers_of(store: PagedStore) -> list[PageNumbers]:
    """Return a numbering for each page table of a store."""
    return [PageNumbers(table.arena) for table in page_tables(store)]


def describe(store: PagedStore, numbers: Sequence[PageNumbers]) -> StoreImage:
    """Return what a store is.

    Args:
        store: Of which every step is committed: what `fork` returned.
        numbers: Numbers the pages of each table.
    """
    tables = zip(page_tables(store), numbers, strict=True)
    return StoreImage(
        layout=store.layout,
        num_kv_heads=store.num_kv_heads,
        dtype=str(store.dtype),
        token_dim=store.token_dim,
        capacity=store.capacity,
        compute=store.compute,
        k_len=store.k_len,
        v_len=store.v_len,
        starts=store.start_list(),
        quantized=store.row_counts().get("quantized"),
        tables=[[number.of(row) for row in table.rows] for table, number in tables],
        fused=store.fused,
        origin=store.origin,
    )


@contextmanager
def placed(
    arenas: Sequence[Arena], content: Sequence[Sequence[torch.Tensor]]
) -> Iterator[list[list[int]]]:
    """Copy pages to arenas, and hold them until somebody else does.

    Args:
        arenas: Where to.
        content: The bytes of the pages for each arena, uint8[page_bytes].

    Yields:
        The page ids in each arena.
    """
    held: list[list[int]] = []
    try:
        for arena, pages in zip(arenas, content, strict=True):
            held.append(arena.allocate(len(pages)))
            for page, data in zip(held[-1], pages, strict=True):
                arena.page(page).copy_(data)
        yield held
    finally:
        for arena, taken in zip(arenas, held, strict=False):
            arena.release(taken)


def restore(
    image: StoreImage,
    arenas: Sequence[Arena],
    pages: Sequence[Sequence[int]],
    rotary_table: torch.Tensor | None,
) -> PagedStore:
    """Return a store that holds pages which lie in arenas already.

    Args:
        image: What it is.
        arenas: One for each table.
        pages: Page ids by number, for each table.
        rotary_table: The angles that K turns by, if the layout keeps its turning mean.

    Raises:
        CacheFileError: There is no page of a number, or no angles.
    """
    rotary = image.layout.rotary
    words = None if rotary is None else rotary.table_words(image.layout.page_size)
    found = None if rotary_table is None else rotary_table.numel()
    if words != found or (rotary_table is not None and rotary_table.dtype != torch.float32):
        raise CacheFileError(
            f"a saved cache has {found} angles of rotary embedding, where its layout asks for "
            f"{words}; the file is damaged"
        )
    store = _empty(image, arenas, rotary_table)
    store.compute = image.compute
    store.fuse(image.fused)
    store.set_starts(image.starts)
    for table, rows, ids in zip(page_tables(store), image.tables, pages, strict=True):
        if any(not 0 <= number < len(ids) for row in rows for number in row):
            raise CacheFileError(f"a saved cache names pages that are not among its {len(ids)}")
        for b, row in enumerate(rows):
            table.share(b, [ids[number] for number in row])
        table.point_to_slabs()
    store.k_len, store.v_len, store.origin = image.k_len, image.v_len, image.origin
    if isinstance(store, QuantizedStore) and image.quantized is not None:
        store.set_quantized(image.quantized, image.quantized)
    return store


def _empty(
    image: StoreImage, arenas: Sequence[Arena], rotary_table: torch.Tensor | None
) -> PagedStore:
    kind = image.layout, image.num_kv_heads, DTYPES[image.dtype], arenas[0].device
    batch, capacity, token_dim = len(image.starts), image.capacity, image.token_dim
    if image.layout.window is None:
        return PagedStore(*kind, arenas[0], batch=batch, capacity=capacity, token_dim=token_dim)
    return QuantizedStore(
        *kind,
        (arenas[0], arenas[1]),
        batch=batch,
        capacity=capacity,
        token_dim=token_dim,
        rotary_table=rotary_table,
    )
