"""Options of the backend: parsed once, frozen, and refused with the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvcompile.byte_sizes import parse_bytes
from kvcompile.codegen.errors import KvcompileError
from kvcompile.codegen.formats import get_format
from kvcompile.passes.layer_dtypes import Dtypes, LayerDtypes

KV_CACHE_DTYPES = (
    *("auto", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("int8", "int4", "int3", "int2", "int1"),
)
DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
"""Full names of formats."""

COMPUTE_DTYPES = ("auto", "int8", "fp32")
PAGE_SIZES = (16, 32, 64, 128)
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ALIASES = {"block_size": "page_size", "group_size": "q_group_size"}


class OptionError(KvcompileError, ValueError):
    """An option is unknown or has a bad value; names it and the nearest valid one."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What `torch.compile(..., backend="kvcompile", options={...})` understands.

    A dtype is a name, or a mapping from layers to names: {0: "int8", -1: "int8",
    "default": "int4"}. Layers are numbered in the order in which the model runs them; -1 is the
    last one.

    Attributes:
        kv_cache_dtype: Format of K and V. `auto` stores the model's dtype exactly; `bf16` rounds to
            it; `fp8` (in full `fp8_e4m3`), `fp8_e5m2`, `int8`, `int4`, `int3`, `int2` and `int1`
            are quantized.
        k_cache_dtype: Format of K, if it is not that of V.
        v_cache_dtype: Format of V, if it is not that of K.
        kv_cache_dtype_skip_layers: Layers that are stored exactly.
        page_size: Tokens per page, one of 16, 32, 64, 128; None for 32, or 64 if a format is
            quantized (on a GPU 128 where 64 are too few for tensor cores). A page is the group of
            tokens that share K's scale of a channel.
        q_group_size: Channels of a token of V that share a scale, a multiple of 16.
        residual_length: Most recent tokens that stay exact in a quantized cache.
        num_sink_tokens: First tokens that stay exact in a quantized cache.
        compute_dtype: How attention multiplies quantized K and V: `fp32` decodes them in registers,
            `int8` rounds the query to int8 and multiplies integers; `auto` is the faster one.
        separate_k_bias: Keep apart from quantized K what its projection's bias becomes under rotary
            embedding, in up to sixteen pairs of channels, and add its score back; where there is a
            bias and the frequencies are an input of the graph.
        gemv: Multiply the few rows of a decode step with weights as they lie, in a generated
            kernel; False leaves all products to the inner backend.
        fuse_rope: Turn q and new K (rotary embedding) where attention and append load them; False
            leaves the rotation to the inner backend, and None does so on a CPU.
        kv_cache_memory_bytes: The most bytes that the pages of all living caches of the compiled
            model take together: a number, or a text such as "2GiB" or "512MB". A step that needs
            more raises `CacheBudgetError` and can be repeated. Slabs count, whether their pages
            are held or free; tables and dense tensors do not.
        strict: Raise the remark of an attention or cache that cannot be rewritten, instead of
            running it as the model wrote it.
        inner_backend: Compiler of the rest of the graph: `inductor`, `aot_eager` or `eager`.
        mode: Inductor's mode, for whoever gives options too: `torch.compile` takes either. Under
            `reduce-overhead` and `max-autotune` the decode steps of a static cache on a GPU are
            recorded once and replayed.
        verify: Check the invariants after every pass.
    """

    kv_cache_dtype: Dtypes = "auto"
    k_cache_dtype: Dtypes | None = None
    v_cache_dtype: Dtypes | None = None
    kv_cache_dtype_skip_layers: Sequence[int] = ()
    page_size: int | None = None
    q_group_size: int = 64
    residual_length: int = 64
    num_sink_tokens: int = 4
    compute_dtype: str = "auto"
    separate_k_bias: bool = True
    gemv: bool = True
    fuse_rope: bool | None = None
    kv_cache_memory_bytes: int | str | None = None
    strict: bool = False
    inner_backend: str = "inductor"
    mode: str | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        _check_dtypes("kv_cache_dtype", self.kv_cache_dtype)
        for name in ("k_cache_dtype", "v_cache_dtype"):
            if getattr(self, name) is not None:
                _check_dtypes(name, getattr(self, name))
        for layer in _sequence("kv_cache_dtype_skip_layers", self.kv_cache_dtype_skip_layers):
            _whole_number("kv_cache_dtype_skip_layers", layer, least=None)
        _one_of("page_size", self.page_size, (None, *PAGE_SIZES))
        _whole_number("q_group_size", self.q_group_size, least=16, multiple=16)
        _whole_number("residual_length", self.residual_length, least=0)
        _whole_number("num_sink_tokens", self.num_sink_tokens, least=0)
        self.memory_limit()
        _one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _one_of("inner_backend", self.inner_backend, INNER_BACKENDS)
        _one_of("mode", self.mode, (None, *MODES))
        for name in ("separate_k_bias", "gemv", "strict", "verify"):
            _one_of(name, getattr(self, name), (False, True))
        _one_of("fuse_rope", self.fuse_rope, (None, False, True))
        for name in sorted(self.dtypes().names()):
            least = 16 if name == "auto" else get_format(name).smallest_page
            if self.page_size is not None and self.page_size < least:
                raise OptionError(
                    f"option 'page_size' cannot be {self.page_size} with {name!r}: did you mean "
                    f"{least}?; a page of it has at least {least} tokens"
                )

    def memory_limit(self) -> int | None:
        """Return the most bytes of pages, or None.

        Raises:
            OptionError: It is given, and is no positive number of bytes.
        """
        name, limit = "kv_cache_memory_bytes", self.kv_cache_memory_bytes
        if isinstance(limit, str):
            found = parse_bytes(limit)
            if isinstance(found, str):
                raise OptionError(
                    f"option {name!r} cannot be {limit!r}: did you mean {found!r}?; it is a number "
                    "of bytes, or a text with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
                )
            limit = found
        if limit is not None:
            _whole_number(name, limit, least=1)
        return limit

    def dtypes(self) -> LayerDtypes:
        """Return the formats by layer, each under its short name."""
        skipped = tuple(self.kv_cache_dtype_skip_layers)
        own = (self.k_cache_dtype, self.v_cache_dtype)
        k, v = (None if dtypes is None else _short(dtypes) for dtypes in own)
        return LayerDtypes(_short(self.kv_cache_dtype), k, v, skipped)


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


def _short(dtypes: Dtypes) -> Dtypes:
    """Return dtypes with no format under its full name."""
    if isinstance(dtypes, str):
        return DTYPE_ALIASES.get(dtypes, dtypes)
    return {layer: DTYPE_ALIASES.get(name, name) for layer, name in dtypes.items()}


def _check_dtypes(name: str, value: object) -> None:
    """Refuse a dtype, or a mapping from layers to dtypes, that names something unknown."""
    if not isinstance(value, Mapping):
        _one_of(name, value, KV_CACHE_DTYPES)
        return
    for layer, dtype in value.items():
        if type(layer) is not int and layer != "default":
            raise OptionError(
                f"option {name!r} names the layer {layer!r}; layers are whole numbers or 'default'"
            )
        _one_of(f"{name}[{layer!r}]", dtype, KV_CACHE_DTYPES)


def _sequence(name: str, value: object) -> list[object]:
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return list(value)
    raise OptionError(
        f"option {name!r} cannot be {value!r}; a list of layers is wanted, as [0, -1]"
    )


def _whole_number(name: str, value: object, *, least: int | None, multiple: int = 1) -> None:
    """Refuse what is not a whole number, too small or no multiple of `multiple`."""
    wanted = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    if least is not None:
        wanted += f", at least {least}"
    if type(value) is not int:
        raise OptionError(f"option {name!r} cannot be {value!r}; it is {wanted}")
    if (least is not None and value < least) or value % multiple:
        nearest = max(least or 0, round(value / multiple) * multiple)
        raise OptionError(
            f"option {name!r} cannot be {value!r}: did you mean {nearest!r}?; it is {wanted}"
        )


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
