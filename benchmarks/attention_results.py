"""Figures of the attention benchmark: as tables, for a file, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.stores import Setting
from benchmarks.timing import Timing

SDPA = "SDPA"
SDPA_FP32 = "SDPA over fp32"
CAT_SDPA = "cat + SDPA"


@dataclass(frozen=True)
class Figures:
    """One candidate in one setting.

    Attributes:
        name: The candidate.
        timing: Single calls.
        nbytes: What a call has to read.
        append: Writing one token into the pages beforehand; None for what does not use pages.
        bound: Name of what reads the same pages and does nothing else; None for the rest.
    """

    name: str
    timing: Timing
    nbytes: int
    append: Timing | None = None
    bound: str | None = None

    @property
    def microseconds(self) -> float:
        """The p25 of a call."""
        return self.timing.p25 * 1e6

    @property
    def step_microseconds(self) -> float:
        """The same with one token written first: what `cat` and attention do together."""
        return self.microseconds + (0.0 if self.append is None else self.append.p25 * 1e6)


@dataclass(frozen=True)
class Result:
    """All candidates in one setting.

    Attributes:
        setting: What was attended over.
        figures: By name of the candidate.
        stream_bytes_per_second: What a plain sum over memory read in the same turns.
    """

    setting: Setting
    figures: dict[str, Figures]
    stream_bytes_per_second: float

    def ratio(self, name: str, baseline: str) -> float | None:
        """Return how many times faster a candidate is than another, None if one is missing.

        Against `cat + SDPA`, which writes a token too, the time of pages is that of a whole step.
        """
        if name not in self.figures or baseline not in self.figures:
            return None
        own, other = self.figures[name], self.figures[baseline]
        return other.microseconds / (
            own.step_microseconds if baseline == CAT_SDPA else own.microseconds
        )

    def stream_share(self, name: str) -> float:
        """Return the share of the stream's bandwidth at which a candidate reads its bytes."""
        own = self.figures[name]
        return own.nbytes / own.timing.p25 / self.stream_bytes_per_second

    def reading_share(self, name: str) -> float | None:
        """Return the share of a candidate's time that reading its pages alone takes.

        None for what has no pages.
        """
        own = self.figures[name]
        if own.bound is None:
            return None
        return self.figures[own.bound].microseconds / own.microseconds

    def as_json(self) -> dict[str, Any]:
        """Return everything for a file."""
        setting = self.setting
        return {
            "q_heads": setting.shape.num_q_heads,
            "kv_heads": setting.shape.num_kv_heads,
            "head_dim": setting.shape.head_dim,
            "dtype": setting.dtype,
            "batch": setting.batch,
            "tokens": setting.context,
            "layers": setting.layers,
            "stream_gb_per_s": self.stream_bytes_per_second / 1e9,
            "candidates": [
                {
                    "name": name,
                    "p25_us": own.microseconds,
                    "median_us": own.timing.median * 1e6,
                    "calls": len(own.timing.seconds),
                    "append_p25_us": None if own.append is None else own.append.p25 * 1e6,
                    "bytes": own.nbytes,
                    "over_sdpa": self.ratio(name, SDPA),
                    "over_cat_sdpa": self.ratio(name, CAT_SDPA),
                    "stream_share": self.stream_share(name),
                    "reading_share": self.reading_share(name),
                }
                for name, own in self.figures.items()
            ],
        }


def panel_of(setting: Setting) -> str:
    """Return what the settings of one table and panel have in common: all but the length."""
    return f"{setting.shape}, {setting.dtype}, batch {setting.batch}"


def names_in(results: Sequence[Result]) -> list[str]:
    """Return the names of all candidates, in the order in which they first occur."""
    return list(dict.fromkeys(name for result in results for name in result.figures))


def tables(title: str, panel: Sequence[Result]) -> list[Table]:
    """Return two tables: times, and how much faster pages are than each baseline.

    Args:
        title: What the results have in common.
        panel: Results that differ in length; no tables if there are none.
    """
    return [_times(title, panel), _gains(panel)] if panel else []


