"""Fail if a source file is longer than 400 lines; print the total of each part of the project."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("kvcompile", "passes", "codegen", "tests", "benchmarks", "examples", "tools")
LIMIT = 400


def python_files(part: str) -> list[Path]:
    """Return the Python files of one top-level folder; links to other folders are not followed."""
    return sorted(path for path in (ROOT / part).rglob("*.py"))


def line_count(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def too_long() -> list[str]:
    """Return one message for each file over the limit."""
    sizes = {path: line_count(path) for part in PARTS for path in python_files(part)}
    return [
        f"{path.relative_to(ROOT)}: {lines} lines, more than {LIMIT}: split it"
        for path, lines in sizes.items()
        if lines > LIMIT
    ]


def main() -> int:
    """Print the sizes; return 1 if a file is too long."""
    total = 0
    for part in PARTS:
        lines = sum(line_count(path) for path in python_files(part))
        total += lines
        print(f"{part:12}{lines:7} lines")
    print(f"{'total':12}{total:7} lines")
    messages = too_long()
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
