"""A hard limit on the pages of all caches that one compiled model makes.

What counts are the bytes of slabs, whether their pages are held or free. Caches under a budget take
their pages from the same arenas, one per page size and device: what one gives back another can
take, and slabs without a held page go back when an arena of another page size needs the room.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheBudgetError


class Budget:
    """A limit, and the arenas whose slabs count.

    Attributes:
        limit: Bytes.
        token_bytes: About how many bytes of pages a token of one row takes in all layers.
        was_exceeded: Whether a reservation has failed, and nobody has looked since for what cropped
            caches still hold.
        lock: Held by an arena that allocates; all arenas of a budget share it.
    """

    def __init__(self, limit: int) -> None:
        """Begin with all of it left."""
        self.limit = limit
        self.token_bytes = 0.0
        self.was_exceeded = False
        self.lock = threading.Lock()
        self._arenas: weakref.WeakValueDictionary[tuple[int, torch.device], Arena] = (
            weakref.WeakValueDictionary()
        )
        self._owner: object = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, limit: int | None) -> Budget | None:
        """Return the budget of a compiled model, or None if it has none.

        Dynamo hands the very same mapping to every graph of a compiled model: that is how its
        graphs are recognised. Models compiled with one mapping share one budget.

        Args:
            options: What the user gave, as the object it is.
            limit: Bytes, or None.
        """
        if limit is None:
            return None
        with _finding:
            budget = _budgets.get(id(options))
            if budget is None or budget.limit != limit:
                budget = _budgets[id(options)] = cls(limit)
                budget._owner = options  # as long as it lives, nothing else has its id
            return budget

    @property
    def in_use(self) -> int:
        """Bytes of all slabs."""
        return sum(arena.allocated_bytes for arena in self._living())

    @property
    def room(self) -> int:
        """Bytes of slabs that can be added."""
        return self.limit - self.in_use

    def arena(self, page_bytes: int, device: torch.device, *, stores: int) -> Arena:
        """Return the arena with pages of a size on a device; see `Arena` for `stores`."""
        with _finding:
            arena = self._arenas.get((page_bytes, device))
            if arena is None:
                arena = Arena(page_bytes, device, stores=stores, budget=self)
                self._arenas[page_bytes, device] = arena
            return arena

    def grant(self, asking: Arena, least: int, wanted: int) -> int:
        """Return how many bytes of slabs an arena may add, `least` to `wanted`.

        The caller holds the lock.

        Raises:
            CacheBudgetError: There is no room for `least` bytes.
        """
        if self.room < least:
            self._shrink(asking)
        if self.room < least:
            raise self._exceeded(least)
        return min(wanted, self.room)

    def _living(self) -> list[Arena]:
        # Other threads may add one meanwhile: a list of references is taken at once.
        return [arena for ref in self._arenas.valuerefs() if (arena := ref()) is not None]

    def _shrink(self, asking: Arena) -> None:
        """Take slabs without a held page from all other arenas."""
        for arena in self._living():
            if arena is not asking:
                arena.drop_empty_slabs()

    def _exceeded(self, least: int) -> CacheBudgetError:
        self.was_exceeded = True
        in_use = self.in_use
        fits = ""
        if self.token_bytes:
            fits = (
                f" About {int(self.limit / self.token_bytes):,} tokens fit, of all rows of all "
                f"caches together, at {self.token_bytes:,.0f} bytes in all layers."
            )
        return CacheBudgetError(
            f"{least:,} bytes of pages were to be added to the {in_use:,} in use, but "
            f"kv_cache_memory_bytes is {self.limit:,}.{fits} No token is lost, and the step can be "
            "repeated behind the `except` block; inside it the traceback keeps the handles of the "
            "failed step alive. Drop or crop another cache of this model first; or compile with a "
            "larger kv_cache_memory_bytes or a smaller kv_cache_dtype, or generate fewer tokens or "
            "rows"
        )


_finding = threading.Lock()
_budgets: weakref.WeakValueDictionary[int, Budget] = weakref.WeakValueDictionary()
