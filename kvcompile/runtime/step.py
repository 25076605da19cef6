"""What a store is lent for one step on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompile.runtime.device_tables import Tables
    from kvcompile.runtime.mask_watch import MaskWatch


@dataclass(frozen=True)
class Step:
    """One step, as the operators of a layer see it.

    Attributes:
        watch: Looks at masks.
        position: Where the new tokens begin, if the host knows.
        tables: What kernels read instead of the store's own tables, if the step is recorded.
    """

    watch: MaskWatch
    position: int | None = None
    tables: Tables | None = None
