"""Texts to measure a model on: any file, or the reference that every Python carries."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcompile.codegen.errors import KvcompileError

PYDOC = "pydoc:"
"""Stands for a file with the longer topics of the running Python's language reference."""

SHORTEST_TOPIC = 3000
"""Characters; shorter topics are mostly lists of references to others."""


class TextError(KvcompileError, ValueError):
    """A text cannot be read or is too short; the message says what would do."""


@dataclass(frozen=True)
class Text:
    """A text and the name that tables give it."""

    name: str
    content: str


def read_text(source: str) -> Text:
    """Return a text.

    Args:
        source: Path of a file in UTF-8, or `pydoc:`.

    Raises:
        TextError: There is no such file, or it is not text.
    """
    if source == PYDOC:
        return Text("pydoc", _python_reference())
    path = Path(source)
    try:
        return Text(path.stem, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise TextError(f"{source!r} is not text in UTF-8: {error}") from error
    except OSError as error:
        raise TextError(f"cannot read {source!r}: {error.strerror}{_nearest(source)}") from error


def cut_windows(
    ids: Sequence[int], *, window: int, count: int, bos: int | None, name: str = "the text"
) -> list[torch.Tensor]:
    """Cut a text into windows that follow one another.

    Args:
        ids: Tokens of the text, no special ones.
        window: Tokens of a window.
        count: How many windows.
        bos: Token that every window begins with, or None.
        name: What a refusal calls the text.

    Returns:
        `count` tensors, int64 [1, window].

    Raises:
        TextError: The text is too short.
    """
    first = [] if bos is None else [bos]
    stride = window - len(first)
    if len(ids) < count * stride:
        raise TextError(
            f"{name} has {len(ids)} tokens, enough for {len(ids) // stride} windows of {window}; "
            f"{count} were asked for"
        )
    return [torch.tensor([[*first, *ids[i * stride : (i + 1) * stride]]]) for i in range(count)]


def _python_reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(
        topics[name] for name in sorted(topics) if len(topics[name]) > SHORTEST_TOPIC
    )


def _nearest(source: str) -> str:
    """Return a clause that names the file beside it, or the built-in text, with a name like it."""
    folder = Path(source).parent
    files = [str(p) for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    close = difflib.get_close_matches(source, [PYDOC, *files], n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""
