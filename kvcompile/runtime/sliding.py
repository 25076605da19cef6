"""Rows whose first tokens go out of sight: what a sliding window has left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.rows import PageRows

if TYPE_CHECKING:
    from kvcompile.runtime.registry import Role


class SlidingRows(PageRows):
    """Rows that can be looked at from any of their tokens on.

    Attributes:
        k_len: Columns of K.
        v_len: Columns of V.
        appended: Column behind the last token that was written.
        epoch: Counts the changes of what columns hold.
        overflows: Whether a static buffer takes more tokens than it has room for, in a step that
            lets its first ones go.
    """

    k_len: int
    v_len: int
    appended: int
    epoch: int
    overflows: bool = False
    _moved: int = 0

    def look_from(self, origin: int) -> None:
        """Let column 0 be the token `origin`, counted from the first one ever stored.

        Stored tokens before it are out of sight of attention, and stay until `drop_before`.
        """
        shift = origin - self.origin
        if not shift:
            return
        self.origin = origin
        self.k_len -= shift
        self.v_len -= shift
        self.appended -= shift
        self.epoch += 1
        self._writable = max(self._writable - shift, 0) if self._writable else 0
        self._write_starts([start - shift for start in self._starts])

    def drop_before(self, column: int) -> None:
        """Give back the pages whose tokens all lie before a column, which is not above 0."""
        self.epoch += 1
        self._drop_front(column)

    def slide(self, past_seen: int) -> None:
        """Prepare a step that sees so many tokens of a static buffer, all or all but the first.

        Raises:
            CacheGapError: The buffer does not hold the tokens that the step counts on.
        """
        moves = self.k_len - past_seen
        if self.k_len != self.v_len or moves != (1 if self.k_len == self.capacity else 0):
            raise CacheGapError(
                f"a sliding window holds {self.k_len} of {self.capacity} tokens, where the step "
                f"counts on {past_seen} before its own; give it the cache of the steps before"
            )
        self.overflows, self._moved = True, moves
        self.look_from(self.origin + moves)

    def settle(self) -> None:
        """Let go what a static buffer has no room for: the step is committed."""
        assert self.capacity is not None
        self.overflows = False
        self.look_from(self.origin + max(self.k_len - self.capacity, 0))
        if self.hidden >= self.page_size:
            self.drop_before(0)

    def slide_back(self) -> None:
        """Undo `slide`: the step has failed."""
        if self.overflows:
            self.overflows = False
            self.look_from(self.origin - self._moved)

    def clear(self) -> None:
        """Give back every page, those out of sight too."""
        hidden = self.hidden
        self.truncate(-hidden)
        self.look_from(self.origin - hidden)

    def truncate(self, length: int, role: Role | None = None) -> None:
        """Drop the tokens from column `length` on."""
        raise NotImplementedError

    def _drop_front(self, column: int) -> list[int]:
        """Give back pages at the front of each row; return how many."""
        counts = [self._front_pages(b, column - start) for b, start in enumerate(self._starts)]
        for b, count in enumerate(counts):
            if count:
                self.pages.remove(b, 0, count)
        size = self.page_size
        self._write_starts([s + n * size for s, n in zip(self._starts, counts, strict=True)])
        return counts

    def _front_pages(self, row: int, tokens: int) -> int:
        """Return how many pages at the front of a row hold none but its first `tokens` tokens."""
        return min(max(tokens, 0) // self.page_size, len(self.pages.rows[row]))
