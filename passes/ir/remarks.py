"""Remarks: what a pass or the runtime did at one attention site, or why it did not."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("kvcompile")

Kind = Literal["passed", "missed", "failed", "note"]


@dataclass(frozen=True)
class Remark:
    """One fact about one site.

    Attributes:
        kind: `passed`; `missed` (does not apply); `failed` (was asked for and cannot);
            `note` (happened at run time, outside any pass).
        code: Stable code such as `KVC101`; every code is listed in `remark_codes`.
        origin: Name of the pass, or of the part of the runtime, that says it.
        site: Name of the attention site (`layers.3.self_attn`), or "" for the whole graph.
        where: The user's source line, `file.py:212`, or "".
        reason: One sentence; may name shapes and operators.
        hint: What the user can do about it, or "".
        near_miss: The pattern that came nearest and how far it matched, or "".
    """

    kind: Kind
    code: str
    origin: str
    site: str
    where: str
    reason: str
    hint: str = ""
    near_miss: str = ""

    def __str__(self) -> str:
        head = " ".join(x for x in (self.kind, self.code, self.origin, self.site, self.where) if x)
        lines = [f"{head}: {self.reason}"]
        if self.near_miss:
            lines.append(f"  nearest: {self.near_miss}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


_notices: deque[Remark] = deque(maxlen=1000)
_said: set[tuple[str, str]] = set()


def emit(remark: Remark, *, once: str | None = None) -> None:
    """Log a remark made outside a pass and keep it for `notices()`.

    Args:
        remark: What to say.
        once: If given, say it only the first time this key comes with this code.
    """
    if once is not None:
        if (remark.code, once) in _said:
            return
        _said.add((remark.code, once))
    _notices.append(remark)
    logger.log(logging.INFO if remark.kind == "passed" else logging.WARNING, "%s", remark)


def notices() -> tuple[Remark, ...]:
    """Return the remarks emitted so far in this process, oldest first (the last 1000)."""
    return tuple(_notices)


def forget_notices() -> None:
    """Forget every emitted remark, so that `once` keys speak again."""
    _notices.clear()
    _said.clear()
