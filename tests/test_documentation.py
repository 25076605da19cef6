"""The documents keep their word: commands exist, links lead somewhere, files stay short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """Return the anchors that a Markdown viewer gives to a document's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


documents = pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in DOCUMENTS]
)


@documents
def test_commands_are_make_targets(path: Path) -> None:
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), re.MULTILINE))
    assert commands <= MAKE_TARGETS


@documents
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@documents
def test_named_files_exist(path: Path) -> None:
    """A path in backquotes below one of the project's folders is a file or a folder of it."""
    if path.name == "CHANGELOG.md":
        pytest.skip("old entries may name what is gone")
    folders = "kvcompile|passes|codegen|tests|examples|benchmarks|docs|tools|requirements"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", path.read_text()):
        assert (ROOT / name).exists(), name


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_every_variable_is_documented() -> None:
    sources = [p for f in ("kvcompile", "passes", "codegen") for p in (ROOT / f).rglob("*.py")]
    used = {v for p in sources for v in re.findall(r"\bKVCOMPILE_[A-Z_]+", p.read_text())}
    documented = set(
        re.findall(r"`(KVCOMPILE_[A-Z_]+)`", (ROOT / "docs/environment.md").read_text())
    )
    assert used == documented


def test_files_are_short() -> None:
    done = subprocess.run(
        [sys.executable, "tools/check_sizes.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
