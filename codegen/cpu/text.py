"""Assembling C++ text: `$name` stands for a literal, because braces belong to C++."""

from __future__ import annotations

from string import Template


def render(template: str, **literals: object) -> str:
    """Fill in every `$name` of `template` and strip blank lines around it.

    Raises:
        KeyError: The template has a `$name` that was not given.
    """
    return Template(template).substitute({k: str(v) for k, v in literals.items()}).strip("\n")


def join_sections(*sections: str) -> str:
    """Join the parts of a file by one blank line each; empty parts vanish."""
    return "\n\n".join(s.strip("\n") for s in sections if s.strip()) + "\n"


def comment(lines: list[str]) -> str:
    """Print lines as a block of `//` comments."""
    return "\n".join(f"// {line}".rstrip() for line in lines)
