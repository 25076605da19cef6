"""Where the bytes of a cache are, and which operators needed it dense."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console, RenderableType
from rich.table import Table

from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.store_bytes import StoreBytes

if TYPE_CHECKING:
    from kvcompile.runtime.arena import Arena
    from kvcompile.runtime.rows import Holding


@dataclass(frozen=True)
class LayerReport:
    """One store of a cache.

    Attributes:
        batch: Rows.
        length: Tokens of each row, left padding included.
        bytes: Bytes by part.
    """

    batch: int
    length: int
    bytes: StoreBytes


@dataclass(frozen=True)
class MemoryReport:
    """All bytes behind the handles of a cache. Pages shared by several stores count once.

    Attributes:
        layers: One entry per store, in the order in which the cache holds them.
        stored: Bytes of tokens, those of `window` among them.
        window: Bytes of tokens stored exactly beside quantized pages: sinks and ring.
        slack: Bytes of slots without a token, in pages that this cache holds.
        unused: Bytes of pages that are free, or held by another cache of the same arena.
        allocated: Bytes of all slabs: stored + slack + unused.
        tables: Block tables, left-padding counts, state and anchor tensors, slab tables, angles of
            rotary embedding.
        dense: Dense tensors that handles were turned into by writes and views.
        total: allocated + tables + dense: the sum of all distinct storages.
        materializations: Operator -> how often it needed the dense tensor.
    """

    layers: tuple[LayerReport, ...]
    stored: int
    window: int
    slack: int
    unused: int
    allocated: int
    tables: int
    dense: int
    total: int
    materializations: Mapping[str, int]

    def __rich__(self) -> RenderableType:
        """Return a table: a row per layer, then the totals."""
        table = Table(title=f"KV cache: {self.total:,} bytes", show_footer=True)
        columns = {
            "layer": "all",
            "rows": "",
            "tokens": "",
            "pages": f"{self.stored - self.window:,}",
            "window": f"{self.window:,}",
            "slack": f"{self.slack:,}",
            "tables": f"{self.tables:,}",
            "dense": f"{self.dense:,}",
        }
        for name, footer in columns.items():
            table.add_column(name, footer, justify="right")
        for number, layer in enumerate(self.layers):
            part = layer.bytes
            tables = part.block_table + part.starts + part.state
            sizes = (part.codes, part.window, part.slack, tables)
            table.add_row(
                str(number),
                str(layer.batch),
                str(layer.length),
                *(f"{size:,}" for size in (*sizes, part.dense)),
            )
        notes = [f"allocated {self.allocated:,} bytes, of which {self.unused:,} unused"]
        notes += [f"{count} x dense for {name}" for name, count in self.materializations.items()]
        table.caption = "\n".join(notes)
        return table

    def __str__(self) -> str:
        """Return the table as plain text."""
        text = io.StringIO()
        Console(file=text, width=100, no_color=True).print(self)
        return text.getvalue()


def memory_report(cache: object) -> MemoryReport:
    """Account for every byte behind the handles found in a cache object or container.

    Args:
        cache: Anything that holds handles: a transformers cache, tuples of (k, v), a module.
    """
    handles = list(handles_in(cache))
    stores = list({handle.store.key: handle.store for handle in handles if handle.store}.values())
    kept = [cell for h in handles if h.cell is not None for cell in h.cell.memory()]
    cells = {id(cell): cell for cell in kept}
    holdings = [holding for store in stores for holding in store.holdings()]
    arenas = {id(holding.arena): holding.arena for holding in holdings}
    layers = tuple(
        LayerReport(store.batch, max(store.k_len, store.v_len), store.stored_bytes())
        for store in stores
    )
    held, stored = _pages_of(holdings)
    _, window = _pages_of([h for store in stores for h in store.holdings()[1:]])
    allocated = sum(arena.allocated_bytes for arena in arenas.values())
    tables = sum(_table_bytes(arena) for arena in arenas.values()) + sum(
        layer.bytes.block_table + layer.bytes.starts + layer.bytes.state for layer in layers
    )
    angles = {
        id(store.rotary_table): store.rotary_table
        for store in stores
        if store.rotary_table is not None
    }
    tables += sum(table.nbytes for table in angles.values())
    dense = sum(layer.bytes.dense for layer in layers) + sum(cell.nbytes for cell in cells.values())
    counts: Counter[str] = Counter()
    for counter in {
        id(store.materializations): store.materializations for store in stores
    }.values():
        counts.update(counter)
    return MemoryReport(
        layers=layers,
        stored=stored,
        window=window,
        slack=held - stored,
        unused=allocated - held,
        allocated=allocated,
        tables=tables,
        dense=dense,
        total=allocated + tables + dense,
        materializations=dict(counts.most_common()),
    )


def handles_in(value: object) -> Iterator[KVTensor]:
    """Yield the handles reachable from an object through containers and attributes."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, KVTensor):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.Tensor)):
            stack.extend(reversed(list(vars(item).values())))


def _pages_of(holdings: list[Holding]) -> tuple[int, int]:
    """Return the bytes of all distinct pages, and of the tokens in them."""
    filled: dict[tuple[int, int], tuple[int, Holding]] = {}
    for holding in holdings:
        for page, tokens in holding.filled.items():
            known = filled.get((id(holding.arena), page), (0, holding))[0]
            filled[id(holding.arena), page] = (max(tokens, known), holding)
    held = sum(holding.arena.page_bytes for _, holding in filled.values())
    stored = sum(
        tokens * holding.arena.page_bytes // holding.page_size
        for tokens, holding in filled.values()
    )
    return held, stored


def _table_bytes(arena: Arena) -> int:
    return sum(tensor.nbytes for tensor in arena.tensors()) - arena.allocated_bytes
