"""Handles that move to another device: pages as the kernels there read them."""

from __future__ import annotations

import pytest
import torch

from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.handle_ops import moved_to
from kvcompile.runtime.report import memory_report
from kvcompile.runtime.store import PagedStore
from tests.support.stores import PAGE, filled_store

LENGTH = 3 * PAGE + 5
CPU = torch.device("cpu")


@pytest.fixture
def gpus_order(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let main memory be the memory of a GPU, until it is undone."""
    monkeypatch.setenv("KVCOMPILE_TARGET", "gpu")
    return monkeypatch


def store_of(handle: KVTensor) -> PagedStore:
    assert handle.store is not None
    return handle.store


@pytest.mark.parametrize("quantized", [False, True])
def test_there_and_back(quantized: bool, gpus_order: pytest.MonkeyPatch) -> None:
    case = filled_store(LENGTH, quantized=quantized)
    there = [moved_to(handle, CPU) for handle in (case.k, case.v)]
    assert store_of(there[0]) is store_of(there[1])
    assert store_of(there[0]).layout.order == "gpu16"
    gpus_order.undo()
    back = [moved_to(handle, CPU) for handle in there]
    assert memory_report([case.k, there, back]).materializations == {}
    assert store_of(back[0]) is store_of(back[1])
    assert store_of(back[0]).layout == case.store.layout
    for handle, dense in zip(back, (case.dense_k, case.dense_v), strict=True):
        assert torch.equal(handle.materialize(), dense)


def test_a_crop_moves_what_it_shows_and_the_rest_stays(gpus_order: pytest.MonkeyPatch) -> None:
    case = filled_store(LENGTH)
    short = case.k[:, :, : PAGE + 1]
    assert isinstance(short, KVTensor)
    there = moved_to(short, CPU)
    gpus_order.undo()
    assert there.shape == short.shape
    assert torch.equal(moved_to(there, CPU).materialize(), case.dense_k[:, :, : PAGE + 1])
    assert torch.equal(case.k.materialize(), case.dense_k)


def test_layers_share_pages_of_one_arena_there_as_here(gpus_order: pytest.MonkeyPatch) -> None:
    case = filled_store(LENGTH)
    fork = case.k.clone()
    assert isinstance(fork, KVTensor)
    there = [moved_to(handle, CPU) for handle in (case.k, fork)]
    assert store_of(there[0]) is not store_of(there[1])
    assert store_of(there[0]).arena is store_of(there[1]).arena
    assert store_of(there[0]).arena is not case.store.arena


def test_what_has_no_kernels_or_another_dtype_is_dense(gpus_order: pytest.MonkeyPatch) -> None:
    gpus_order.undo()
    case = filled_store(LENGTH)
    meta = case.k.to("meta")
    assert (meta.shape, meta.device.type) == (case.k.shape, "meta")
    assert torch.equal(case.k.to(torch.float64), case.dense_k.double())
    assert memory_report([case.k]).materializations == {"aten._to_copy": 2}


def test_what_was_written_moves_as_the_tensor_that_it_is() -> None:
    case = filled_store(LENGTH)
    case.k[0, 0, 0, 0] = 7.0
    assert moved_to(case.k, CPU) is NotImplemented


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_to_a_gpu_and_back(quantized: bool, gpus_order: pytest.MonkeyPatch) -> None:
    case = filled_store(LENGTH, quantized=quantized)
    there = [handle.cuda() for handle in (case.k, case.v)]
    assert all(isinstance(handle, KVTensor) and handle.is_cuda for handle in there)
    back = [handle.cpu() for handle in there]
    assert memory_report([case.k, there, back]).materializations == {}
    for handle, dense in zip((there[0], back[1]), (case.dense_k, case.dense_v), strict=True):
        assert torch.equal((handle + 0).cpu(), dense)
