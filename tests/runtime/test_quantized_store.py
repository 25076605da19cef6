"""Stores with quantized pages, against a row-by-row model of what is quantized and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.runtime import launch
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.registry import ROLES
from kvcompile.runtime.report import memory_report
from tests.support.stores import HEADS, PAGE, new_tokens, push, quantized_store


@dataclass
class Row:
    """The tokens of one sequence, as a cache returns them, and how many pages are quantized."""

    layout: RecordLayout
    start: int
    k: torch.Tensor
    v: torch.Tensor
    full: int = 0
    dtype: torch.dtype = torch.float32

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add tokens [K, S, D] and quantize what has become old enough."""
        window, size = self.layout.window, self.layout.page_size
        assert window is not None
        self.k = torch.cat([self.k, k], 1)
        self.v = torch.cat([self.v, v], 1)
        stored = self.k.shape[1]
        while window.num_sink_tokens + (self.full + 1) * size + window.residual_length <= stored:
            first = window.num_sink_tokens + self.full * size
            page = slice(first, first + size)
            k, v = self.layout.unpack(self.layout.pack(self.k[:, page], self.v[:, page]))
            self.k[:, page], self.v[:, page] = k.to(self.dtype), v.to(self.dtype)
            self.full += 1

    def truncate(self, stored: int) -> None:
        """Drop tokens; a page that is cut becomes part of the ring again."""
        window = self.layout.window
        assert window is not None
        self.k, self.v = self.k[:, :stored], self.v[:, :stored]
        whole = max(stored - window.num_sink_tokens, 0) // self.layout.page_size
        self.full = min(self.full, whole)

    def copy(self) -> Row:
        """Return an independent row with the same tokens."""
        return Row(self.layout, self.start, self.k.clone(), self.v.clone(), self.full, self.dtype)


