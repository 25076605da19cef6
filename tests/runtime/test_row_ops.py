"""Rows of handles: slices are views on pages, selections and joins are values on pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcompile.runtime.claim import claim
from kvcompile.runtime.errors import HandleWriteError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.report import memory_report
from tests.support.stores import PAGE, Filled, filled_store, new_tokens, push

Op = Callable[[Any], Any]
LENGTH = 3 * PAGE + 5
BATCH = 4
ROWS = torch.tensor([3, 0])

KINDS = [(False, None), (True, None), (False, 80), (True, 80)]


@pytest.fixture(params=KINDS, ids=["exact", "quantized", "exact static", "quantized static"])
def case(request: pytest.FixtureRequest) -> Filled:
    quantized, capacity = request.param
    return filled_store(
        LENGTH, batch=BATCH, capacity=capacity, quantized=quantized, starts=(0, 2, 0, 21)
    )


@pytest.fixture(params=KINDS[:2], ids=["exact", "quantized"])
def growing(request: pytest.FixtureRequest) -> Filled:
    return filled_store(LENGTH, batch=BATCH, quantized=request.param[0], starts=(0, 2, 0, 21))


def goes_on(k: Any, v: Any, dense_k: torch.Tensor, dense_v: torch.Tensor) -> None:
    """Check two handles, and that a step appends to the one store they lie in."""
    assert isinstance(k, KVTensor)
    assert isinstance(v, KVTensor)
    assert k.store is v.store
    store = claim(k, v)
    assert store is k.store
    assert not store.materializations
    assert torch.equal(k.materialize(), dense_k)
    assert torch.equal(v.materialize(), dense_v)
    new = new_tokens(store.batch, 2)
    push(store, *new)
    tail = store.heads_first(store.materialize("k"))[:, :, store.length - 2 : store.length]
    assert torch.equal(tail, new[0])


SELECTIONS: dict[str, Op] = {
    "[0, 2]": lambda h: h[[0, 2]],
    "tensor": lambda h: h[ROWS, ...],
    "mask": lambda h: h[torch.tensor([True, False, True, True])],
    "index_select": lambda h: torch.index_select(h, 0, ROWS),
    "repeat_interleave": lambda h: h.repeat_interleave(2, dim=0),
    "repeat": lambda h: h.repeat(2, 1, 1, 1),
    "cat with itself": lambda h: torch.cat([h, h]),
    "cat with nothing": lambda h: torch.cat([torch.tensor([], dtype=h.dtype), h], dim=-2),
}

SLICES: dict[str, Op] = {
    "1:3": lambda h: h[1:3],
    ":2": lambda h: h[:2],
    "-1:": lambda h: h[-1:],
    "::2": lambda h: h[::2],
    "1::3": lambda h: h[1::3],
    "slice of a slice": lambda h: h[1:][::2],
    "narrow": lambda h: h.narrow(0, 1, 2),
    "narrow from behind": lambda h: h.narrow(0, -2, 2),
    "torch.narrow": lambda h: torch.narrow(h, 0, 1, 2),
    "split": lambda h: h.split(3)[1],
    "split in lengths": lambda h: torch.split(h, [1, 3], dim=0)[1],
    "chunk": lambda h: h.chunk(2)[1],
    "torch.chunk": lambda h: torch.chunk(h, 2)[1],
    "tensor_split": lambda h: h.tensor_split(3)[0],
    "torch.tensor_split": lambda h: torch.tensor_split(h, (1, 3))[1],
    "crop": lambda h: h[1:3, :, : PAGE + 9],
    "crop from behind": lambda h: h[1:, ..., :-7, :],
    "crop of a selection": lambda h: h[[0, 2], :, : PAGE + 9],
    "slice of a crop": lambda h: h[:, :, : 2 * PAGE][2:],
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selected_rows_share_pages(case: Filled, name: str) -> None:
    used = case.store.arena.used_pages
    k, v = SELECTIONS[name](case.k), SELECTIONS[name](case.v)
    assert case.store.arena.used_pages == used
    goes_on(k, v, SELECTIONS[name](case.dense_k), SELECTIONS[name](case.dense_v))
    assert torch.equal(case.k.materialize(), case.dense_k)


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_rows_share_pages(growing: Filled, name: str) -> None:
    used = growing.store.arena.used_pages
    k, v = SLICES[name](growing.k), SLICES[name](growing.v)
    assert growing.store.arena.used_pages == used
    dense_k = SLICES[name](growing.dense_k)
    assert k.shape == dense_k.shape
    assert torch.equal(k.materialize(), dense_k)
    growing.store.materializations.clear()
    if "crop" in name:  # a claim cuts the store there, and what was cut is quantized again
        assert claim(k, v) is k.store
        return
    goes_on(k, v, dense_k, SLICES[name](growing.dense_v))
    assert torch.equal(growing.k.materialize(), growing.dense_k)


def test_a_row_that_is_shown_several_times(growing: Filled) -> None:
    k, v = growing.k[3:], growing.v[3:]
    dense_k, dense_v = (
        dense[3:].expand(5, -1, -1, -1) for dense in (growing.dense_k, growing.dense_v)
    )
    shape = (5, *k.shape[1:])
    ways = (k.expand(shape), k.expand(5, -1, -1, -1), k.expand(size=shape))
    for shown in (torch.broadcast_to(k, shape), *ways):
        assert isinstance(shown, KVTensor)
        assert torch.equal(shown.materialize(), dense_k)
    growing.store.materializations.clear()
    goes_on(k.expand(5, -1, -1, -1), v.expand_as(dense_v), dense_k, dense_v)
    with pytest.raises(RuntimeError, match="more than one element"):
        k.expand(shape).mul_(2.0)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda h: h[1:3].fill_(2.0),
        lambda h: h[1:3][0].fill_(2.0),
        lambda h: h[::2].__setitem__((0, 1, 3), 7.0),
        lambda h: h[1:][1:, :, :5].mul_(2.0),
        lambda h: torch.narrow(h, 0, 1, 2).zero_(),
        lambda h: h.split(2)[1].copy_(torch.ones(2, *h.shape[1:])),
        lambda h: h[2:].index_copy_(2, torch.tensor([4]), torch.ones(2, 2, 1, 8)),
    ],
)
def test_a_write_to_a_slice_reaches_the_whole(growing: Filled, write: Op, inference: bool) -> None:
    slices = growing.k[1:3], growing.k[1:2][:, :, :PAGE]
    with torch.inference_mode(inference):
        write(growing.k)
    write(growing.dense_k)
    dense = growing.dense_k[1:3], growing.dense_k[1:2, :, :PAGE]
    for handle, expected in ((growing.k, growing.dense_k), *zip(slices, dense, strict=True)):
        assert handle.is_written
        assert torch.equal(handle.materialize(), expected)
    store = claim(slices[0], growing.v[1:3])
    assert torch.equal(store.materialize("k", LENGTH)[:, :, :3], dense[0][:, :, :3])


def test_a_write_to_the_whole_reaches_its_slices(growing: Filled) -> None:
    part, crop = growing.k[1:3], growing.k[3:, :, :7]
    growing.k.mul_(2)
    growing.dense_k.mul_(2)
    assert torch.equal(part.materialize(), growing.dense_k[1:3])
    assert torch.equal(crop.materialize(), growing.dense_k[3:, :, :7])


def test_a_slice_outlives_the_whole(growing: Filled) -> None:
    part, dense = growing.k[1:3], growing.dense_k[1:3]
    del growing.k, growing.v
    assert torch.equal(part.materialize(), dense)
    part.mul_(2)
    assert torch.equal(part.materialize(), dense * 2)
    report = memory_report([part])
    assert report.dense >= growing.dense_k.nbytes


def test_a_slice_of_a_cache_that_is_cropped_and_goes_on(growing: Filled) -> None:
    part = growing.k[1:3]
    k, v = growing.k[:, :, :PAGE], growing.v[:, :, :PAGE]
    del growing.k, growing.v
    push(claim(k, v), *new_tokens(BATCH, LENGTH))
    part.mul_(2)  # makes the whole dense, as it was
    assert torch.equal(part.materialize(), growing.dense_k[1:3] * 2)


def test_slices_of_a_static_buffer_are_views_of_it() -> None:
    case = filled_store(LENGTH, batch=BATCH, capacity=80)
    case.k[1:3].fill_(2.0)
    case.dense_k[1:3].fill_(2.0)
    assert torch.equal(case.k.materialize(), case.dense_k)


def test_k_in_pieces_and_then_v_in_pieces(growing: Filled) -> None:
    pairs = list(zip(growing.k.split(1), growing.v.split(1), strict=True))
    for number, (k, v) in enumerate(pairs):
        here = slice(number, number + 1)
        growing.store.materializations.clear()
        goes_on(k, v, growing.dense_k[here], growing.dense_v[here])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda h: h.index_select(0, torch.tensor([-1])),
        lambda h: h.index_select(4, torch.tensor([0])),
        lambda h: h.repeat_interleave(2, dim=4),
        lambda h: h[torch.tensor([1.0, 0.0])],
        lambda h: torch.cat([h, h[:, :, :1].clone()], dim=6),
    ],
)
def test_what_pytorch_refuses_is_refused(growing: Filled, wrong: Op) -> None:
    with pytest.raises(IndexError) as expected:
        wrong(growing.dense_k)
    with pytest.raises(IndexError) as found:
        wrong(growing.k)
    assert str(found.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_bytes_are_a_mask(case: Filled) -> None:
    chosen = torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    assert torch.equal(case.k[chosen].materialize(), case.dense_k[chosen])


class TestJoin:
    """`cat` along the batch."""

    def test_caches_of_different_arenas(self, case: Filled) -> None:
        static = case.store.capacity is not None
        quantized = case.store.layout.window is not None
        other = filled_store(
            LENGTH, batch=3, capacity=80 if static else None, quantized=quantized, starts=(5, 0, 1)
        )
        shared = other.k[[0, 1, 1]], other.v[[0, 1, 1]]
        before = case.store.arena.used_pages
        k, v = torch.cat([case.k, shared[0]]), torch.cat([case.v, shared[1]])
        assert isinstance(k, KVTensor)
        assert k.store is not None
        assert k.store.start_list() == [0, 2, 0, 21, 5, 0, 0]
        # A page that two rows share is copied once.
        needed = sum(len(h.filled) for h in shared[0].store.holdings()[:1])
        assert case.store.arena.used_pages - before == needed
        rows = [0, 1, 1]
        goes_on(
            k,
            v,
            torch.cat([case.dense_k, other.dense_k[rows]]),
            torch.cat([case.dense_v, other.dense_v[rows]]),
        )
        assert torch.equal(other.k.materialize(), other.dense_k)

    def test_crops_of_different_lengths(self, growing: Filled) -> None:
        other = filled_store(LENGTH + 9, batch=2, quantized=growing.store.layout.window is not None)
        cut = 2 * PAGE + 3
        k = torch.cat([growing.k[..., :cut, :], other.k[..., :cut, :]])
        v = torch.cat([growing.v[..., :cut, :], other.v[..., :cut, :]])
        goes_on(
            k,
            v,
            torch.cat([growing.dense_k, other.dense_k[:, :, :LENGTH]])[:, :, :cut],
            torch.cat([growing.dense_v, other.dense_v[:, :, :LENGTH]])[:, :, :cut],
        )
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            torch.cat([growing.k, other.k])

    @pytest.mark.parametrize("first", [False, True])
    def test_a_dense_tensor(self, growing: Filled, first: bool) -> None:
        more = new_tokens(2, LENGTH)
        order = slice(None, None, -1 if first else 1)
        k = torch.cat([growing.k, more[0]][order])
        assert isinstance(k, KVTensor)
        rows = slice(2) if first else slice(BATCH, None)
        assert torch.equal(k[rows].materialize(), more[0])
        v = torch.cat([growing.v, more[1]][order])
        assert isinstance(v, KVTensor)
        assert v.store is not None
        fresh = filled_store(0, quantized=growing.store.layout.window is not None).store
        push(fresh, *more)
        v.store.materializations.clear()
        goes_on(
            k,
            v,
            torch.cat([growing.dense_k, fresh.materialize("k")][order]),
            torch.cat([growing.dense_v, fresh.materialize("v")][order]),
        )

    def test_what_cannot_lie_in_one_store_is_dense(self, growing: Filled) -> None:
        for other in (growing.dense_k.double(), growing.k.clone().fill_(1.0)):
            joined = torch.cat([growing.k, other])
            assert type(joined) is torch.Tensor
            assert torch.equal(joined, torch.cat([growing.dense_k, other]))


def test_shape_changes_of_a_slice_in_place_are_refused(growing: Filled) -> None:
    with pytest.raises(HandleWriteError, match="in place"):
        growing.k[1:].unsqueeze_(0)
