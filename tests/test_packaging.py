"""One package, whichever way it is installed: the list of packages, the guards, the wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def run_python(code: str, *, cwd: Path = ROOT, python: str | Path = sys.executable) -> str:
    """Run a line of Python in a fresh process; return what it printed, standard error included."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def packages_in_tree() -> set[str]:
    """Return the name of every package of the project, found by its `__init__.py`."""
    places = {
        "kvcompile": "kvcompile",
        "passes": "kvcompile.passes",
        "codegen": "kvcompile.codegen",
    }
    found = set()
    for folder, package in places.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            inner = path.parent.relative_to(ROOT / folder).parts
            if folder != "kvcompile" or inner[:1] not in (("passes",), ("codegen",)):
                found.add(".".join((package, *inner)))
    return found


def test_package_list_equals_the_tree() -> None:
    assert SETUPTOOLS["packages"] == sorted(packages_in_tree())


@pytest.mark.parametrize("name", ["passes", "codegen"])
def test_floors_are_links_to_the_real_folders(name: str) -> None:
    assert (ROOT / "kvcompile" / name).readlink() == Path("..") / name
    assert SETUPTOOLS["package-dir"][f"kvcompile.{name}"] == name


@pytest.mark.parametrize("name", ["passes", "codegen"])
def test_a_bare_import_is_refused(name: str) -> None:
    """From the checkout `import passes` would succeed and be a second copy of every class."""
    assert f"ImportError: import kvcompile.{name}, not {name}" in run_python(f"import {name}")


def test_import_is_lazy() -> None:
    loaded = run_python(
        "import sys, kvcompile; optional = ('triton', 'transformers', 'typer', 'matplotlib');"
        " print([m for m in optional if m in sys.modules])"
    )
    assert loaded == "[]\n"


def test_public_names_exist() -> None:
    import kvcompile

    missing = [name for name in kvcompile.__all__ if not hasattr(kvcompile, name)]
    assert missing == []


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """Build the wheel, install it where nothing else is, and compile something by the string."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *quiet, "--no-build-isolation", "-w", ".", source],
        cwd=tmp_path,
        check=True,
    )
    (wheel,) = tmp_path.glob("kvcompile-*.whl")

    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    # What is on the path would count as installed.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install"]
    subprocess.run([*pip, *quiet, wheel], check=True, env=clean)
    site_packages = Path(
        run_python("import site; print(site.getsitepackages()[0])", python=python).strip()
    )
    assert sorted(p.name for p in site_packages.iterdir() if p.suffix != ".dist-info") == [
        "kvcompile"
    ]
    assert {
        ".".join(p.parent.relative_to(site_packages).parts)
        for p in (site_packages / "kvcompile").rglob("__init__.py")
    } == packages_in_tree()
    assert (site_packages / "kvcompile" / "py.typed").exists()

    # Torch is the one thing lent; its folder comes after the environment's own.
    (site_packages / "lent.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    printed = run_python(
        "import torch; f = torch.compile(lambda x: x + 1, backend='kvcompile');"
        " print(f(torch.zeros(1)).item()); import kvcompile; print(kvcompile.__file__)",
        cwd=tmp_path,
        python=python,
    )
    assert printed.splitlines()[-2:] == ["1.0", str(site_packages / "kvcompile" / "__init__.py")]
    script = [str(python.with_name("kvcompile")), "eval", "--help"]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Usage: kvcompile eval")
