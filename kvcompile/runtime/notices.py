"""What is said once about something that stores and handles do by themselves."""

from __future__ import annotations

from kvcompile.passes.ir.remarks import Remark, emit


def tell_cut_inside_a_page() -> None:
    """Say that tokens of a quantized page were decoded, to be quantized again."""
    _tell(
        "KVC505",
        "crop",
        once="crop",
        reason="a cache was cut inside a quantized page; the tokens that stay of it will "
        "be quantized a second time",
        hint="a larger residual_length keeps more of the recent tokens exact",
    )


def tell_stale_view() -> None:
    """Say that a view of a static cache no longer shows it."""
    _tell(
        "KVC504",
        "claim",
        once="stale-view",
        reason="a view of a static cache is still held while the cache goes on in pages: it "
        "shows the tokens of the time it was taken, and writes to it no longer reach the cache",
        hint="take views of a static cache anew after every step",
    )


def tell_still_held() -> None:
    """Say that the memory of an adopted buffer is not released."""
    _tell(
        "KVC504",
        "adopt",
        once="adopted-and-held",
        reason="a buffer has moved into pages, but somebody still holds its dense tensor: its "
        "memory is not released, and writes to it no longer reach the cache",
        hint="take buffers from the module itself after kvcompile.adopt",
    )


def tell_turned_dense(operator: str) -> None:
    """Say that a handle keeps a dense tensor from now on."""
    _tell(
        "KVC503",
        "handle",
        once=operator,
        reason=f"{operator} writes to a KV handle or takes a view of it, so that the handle "
        "keeps a dense tensor besides its pages until it dies or is appended to",
        hint="Operators that copy, and crops from token 0, keep the cache in pages.",
    )


def tell_materialized(operator: str) -> None:
    """Say that a dense tensor was made of a handle for one operator."""
    _tell(
        "KVC507",
        "handle",
        once=operator,
        reason=f"{operator} needed a KV handle as a dense tensor, which was made for it and "
        "dropped again; memory_report counts how often",
        hint="What stays in pages: crops from token 0; slicing, selecting, repeating and "
        "joining rows; clone and deepcopy; saving and loading.",
    )


def _tell(code: str, origin: str, *, once: str, reason: str, hint: str) -> None:
    emit(Remark("note", code, origin, site="", where="", reason=reason, hint=hint), once=once)
