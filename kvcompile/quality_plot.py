"""A plot of quality against bytes; the one place that imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcompile.codegen.errors import KvcompileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvcompile.quality_report import QualityReport

MARKERS = "osD^v<>PX"


class PlotError(KvcompileError):
    """A plot cannot be made: matplotlib is missing, or does not write this kind of file."""


def check_plot(path: Path) -> None:
    """Make sure that a plot can be written, before anything is measured for it.

    Raises:
        PlotError: It cannot.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install 'kvcompile[plots]'") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise PlotError(f"{path.name!r} must end in one of {', '.join('.' + k for k in kinds)}")


def plot(report: QualityReport, path: Path) -> None:
    """Write a plot of KL and of the change in perplexity against the bytes of a token.

    Args:
        report: What was measured.
        path: File to write, of a kind that matplotlib knows.

    Raises:
        PlotError: It cannot be made.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    kl, change = figure.subplots(1, 2)
    for number, (text, qualities) in enumerate(report.results.items()):
        exact, *formats = qualities
        sizes = [quality.footprint.bytes_per_token / 1024 for quality in formats]
        style = {"label": text, "marker": MARKERS[number % len(MARKERS)], "linestyle": "none"}
        kl.plot(sizes, [quality.kl for quality in formats], **style)
        change.plot(sizes, [100 * quality.perplexity_change for quality in formats], **style)
        if number == 0:
            for quality, size in zip(formats, sizes, strict=True):
                _name(kl, quality.label, size, quality.kl)
                _name(change, quality.label, size, 100 * quality.perplexity_change)
            for axes in (kl, change):
                axes.axvline(exact.footprint.bytes_per_token / 1024, color="grey", linestyle=":")
    if any(quality.kl > 0 for qualities in report.results.values() for quality in qualities):
        kl.set_yscale("log")
    kl.set_ylabel("mean KL from the exact cache, nats")
    if any(
        quality.perplexity_change > 0.1
        for _, *formats in report.results.values()
        for quality in formats
    ):
        change.set_yscale("symlog", linthresh=1)
    change.set_ylabel("change in perplexity, %")
    for axes in (kl, change):
        axes.set(xlabel="KV cache, KiB per token (dotted: exact)")
        axes.margins(0.1)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(f"{report.model}, {report.dtype}")
    figure.savefig(path, dpi=150)


def _name(axes: Axes, label: str, x: float, y: float) -> None:
    axes.annotate(label, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
