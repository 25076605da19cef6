"""What `kvcompile eval` found, as a table, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvcompile.evaluation import Quality, Schedule

COLUMNS = (
    "text",
    "cache",
    "PPL",
    "ΔPPL",
    "±",
    "KL",
    "KL 99 %",
    "top-1",
    "bits",
    "in pages",
    "of dense",
)


@dataclass(frozen=True)
class QualityReport:
    """An evaluation of one model.

    Attributes:
        model: Its name.
        dtype: Dtype of its weights, and of the dense cache that bytes are compared with.
        schedule: How each window was fed.
        windows: Windows of each text.
        machine: See `kvcompile.machine.machine`.
        options: Options of the backend by label.
        results: Per text the exact cache, then the formats.
    """

    model: str
    dtype: str
    schedule: Schedule
    windows: int
    machine: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]
    results: Mapping[str, tuple[Quality, ...]]

    @property
    def problems(self) -> list[str]:
        """Everything that makes a figure another one than was asked for."""
        return [
            f"{text}, {quality.label}: {problem}"
            for text, qualities in self.results.items()
            for quality in qualities
            for problem in quality.problems
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, one row per text and cache; see `COLUMNS`."""
        return [
            _row(text, quality, is_exact=number == 0)
            for text, qualities in self.results.items()
            for number, quality in enumerate(qualities)
        ]

    @property
    def caption(self) -> str:
        """What the figures must be read with."""
        scored = next((q.tokens for qualities in self.results.values() for q in qualities), 0)
        schedule = self.schedule
        return (
            f"{self.model}, {self.dtype}; {self.windows} x {schedule.window} tokens of "
            f"each text, {scored:,} tokens scored, fed {schedule.step} at a time after a prefill "
            f"of {schedule.parts()[0][1]}; "
            + ", ".join(f"{key} {value}" for key, value in self.machine.items())
        )


def _row(text: str, quality: Quality, *, is_exact: bool) -> tuple[str, ...]:
    taken = quality.footprint
    mark = " (!)" if quality.problems else ""
    change = (
        ("-",) * 5
        if is_exact
        else (
            f"{quality.perplexity_change:+.2%}",
            f"{quality.perplexity_change_error:.2%}",
            f"{quality.kl:.5f}",
            f"{quality.kl_99:.4f}",
            f"{quality.top1:.2%}",
        )
    )
    return (
        text,
        f"{quality.label}{mark}",
        f"{quality.perplexity:.3f}",
        *change,
        f"{taken.bits_per_value:.2f}",
        f"{taken.bits_in_pages:.2f}",
        f"{taken.stored / taken.dense:.3f}",
    )


def table(report: QualityReport) -> Table:
    """Return a table for a terminal; rows with a problem are red."""
    shown = Table(caption=report.caption, caption_justify="left")
    for column in COLUMNS:
        is_name = column in ("text", "cache")
        shown.add_column(column, justify="left" if is_name else "right", overflow="fold")
    qualities = [q for found in report.results.values() for q in found]
    for quality, row in zip(qualities, report.rows(), strict=True):
        shown.add_row(*row, style="bold red" if quality.problems else None)
    return shown


def markdown(report: QualityReport) -> str:
    """Return a table in Markdown, its problems and its caption below it."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *report.rows()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    problems = [f"- **{problem}**" for problem in report.problems]
    return "\n".join([*lines, "", *problems, *([""] if problems else []), report.caption])


def to_json(report: QualityReport) -> str:
    """Return everything that was measured; what is not a finite number is null."""
    content = {
        "model": report.model,
        "dtype": report.dtype,
        "schedule": dataclasses.asdict(report.schedule),
        "windows": report.windows,
        "machine": dict(report.machine),
        "options": {label: dict(options) for label, options in report.options.items()},
        "results": {
            text: [_as_json(quality) for quality in qualities]
            for text, qualities in report.results.items()
        },
    }
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _as_json(quality: Quality) -> dict[str, Any]:
    taken = quality.footprint
    properties = ("bytes_per_token", "bits_per_value", "bits_in_pages")
    derived = {name: getattr(taken, name) for name in properties}
    return {**dataclasses.asdict(quality), "footprint": {**dataclasses.asdict(taken), **derived}}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
