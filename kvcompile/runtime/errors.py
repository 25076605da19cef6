"""Named errors of the page store and of the handle tensors."""

from __future__ import annotations

from kvcompile.codegen.errors import KvcompileError


class CacheGapError(KvcompileError):
    """Tokens were to be written, or read, beyond the last stored token."""


class CacheFullError(KvcompileError):
    """More tokens were to be written than a static cache can hold."""


class CacheBudgetError(KvcompileError):
    """Pages were to be added beyond `kv_cache_memory_bytes`; every cache keeps its tokens."""


class PaddingRevivedError(KvcompileError):
    """A mask makes a left-padding token visible that the first mask declared dead."""


class CacheInUseError(KvcompileError):
    """A static cache was given to two steps at once."""


class CacheKindError(KvcompileError):
    """A cache of another kind stands where a graph writes into a static buffer."""


class StaleHandleError(KvcompileError):
    """A handle refers to tokens, or to a store, that no longer exist."""


class HandleHasNoStorageError(KvcompileError):
    """The address or the storage of a handle was asked for; its data lives in pages."""


class HandleWriteError(KvcompileError):
    """A write to a handle that cannot reach what the handle stands for."""


class CacheFileError(KvcompileError):
    """A saved cache cannot be read: it is damaged, foreign, or made for other machines."""
