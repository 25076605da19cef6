"""What is said once about something that stores do by themselves."""

from __future__ import annotations

from kvcompile.passes.ir.remarks import Remark, emit


def tell_cut_inside_a_page() -> None:
    """Say that tokens of a quantized page were decoded, to be quantized again."""
    emit(
        Remark(
            kind="note",
            code="KVC505",
            origin="crop",
            site="",
            where="",
            reason="a cache was cut inside a quantized page; the tokens that stay of it will "
            "be quantized a second time",
            hint="a larger residual_length keeps more of the recent tokens exact",
        ),
        once="crop",
    )


def tell_stale_view() -> None:
    """Say that a view of a static cache no longer shows it."""
    emit(
        Remark(
            kind="note",
            code="KVC504",
            origin="claim",
            site="",
            where="",
            reason="a view of a static cache is still held while the cache goes on in pages: it "
            "shows the tokens of the time it was taken, and writes to it no longer reach the cache",
            hint="take views of a static cache anew after every step",
        ),
        once="stale-view",
    )
