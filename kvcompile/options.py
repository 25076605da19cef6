"""Options of the backend: parsed once, frozen, and refused with the nearest valid one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvcompile.codegen.errors import KvcompileError

if TYPE_CHECKING:
    from collections.abc import Mapping

KV_CACHE_DTYPES = ("auto",)
PAGE_SIZES = (16, 32, 64, 128)
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
ALIASES = {"block_size": "page_size"}


class OptionError(KvcompileError, ValueError):
    """An option is unknown or has a bad value; names it and the nearest valid one."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What `torch.compile(..., backend="kvcompile", options={...})` understands.

    Attributes:
        kv_cache_dtype: Format of K and V. `auto` stores the model's dtype exactly.
        page_size: Tokens per page, one of 16, 32, 64, 128.
        strict: Raise the remark of an attention or cache that cannot be rewritten, instead of
            running it as the model wrote it.
        inner_backend: Compiler of the rest of the graph: `inductor`, `aot_eager` or `eager`.
        verify: Check the invariants after every pass.
    """

    kv_cache_dtype: str = "auto"
    page_size: int = 32
    strict: bool = False
    inner_backend: str = "inductor"
    verify: bool = False

    def __post_init__(self) -> None:
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("page_size", self.page_size, PAGE_SIZES)
        _one_of("inner_backend", self.inner_backend, INNER_BACKENDS)
        for name in ("strict", "verify"):
            _one_of(name, getattr(self, name), (False, True))


def parse_options(given: Mapping[str, Any] | None) -> CacheOptions:
    """Return the options of a call.

    Args:
        given: Option names and values; None means the defaults.

    Raises:
        OptionError: A name is unknown or a value is not allowed.
    """
    known = [f.name for f in fields(CacheOptions)]
    parsed: dict[str, Any] = {}
    for raw, value in (given or {}).items():
        name = ALIASES.get(raw, raw)
        if name not in known:
            raise OptionError(f"unknown option {raw!r}{_nearest(raw, [*known, *ALIASES])}")
        if name in parsed:
            raise OptionError(f"option {name!r} is given twice, as {raw!r} too")
        parsed[name] = value
    return CacheOptions(**parsed)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not one of the allowed ones, of the same type."""
    if any(type(value) is type(a) and value == a for a in allowed):
        return
    raise OptionError(
        f"option {name!r} cannot be {value!r}{_nearest(value, allowed)}; "
        f"allowed: {', '.join(map(repr, allowed))}"
    )


def _nearest(value: object, allowed: object) -> str:
    """Return a clause that names the allowed value nearest to the given one, if any is near."""
    choices = list(allowed)  # type: ignore[call-overload]
    if isinstance(value, int) and not isinstance(value, bool):
        numbers = [c for c in choices if isinstance(c, int)]
        best: object = min(numbers, key=lambda c: abs(c - value)) if numbers else None
    else:
        close = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1, cutoff=0.4)
        best = close[0] if close else None
    return f": did you mean {best!r}?" if best is not None else ""
