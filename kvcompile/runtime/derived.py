"""One store for K and V: what is derived from a store is asked for twice, once per role."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompile.runtime.registry import Role
    from kvcompile.runtime.store import PagedStore


class Derived:
    """The stores derived from another one that are alive, and the roles that were given them."""

    def __init__(self) -> None:
        """Begin without one."""
        self._made: dict[object, tuple[weakref.ref[PagedStore], set[str]]] = {}

    def store(
        self, what: object, role: Role, at_least: int, make: Callable[[], PagedStore]
    ) -> PagedStore:
        """Return the store that `make` makes; see `PagedStore.derive`.

        Args:
            what: Names what is made, and what it is made of at this time.
            role: The role that asks.
            at_least: Tokens of the role that must be in it, counted from the first ever stored.
            make: Makes the store.
        """
        if what in self._made:
            ref, roles = self._made[what]
            store = ref()
            is_given = bool(roles & {*role})  # "kv" asks for K and for V
            # One that was given to the other role may have been cut short since then.
            is_whole = store is not None and store.origin + store.role_length(role) >= at_least
            if store is not None and is_whole and not is_given:
                roles.update(role)
                return store
        store = make()
        self._made = {key: made for key, made in self._made.items() if made[0]() is not None}
        self._made[what] = weakref.ref(store), {*role}
        return store
