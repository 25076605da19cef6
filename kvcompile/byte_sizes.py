"""Numbers of bytes as people write them."""

from __future__ import annotations

import difflib
import re

UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{infix}B": base ** (power + 1)
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT")
}
"""Bytes of each unit: B; KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024."""


def parse_bytes(text: str) -> int | str:
    """Return the bytes that a text such as "2GiB" or "1.5 GB" names, a fraction of one dropped.

    Returns:
        The number; where the text names none, the nearest text that does.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is not None and found[2] in UNITS:
        return int(float(found[1]) * UNITS[found[2]])
    digits = re.search(r"\d+(?:\.\d+)?", text)
    letters = re.search(r"[A-Za-z]+", text)
    return (digits[0] if digits else "2") + _nearest_unit(letters[0] if letters else "GiB")


def _nearest_unit(text: str) -> str:
    """Return the unit that a text resembles most, whatever the case of its letters."""
    by_letters: dict[str, str] = {unit.lower(): unit for unit in UNITS}
    text = text.lower()
    close: list[str] = difflib.get_close_matches(text, by_letters, n=1, cutoff=0.4)
    if close:
        return by_letters[close[0]]
    return f"{text[0].upper()}B" if text[0] in "kmgt" else "GiB"
