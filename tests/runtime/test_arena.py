"""Pages: reference counts, reuse, slabs that never move, exact bytes."""

import gc
import itertools
import threading

import torch

from kvcompile.runtime.arena import GROWTH, LARGEST_SLAB_BYTES, SMALLEST_SLAB_BYTES, Arena


def test_a_released_page_is_reused_before_a_slab_is_added() -> None:
    arena = Arena(256, slab_bytes=1024)
    first = arena.allocate(4)
    assert arena.allocated_bytes == 1024
    arena.release(first[1:3])
    assert sorted(arena.allocate(2)) == first[1:3]
    assert arena.allocated_bytes == 1024


def test_a_page_stays_until_its_last_reference_goes() -> None:
    arena = Arena(256)
    (page,) = arena.allocate(1)
    arena.retain([page])
    arena.release([page])
    assert arena.references(page) == 1
    assert arena.used_pages == 1
    arena.release([page])
    assert arena.used_pages == 0


def test_the_slab_table_holds_addresses_and_outgrown_tables_stay_valid() -> None:
    arena = Arena(64, slab_bytes=64)
    pages = arena.allocate(3)
    table = arena.slab_table
    arena.allocate(500)
    assert arena.slab_table is not table
    for page in pages:
        assert table[page >> arena.shift] == arena.page(page).data_ptr()
        assert arena.slab_table[page >> arena.shift] == arena.page(page).data_ptr()
    assert any(tensor is table for tensor in arena.tensors())


def test_every_page_lies_in_its_slab_and_no_two_overlap() -> None:
    arena = Arena(192, slab_bytes=1000)
    pages = arena.allocate(37)
    starts = sorted(arena.page(page).data_ptr() for page in pages)
    assert all(b - a >= 192 for a, b in itertools.pairwise(starts))
    assert all(
        arena.page(page).data_ptr()
        == arena.slab_table[page >> arena.shift] + (page & ((1 << arena.shift) - 1)) * 192
        for page in pages
    )


def test_a_copied_page_has_the_bytes_and_one_reference() -> None:
    arena = Arena(256)
    (page,) = arena.allocate(1)
    arena.page(page).copy_(torch.arange(256, dtype=torch.uint8))
    copy = arena.copy_page(page)
    assert copy != page
    assert torch.equal(arena.page(copy), arena.page(page))
    assert (arena.references(page), arena.references(copy)) == (1, 1)


def test_the_first_slabs_hold_what_is_expected_and_nothing_more() -> None:
    shared = Arena(4096, stores=8)
    for _ in range(8):
        shared.allocate(1000)
    assert shared.allocated_bytes == 8 * 1000 * 4096
    many = Arena(4096, stores=3)
    for _ in range(3):
        many.allocate(5000)
    assert many.allocated_bytes == 3 * 5000 * 4096
    assert all(slab.nbytes <= LARGEST_SLAB_BYTES for slab in many.tensors()[:2])
    large_page = Arena(3 << 20)
    large_page.allocate(1)
    assert large_page.allocated_bytes == 3 << 20


def test_later_slabs_are_small_beside_what_is_there() -> None:
    arena = Arena(1024)
    arena.allocate(1)
    held = 1
    while arena.allocated_bytes < 40 * SMALLEST_SLAB_BYTES:
        arena.allocate(1)
        held += 1
    unused = arena.allocated_bytes - held * 1024
    assert unused <= max(SMALLEST_SLAB_BYTES, arena.allocated_bytes // GROWTH)
    large = Arena(1024)
    large.allocate(100_000)
    before = large.allocated_bytes
    large.allocate(1)
    assert 0 < large.allocated_bytes - before <= before // GROWTH
    assert len(set(large.allocate(3000))) == 3000


def test_poison_fills_new_and_freed_pages() -> None:
    arena = Arena(256)
    (page,) = arena.allocate(1)
    assert (arena.page(page) == 0xFF).all()
    arena.page(page).zero_()
    arena.release([page])
    assert arena.used_pages == 0
    assert (arena.page(page) == 0xFF).all()


def test_a_release_inside_an_allocation_does_not_deadlock() -> None:
    arena = Arena(256)
    pages = arena.allocate(2)
    # What a finalizer does when garbage collection runs while this thread holds the lock.
    with arena._lock:
        arena.release(pages)
    assert arena.used_pages == 0


def test_threads_never_get_the_same_page() -> None:
    arena = Arena(64, slab_bytes=4096)
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for step in range(200):
            pages = arena.allocate(3)
            mine.extend(pages[1:])
            arena.release(pages[:1])
            if step == 100:
                gc.collect()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [page for mine in taken for page in mine]
    assert len(set(everything)) == len(everything) == 4 * 200 * 2
    assert arena.used_pages == len(everything)


def test_huge_pages_are_only_asked_for() -> None:
    arena = Arena(1 << 20, slab_bytes=4 << 20)
    pages = arena.allocate(4)
    arena.page(pages[3]).fill_(7)
    assert arena.allocated_bytes == 4 << 20
    assert (arena.page(pages[3]) == 7).all()


def test_what_was_allocated_in_inference_mode_is_written_to_outside() -> None:
    with torch.inference_mode():
        arena = Arena(64)
        (page,) = arena.allocate(1)
        arena.page(page).fill_(3)
    assert arena.page(arena.copy_page(page)).tolist() == [3] * 64
    slabs = len(arena.tensors())
    while len(arena.tensors()) == slabs:  # another slab enters the table
        arena.allocate(1)
    assert arena.page(page).tolist() == [3] * 64
