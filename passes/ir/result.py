"""Refusals are values that carry a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, eq=False)
class Missed:
    """Something does not apply.

    Attributes:
        code: Remark code.
        reason: One sentence, for users.
        node: The node where matching stopped, or None.
        hint: What the user can do, or "".
        near_miss: The nearest pattern and how far it matched, or "".
    """

    code: str
    reason: str
    node: fx.Node | None = None
    hint: str = ""
    near_miss: str = ""
