"""A past that is used twice is truncated or forked, never overwritten."""

import copy
import gc

import pytest
import torch

from kvcompile.passes.ir.remarks import forget_notices, notices
from kvcompile.runtime.claim import claim
from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.handle import KVTensor
from tests.support.stores import PAGE, Filled, filled_store, new_tokens, push

LENGTH = PAGE + 3


@pytest.fixture
def case() -> Filled:
    return filled_store(LENGTH)


def cat(past: KVTensor, new: torch.Tensor) -> KVTensor:
    """Append as a model does that runs without a compiled graph."""
    grown = torch.cat([past, new], dim=-2)
    assert isinstance(grown, KVTensor)
    return grown


def crop(handle: KVTensor, length: int) -> KVTensor:
    cropped = handle[..., :length, :]
    assert isinstance(cropped, KVTensor)
    return cropped


def step(k: KVTensor, v: KVTensor) -> tuple[KVTensor, KVTensor, torch.Tensor, torch.Tensor]:
    """Do what one compiled step does; return the new handles and the new tokens."""
    store = claim(k, v)
    new_k, new_v = new_tokens(store.batch, 1)
    push(store, new_k, new_v)
    return KVTensor.of(store, "k"), KVTensor.of(store, "v"), new_k, new_v


def test_the_end_of_the_store_is_claimed_in_place(case: Filled) -> None:
    k, v, _, _ = step(case.k, case.v)
    assert k.store is v.store is case.store
    assert claim(k, v) is case.store


def test_two_shallow_copies_step_apart(case: Filled) -> None:
    first, second = {"k": case.k, "v": case.v}, {"k": case.k, "v": case.v}
    expected = {"first": case.dense_k, "second": case.dense_k}
    for _ in range(PAGE + 2):
        for name, cache in (("first", first), ("second", second)):
            cache["k"], cache["v"], new_k, _ = step(cache["k"], cache["v"])
            expected[name] = torch.cat([expected[name], new_k], dim=2)
    assert torch.equal(first["k"], expected["first"])
    assert torch.equal(second["k"], expected["second"])
    assert first["k"].store is case.store
    assert second["k"].store is not case.store


def test_a_longer_store_is_truncated_when_nobody_needs_the_rest(case: Filled) -> None:
    k, v, _, _ = step(case.k, case.v)
    del k, v
    gc.collect()
    used = case.store.arena.used_pages
    k, _, new_k, _ = step(case.k, case.v)
    assert k.store is case.store
    assert case.store.arena.used_pages == used
    assert torch.equal(k, torch.cat([case.dense_k, new_k], 2))


def test_one_live_handle_of_either_role_is_enough_to_fork(case: Filled) -> None:
    old = step(case.k, case.v)
    keep, expected = old[1], torch.cat([case.dense_v, old[3]], 2)
    del old
    gc.collect()
    k, _, _, _ = step(case.k, case.v)
    assert k.store is not case.store
    assert torch.equal(keep, expected)


def test_a_crop_goes_on_in_place_and_the_original_survives(case: Filled) -> None:
    k, v, new_k, _ = step(crop(case.k, 5), crop(case.v, 5))
    assert torch.equal(case.k, case.dense_k)
    assert torch.equal(k, torch.cat([case.dense_k[:, :, :5], new_k], 2))
    del case.k, case.v
    cropped = crop(k, 3), crop(v, 3)
    del k, v
    gc.collect()
    store = cropped[0].store
    assert claim(*cropped) is store
    assert store is not None
    assert store.length == 3


def test_a_failed_step_is_retried(case: Filled) -> None:
    store = claim(case.k, case.v)
    store.append(*new_tokens(2, 1), LENGTH)  # and then the graph raises
    k, v, new_k, new_v = step(case.k, case.v)
    assert k.store is case.store
    assert torch.equal(k, torch.cat([case.dense_k, new_k], 2))
    assert torch.equal(v, torch.cat([case.dense_v, new_v], 2))


