"""The file of results: one JSON object per line and class."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"

Record = dict[str, Any]


def read(path: Path) -> dict[str, Record]:
    """Return the records of a file by name of the class; none if there is no file."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    return {record["name"]: record for record in records}


def write(path: Path, records: Iterable[Record]) -> None:
    """Write all records, ordered by family and name."""
    ordered = sorted(records, key=lambda r: (r["family"], r["name"].lower()))
    path.write_text("".join(json.dumps(record) + "\n" for record in ordered))
