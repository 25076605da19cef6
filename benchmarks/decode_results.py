"""Figures of the end-to-end benchmark: as a table, for a file, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.decode_candidates import EAGER, STATIC
from benchmarks.timing import Timing


@dataclass(frozen=True)
class Row:
    """One candidate at one context length.

    Attributes:
        context: Tokens of the prompt.
        name: The candidate.
        timing: Single steps; None if it is not installed.
        kv_bytes: What its cache holds.
        prefill_seconds: Time of the prompt, compilation included.
        error: How far its logits are from the first candidate's, by their spread; None for itself.
        missing: Why there are no figures.
    """

    context: int
    name: str
    timing: Timing | None
    kv_bytes: int = 0
    prefill_seconds: float = 0.0
    error: float | None = None
    missing: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row for a file."""
        found: dict[str, Any] = {"context": self.context, "candidate": self.name}
        if self.timing is None:
            return found | {"missing": self.missing}
        return found | {
            "kv_bytes": self.kv_bytes,
            "prefill_s": self.prefill_seconds,
            "error": self.error,
            **self.timing.as_json(),
        }


def ratio(rows: Sequence[Row], row: Row, baseline: str) -> float | None:
    """Return how many times faster a row is than a baseline of the same context, if there is one.

    Args:
        rows: All rows.
        row: The row.
        baseline: Name of the other one.
    """
    other = next((r for r in rows if (r.context, r.name) == (row.context, baseline)), None)
    if other is None or other.timing is None or row.timing is None:
        return None
    return other.timing.p25 / row.timing.p25


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    shown = Table(title="one decode step")
    shown.add_column("context", justify="right")
    shown.add_column("candidate", no_wrap=True)
    baselines = [name for name in (EAGER, STATIC) if any(row.name == name for row in rows)]
    ratios = [f"over {name}" for name in baselines]
    for column in ("p25 ms", "median ms", "tokens/s", *ratios, "KV MiB", "logits off"):
        shown.add_column(column, justify="right")
    for number, row in enumerate(rows):
        if number and rows[number - 1].context != row.context:
            shown.add_section()
        if row.timing is None:
            shown.add_row(f"{row.context:,}", f"{row.name}: {row.missing}")
            continue
        gains = (ratio(rows, row, name) for name in baselines)
        shown.add_row(
            f"{row.context:,}",
            row.name,
            f"{row.timing.p25 * 1e3:.2f}",
            f"{row.timing.median * 1e3:.2f}",
            f"{1 / row.timing.p25:.1f}",
            *("-" if gain is None else f"{gain:.2f}" for gain in gains),
            f"{row.kv_bytes / 2**20:.1f}",
            "-" if row.error is None else f"{row.error:.3f}",
        )
    return shown


def plot(rows: Sequence[Row], conditions: str, path: Path) -> None:
    """Plot time and memory of every candidate, one line of panels per context length.

    Args:
        rows: What was measured.
        conditions: What the figures must be read with.
        path: File to write, of a kind that matplotlib knows.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.timing is not None]
    contexts = list(dict.fromkeys(row.context for row in measured))
    names = list(dict.fromkeys(row.name for row in measured))
    palette = colormaps["tab20"]
    colors = {name: palette(number) for number, name in enumerate(names)}
    figure = Figure(figsize=(12, 1 + 0.4 * len(measured) + len(contexts)), layout="constrained")
    axes = figure.subplots(len(contexts), 2, squeeze=False)
    for line, context in enumerate(contexts):
        found = [row for row in measured if row.context == context]
        times = [row.timing.p25 * 1e3 for row in found if row.timing is not None]
        sizes = [row.kv_bytes / 2**20 for row in found]
        for panel, values, unit in zip(axes[line], (times, sizes), UNITS, strict=True):
            names = [row.name for row in found]
            bars = panel.barh(names, values, color=[colors[name] for name in names])
            panel.bar_label(bars, fmt="{:.3g}", padding=3)
            panel.invert_yaxis()
            panel.margins(x=0.15)
            panel.set(title=f"{context:,} tokens of context", xlabel=unit)
        axes[line][1].set_yticklabels([])
    figure.suptitle(conditions, fontsize="small")
    figure.savefig(path, dpi=150)


UNITS = ("ms per token (p25 of single steps)", "KV cache, MiB")
