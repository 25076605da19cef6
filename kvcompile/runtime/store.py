"""The page store: K and V of one layer in pages, one block-table row per sequence.

Letters: B batch, K KV heads, S new tokens, D head dim, P page size. Lengths are Python integers.
They count columns: virtual left-padding tokens, which own no page, are among them, and tokens that
a sliding window has left behind are not. The token in column t of row b lives at index
`t - starts[b]` of that row. A store is not thread-safe; its arena is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime import launch
from kvcompile.runtime.dense import DenseCell, Materializations, dense_of
from kvcompile.runtime.derived import Derived
from kvcompile.runtime.device_tables import CountName, DeviceTables, Tables
from kvcompile.runtime.errors import CacheFullError, CacheGapError
from kvcompile.runtime.registry import ROLES, Role, anchor_for, register
from kvcompile.runtime.rows import Holding
from kvcompile.runtime.shapes import DenseShapes
from kvcompile.runtime.sliding import SlidingRows
from kvcompile.runtime.store_bytes import StoreBytes

if TYPE_CHECKING:
    from kvcompile.codegen.layout import RecordLayout
    from kvcompile.codegen.spec import Compute
    from kvcompile.runtime.arena import Arena
    from kvcompile.runtime.handle import KVTensor
    from kvcompile.runtime.rope import Rope
    from kvcompile.runtime.step import Step


HANDLES_BEFORE_SWEEP = 64


def store_kind(
    layout: RecordLayout, num_kv_heads: int, dtype: torch.dtype, is_static: bool, token_dim: int
) -> tuple[object, ...]:
    """Return what a graph must know of a store, as a tuple that is cheap to compare."""
    return layout.symbol, num_kv_heads, dtype, is_static, token_dim


New = torch.Tensor | None  # tokens of K or V, [B, K, S, D]; None leaves the role alone


class PagedStore(DenseShapes, SlidingRows):
    """K and V of one layer.

    Attributes:
        compute: How attention multiplies quantized K and V; None if they are exact.
        dtype: Dtype of the dense K and V it stands for.
        device: Device of pages and handles.
        k_len: Tokens of K, padding included; moved only by `commit` and `truncate`.
        v_len: The same of V. Eager code appends K and V one after the other.
        appended: Tokens written by the last `append`, committed or not.
        claimed: Whether a step is under way that will append to it and commit.
        readers: Steps under way that only read it.
        step: What it is lent for the step under way, on a GPU.
        kind: What a graph was compiled for; only stores of the same kind can take its tokens.
        cells: Per role the dense tensor a static buffer was turned into by a write or a view.
        materializations: Operator name -> how often it needed the dense tensor; shared by all
            stores that descend from one another.
    """

    def __init__(
        self,
        layout: RecordLayout,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        arena: Arena,
        *,
        batch: int,
        capacity: int | None = None,
        token_dim: int = 2,
    ) -> None:
        self.key = register(self)
        self.compute: Compute | None = None
        super().__init__(arena, layout.page_size, batch, capacity, self.key)
        self.layout = layout
        self.num_kv_heads = num_kv_heads
        self.dtype = dtype
        self.device = torch.device(device)
        self._device_tables = DeviceTables(self.device)
        self.step: Step | None = None
        self.token_dim = token_dim
        self.k_len = 0
        self.v_len = 0
        self.appended = 0
        self._prepared: tuple[int, int] | None = None
        self.claimed = False
        self.readers = 0
        self.materializations = Materializations()
        self.kind = store_kind(layout, num_kv_heads, dtype, capacity is not None, token_dim)
        self._handles: list[weakref.ref[KVTensor]] = []
        self.cells: dict[Role, DenseCell] = {}
        self.epoch = 0
        self._derived = Derived()
        self.anchors: dict[Role, torch.Tensor] = {r: anchor_for(self.key, r) for r in ROLES}

    def __repr__(self) -> str:
        kind = "grows" if self.capacity is None else f"capacity {self.capacity}"
        return (
            f"PagedStore(key {self.key}, batch {self.batch}, {self.num_kv_heads} KV heads, "
            f"K {self.k_len} and V {self.v_len} tokens, {kind}, "
            f"{sum(len(h.filled) for h in self.holdings())} pages)"
        )

    @property
    def keeps_later_tokens(self) -> bool:
        """Whether writing at a position leaves the tokens behind it as they are."""
        return self.capacity is not None

    @property
    def device_tables(self) -> Tables:
        """What GPU kernels read of it; empty where the kernels are a CPU's."""
        lent = None if self.step is None else self.step.tables
        return self._device_tables if lent is None else lent

    @property
    def length(self) -> int:
        """Tokens that have both K and V."""
        return min(self.k_len, self.v_len)

    def role_length(self, role: Role) -> int:
        """Return the tokens stored of one role."""
        if role == "kv":
            return self.length
        return self.k_len if role == "k" else self.v_len

    def reserve(self, past_len: int, new_len: int, role: Role | None = None) -> None:
        """Make pages for tokens past_len .. past_len + new_len - 1 of every row.

        Tokens from `past_len` on are dropped, except by a static store, whose later tokens stay
        as those of a dense buffer do. A page shared with another store or row is copied
        before it can be written.

        Args:
            past_len: First token to be written.
            new_len: Tokens to be written.
            role: The only role that will be written, or None for both.

        Raises:
            CacheGapError: If `past_len` is negative, or beyond the stored tokens.
            CacheFullError: If a static store cannot hold the tokens.
        """
        if past_len == self.k_len == self.v_len and past_len + new_len <= self._writable:
            return
        stored = self.length if role is None else self.role_length(role)
        end = past_len + new_len
        if self.capacity is not None and end > self.capacity and not self.overflows:
            raise CacheFullError(
                f"{end} tokens do not fit into a static cache of {self.capacity}; make its buffers "
                f"longer (at least {end}: max_cache_len of a StaticCache)"
            )
        if past_len < 0:
            raise CacheGapError(
                f"tokens were to be written at position {past_len}; a cache in pages counts "
                "positions from 0, not from its end"
            )
        if past_len > stored:
            raise CacheGapError(
                f"tokens at position {past_len} were to be appended to a cache of {stored} tokens; "
                f"positions must follow one another: start at {stored}, or at an earlier position "
                "to overwrite"
            )
        longest = max(self.k_len, self.v_len) if role is None else stored
        if past_len < longest and not self.keeps_later_tokens:
            self.truncate(past_len, role)
        self._own_pages(past_len, end, both=role is None)

    def append(
        self, k: New, v: New, past_len: int, *, attends: bool = False, rope: Rope | None = None
    ) -> None:
        """Write tokens from `past_len` on; the lengths move only with `commit`.

        Args:
            k: [B, K, S, D] of the store's dtype, or None to leave K alone.
            v: The same for V.
            past_len: Position of the first token.
            attends: Whether the same tokens will attend to the store.
            rope: What K turns by on its way in, if it comes unrotated.
        """
        new = k if k is not None else v
        if new is None:
            return
        if new.shape[0] != self.batch:
            told = f"{new.shape[0]} rows were to be appended to a cache of {self.batch} rows"
            raise ValueError(f"{told}; select rows of the cache first")
        role: Role | None = None if k is not None and v is not None else "v" if k is None else "k"
        if self._prepared != (past_len, new.shape[2]):
            self.reserve(past_len, new.shape[2], role)
            self.epoch += 1
        launch.append(self, k, v, past_len, rope)
        self.appended = past_len + new.shape[2]

    def prepare(self, past_len: int, new_len: int) -> None:
        """Do on the host what an append of K and V will ask for; see `reserve` for errors.

        Until the next commit, appending these tokens only launches kernels: a recorded step, whose
        kernels are launched without it, finds everything in place.
        """
        self.reserve(past_len, new_len)
        self.epoch += 1
        self._prepared = past_len, new_len

    def dense_for_chunk(self, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `stored` tokens for a chunk of queries: K and V [B, K, T, D]."""
        return launch.gather(self, "k", 0, stored), launch.gather(self, "v", 0, stored)

    def commit(self, length: int, role: Role | None = None) -> None:
        """Declare the tokens below `length` stored.

        Raises:
            CacheGapError: If they were not appended.
        """
        if length > self.appended and length > self.role_length(role or "k"):
            raise CacheGapError(
                f"{length} tokens were to be committed, but only {self.appended} were appended"
            )
        self._prepared = None
        static = self.keeps_later_tokens
        if role != "v":
            self.k_len = max(length, self.k_len) if static else length
        if role != "k":
            self.v_len = max(length, self.v_len) if static else length

    def abandon(self) -> None:
        """Forget what was appended since the last commit: the step that did it has failed."""
        self._prepared = None
        self._drop_pages(max(self.k_len, self.v_len))
        self.slide_back()

    def truncate(self, length: int, role: Role | None = None) -> None:
        """Drop the tokens from `length` on, and the pages nobody needs any more."""
        if role != "v":
            self.k_len = min(self.k_len, length)
        if role != "k":
            self.v_len = min(self.v_len, length)
        kept = max(self.k_len, self.v_len)
        self.epoch += 1
        self._drop_pages(kept)

    def set_starts(self, starts: Sequence[int]) -> None:
        """Declare the first `starts[b]` tokens of each row left padding; they own no page.

        Raises:
            CacheGapError: If tokens are stored already.
        """
        if self.k_len or self.v_len:
            raise CacheGapError(
                f"left padding was to be declared with {self.length} tokens stored; it can only "
                "be learned from the first mask"
            )
        if list(starts) != self._starts:
            self.truncate(0)
            self._write_starts(list(starts))

    def fork(self) -> PagedStore:
        """Return a store with the same tokens, sharing all pages until one of the two writes."""
        return self.select_rows(range(self.batch))

    def select_rows(self, index: Sequence[int]) -> PagedStore:
        """Return a store whose row i is this one's row `index[i]`, sharing pages."""
        return self._sharing([(self, i) for i in index])

    def joined(self, others: Sequence[PagedStore]) -> PagedStore:
        """Return a store with the rows of this one and then those of `others`, sharing pages.

        All must have the same arenas, layout and length.
        """
        return self._sharing([(store, i) for store in (self, *others) for i in range(store.batch)])

    def derive(
        self, what: object, role: Role, at_least: int, make: Callable[[], PagedStore]
    ) -> PagedStore:
        """Return the store that `make` makes, the same one for K and then for V.

        K and V are selected, cloned or forked one after the other; both must end up in one
        store. Each derived store is given once per role, so that two clones stay apart.

        Args:
            what: Names what is made.
            role: The role that asks.
            at_least: Tokens of the role that must be in it.
            make: Makes the store.
        """
        return self._derived.store((what, self.epoch), role, self.origin + at_least, make)

    def take_rows(self, sources: Sequence[tuple[PagedStore, int]], k_len: int, v_len: int) -> None:
        """Hold the pages of rows (store, number) of others; nothing is stored here before."""
        self.k_len, self.v_len = k_len, v_len
        self._share_rows(sources, max(k_len, v_len))
        for store, _ in sources:
            store._writable = 0

    def note(self, handle: KVTensor) -> None:
        """Remember a handle for as long as it lives."""
        self._handles.append(weakref.ref(handle))
        if len(self._handles) > HANDLES_BEFORE_SWEEP:
            self._handles = [ref for ref in self._handles if ref() is not None]

    def live_handles(self) -> list[KVTensor]:
        """Return the handles that stand for tokens of this store."""
        alive = [handle for ref in self._handles if (handle := ref()) is not None]
        return [handle for handle in alive if handle.store is self]

    def empty_like(self, batch: int | None = None) -> PagedStore:
        """Return an empty store of the same kind in the same arena."""
        store = self._new(self.batch if batch is None else batch)
        store.compute = self.compute
        store.materializations = self.materializations
        store.fuse(self.fused)
        return store

    def same_tokens(self, other: PagedStore) -> bool:
        """Whether both stores hold the same pages, lengths and padding."""
        return (self.k_len, self.v_len) == (other.k_len, other.v_len) and self._same_rows(other)

    def materialize(
        self,
        role: Role,
        length: int | None = None,
        operator: str = "materialize",
        begin: int | None = None,
    ) -> torch.Tensor:
        """Return the dense tensor of one role, laid out like its handle; count the need of it.

        Padding rows are zeros. Of a static store T is the capacity, and positions beyond the
        length are zeros.

        Args:
            role: K, V or both.
            length: Tokens from `begin` on; by default all.
            operator: What needs them.
            begin: The first token, counted from the first one ever stored; by default that in
                column 0.

        Raises:
            StaleHandleError: If these tokens are not stored.
        """
        self.materializations.add(operator)
        return dense_of(self, role, length, begin)

    def row_counts(self) -> dict[CountName, list[int]]:
        """Return what kernels must know of each row."""
        return {"starts": self.start_list()}

    def holdings(self) -> list[Holding]:
        """Return the distinct pages of each arena and how many tokens each holds."""
        return self._holdings(max(self.k_len, self.v_len))

    def stored_bytes(self) -> StoreBytes:
        """Return the exact bytes by part."""
        return StoreBytes.of(
            self.holdings(),
            block_table=sum(table.nbytes for table in self._tables()),
            starts=self.starts.nbytes,
            state=self.state.nbytes + sum(anchor.nbytes for anchor in self.anchors.values()),
            dense=sum(cell.nbytes for cell in self.cells.values()),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor the store owns outside its arenas."""
        cells = [tensor for cell in self.cells.values() for tensor in cell.tensors()]
        return [self.state, *self._tables(), self.starts, *self.anchors.values(), *cells]

    def _tables(self) -> list[torch.Tensor]:
        return [self.block_table, *self._device_tables.tensors()]

    def _new(self, batch: int) -> PagedStore:
        return PagedStore(
            self.layout,
            self.num_kv_heads,
            self.dtype,
            self.device,
            self.arena,
            batch=batch,
            capacity=self.capacity,
            token_dim=self.token_dim,
        )

    def _sharing(self, sources: Sequence[tuple[PagedStore, int]]) -> PagedStore:
        result = self.empty_like(len(sources))
        result.origin = self.origin
        result.take_rows(sources, self.k_len, self.v_len)
        return result
