"""The page store against dense tensors: sharing, truncation, padding, static buffers, bytes."""

import gc

import pytest
import torch

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheFullError, CacheGapError, StaleHandleError
from kvcompile.runtime.store import PagedStore
from tests.support.stores import DIM_QK, HEADS, PAGE, empty_store, filled_store, new_tokens, push


def assert_holds(store: PagedStore, k: torch.Tensor, v: torch.Tensor) -> None:
    torch.testing.assert_close(store.materialize("k"), k, rtol=0, atol=0)
    torch.testing.assert_close(store.materialize("v"), v, rtol=0, atol=0)


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE])
def test_tokens_come_back_at_page_borders(length: int) -> None:
    case = filled_store(length)
    assert_holds(case.store, case.dense_k, case.dense_v)
    assert len(case.store.holdings()[0].filled) == 2 * -(-length // PAGE)


def test_at_once_in_chunks_and_one_by_one_give_the_same_bytes() -> None:
    k, v = new_tokens(1, 37)
    contents = []
    for chunks in ([37], [5, 20, 12], [1] * 37):
        store, position = empty_store(batch=1), 0
        for size in chunks:
            tokens = slice(position, position + size)
            push(store, k[:, :, tokens], v[:, :, tokens])
            position += size
        pages = [store.arena.page(page).clone() for page in store.holdings()[0].filled]
        contents.append(torch.cat(pages))
    assert torch.equal(contents[0], contents[1])
    assert torch.equal(contents[0], contents[2])


def test_reserving_what_is_there_touches_nothing() -> None:
    store = filled_store(PAGE + 1).store
    used, words = store.arena.used_pages, store.state.clone()
    store.reserve(PAGE + 1, 1)
    store.reserve(PAGE + 1, PAGE - 1)
    assert store.arena.used_pages == used
    assert torch.equal(store.state, words)


def test_a_fork_and_its_origin_grow_apart() -> None:
    case = filled_store(PAGE + 3)
    fork = case.store.fork()
    assert case.store.arena.used_pages == 4
    (k1, v1), (k2, v2) = new_tokens(2, 1), new_tokens(2, 20)
    push(fork, k1, v1)
    push(case.store, k2, v2)
    assert_holds(fork, torch.cat([case.dense_k, k1], 2), torch.cat([case.dense_v, v1], 2))
    assert_holds(case.store, torch.cat([case.dense_k, k2], 2), torch.cat([case.dense_v, v2], 2))
    # Full pages are still shared; each side has its own tail.
    assert case.store.arena.used_pages == 2 + 2 + 4


def test_only_the_last_owner_writes_in_place() -> None:
    case = filled_store(PAGE + 3)
    fork = case.store.fork()
    push(fork, *new_tokens(2, 1))
    used = case.store.arena.used_pages
    push(case.store, *new_tokens(2, 1))
    assert case.store.arena.used_pages == used


def test_truncating_a_fork_into_a_shared_page_leaves_the_origin_alone() -> None:
    case = filled_store(3 * PAGE)
    fork = case.store.fork()
    push(fork, *new_tokens(2, 1))
    fork.truncate(PAGE + 2)
    k, v = new_tokens(2, 3)
    push(fork, k, v)
    assert_holds(case.store, case.dense_k, case.dense_v)
    assert_holds(
        fork,
        torch.cat([case.dense_k[:, :, : PAGE + 2], k], 2),
        torch.cat([case.dense_v[:, :, : PAGE + 2], v], 2),
    )


def test_selected_rows_share_pages_and_grow_apart() -> None:
    case = filled_store(PAGE + 3)
    used = case.store.arena.used_pages
    beams = case.store.select_rows([1, 1, 0])
    assert case.store.arena.used_pages == used
    k, v = new_tokens(3, 1)
    push(beams, k, v)
    index = torch.tensor([1, 1, 0])
    assert_holds(
        beams, torch.cat([case.dense_k[index], k], 2), torch.cat([case.dense_v[index], v], 2)
    )
    assert_holds(case.store, case.dense_k, case.dense_v)


def test_joined_rows() -> None:
    case = filled_store(PAGE + 3)
    joined = case.store.joined([case.store.select_rows([1])])
    index = torch.tensor([0, 1, 1])
    assert_holds(joined, case.dense_k[index], case.dense_v[index])


def test_a_position_below_the_length_overwrites_and_a_gap_is_an_error() -> None:
    case = filled_store(2 * PAGE + 1)
    k, v = new_tokens(2, 2)
    push(case.store, k, v, past_len=5)
    assert case.store.length == 7
    assert case.store.arena.used_pages == 2
    assert_holds(
        case.store,
        torch.cat([case.dense_k[:, :, :5], k], 2),
        torch.cat([case.dense_v[:, :, :5], v], 2),
    )
    with pytest.raises(CacheGapError, match=r"position 9 .* of 7 tokens"):
        case.store.append(k, v, 9)
    with pytest.raises(CacheGapError, match="position -1"):
        case.store.append(k, v, -1)


def test_uncommitted_tokens_do_not_count_and_a_retry_overwrites_them() -> None:
    case = filled_store(PAGE)
    case.store.append(*new_tokens(2, 3), PAGE)
    assert case.store.length == PAGE
    k, v = new_tokens(2, 2)
    push(case.store, k, v)
    assert_holds(case.store, torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2))


