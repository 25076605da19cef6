"""A hard limit on slabs: how they are cut to fit, what goes back, and what a failure leaves."""

import gc

import pytest
import torch

from kvcompile.runtime.arena import SMALLEST_SLAB_BYTES, Arena
from kvcompile.runtime.budget import Budget
from kvcompile.runtime.claim import claim
from kvcompile.runtime.errors import CacheBudgetError
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.registry import ROLES
from kvcompile.runtime.store import PagedStore
from tests.support.stores import DIM_VO, HEADS, PAGE, empty_store, new_tokens, push, quantized_store

CPU = torch.device("cpu")


def limited(store: PagedStore, budget: Budget) -> PagedStore:
    """Return an empty store of the same kind whose pages come from a budget."""
    exact = store.exact.arena if isinstance(store, QuantizedStore) else None
    arenas = [
        budget.arena(arena.page_bytes, CPU, stores=1)
        for arena in (store.arena, exact)
        if arena is not None
    ]
    common = (store.layout, HEADS, store.dtype, CPU)
    kept = {"batch": store.batch, "capacity": store.capacity}
    if exact is None:
        return PagedStore(*common, arenas[0], **kept)  # type: ignore[arg-type]
    result = QuantizedStore(*common, (arenas[0], arenas[1]), **kept)  # type: ignore[arg-type]
    result.compute = store.compute
    return result


def test_the_mapping_of_options_is_what_makes_graphs_one_model() -> None:
    options, equal = {"page_size": 64}, {"page_size": 64}
    budget = Budget.of(options, 100)
    assert Budget.of(options, 100) is budget
    assert Budget.of(equal, 100) is not budget
    assert Budget.of(options, None) is None


def test_a_slab_is_cut_to_what_is_left_and_every_page_can_be_had() -> None:
    budget = Budget(SMALLEST_SLAB_BYTES + 10 * 1024 + 1)
    arena = budget.arena(1024, CPU, stores=1)
    pages = arena.allocate(3)
    while True:
        try:
            pages += arena.allocate(1)
        except CacheBudgetError:
            break
    assert len(pages) == budget.limit // 1024
    assert budget.in_use == len(pages) * 1024
    with pytest.raises(CacheBudgetError, match=r"2,048 bytes .* 75,776 in use, .* is 75,777"):
        arena.allocate(2)
    arena.release(pages[:2])
    assert sorted(arena.allocate(2)) == sorted(pages[:2])


def test_two_page_sizes_leave_each_other_what_is_left() -> None:
    """Neither takes a whole slab where the other one could still need the room."""
    budget = Budget(256 * 1024)
    first, second = (budget.arena(size, CPU, stores=1) for size in (1024, 512))
    taken = 0
    while True:
        try:
            first.allocate(1)
            second.allocate(1)
        except CacheBudgetError:
            break
        taken += 1024 + 512
    assert taken > 0.97 * budget.limit
    assert budget.in_use <= budget.limit


def test_slabs_of_what_died_make_room_for_pages_of_another_size() -> None:
    budget = Budget(64 * 1024)
    small, large = (budget.arena(size, CPU, stores=1) for size in (1024, 4096))
    assert budget.arena(1024, CPU, stores=7) is small
    pages = small.allocate(60)
    small.release(pages[8:])
    with pytest.raises(CacheBudgetError):
        large.allocate(10)  # a slab with a held page stays
    small.release(pages[:8])
    held = large.allocate(10)
    assert (small.allocated_bytes, budget.in_use) == (0, 10 * 4096)
    (again,) = small.allocate(1)
    assert small.page(again).data_ptr() == small.slab_table[again >> small.shift]
    large.release(held)
    del small, large
    gc.collect()
    assert budget.in_use == 0


