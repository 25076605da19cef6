"""Golden files: printed programs and generated kernels, read as a diff when they change.

The texts of `test_x.py` lie beside it in `test_x.expected`, one section per test:

    --- test_name[parameters]
    text

A test asks for the fixture `golden` and calls it with the text it made. The text must be stable as
it comes (no addresses, no times, names in a fixed order): nothing is filtered here.
`make golden` rewrites the files.
"""

from pathlib import Path

HEADING = "--- "


def read_sections(path: Path) -> dict[str, str]:
    """Return the text of each section of a golden file; empty if there is no such file."""
    if not path.exists():
        return {}
    sections: dict[str, str] = {}
    name = ""
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith(HEADING):
            name = line.removeprefix(HEADING).strip()
            sections[name] = ""
        else:
            sections[name] += line
    return sections


def write_sections(path: Path, sections: dict[str, str]) -> None:
    """Write a golden file, its sections sorted by name; leave an equal file untouched."""
    text = "".join(f"{HEADING}{name}\n{sections[name]}" for name in sorted(sections))
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


class Golden:
    """Compares the text of one test with its section, or rewrites the section."""

    def __init__(self, path: Path, name: str, *, update: bool) -> None:
        self.path = path
        self.name = name
        self.update = update

    def __call__(self, text: str) -> None:
        """Assert that `text` is what the golden file says.

        Args:
            text: What the test made; a missing final newline is added.

        Raises:
            AssertionError: The text differs, or there is no such section.
            ValueError: A line of the text looks like a heading.
        """
        text = text if text.endswith("\n") else text + "\n"
        if any(line.startswith(HEADING) for line in text.splitlines()):
            raise ValueError(f"a line of a golden text may not start with {HEADING!r}")
        sections = read_sections(self.path)
        if self.update:
            write_sections(self.path, sections | {self.name: text})
            return
        assert self.name in sections, f"{self.path.name} has no {self.name}: run make golden"
        assert text == sections[self.name], f"{self.path.name} differs: run make golden, read it"
