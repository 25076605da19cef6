"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.timing import conditions, describe
from kvcompile.format_requests import FormatRequest, parse_formats
from kvcompile.options import OptionError
from kvcompile.passes.plan_formats import EXACT_FORMATS
from kvcompile.quality_plot import PlotError, check_plot

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in EXACT_FORMATS.items()}
"""Dtypes of models, by name."""


def begin() -> tuple[Console, dict[str, str]]:
    """Print what the figures are of; return the console and that description, for JSON.

    A file or a pipe has no width; tables of many columns are not to be cut there.
    """
    console, found = Console(highlight=False), conditions()
    if not console.is_terminal:
        console.width = 160
    console.print(describe(found), markup=False)
    return console, found


def add_formats(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--formats`."""
    parser.add_argument(
        "--formats",
        default=default,
        help="formats of kvcompile's pages, separated by commas: a kv_cache_dtype (auto is exact), "
        "one for K and one for V (k8v4), further options of the backend behind a colon "
        "(int4:residual_length=32)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--plot`."""
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the figures, .png or .svg")


def formats_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, common: Mapping[str, Any]
) -> list[FormatRequest]:
    """Return the formats asked for; end with an error of usage if some are refused.

    Args:
        parser: What parsed `args`.
        args: Has `formats`.
        common: Options that every format gets.
    """
    try:
        return parse_formats([args.formats], common)
    except OptionError as error:
        parser.error(f"--formats: {error}")


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error of usage if a file could not be written after the measurement."""
    for path in (args.json, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(path.parent)!r} for {path.name!r}")
    if args.plot is not None:
        try:
            check_plot(args.plot)
        except PlotError as error:
            parser.error(f"--plot: {error}")


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write a benchmark's figures."""
    path.write_text(json.dumps(found, indent=2) + "\n")