def test_a_cache_that_died_in_a_cycle_is_collected_before_the_budget_is_exceeded() -> None:
    kind = empty_store()
    budget = Budget(50 * kind.arena.page_bytes)
    store = limited(kind, budget)
    push(store, *new_tokens(2, 20 * PAGE))
    cycle: list[object] = [store]
    cycle.append(cycle)
    gc.disable()
    try:
        del store, cycle
        push(limited(kind, budget), *new_tokens(2, 20 * PAGE))
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [empty_store, quantized_store])
def test_a_store_that_finds_no_room_keeps_its_tokens(make: object) -> None:
    budget = Budget(24 * 1024)
    kind: PagedStore = make(batch=1)  # type: ignore[operator]
    store, other = limited(kind, budget), limited(kind, budget)
    k, v = new_tokens(1, 400)
    push(other, k[:, :, :40], v[:, :, :40])
    length = 0
    with pytest.raises(CacheBudgetError):  # noqa: PT012 -- as many as fit
        while True:
            push(store, k[:, :, length : length + 1], v[:, :, length : length + 1])
            length += 1
    store.abandon()
    assert (store.length, store.appended) == (length, length)
    once = make(batch=1)  # type: ignore[operator]
    push(once, k[:, :, :length], v[:, :, :length])
    assert all(torch.equal(store.materialize(role), once.materialize(role)) for role in ROLES)
    other.truncate(0)
    push(store, k[:, :, length : length + 1], v[:, :, length : length + 1])
    push(once, k[:, :, length : length + 1], v[:, :, length : length + 1])
    assert all(torch.equal(store.materialize(role), once.materialize(role)) for role in ROLES)


def test_a_step_is_repeated_behind_the_except_block_as_its_error_says() -> None:
    kind = empty_store()
    budget = Budget(50 * kind.arena.page_bytes)

    def generate(tokens: int) -> None:
        store = limited(kind, budget)
        push(store, *new_tokens(2, tokens))
        if tokens == 20 * PAGE:
            store.append(*new_tokens(2, 10 * PAGE), tokens)

    with pytest.raises(CacheBudgetError, match="repeated behind the `except` block") as caught:
        generate(20 * PAGE)
    with pytest.raises(CacheBudgetError):  # as inside it: somebody holds the traceback
        generate(10 * PAGE)
    del caught
    generate(10 * PAGE)


def test_beams_that_find_no_room_for_a_copy_keep_their_tokens() -> None:
    kind = empty_store(batch=1)
    budget = Budget(6 * kind.arena.page_bytes)
    store = limited(kind, budget)
    k, v = new_tokens(1, 2 * PAGE + 3)
    push(store, k, v)
    beams = store.select_rows([0, 0, 0, 0, 0])
    with pytest.raises(CacheBudgetError):
        beams.append(*new_tokens(5, 1), 2 * PAGE + 3)
    beams.abandon()
    assert torch.equal(beams.materialize("v"), v.expand(5, -1, -1, -1))
    assert torch.equal(store.materialize("k"), k)
    beams = beams.select_rows([1, 2, 3])
    new_k, new_v = new_tokens(3, 1)
    push(beams, new_k, new_v)
    assert torch.equal(beams.materialize("k"), torch.cat([k.expand(3, -1, -1, -1), new_k], 2))


def test_an_abandoned_step_gives_its_pages_back() -> None:
    for store in (empty_store(), quantized_store()):
        push(store, *new_tokens(2, 5))
        before = store.holdings()
        store.append(*new_tokens(2, 3 * PAGE), 5)
        store.abandon()
        assert store.holdings() == before


@pytest.mark.parametrize("make", [empty_store, quantized_store])
def test_a_written_static_cache_that_finds_no_room_keeps_what_was_written(make: object) -> None:
    kind: PagedStore = make(batch=1, capacity=100)  # type: ignore[operator]
    budget = Budget(24 * 1024)
    store = limited(kind, budget)
    push(store, *new_tokens(1, 40))
    k, v = KVTensor.of(store, "k"), KVTensor.of(store, "v")
    v_before = v.materialize()
    k.copy_(torch.ones_like(k.materialize()))
    other = budget.arena(64, CPU, stores=1)
    rest = other.allocate(budget.room // 64)
    with pytest.raises(CacheBudgetError):
        claim(k, v)
    assert (k.materialize() == 1).all()
    assert torch.equal(v.materialize(), v_before)
    other.release(rest)
    assert claim(k, v) is store
    assert store.length == 100
    torch.testing.assert_close(store.materialize("k"), torch.ones(1, HEADS, 100, 8))


def test_a_crop_into_a_quantized_page_finds_room_before_it_gives_anything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = quantized_store(batch=1, residual=0)
    k, v = new_tokens(1, 4 * PAGE)
    push(store, k, v)
    fork = store.fork()
    expected = store.materialize("v")
    assert expected.shape == (1, HEADS, 4 * PAGE, DIM_VO)

    def no_memory(self: Arena, count: int) -> list[int]:
        if count:
            raise MemoryError
        return []

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "allocate", no_memory)
        with pytest.raises(MemoryError):
            store.truncate(2 * PAGE)
    store.truncate(2 * PAGE)
    torch.testing.assert_close(store.materialize("v"), expected[:, :, : 2 * PAGE])
    assert torch.equal(fork.materialize("v"), expected)
