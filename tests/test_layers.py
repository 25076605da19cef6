"""Imports go down only, optional libraries stay optional: read off the sources, and linted."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"kvcompile": 2, "kvcompile.passes": 1, "kvcompile.codegen": 0}
FOLDERS = {"kvcompile": "kvcompile", "kvcompile.passes": "passes", "kvcompile.codegen": "codegen"}
SOURCES = [
    (package, path)
    for package, folder in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.resolve().relative_to(ROOT).parts[0] == folder
]


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full name of each module imported anywhere in a file, function bodies included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(module: str) -> int | None:
    """Return the floor a module stands on; None outside the project."""
    for package in ("kvcompile.passes", "kvcompile.codegen", "kvcompile"):
        if f"{module}.".startswith(f"{package}."):
            return FLOORS[package]
    return None


@pytest.mark.parametrize(
    ("package", "path"), [pytest.param(*x, id=str(x[1].relative_to(ROOT))) for x in SOURCES]
)
def test_imports_go_down(package: str, path: Path) -> None:
    for module in imported_modules(path):
        other = floor(module)
        assert other is None or other <= FLOORS[package], f"{path.name} imports {module} above it"


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("matplotlib", ["quality_plot.py"]),
        ("transformers", ["cli.py"]),
        ("triton", ["compile.py"]),
        ("typer", ["cli.py"]),
    ],
)
def test_optional_library_is_imported_where_it_is_needed(package: str, expected: list[str]) -> None:
    users = [
        path.name
        for _, path in SOURCES
        if any(module.split(".")[0] == package for module in imported_modules(path))
    ]
    assert users == expected


@pytest.mark.slow
def test_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_contracts_catch_an_import_that_goes_up(tmp_path: Path) -> None:
    """The contracts see through the links: a planted violation on the ground floor is found."""
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    for folder in FOLDERS.values():
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "codegen" / "errors.py").open("a") as file:
        file.write("\n\nimport kvcompile.passes.ir.remarks\n")
    done = subprocess.run([lint], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "kvcompile.codegen.errors" in done.stdout