@dataclass
class Model:
    """A store and its rows."""

    store: QuantizedStore
    rows: list[Row]
    length: int = 0

    def append(self, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        """Append K, V [B, K, S, D] at a position."""
        if position < self.length:
            self.truncate(position)
        self.length = position + k.shape[2]
        for b, row in enumerate(self.rows):
            first = max(row.start - position, 0)
            row.append(k[b, :, first:], v[b, :, first:])

    def truncate(self, length: int) -> None:
        """Drop the tokens from a position on."""
        self.length = min(self.length, length)
        for row in self.rows:
            row.truncate(max(self.length - row.start, 0))
            row.start = min(row.start, self.length)

    def check(self) -> None:
        """Hold the store against the rows, bit by bit."""
        assert self.store.k_len == self.store.v_len == self.length
        assert self.store.quantized.tolist() == [row.full for row in self.rows]
        k, v = self.store.materialize("k"), self.store.materialize("v")
        for b, row in enumerate(self.rows):
            assert torch.equal(k[b, :, row.start :], row.k.to(k.dtype))
            assert torch.equal(v[b, :, row.start :], row.v.to(v.dtype))
            assert not k[b, :, : row.start].any()


def new_model(store: QuantizedStore, starts: list[int]) -> Model:
    """Return the model of an empty store with left padding."""
    store.set_starts(starts)
    dims = (store.layout.head_dim_qk, store.layout.head_dim_vo)
    k, v = (torch.empty(HEADS, 0, dim, dtype=store.dtype) for dim in dims)
    return Model(store, [Row(store.layout, start, k, v, dtype=store.dtype) for start in starts])


class QuantizedMachine(RuleBasedStateMachine):
    """Related stores are appended to, cropped, forked, reordered and freed."""

    @initialize(batch=st.integers(1, 3), data=st.data())
    def begin(self, batch: int, data: st.DataObject) -> None:
        starts = data.draw(st.lists(st.integers(0, PAGE + 2), min_size=batch, max_size=batch))
        sinks, residual = data.draw(st.sampled_from([(0, 0), (3, 5), (4, 16), (17, 40)]))
        store = quantized_store(batch=batch, sinks=sinks, residual=residual)
        self.arenas = (store.arena, store.exact.arena)
        model = new_model(store, starts)
        self.models = [model]
        self.grow(model, data.draw(st.integers(1, 5 * PAGE)), 0)

    def pick(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.integers(0, len(self.models) - 1))]

    def grow(self, model: Model, tokens: int, position: int) -> None:
        k, v = new_tokens(model.store.batch, tokens)
        model.store.append(k, v, position)
        model.store.commit(position + tokens)
        model.append(k, v, position)

    @rule(data=st.data(), tokens=st.integers(1, 4 * PAGE), crop=st.integers(0, 4))
    def append(self, data: st.DataObject, tokens: int, crop: int) -> None:
        model = self.pick(data)
        self.grow(model, tokens, max(model.length - crop, 0))

    @rule(data=st.data(), tokens=st.integers(1, 6 * PAGE))
    def append_and_fail(self, data: st.DataObject, tokens: int) -> None:
        model = self.pick(data)
        model.store.append(*new_tokens(model.store.batch, tokens), model.length)
        model.store.abandon()

    @rule(data=st.data(), tokens=st.integers(1, 6 * PAGE))
    def fail_and_repeat(self, data: st.DataObject, tokens: int) -> None:
        model = self.pick(data)
        model.store.append(*new_tokens(model.store.batch, tokens), model.length)
        self.grow(model, tokens, model.length)

    @rule(data=st.data(), tokens=st.integers(1, 3 * PAGE), crop=st.integers(0, 4 * PAGE))
    def append_k_then_v(self, data: st.DataObject, tokens: int, crop: int) -> None:
        """What eager code does: crop both, then K grows and after it V."""
        model = self.pick(data)
        k, v = new_tokens(model.store.batch, tokens)
        position = max(model.length - crop, 0)
        handles = [KVTensor.of(model.store, role, position) for role in ROLES]
        grown = [torch.cat([h, x], 2) for h, x in zip(handles, (k, v), strict=True)]
        assert all(isinstance(handle, KVTensor) for handle in grown)
        (store,) = {handle.store for handle in grown if isinstance(handle, KVTensor)}
        assert isinstance(store, QuantizedStore)
        model.store = store
        model.append(k, v, position)

    @rule(data=st.data(), length=st.integers(0, 8 * PAGE))
    def truncate(self, data: st.DataObject, length: int) -> None:
        model = self.pick(data)
        model.store.truncate(length)
        model.truncate(length)

    @precondition(lambda self: len(self.models) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        model = self.pick(data)
        fork = model.store.fork()
        assert isinstance(fork, QuantizedStore)
        self.models.append(Model(fork, [row.copy() for row in model.rows], model.length))

    @precondition(lambda self: len(self.models) < 5)
    @rule(data=st.data(), rows=st.integers(1, 4))
    def select_rows(self, data: st.DataObject, rows: int) -> None:
        model = self.pick(data)
        index = data.draw(
            st.lists(st.integers(0, model.store.batch - 1), min_size=rows, max_size=rows)
        )
        chosen = model.store.select_rows(index)
        assert isinstance(chosen, QuantizedStore)
        self.models.append(Model(chosen, [model.rows[i].copy() for i in index], model.length))

    @precondition(lambda self: len(self.models) > 1)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.models.remove(self.pick(data))

    @invariant()
    def every_store_is_its_model(self) -> None:
        for model in self.models:
            model.check()

    @invariant()
    def no_page_is_lost(self) -> None:
        stores = [model.store for model in self.models]
        for arena, tables in zip(
            self.arenas,
            ([s.pages for s in stores], [s.exact for s in stores]),
            strict=True,
        ):
            pages = {page for table in tables for row in table.rows for page in row if page >= 0}
            assert arena.used_pages == len(pages)


QuantizedMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestQuantizedStores = QuantizedMachine.TestCase


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formats", [("int8", "int2"), ("bf16", "int4"), ("fp8", "fp8_e5m2")])
def test_however_the_tokens_come_the_bytes_are_the_same(
    dtype: torch.dtype, formats: tuple[str, str]
) -> None:
    k, v = (x.to(dtype) for x in new_tokens(2, 5 * PAGE + 3))
    found = []
    for steps in ([5 * PAGE + 3], [1] * (5 * PAGE + 3), [7, PAGE, 2 * PAGE + 1, 1, PAGE * 2 - 6]):
        store = quantized_store(k_format=formats[0], v_format=formats[1], dtype=dtype)
        store.set_starts([0, 2])
        position = 0
        for step in steps:
            part = slice(position, position + step)
            push(store, k[:, :, part], v[:, :, part], position)
            position += step
        records = [store.arena.page(page) for row in store.pages.rows for page in row]
        found.append((store.materialize("k"), store.materialize("v"), torch.stack(records)))
    assert found[0][2].shape[0] == 8
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_head_alone_has_the_bytes_that_it_has_among_others() -> None:
    k, v = new_tokens(2, 5 * PAGE)
    records = []
    for heads in (slice(0, HEADS), *(slice(h, h + 1) for h in range(HEADS))):
        store = quantized_store(heads=heads.stop - heads.start)
        push(store, k[:, heads], v[:, heads])
        pages = [store.arena.page(page) for row in store.pages.rows for page in row]
        records.append(torch.stack(pages).view(len(pages), heads.stop - heads.start, -1))
    assert torch.equal(records[0], torch.cat(records[1:], dim=1))


def test_bytes_by_part_and_what_is_freed() -> None:
    store = quantized_store(batch=1, sinks=4, residual=16)
    record = store.layout.page_bytes(HEADS)
    exact = store.layout.exact.page_bytes(HEADS)
    push(store, *new_tokens(1, 10 * PAGE))
    parts = store.stored_bytes()
    # 4 sinks; 8 pages are quantized, for 16 tokens must follow; 28 are in the ring.
    assert store.quantized.tolist() == [8]
    assert parts.codes == 8 * record
    assert parts.window == (4 + 28) * exact // 16
    assert store.exact.arena.used_pages == 1 + 2
    dense = 2 * HEADS * 4 * (8 + 5) // 2 * 10 * PAGE
    assert parts.codes + parts.window + parts.slack < 0.75 * dense


def test_a_static_buffer_is_truncated_by_an_earlier_position() -> None:
    store = quantized_store(batch=1, capacity=20 * PAGE)
    k, v = new_tokens(1, 6 * PAGE)
    push(store, k, v)
    again = new_tokens(1, 2)
    push(store, *again, 2 * PAGE)
    assert store.length == 2 * PAGE + 2
    assert torch.equal(store.materialize("k")[:, :, 2 * PAGE : 2 * PAGE + 2], again[0])
    assert not store.materialize("k")[:, :, 2 * PAGE + 2 :].any()
    for new in (1, 40):
        with pytest.raises(CacheGapError, match="start at 34"):
            store.append(*new_tokens(1, new), 40, attends=True)
    with pytest.raises(ValueError, match="rows"):
        store.append(*new_tokens(2, 40), 34, attends=True)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.56), ("int4", 0.30), ("int2", 0.18)])