def _times(title: str, panel: Sequence[Result]) -> Table:
    caption = "us, times as fast as SDPA, share of the stream, share of only reading the pages"
    shown = Table(title=title, caption=caption)
    shown.add_column("candidate", no_wrap=True)
    for result in panel:
        shown.add_column(f"{result.setting.context:,} tokens", justify="right", no_wrap=True)
    for name in names_in(panel):
        shown.add_row(name, *(_time(result, name) for result in panel))
    stream = (f"{result.stream_bytes_per_second / 1e9:.1f} GB/s" for result in panel)
    shown.add_section()
    shown.add_row("stream", *stream)
    return shown


def _time(result: Result, name: str) -> str:
    own = result.figures.get(name)
    if own is None:
        return "-"
    ratio = result.ratio(name, SDPA)
    faster = "" if ratio is None else f"{ratio:.2f}x"
    of_reading = result.reading_share(name)
    last = "" if of_reading is None else f"{of_reading:.0%}"
    return f"{own.microseconds:,.0f} {faster:>7} {result.stream_share(name):>4.0%} {last:>4}"


def _gains(panel: Sequence[Result]) -> Table:
    """Return the speed-up of each format over each baseline, one column per baseline and length."""
    paged = [n for n in names_in(panel) if any(_is_paged(result, n) for result in panel)]
    bounds = {own.bound for result in panel for own in result.figures.values()}
    baselines = [name for name in names_in(panel) if name not in paged and name not in bounds]
    shown = Table(title="times as fast as each baseline (beside cat with the token's append)")
    shown.add_column("tokens", justify="right")
    shown.add_column("pages", no_wrap=True)
    for baseline in baselines:
        shown.add_column(baseline, justify="right")
    for result in panel:
        for name in paged:
            ratios = (result.ratio(name, baseline) for baseline in baselines)
            cells = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            shown.add_row(f"{result.setting.context:,}", name, *cells)
        shown.add_section()
    return shown


def _is_paged(result: Result, name: str) -> bool:
    return name in result.figures and result.figures[name].append is not None


def plot(results: Sequence[Result], conditions: str, path: Path) -> None:
    """Plot, by tokens, the ratio to SDPA and the share of the stream of each candidate.

    Args:
        results: What was measured; the settings of one panel lie together.
        conditions: What the figures must be read with.
        path: File to write, of a kind that matplotlib knows.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(panel_of(result.setting), []).append(result)
    figure = Figure(figsize=(2 + 4 * len(found), 9), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False, sharey="row")
    palette = colormaps["tab20"]
    colors = {name: palette(number) for number, name in enumerate(names_in(results))}
    for column, (title, panel) in enumerate(found.items()):
        upper, lower = axes[0, column], axes[1, column]
        for name in names_in(panel):
            measured = [result for result in panel if name in result.figures]
            tokens = [result.setting.context for result in measured]
            line = "-" if _is_paged(measured[0], name) else ":"
            style = {"label": name, "color": colors[name], "marker": "o", "linestyle": line}
            upper.plot(tokens, [result.ratio(name, SDPA) for result in measured], **style)
            lower.plot(tokens, [result.stream_share(name) for result in measured], **style)
        upper.set(title=title, xscale="log", yscale="log")
        lower.set(xscale="log", ylim=(0, None))
        tokens = [result.setting.context for result in panel]
        for each in (upper, lower):
            each.set_xticks(tokens, [f"{count:,}" for count in tokens], minor=False)
            each.xaxis.set_minor_formatter(NullFormatter())
            each.set_xlabel("tokens")
            each.grid(visible=True, alpha=0.3)
        upper.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        upper.yaxis.set_major_formatter(ScalarFormatter())
    axes[0, 0].set_ylabel("times as fast as SDPA")
    axes[1, 0].set_ylabel("share of the stream's bandwidth")
    handles = {
        label: handle
        for panel_axes in axes[0]
        for handle, label in zip(*panel_axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize="small")
    figure.suptitle(conditions, fontsize="small")
    figure.savefig(path, dpi=150)
