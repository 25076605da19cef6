"""Any sequence of operations on any number of related stores, against dense tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.store import PagedStore
from tests.support.stores import HEADS, PAGE, empty_store, new_tokens


@dataclass
class Model:
    """A store and the dense tensors it stands for."""

    store: PagedStore
    k: torch.Tensor
    v: torch.Tensor

    @property
    def length(self) -> int:
        return self.k.shape[2]


class StoreMachine(RuleBasedStateMachine):
    """Stores that share one arena are appended to, cropped, forked, reordered and freed."""

    @initialize(batch=st.integers(1, 3), data=st.data())
    def begin(self, batch: int, data: st.DataObject) -> None:
        first = empty_store(batch=batch)
        self.arena: Arena = first.arena
        starts = data.draw(st.lists(st.integers(0, PAGE + 2), min_size=batch, max_size=batch))
        first.set_starts(starts)
        k, v = new_tokens(batch, PAGE + 2)
        for row, start in enumerate(starts):
            k[row, :, :start] = 0
            v[row, :, :start] = 0
        first.append(k, v, 0)
        first.commit(PAGE + 2)
        self.models = [Model(first, k, v)]

    def pick(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.integers(0, len(self.models) - 1))]

    @rule(data=st.data(), tokens=st.integers(1, 2 * PAGE + 1), crop=st.integers(0, 4))
    def append(self, data: st.DataObject, tokens: int, crop: int) -> None:
        model = self.pick(data)
        position = max(model.length - crop, 0)
        k, v = new_tokens(model.store.batch, tokens)
        model.store.append(k, v, position)
        model.store.commit(position + tokens)
        model.k = torch.cat([model.k[:, :, :position], k], 2)
        model.v = torch.cat([model.v[:, :, :position], v], 2)

    @rule(data=st.data(), tokens=st.integers(1, PAGE))
    def append_and_fail(self, data: st.DataObject, tokens: int) -> None:
        model = self.pick(data)
        model.store.append(*new_tokens(model.store.batch, tokens), model.length)

    @rule(data=st.data(), length=st.integers(0, 5 * PAGE))
    def truncate(self, data: st.DataObject, length: int) -> None:
        model = self.pick(data)
        model.store.truncate(length)
        model.k, model.v = model.k[:, :, :length], model.v[:, :, :length]

    @precondition(lambda self: len(self.models) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        model = self.pick(data)
        self.models.append(Model(model.store.fork(), model.k, model.v))

    @precondition(lambda self: len(self.models) < 5)
    @rule(data=st.data(), rows=st.integers(1, 4))
    def select_rows(self, data: st.DataObject, rows: int) -> None:
        model = self.pick(data)
        row = st.integers(0, model.store.batch - 1)
        index = data.draw(st.lists(row, min_size=rows, max_size=rows))
        chosen = model.store.select_rows(index)
        self.models.append(Model(chosen, model.k[index], model.v[index]))

    @precondition(lambda self: len(self.models) > 1)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        del self.models[data.draw(st.integers(0, len(self.models) - 1))]

    @invariant()
    def every_store_holds_its_tokens(self) -> None:
        for model in self.models:
            assert model.store.length == model.length
            assert torch.equal(model.store.materialize("k"), model.k)
            assert torch.equal(model.store.materialize("v"), model.v)

    @invariant()
    def no_page_is_lost_or_shared_by_mistake(self) -> None:
        stores = [model.store for model in self.models]
        held = {page for store in stores for page in store.holdings()[0].filled}
        assert self.arena.used_pages == len(held)
        for store in stores:
            part = store.stored_bytes()
            assert (
                part.codes + part.slack == len(store.holdings()[0].filled) * self.arena.page_bytes
            )
            assert store.arena.page_bytes == HEADS * store.layout.record_bytes


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