def test_all_bytes_beside_dense_bf16_at_8192_tokens(name: str, most: float) -> None:
    """SmolLM2-135M's 30 layers of 3 KV heads, filled by one prompt and some decoding steps."""
    layers, heads, tokens, steps = 30, 3, 8192, 16
    layout = RecordLayout(name, name, 64, 64, 64, window=Window("bf16", 4, 64))
    arena = Arena(layout.page_bytes(heads), stores=layers)
    exact = Arena(layout.exact.page_bytes(heads), stores=layers)
    k, v = torch.randn(2, 1, heads, tokens, 64).bfloat16()
    stores = []
    for _ in range(layers):
        store = QuantizedStore(layout, heads, torch.bfloat16, "cpu", (arena, exact), batch=1)
        store.append(k[:, :, :-steps], v[:, :, :-steps], 0)
        store.commit(tokens - steps)
        stores.append(store)
    for position in range(tokens - steps, tokens):
        for store in stores:
            new = slice(position, position + 1)
            push(store, k[:, :, new], v[:, :, new])
    handles = [(KVTensor.of(store, "k"), KVTensor.of(store, "v")) for store in stores]
    report = memory_report(handles)
    tensors = [*arena.tensors(), *exact.tensors(), *(t for s in stores for t in s.tensors())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert report.total == sum(storages.values())
    assert report.total / (layers * (k.nbytes + v.nbytes)) <= most


def test_a_fork_takes_what_is_committed_from_a_store_in_the_middle_of_a_step() -> None:
    """Another thread's step has appended, and must find its pages when it goes on."""
    store = quantized_store(batch=1)
    k, v = new_tokens(1, 8 * PAGE)
    push(store, k[:, :, : 3 * PAGE], v[:, :, : 3 * PAGE])
    expected = store.materialize("k")
    store.append(k[:, :, 3 * PAGE :], v[:, :, 3 * PAGE :], 3 * PAGE)
    fork = store.fork()
    assert torch.equal(fork.materialize("k"), expected)
    store.commit(8 * PAGE)
    assert torch.equal(fork.materialize("k"), expected)
    once = quantized_store(batch=1)
    push(once, k, v)
    assert torch.equal(store.materialize("k"), once.materialize("k"))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_memory_that_runs_out_leaves_the_store_as_it_was(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = quantized_store(batch=1)
    k, v = new_tokens(1, 9 * PAGE)
    push(store, k[:, :, : 2 * PAGE + 9], v[:, :, : 2 * PAGE + 9])
    other = store.fork()
    expected = store.materialize("k")
    calls = 0
    real = Arena.allocate

    def allocate(self: Arena, count: int) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError
        return real(self, count)

    monkeypatch.setattr(Arena, "allocate", allocate)
    rest = slice(2 * PAGE + 9, None)
    with pytest.raises(MemoryError):
        store.append(k[:, :, rest], v[:, :, rest], 2 * PAGE + 9)
    monkeypatch.undo()
    assert torch.equal(store.materialize("k"), expected)
    push(store, k[:, :, rest][:, :, :1], v[:, :, rest][:, :, :1])
    push(store, k[:, :, rest][:, :, 1:], v[:, :, rest][:, :, 1:])
    once = quantized_store(batch=1)
    push(once, k, v)
    assert torch.equal(store.materialize("v"), once.materialize("v"))
    assert torch.equal(other.materialize("k"), expected)


@pytest.mark.parametrize("end", ["commits", "is abandoned", "runs out of memory"])
def test_a_chunk_that_is_quantized_late_can_only_fail_before_its_commit(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layers may have committed before; a chunk that fails leaves nothing behind."""
    monkeypatch.setattr(launch, "reads_pages", lambda store, queries: True)
    store, first = quantized_store(batch=1), 2 * PAGE + 9
    k, v = new_tokens(1, 9 * PAGE)
    push(store, k[:, :, :first], v[:, :, :first])
    arenas = store.arena, store.exact.arena
    used = [arena.used_pages for arena in arenas]
    real = Arena.allocate

    def allocate(self: Arena, count: int) -> list[int]:
        if count and (no_memory or self is short_of_memory):
            raise MemoryError
        return real(self, count)

    no_memory = False
    short_of_memory = store.exact.arena if end == "runs out of memory" else None
    monkeypatch.setattr(Arena, "allocate", allocate)
    rest = k[:, :, first:], v[:, :, first:]
    if short_of_memory is None:
        store.append(*rest, first, attends=True)
    else:
        with pytest.raises(MemoryError):
            store.append(*rest, first, attends=True)
    if end == "commits":
        no_memory = True
        store.commit(store.appended)
        no_memory = False
    else:
        short_of_memory = None
        store.abandon()
        assert [arena.used_pages for arena in arenas] == used
        for t in range(first, 9 * PAGE):
            push(store, k[:, :, t : t + 1], v[:, :, t : t + 1])
    once = quantized_store(batch=1)
    push(once, k, v)
    for role in ROLES:
        assert torch.equal(store.materialize(role), once.materialize(role))
