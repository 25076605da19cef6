"""One store for K and V: what is derived from a store is asked for twice, once per role."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompile.runtime.registry import Role
    from kvcompile.runtime.store import PagedStore


class LastDerived:
    """The store last derived from another one, and the roles that were given it."""

    def __init__(self) -> None:
        """Begin without one."""
        self._made: tuple[object, int, weakref.ref[PagedStore]] | None = None
        self._roles: set[Role] = set()

    def store(
        self, what: object, epoch: int, role: Role, make: Callable[[], PagedStore]
    ) -> PagedStore:
        """Return the store that `make` makes; see `PagedStore.derive`.

        Args:
            what: Names what is made.
            epoch: Counts the changes of the store that it is made from.
            role: The role that asks.
            make: Makes the store.
        """
        if self._made is not None and role not in self._roles:
            its_what, its_epoch, ref = self._made
            store = ref()
            if store is not None and (its_what, its_epoch) == (what, epoch):
                self._roles.add(role)
                return store
        store = make()
        self._made = what, epoch, weakref.ref(store)
        self._roles = {role}
        return store
