"""Whether memory stays flat over many generations, and how much of it lies fragmented.

`python -m benchmarks.leaks` runs 1,000 short generations of a tiny model in every mode in turn and
prints after each hundred what is alive; then stores of random sizes come and go in one arena.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.runtime import launch
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.registry import living
from kvcompile.runtime.store import PagedStore
from tests.support.compiled import compiled, settings
from tests.support.tiny_models import prompt, tiny_llama

RSS_MIB = 24
"""By how much the resident memory may grow: allocators keep some of what they were given back."""


@dataclass(frozen=True)
class Alive:
    """What lives after a garbage collection.

    Attributes:
        stores: Page stores.
        arenas: Arenas.
        slab_bytes: Bytes of all slabs.
        storages: Distinct storages of tensors that Python knows.
        rss: Resident bytes of the process.
    """

    stores: int
    arenas: int
    slab_bytes: int
    storages: int
    rss: int

    @classmethod
    def now(cls) -> Alive:
        """Collect garbage and count."""
        gc.collect()
        objects = gc.get_objects()
        arenas = [x for x in objects if type(x) is Arena]
        storages = {
            x.untyped_storage()._cdata
            for x in objects
            if type(x) in (torch.Tensor, torch.nn.Parameter)
        }
        pages = Path("/proc/self/statm").read_text().split()[1]
        return cls(
            stores=len(living()),
            arenas=len(arenas),
            slab_bytes=sum(arena.allocated_bytes for arena in arenas),
            storages=len(storages),
            rss=int(pages) * 4096,
        )

    def __str__(self) -> str:
        return (
            f"{self.stores} stores, {self.arenas} arenas, {self.slab_bytes:,} bytes of slabs, "
            f"{self.storages} storages, {self.rss / 2**20:.1f} MiB resident"
        )

    def grown_since(self, before: Alive) -> list[str]:
        """Return what has grown since, in words."""
        names = [n for n in ("stores", "arenas", "slab_bytes") if getattr(self, n)]
        if self.storages > before.storages:
            names.append("storages")
        if self.rss > before.rss + (RSS_MIB << 20):
            names.append("rss")
        return [f"{name}: {getattr(before, name):,} -> {getattr(self, name):,}" for name in names]


class Generations:
    """Short generations of one compiled model, each in the next mode."""

    def __init__(self, **options: Any) -> None:
        """Compile a tiny model with options of the backend."""
        self._run = compiled(tiny_llama(layers=2), **options)
        self._count = 0
        self.modes: Sequence[Callable[[], None]] = (
            self._greedy,
            self._beams,
            self._static,
            self._crop,
            self._cycle,
            self._failing,
        )

    def next(self) -> None:
        """Generate once."""
        with torch.no_grad():
            self.modes[self._count % len(self.modes)]()
        self._count += 1

    def _greedy(self) -> None:
        self._run.generate(prompt(40), **settings(4))

    def _beams(self) -> None:
        self._run.generate(prompt(40), **settings(4, num_beams=3))

    def _static(self) -> None:
        self._run.generate(prompt(40), **settings(4, cache_implementation="static"))

    def _filled(self) -> Any:
        return self._run.generate(prompt(40), **settings(3)).past_key_values

    def _crop(self) -> None:
        cache = self._filled()
        cache.crop(-20)
        self._run(prompt(1), cache=cache)

    def _cycle(self) -> None:
        cache = self._filled()
        holder: list[Any] = [cache]
        holder.append(holder)

    def _failing(self) -> None:
        """A step that fails in the second layer, then goes well."""
        cache, real, calls = self._filled(), launch.attend, 0

        def attend(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError
            return real(*args)

        launch.attend = attend  # type: ignore[assignment]
        try:
            self._run(prompt(1), cache=cache)
        except MemoryError:
            pass
        finally:
            launch.attend = real
        self._run(prompt(1), cache=cache)


def flatness(count: int, report: Callable[[str], None], **options: Any) -> list[str]:
    """Generate `count` times; return what has grown since the first tenth, in words.

    Args:
        count: Generations, at least twice the number of modes.
        report: Gets a line ten times.
        **options: Of the backend.
    """
    generations = Generations(**options)
    warm_up = max(count // 10, 2 * len(generations.modes))
    for _ in range(warm_up):
        generations.next()
    first = last = Alive.now()
    report(f"{warm_up:,} generations: {first}")
    for number in range(warm_up + 1, count + 1):
        generations.next()
        if number % warm_up == 0 or number == count:
            last = Alive.now()
            report(f"{number:,} generations: {last}")
    return last.grown_since(first)


@dataclass(frozen=True)
class Fragmentation:
    """Bytes of slabs by bytes of tokens, while stores come and go.

    Attributes:
        median: Over all steps.
        worst: Of all steps.
        peak: Bytes of slabs at the end, by the most bytes of tokens there ever were.
        slack: Median share of the held pages that holds no token.
    """

    median: float
    worst: float
    peak: float
    slack: float

    def __str__(self) -> str:
        return (
            f"allocated / stored {self.median:.3f} (median), {self.worst:.3f} (worst); allocated / "
            f"most ever stored {self.peak:.3f}; {self.slack:.1%} of the held pages are empty slots"
        )


def fragmentation(name: str, steps: int, seed: int = 0) -> Fragmentation:
    """Let stores of random batch sizes and lengths grow, be cropped, reordered and freed.

    Args:
        name: `exact` or `int4`.
        steps: How many of these operations.
        seed: Of the choices.
    """
    choose = random.Random(seed)
    arenas = _arenas(name)
    stores: list[PagedStore] = []
    ratios, slacks, most = [], [], 0
    for step in range(steps):
        _random_operation(choose, stores, name, arenas)
        if step < steps // 10 or not stores:
            continue
        held, stored = _held_and_stored(stores)
        allocated = sum(arena.allocated_bytes for arena in arenas)
        most = max(most, stored)
        ratios.append(allocated / stored)
        slacks.append(1 - stored / held)
    median = statistics.median
    return Fragmentation(median(ratios), max(ratios), allocated / most, median(slacks))


HEADS, DIM = 3, 64


def _layout(name: str) -> RecordLayout:
    if name == "exact":
        return RecordLayout("bf16", "bf16", DIM, DIM, 32)
    return RecordLayout("int4", "int4", DIM, DIM, 64, 64, Window("bf16", 4, 64))


def _arenas(name: str) -> tuple[Arena, ...]:
    layout = _layout(name)
    layouts = [layout] if layout.window is None else [layout, layout.exact]
    return tuple(Arena(each.page_bytes(HEADS)) for each in layouts)


def _new_store(name: str, arenas: tuple[Arena, ...], batch: int) -> PagedStore:
    common = (_layout(name), HEADS, torch.bfloat16, "cpu")
    if len(arenas) == 1:
        return PagedStore(*common, arenas[0], batch=batch)
    return QuantizedStore(*common, (arenas[0], arenas[1]), batch=batch)


def _random_operation(
    choose: random.Random, stores: list[PagedStore], name: str, arenas: tuple[Arena, ...]
) -> None:
    what = choose.choice(("new", "grow", "grow", "grow", "crop", "select", "free"))
    if what == "new" or not stores:
        if len(stores) < 24:
            stores.append(_new_store(name, arenas, choose.randint(1, 4)))
            _grow(stores[-1], choose.randint(100, 1500))
        return
    number = choose.randrange(len(stores))
    store = stores[number]
    if what == "grow":
        _grow(store, choose.randint(1, 300))
    elif what == "crop":
        store.truncate(max(store.length - choose.randint(1, 200), 50))
    elif what == "select":
        stores[number] = store.select_rows(choose.choices(range(store.batch), k=store.batch))
    elif len(stores) > 8:
        del stores[number]


def _grow(store: PagedStore, tokens: int) -> None:
    new = torch.zeros(store.batch, HEADS, tokens, DIM, dtype=torch.bfloat16)
    store.append(new, new, store.length)
    store.commit(store.appended)


def _held_and_stored(stores: Sequence[PagedStore]) -> tuple[int, int]:
    """Return the bytes of all distinct pages, and of the tokens in them."""
    held: dict[tuple[int, int], tuple[int, int]] = {}
    for holding in (h for store in stores for h in store.holdings()):
        size = holding.arena.page_bytes
        for page, tokens in holding.filled.items():
            stored = max(tokens * size // holding.page_size, held.get((size, page), (0, 0))[1])
            held[size, page] = size, stored
    return sum(size for size, _ in held.values()), sum(stored for _, stored in held.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both; return 1 if something has grown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaks", description=__doc__)
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000, help="operations on stores")
    args = parser.parse_args(arguments)
    grown = []
    for kv_cache_dtype in ("auto", "int4"):
        print(f"kv_cache_dtype={kv_cache_dtype}")
        grown += flatness(args.generations, print, kv_cache_dtype=kv_cache_dtype)
    print("grown: " + ("; ".join(grown) or "nothing"))
    for name in ("exact", "int4"):
        print(f"{name}: {fragmentation(name, args.steps)}")
    return bool(grown)


if __name__ == "__main__":
    raise SystemExit(main())
