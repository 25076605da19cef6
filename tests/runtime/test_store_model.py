"""Any sequence of operations on any number of related stores, against dense tensors.

The model of an exact store is the dense tensors that were appended. The model of a quantized one is
what they become: a page, once full and old enough, is what plain torch decodes of what it encoded;
everything else stays as it was, bit for bit. So selecting, forking, joining, moving to another
arena, saving and loading change no bit. A crop changes none either; but the tokens that stay of a
page which is cut in two are exact again, and are quantized a second time once they are old enough.
A window that slides on changes which token is in column 0, and gives whole pages back.

The suite takes a few hundred steps. KVCOMPILE_STORE_STEPS=10000 lets each machine take at least
that many: `KVCOMPILE_STORE_STEPS=10000 python -m pytest -n 0 tests/runtime/test_store_model.py`.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcompile
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.joining import Rows, join
from kvcompile.runtime.registry import ROLES, Half
from kvcompile.runtime.store import PagedStore
from tests.support.stores import PAGE, empty_store, new_tokens, push, quantized_store

STEPS = int(os.environ.get("KVCOMPILE_STORE_STEPS", "400"))
STEPS_OF_ONE_RUN = 30  # at most: on average 24
SINKS = 8  # at least those of a quantized store
MOST_STORES = 5
MOST_ROWS = 6


@dataclass
class Model:
    """A store and the dense tensors it stands for.

    Attributes:
        store: The store.
        dense: K and V; zeros before the first token of a row.
        starts: Where the first token of each row is.
        full: Quantized pages of each row, with those that were given back.
        first: Where column 0 is: tokens before it are out of sight.
    """

    store: PagedStore
    dense: dict[Half, torch.Tensor]
    starts: list[int]
    full: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def length(self) -> int:
        return self.dense["k"].shape[2]

    @property
    def columns(self) -> int:
        """Tokens in sight."""
        return self.length - self.first

    def widened(self, first: int) -> Model:
        """Return the same with column 0 further to the right."""
        more = first - self.first
        dense = {role: F.pad(x, (0, 0, more, 0)) for role, x in self.dense.items()}
        starts = [start + more for start in self.starts]
        return Model(self.store, dense, starts, list(self.full), first)

    def copy(self, store: PagedStore, rows: list[int] | None = None) -> Model:
        """Return the model of a store that was made of some rows."""
        rows = list(range(len(self.starts))) if rows is None else rows
        dense = {role: tensor[rows] for role, tensor in self.dense.items()}
        starts, full = ([numbers[i] for i in rows] for numbers in (self.starts, self.full))
        return Model(store, dense, starts, full, self.first)

    def crop(self, columns: int) -> None:
        """Drop tokens; a page that loses one is no longer quantized."""
        length = self.first + columns
        self.dense = {role: tensor[:, :, :length] for role, tensor in self.dense.items()}
        window = self.store.layout.window
        if window is not None:
            for b, start in enumerate(self.starts):
                whole = max(self.length - start - window.num_sink_tokens, 0) // PAGE
                self.full[b] = min(self.full[b], whole)
        self.starts = [min(start, self.length) for start in self.starts]

    def append(self, new: dict[Half, torch.Tensor]) -> None:
        """Add tokens."""
        self.dense = {role: torch.cat([self.dense[role], new[role]], 2) for role in ROLES}
        self.quantize()

    def quantize(self) -> None:
        """Quantize the pages that are old enough."""
        layout = self.store.layout
        if layout.window is None:
            return
        for b, start in enumerate(self.starts):
            due = layout.window.full_pages(self.length - start, PAGE)
            for page in range(self.full[b], due):
                first = start + layout.window.num_sink_tokens + page * PAGE
                for role, tensor in self.dense.items():
                    place = tensor[b, :, first : first + PAGE]
                    place.copy_(layout.decode(role, layout.encode(role, place)))
            self.full[b] = max(self.full[b], due)


class StoreMachine(RuleBasedStateMachine):
    """Stores of two arenas are appended to, cropped, forked, reordered, joined, saved and freed."""

    steps = 0

    def new_store(self, batch: int) -> PagedStore:
        return empty_store(batch=batch)

    @initialize(batch=st.integers(1, 3), data=st.data())
    def begin(self, batch: int, data: st.DataObject) -> None:
        torch.manual_seed(0)
        self.models: list[Model] = []
        for _ in range(2):
            starts = data.draw(st.lists(st.integers(0, PAGE + 2), min_size=batch, max_size=batch))
            store = self.new_store(batch)
            store.set_starts(starts)
            k, v = new_tokens(batch, 3 * PAGE)
            for row, start in enumerate(starts):
                k[row, :, :start] = 0
                v[row, :, :start] = 0
            push(store, k, v)
            self.models.append(Model(store, {"k": k.clone(), "v": v.clone()}, starts, [0] * batch))
            self.models[-1].quantize()

    def pick(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.integers(0, len(self.models) - 1))]

    def tokens(self, model: Model, count: int) -> dict[Half, torch.Tensor]:
        return dict(zip(ROLES, new_tokens(model.store.batch, count), strict=True))

    @rule(data=st.data(), count=st.integers(1, 2 * PAGE + 1), crop=st.integers(0, 4))
    def append(self, data: st.DataObject, count: int, crop: int) -> None:
        model = self.pick(data)
        model.crop(max(model.columns - crop, 0))
        new = self.tokens(model, count)
        push(model.store, new["k"], new["v"], model.columns)
        model.append(new)

    @rule(data=st.data(), count=st.integers(1, PAGE))
    def append_one_role_after_the_other(self, data: st.DataObject, count: int) -> None:
        model = self.pick(data)
        new = self.tokens(model, count)
        model.store.append(new["k"], None, model.columns)
        model.store.commit(model.columns + count, "k")
        model.store.append(None, new["v"], model.columns)
        model.store.commit(model.columns + count, "v")
        model.append(new)

    @rule(data=st.data(), count=st.integers(1, 2 * PAGE))
    def append_and_fail(self, data: st.DataObject, count: int) -> None:
        model = self.pick(data)
        new = self.tokens(model, count)
        model.store.append(new["k"], new["v"], model.columns)
        model.store.abandon()

    @rule(data=st.data(), count=st.integers(0, 3 * PAGE), drop=st.booleans())
    def slide(self, data: st.DataObject, count: int, drop: bool) -> None:
        """A window leaves tokens behind; somebody may still hold them."""
        model = self.pick(data)
        count = min(count, model.columns)
        model.store.look_from(model.store.origin + count)
        model.first += count
        if drop:
            model.store.drop_before(0)
            assert model.store.hidden < PAGE + SINKS

    @rule(data=st.data(), length=st.integers(0, 6 * PAGE))
    def truncate(self, data: st.DataObject, length: int) -> None:
        model = self.pick(data)
        model.store.truncate(length)
        model.crop(length)

    @precondition(lambda self: len(self.models) < MOST_STORES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        model = self.pick(data)
        self.models.append(model.copy(model.store.fork()))

    @precondition(lambda self: len(self.models) < MOST_STORES)
    @rule(data=st.data(), rows=st.integers(1, 4))
    def select_rows(self, data: st.DataObject, rows: int) -> None:
        model = self.pick(data)
        row = st.integers(0, model.store.batch - 1)
        index = data.draw(st.lists(row, min_size=rows, max_size=rows))
        self.models.append(model.copy(model.store.select_rows(index), index))

    @precondition(lambda self: len(self.models) < MOST_STORES)
    @rule(data=st.data(), crop=st.integers(0, 3), dense_rows=st.integers(0, 2))
    def join(self, data: st.DataObject, crop: int, dense_rows: int) -> None:
        """Within an arena or across, crops of different lengths, and rows that are dense."""
        models = [self.pick(data), self.pick(data)]
        length = max(min(model.columns for model in models) - crop, 0)
        first = max(model.first for model in models)
        batch = sum(model.store.batch for model in models) + dense_rows
        if batch > MOST_ROWS:
            return
        parts = [model.copy(model.store).widened(first) for model in models]
        for part in parts:
            part.crop(length)
        rows = dict(zip(ROLES, new_tokens(dense_rows, length), strict=True))
        joined: list[PagedStore] = []
        for role in ROLES:
            given: list[Any] = [Rows(model.store, model.store.origin) for model in models]
            store = join([*given, rows[role]] if dense_rows else given, role, length)
            assert store is not None
            joined.append(store)
        assert joined[0] is joined[1]
        padded = {role: F.pad(tensor, (0, 0, first, 0)) for role, tensor in rows.items()}
        dense = {
            role: torch.cat([*(part.dense[role] for part in parts), padded[role]]) for role in ROLES
        }
        starts = [start for part in parts for start in part.starts] + [first] * dense_rows
        full = [pages for part in parts for pages in part.full] + [0] * dense_rows
        self.models.append(Model(joined[0], dense, starts, full, first))
        if dense_rows:
            self.models[-1].quantize()

    @precondition(lambda self: len(self.models) < MOST_STORES)
    @rule(data=st.data(), pickled=st.booleans())
    def save_and_load(self, data: st.DataObject, pickled: bool) -> None:
        model = self.pick(data)
        pair = KVTensor.of(model.store, "k"), KVTensor.of(model.store, "v")
        if pickled:
            k, _ = pickle.loads(pickle.dumps(pair))
        else:
            with tempfile.TemporaryDirectory() as folder:
                kvcompile.save_cache([pair], Path(folder) / "cache")
                ((k, _),) = kvcompile.load_cache(Path(folder) / "cache")
        self.models.append(model.copy(k.store))

    @precondition(lambda self: len(self.models) > 1)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        del self.models[data.draw(st.integers(0, len(self.models) - 1))]

    @invariant()
    def every_store_holds_its_tokens(self) -> None:
        type(self).steps += 1
        for model in self.models:
            assert model.store.length == model.columns
            for found, start in zip(model.store.start_list(), model.starts, strict=True):
                given_back = found - (start - model.first)
                assert given_back == 0 or (given_back % PAGE == 0 and found <= 0)
            for role in ROLES:
                expected = model.dense[role][:, :, model.first :]
                assert torch.equal(model.store.materialize(role), expected)

    @invariant()
    def no_page_is_lost_or_shared_by_mistake(self) -> None:
        held: dict[Arena, set[int]] = defaultdict(set)
        for model in self.models:
            held_bytes = 0
            for holding in model.store.holdings():
                held[holding.arena].update(holding.filled)
                held_bytes += holding.held_bytes
            part = model.store.stored_bytes()
            assert part.codes + part.window + part.slack == held_bytes
        for arena, pages in held.items():
            assert arena.used_pages == len(pages)


class QuantizedMachine(StoreMachine):
    """The same with int4 pages, sinks and a ring."""

    def new_store(self, batch: int) -> PagedStore:
        return quantized_store(batch=batch)


_settings = settings(
    max_examples=-(-STEPS // 20),
    stateful_step_count=STEPS_OF_ONE_RUN,
    deadline=None,
)
TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = _settings
TestQuantizedMachine = QuantizedMachine.TestCase
TestQuantizedMachine.settings = _settings