def test_committing_what_was_never_appended_is_an_error() -> None:
    store = filled_store(PAGE).store
    with pytest.raises(CacheGapError, match=f"only {PAGE} were appended"):
        store.commit(PAGE + 1)


def test_k_and_v_may_be_appended_one_after_the_other() -> None:
    case = filled_store(PAGE - 1)
    k, v = new_tokens(2, 2)
    case.store.append(k, None, PAGE - 1)
    case.store.commit(PAGE + 1, "k")
    assert (case.store.k_len, case.store.v_len, case.store.length) == (PAGE + 1, PAGE - 1, PAGE - 1)
    assert torch.equal(case.store.materialize("v"), case.dense_v)
    case.store.append(None, v, PAGE - 1)
    case.store.commit(PAGE + 1, "v")
    assert_holds(case.store, torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2))


def test_a_wrong_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"3 rows .* cache of 2 rows"):
        filled_store(4).store.append(*new_tokens(3, 1), 4)


def test_a_static_store_reads_zeros_beyond_its_length_and_refuses_what_does_not_fit() -> None:
    case = filled_store(PAGE + 2, capacity=2 * PAGE + 5)
    assert_holds(case.store, case.dense_k, case.dense_v)
    k, v = new_tokens(2, PAGE + 4)
    with pytest.raises(CacheFullError, match=f"{2 * PAGE + 6} tokens .* cache of {2 * PAGE + 5}"):
        case.store.append(k, v, PAGE + 2)
    push(case.store, k[:, :, 1:], v[:, :, 1:])
    assert case.store.length == case.store.capacity
    with pytest.raises(CacheFullError):
        case.store.reserve(2 * PAGE + 5, 1)


def test_static_pages_come_with_the_tokens() -> None:
    store = empty_store(capacity=100 * PAGE)
    assert store.arena.used_pages == 0
    push(store, *new_tokens(2, 3))
    assert store.arena.used_pages == 2


def test_left_padding_owns_no_page_and_reads_as_zeros() -> None:
    store = empty_store(batch=3)
    k, v = new_tokens(3, 2 * PAGE)
    store.set_starts([0, PAGE + 4, 2 * PAGE])
    push(store, k, v)
    for row, start in enumerate([0, PAGE + 4, 2 * PAGE]):
        k[row, :, :start] = 0
        v[row, :, :start] = 0
    assert_holds(store, k, v)
    assert len(store.holdings()[0].filled) == 2 + 1 + 0
    k1, v1 = new_tokens(3, 1)
    push(store, k1, v1)
    assert_holds(store, torch.cat([k, k1], 2), torch.cat([v, v1], 2))


def test_cropping_into_left_padding_frees_the_rest_for_tokens() -> None:
    store = empty_store(batch=2)
    k, v = new_tokens(2, 10)
    store.set_starts([0, 6])
    push(store, k, v)
    store.truncate(4)
    k1, v1 = new_tokens(2, 5)
    push(store, k1, v1)
    k[1, :, :4] = 0
    v[1, :, :4] = 0
    assert store.start_list() == [0, 4]
    assert_holds(store, torch.cat([k[:, :, :4], k1], 2), torch.cat([v[:, :, :4], v1], 2))


def test_padding_is_learned_while_empty_only() -> None:
    with pytest.raises(CacheGapError, match="first mask"):
        filled_store(3).store.set_starts([1, 0])


def test_asking_for_more_than_is_stored_is_an_error() -> None:
    store = filled_store(5).store
    with pytest.raises(StaleHandleError, match=r"6 tokens of K .* only 5"):
        store.materialize("k", 6)


def test_pages_go_back_when_stores_die_even_in_cycles() -> None:
    arena: Arena = filled_store(1).store.arena
    for step in range(50):
        store = empty_store(arena=arena)
        push(store, *new_tokens(2, 3 * PAGE + step))
        others = [store.fork(), store.select_rows([0, 0, 1])]
        push(others[0], *new_tokens(2, 5))
        cycle: dict[str, object] = {"store": store, "others": others}
        cycle["self"] = cycle
        del store, others, cycle
    gc.collect()
    assert arena.used_pages == 0
    assert arena.allocated_bytes <= 4 << 20


@pytest.mark.parametrize("length", [1000, 1024, 1025, 1991])
def test_waste_is_at_most_four_percent_and_a_slab(length: int) -> None:
    store = empty_store(batch=3, page_size=32)
    push(store, *new_tokens(3, length))
    part = store.stored_bytes()
    channels = DIM_QK + 8  # V has 5 channels, rounded up to 8
    assert part.codes == 3 * length * HEADS * channels * 4
    slab = store.arena.page_bytes << store.arena.shift
    assert store.arena.allocated_bytes <= 1.04 * part.codes + slab
    assert part.codes + part.slack == store.arena.used_pages * store.arena.page_bytes


def test_block_table_and_state_follow_growth() -> None:
    store = empty_store(batch=2)
    state = store.state
    push(store, *new_tokens(2, 40 * PAGE))
    assert store.state is state
    assert state[1] == store.block_table.data_ptr()
    assert state[2] == store.block_table.shape[1] >= 40
    assert state[0] == store.arena.slab_table.data_ptr()
    assert state[3] == store.starts.data_ptr()
    assert state[4:8].tolist() == [store.arena.shift, store.arena.page_bytes, 2, store.key]
    assert not state[8:].any()
