"""Masks on a device are looked at once per step, whatever tensor each layer gets them as."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.mask_watch import MaskWatch
from kvcompile.runtime.masks import is_visible
from kvcompile.runtime.store import PagedStore
from tests.support.programs import static_handles

STORED, CAPACITY = 3, 8


@pytest.fixture
def store() -> PagedStore:
    handle, _ = static_handles(STORED, CAPACITY)
    assert isinstance(handle, KVTensor)
    assert isinstance(handle.store, PagedStore)
    return handle.store


def test_views_of_one_mask_are_looked_at_once(store: PagedStore) -> None:
    watch = MaskWatch(torch.device("cpu"))
    mask = torch.ones(2, 1, 1, CAPACITY, dtype=torch.bool)
    for _ in range(3):
        watch.look(store, mask.view(mask.shape), STORED)
    assert watch._seen.tolist() == [1, 0]
    watch.send()
    with pytest.raises(CacheGapError, match="earlier step"):
        watch.begin()
    assert watch._seen.tolist() == [0, 0]
    watch.look(store, mask, STORED)
    assert watch._seen.tolist() == [1, 0], "the next step looks again"


def test_each_mask_of_a_step_is_looked_at(store: PagedStore) -> None:
    """Although one that were gone would leave its place to the next."""
    watch = MaskWatch(torch.device("cpu"))
    mask = torch.ones(2, 1, 1, CAPACITY, dtype=torch.bool)
    for _ in range(3):
        watch.look(store, mask.clone(), STORED)
    watch.look(store, mask[..., :5], STORED)
    assert watch._seen.tolist() == [4, 0]


def test_threads_take_turns(store: PagedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decode with one graph, whose steps share what was looked at last."""
    watch, inside = MaskWatch(torch.device("cpu")), threading.Lock()

    def slow(mask: torch.Tensor) -> torch.Tensor:
        assert inside.acquire(blocking=False), "another thread is looking"
        time.sleep(0.01)
        inside.release()
        return is_visible(mask)

    monkeypatch.setattr("kvcompile.runtime.mask_watch.is_visible", slow)

    def step(_: int) -> None:
        watch.begin()
        watch.look(store, torch.ones(2, 1, 1, CAPACITY, dtype=torch.bool), STORED)

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(step, range(6)))
    assert watch._seen.tolist() == [6, 0]
