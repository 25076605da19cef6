"""memory_report: every byte, once; the same as the storages and as the profiler's events."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvcompile.runtime.claim import claim
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.report import memory_report
from kvcompile.runtime.store import PagedStore
from tests.support.stores import HEADS, PAGE, Filled, empty_store, filled_store, new_tokens, push


class Layer:
    """Holds handles as attributes, like a layer of a transformers cache."""

    def __init__(self, store: PagedStore) -> None:
        self.keys, self.values = KVTensor.of(store, "k"), KVTensor.of(store, "v")


class Cache:
    """Holds layers, and itself, like caches that refer to their parents."""

    def __init__(self, stores: list[PagedStore]) -> None:
        self.layers = [Layer(store) for store in stores]
        self.parent = self


@pytest.fixture
def stores() -> list[PagedStore]:
    first = empty_store()
    stores = [first, *(empty_store(arena=first.arena) for _ in range(2))]
    for store in stores:
        push(store, *new_tokens(2, 3 * PAGE + 1))
    return stores


def distinct_storages(stores: list[PagedStore], handles: list[KVTensor]) -> int:
    tensors = [tensor for store in stores for tensor in store.tensors()]
    tensors += [tensor for store in stores for tensor in store.arena.tensors()]
    tensors += [t for handle in handles if handle.cell for t in handle.cell.tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_the_total_is_the_sum_of_distinct_storages(stores: list[PagedStore]) -> None:
    cache = Cache(stores)
    report = memory_report(cache)
    assert report.total == distinct_storages(stores, [])
    assert report.allocated == stores[0].arena.allocated_bytes
    assert report.allocated == report.stored + report.slack + report.unused
    assert report.stored == 3 * 2 * (3 * PAGE + 1) * HEADS * (8 + 8) * 4
    assert [layer.length for layer in report.layers] == [3 * PAGE + 1] * 3
    assert [layer.batch for layer in report.layers] == [2, 2, 2]


def test_shared_pages_count_once(stores: list[PagedStore]) -> None:
    fork = stores[0].fork()
    beams = stores[0].select_rows([0, 0, 0])
    one = memory_report(Cache(stores[:1]))
    many = memory_report(Cache([stores[0], fork, beams]))
    assert many.stored == one.stored
    assert many.total == distinct_storages([stores[0], fork, beams], [])


@pytest.mark.parametrize("capacity", [None, 40])
def test_dense_tensors_are_reported(capacity: int | None) -> None:
    case = filled_store(20, capacity=capacity)
    before = memory_report((case.k, case.v))
    assert before.dense == 0
    case.k.transpose(1, 2)
    case.v.fill_(1)
    report = memory_report((case.k, case.v))
    nbytes = case.dense_k.nbytes + case.dense_v.nbytes
    assert report.dense == nbytes + 2 * 8  # two anchors
    assert report.total == distinct_storages([case.store], [case.k, case.v])
    assert report.materializations == {"transpose": 1, "aten.fill_": 1}


def test_the_counts_survive_forks_and_reordering() -> None:
    case = filled_store(20)
    _ = case.k + 1
    k, v = case.k[torch.tensor([1, 0])], case.v[torch.tensor([1, 0])]
    push(claim(k, v), *new_tokens(2, 1))
    _ = k * 2
    assert memory_report([k, v]).materializations == {"aten.add": 1, "aten.mul": 1}


def test_it_equals_the_profilers_memory_events() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        store = empty_store()
        store.reserve(0, 10 * PAGE)
        for pages in (400, 800, 1600, 2400):
            store.reserve(0, pages * PAGE)
        store.reserve(0, 3000 * PAGE)
    events = Counter(e.self_cpu_memory_usage for e in trace.events())
    slabs = Counter(t.nbytes for t in store.arena.tensors() if t.dtype == torch.uint8)
    assert slabs.total() > 4
    assert slabs <= events
    assert sum(slabs.elements()) == store.arena.allocated_bytes >= 3000 * store.arena.page_bytes


def test_it_is_much_less_than_dense_buffers_of_a_static_cache() -> None:
    case: Filled = filled_store(100, capacity=100_000)
    report = memory_report(case)
    assert report.total < case.dense_k.nbytes / 2


def test_it_prints_a_table(stores: list[PagedStore]) -> None:
    report = memory_report(Cache(stores))
    text = str(report)
    assert f"{report.total:,} bytes" in text
    assert text.count(f"{3 * PAGE + 1}") >= 3
    assert memory_report({}).total == 0
    assert str(memory_report(None))