def test_a_step_that_failed_between_k_and_v_in_eager_is_retried(case: Filled) -> None:
    torch.cat([case.k, new_tokens(2, 1)[0]], dim=2)
    gc.collect()
    assert (case.store.k_len, case.store.v_len) == (LENGTH + 1, LENGTH)
    k, v, new_k, new_v = step(case.k, case.v)
    assert k.store is case.store
    assert torch.equal(k, torch.cat([case.dense_k, new_k], 2))
    assert torch.equal(v, torch.cat([case.dense_v, new_v], 2))


def test_eager_steps_apart_keep_k_and_v_together(case: Filled) -> None:
    caches = []
    for _ in range(3):
        k, v, dense = case.k, case.v, case.dense_k
        for _ in range(3):
            new_k, new_v = new_tokens(2, 1)
            k, v = cat(k, new_k), cat(v, new_v)
            dense = torch.cat([dense, new_k], 2)
        caches.append((k, v, dense))
    assert len({k.store for k, _, _ in caches}) == 3
    for k, v, dense in caches:
        assert k.store is v.store
        assert claim(k, v) is k.store
        assert torch.equal(k, dense)


@pytest.mark.parametrize("quantized", [False, True])
def test_eager_code_forks_what_a_step_is_appending_to(quantized: bool) -> None:
    case = filled_store(LENGTH, quantized=quantized)
    store = claim(case.k, case.v)
    store.claimed = True
    of_step, of_eager = new_tokens(2, 1), new_tokens(2, 1)
    store.append(*of_step, LENGTH)
    k, v = cat(case.k, of_eager[0]), cat(case.v, of_eager[1])
    store.commit(LENGTH + 1)
    assert k.store is v.store
    assert torch.equal(k[:, :, LENGTH:], of_eager[0])
    assert torch.equal(store.materialize("k")[:, :, LENGTH:], of_step[0])


def test_eager_code_goes_on_where_left_padding_was() -> None:
    case = filled_store(LENGTH, starts=(0, 5))
    k, v = crop(case.k, 3), crop(case.v, 3)
    new_k, new_v = new_tokens(2, 1)
    k, v = cat(k, new_k), cat(v, new_v)
    assert k.store is v.store
    assert torch.equal(k, torch.cat([case.dense_k[:, :, :3], new_k], 2))
    assert torch.equal(v, torch.cat([case.dense_v[:, :, :3], new_v], 2))
    assert torch.equal(case.k, case.dense_k)


def test_k_and_v_that_drifted_apart_are_stored_anew(case: Filled) -> None:
    other = filled_store(LENGTH)
    store = claim(case.k, other.v)
    assert store not in (case.store, other.store)
    assert torch.equal(store.materialize("k"), case.dense_k)
    assert torch.equal(store.materialize("v"), other.dense_v)


def test_equal_forks_of_k_and_v_are_one_store(case: Filled) -> None:
    k, v = copy.deepcopy(case.k), copy.deepcopy(case.v)
    assert k.store is not v.store
    used = case.store.arena.used_pages
    assert claim(k, v) is k.store
    assert case.store.arena.used_pages == used


def test_different_lengths_are_an_error(case: Filled) -> None:
    with pytest.raises(CacheGapError, match=f"K has 4 past tokens and V has {LENGTH}"):
        claim(crop(case.k, 4), case.v)


def test_static_forks_bind_both_handles_to_one_buffer() -> None:
    case = filled_store(5, capacity=40)
    k, v = case.k.clone(), copy.deepcopy(case.v)
    assert isinstance(k, KVTensor)
    assert k.store is not v.store
    push(claim(k, v), *new_tokens(2, 1))
    assert v.store is k.store
    assert v.length == 6
    assert case.v.length == 5


def test_a_view_of_a_static_cache_that_outlives_a_step_is_told() -> None:
    forget_notices()
    case = filled_store(PAGE, capacity=50)
    case.k[0].sum()
    claim(case.k, case.v)
    assert "KVC504" not in [remark.code for remark in notices()]
    view = case.k[0]
    claim(case.k, case.v)
    assert "KVC504" in [remark.code for remark in notices()]
    assert view.shape[1] == 50
