"""Memory is flat over many short generations; `python -m benchmarks.leaks` runs 1,000."""

import pytest

from benchmarks.leaks import Alive, flatness, fragmentation

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_nothing_grows_over_generations() -> None:
    lines: list[str] = []
    assert flatness(24, lines.append, kv_cache_dtype="int4") == []
    assert len(lines) == 2


def test_growth_is_told() -> None:
    flat = Alive(stores=0, arenas=0, slab_bytes=0, storages=7, rss=1 << 30)
    assert flat.grown_since(flat) == []
    grown = Alive(stores=1, arenas=1, slab_bytes=64, storages=8, rss=2 << 30)
    assert [line.split(":")[0] for line in grown.grown_since(flat)] == [
        *("stores", "arenas", "slab_bytes", "storages", "rss")
    ]


@pytest.mark.parametrize(("name", "most"), [("exact", 1.05), ("int4", 1.12)])
def test_pages_that_come_and_go_are_used_again(name: str, most: float) -> None:
    found = fragmentation(name, 150)
    assert 1 <= found.peak <= most
    assert found.worst >= found.median >= 1
