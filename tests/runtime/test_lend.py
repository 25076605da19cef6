"""Stores that are only read: by anybody who asks, never changed, forked where somebody writes."""

import threading
from typing import Any

import pytest
import torch

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.runtime.adopted import adopted
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.claim import claim, lend
from kvcompile.runtime.errors import CacheGapError, CacheInUseError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.report import memory_report
from kvcompile.runtime.store import PagedStore
from tests.support.attentions import Cross
from tests.support.compiled import compiled
from tests.support.programs import handles, qkv
from tests.support.stores import PAGE, filled_store, new_tokens, push

LENGTH = PAGE + 3


def crop(handle: KVTensor, length: int) -> KVTensor:
    cropped = handle[..., :length, :]
    assert isinstance(cropped, KVTensor)
    return cropped


def same(store: PagedStore, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.equal(store.materialize("k"), k) and torch.equal(store.materialize("v"), v)


def small_store(layout: RecordLayout, heads: int, token_dim: int) -> PagedStore:
    """Return an empty store of two rows."""
    arena = Arena(layout.page_bytes(heads))
    how: dict[str, Any] = {"batch": 2, "token_dim": token_dim}
    if layout.window is None:
        return PagedStore(layout, heads, torch.float32, "cpu", arena, **how)
    arenas = arena, Arena(layout.exact.page_bytes(heads))
    store = QuantizedStore(layout, heads, torch.float32, "cpu", arenas, **how)
    store.compute = "fp32"
    return store


@pytest.mark.parametrize("capacity", [None, 40])
def test_many_read_one_store(capacity: int | None) -> None:
    case = filled_store(LENGTH, capacity=capacity)
    assert lend(case.k, case.v) is lend(case.k, case.v) is case.store


def test_who_appends_to_what_is_read_gets_a_fork() -> None:
    case = filled_store(LENGTH)
    case.store.readers = 1
    store = claim(case.k, case.v)
    assert store is not case.store
    push(store, *new_tokens(2, 2))
    assert same(case.store, case.dense_k, case.dense_v)


def test_what_is_appended_to_is_read_as_it_was() -> None:
    case = filled_store(LENGTH)
    case.store.claimed = True
    case.store.append(*new_tokens(2, 2), LENGTH)
    store = lend(case.k, case.v)
    case.store.commit(LENGTH + 2)
    assert store is not case.store
    assert same(store, case.dense_k, case.dense_v)


def test_a_static_store_is_read_or_written() -> None:
    case = filled_store(5, capacity=40)
    case.store.readers = 1
    with pytest.raises(CacheInUseError):
        claim(case.k, case.v)
    case.store.readers, case.store.claimed = 0, True
    with pytest.raises(CacheInUseError):
        lend(case.k, case.v)


def test_a_crop_is_read_from_a_fork() -> None:
    case = filled_store(LENGTH)
    store = lend(crop(case.k, 5), crop(case.v, 5))
    assert same(store, case.dense_k[:, :, :5], case.dense_v[:, :, :5])
    assert case.store.length == LENGTH
    with pytest.raises(CacheGapError, match=f"K has 5 past tokens and V has {LENGTH}"):
        lend(crop(case.k, 5), case.v)


@pytest.mark.parametrize("capacity", [None, 40])
def test_what_was_written_is_read_from_a_store_of_its_own(capacity: int | None) -> None:
    case = filled_store(LENGTH, capacity=capacity)
    for tensor in (case.k, case.dense_k):
        tensor[:, :, 2] = 7
    store = lend(case.k, case.v)
    assert store is not case.store
    assert same(store, case.dense_k, case.dense_v)
    assert case.k.is_written


def test_k_of_one_store_and_v_of_another() -> None:
    case, other = filled_store(LENGTH), filled_store(LENGTH)
    store = lend(case.k, other.v)
    assert store not in (case.store, other.store)
    assert same(store, case.dense_k, other.dense_v)


@pytest.mark.usefixtures("fresh_dynamo")
class TestSteps:
    """Steps of a graph that reads a cache."""

    @pytest.fixture
    def run(self) -> Any:
        return compiled(Cross().eval())

    def test_a_step_leaves_the_store_as_it_is(self, run: Any) -> None:
        cache, q = handles(40), qkv(1)[0]
        store = cache[0].store
        assert store is not None
        epoch, dense = store.epoch, tuple(handle.materialize() for handle in cache)
        store.materializations.clear()
        for _ in range(3):
            torch.testing.assert_close(run(q, cache), Cross()(q, dense))
        assert (store.epoch, store.length, store.claimed, store.readers) == (epoch, 40, False, 0)
        assert memory_report(cache).materializations == {}
        short = tuple(handle[:, :, :7] for handle in cache)
        torch.testing.assert_close(run(q, short), Cross()(q, tuple(x[:, :, :7] for x in dense)))
        assert store.length == 40

    def test_a_step_that_fails_lets_go_of_the_store(self, run: Any) -> None:
        cache, q = handles(40), qkv(1)[0]
        run(q, cache)
        with pytest.raises(CacheGapError):
            run(q, (cache[0], crop(cache[1], 3)))
        assert cache[0].store is not None
        assert cache[0].store.readers == 0

    def test_a_cache_of_another_format_and_layout(self, run: Any) -> None:
        """Attention is chosen by the store; tokens in another dimension are stored anew."""
        q = qkv(1)[0]
        run(q, handles(40))
        for layout, heads, token_dim, tokens in (
            (RecordLayout("int4", "int4", 8, 8, 16, 16, Window("fp32", 4, 16)), 2, 2, 90),
            (RecordLayout("fp32", "fp32", 8, 8, 16), 40, 1, 2),
        ):
            store = small_store(layout, heads, token_dim)
            push(store, torch.randn(2, heads, tokens, 8), torch.randn(2, heads, tokens, 8))
            cache = KVTensor.of(store, "k"), KVTensor.of(store, "v")
            dense = tuple(handle.materialize() for handle in cache)
            store.materializations.clear()
            torch.testing.assert_close(run(q, cache), Cross()(q, dense))
            needed = {} if token_dim == 2 else {"graph input": 2}
            assert memory_report(cache).materializations == needed

    @pytest.mark.parametrize("head_dim_vo", [8, 6])
    def test_buffers_that_are_not_full_read_as_zeros(self, head_dim_vo: int) -> None:
        run, q = compiled(Cross().eval()), qkv(1)[0]
        dense = torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, head_dim_vo)
        layout = RecordLayout("fp32", "fp32", 8, head_dim_vo, 16)
        arena = Arena(layout.page_bytes(2))
        store = PagedStore(layout, 2, torch.float32, "cpu", arena, batch=2, capacity=40)
        push(store, dense[0][:, :, :20], dense[1][:, :, :20])
        for x in dense:
            x[:, :, 20:] = 0
        for cache in (
            tuple(adopted(x.clone()) for x in dense),
            (KVTensor.of(store, "k"), KVTensor.of(store, "v")),
        ):
            for _ in range(2):
                torch.testing.assert_close(run(q, cache), Cross()(q, dense))

    def test_two_threads_read_one_cache(self, run: Any) -> None:
        cache, q = handles(40), qkv(1)[0]
        dense = tuple(handle.materialize() for handle in cache)
        expected = Cross()(q, dense)
        run(q, cache)
        wrong: list[torch.Tensor] = []

        def read() -> None:
            with torch.no_grad():
                out = (run(q, cache) for _ in range(200))
                wrong.extend(x for x in out if not torch.allclose(x, expected, atol=1e-5))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert cache[0].store is not None
        assert cache[0].store.readers == 0
