"""From the integer in an anchor or state tensor back to the object that holds the data."""

from __future__ import annotations

import itertools
import weakref
from typing import Literal, Protocol

import torch

from kvcompile.runtime.errors import StaleHandleError

Half = Literal["k", "v"]
Role = Literal["k", "v", "kv"]
ROLES: tuple[Half, Half] = ("k", "v")
"""What a store holds; "kv" is the role of a handle that shows both in one tensor."""

_NUMBERS: tuple[Role, ...] = (*ROLES, "kv")


class Source(Protocol):
    """What an anchor can stand for: a page store, or a tensor that a handle was turned into."""

    def token_dim_of(self, role: Role) -> int:
        """Return the dimension of the dense tensor of a role that counts tokens."""
        ...

    def materialize(
        self, role: Role, length: int, operator: str, begin: int | None = None
    ) -> torch.Tensor:
        """Return the dense tensor of one role; count it under the operator's name."""


_keys = itertools.count(1)
_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()


def register(source: Source) -> int:
    """Return a fresh key, by which `source` is found as long as somebody else holds it."""
    key = next(_keys)
    _sources[key] = source
    return key


def find(key: int) -> Source:
    """Return the source registered under `key`.

    Raises:
        StaleHandleError: If it no longer exists.
    """
    source = _sources.get(key)
    if source is None:
        raise StaleHandleError(
            f"the KV store with registry key {key} no longer exists: a state or anchor tensor "
            "outlived it; keep the cache object alive while its tensors are in use"
        )
    return source


def living() -> list[Source]:
    """Return every source that somebody holds."""
    # Other threads may register meanwhile: a list of references is taken at once.
    return [source for ref in _sources.valuerefs() if (source := ref()) is not None]


_KEY_BITS = 36


def anchor_for(key: int, role: Role, begin: int = 0) -> torch.Tensor:
    """Return the anchor int64[1] that names one role of a source, from the token `begin` on."""
    named = 4 * key + _NUMBERS.index(role)
    return torch.tensor([begin << _KEY_BITS | named], dtype=torch.int64)


def read_anchor(value: int) -> tuple[int, Role, int]:
    """Split an anchor's value into registry key, role and first token."""
    named = value & (1 << _KEY_BITS) - 1
    return named >> 2, _NUMBERS[named & 3], value >> _KEY_BITS
