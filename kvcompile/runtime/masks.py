"""What masks say about left padding, and what they must not say later."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.errors import CacheGapError, PaddingRevivedError

if TYPE_CHECKING:
    from kvcompile.runtime.store import PagedStore


def visible_columns(mask: torch.Tensor) -> torch.Tensor:
    """Return bool[B or 1, T]: columns that at least one head and query of a row can see.

    Of an additive mask, a value at or below half the most negative number of its dtype is dead.
    """
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    while visible.ndim < 4:
        visible = visible.unsqueeze(0)
    return visible.any(dim=2).any(dim=1)


class _LastSeen(threading.local):
    """The answer for the last mask: all layers of a step ask about the same tensor."""

    mask: weakref.ref[torch.Tensor] | None = None
    question: object = None

    def knows(self, mask: torch.Tensor, question: object) -> bool:
        return self.mask is not None and self.mask() is mask and self.question == question

    def remember(self, mask: torch.Tensor, question: object) -> None:
        self.mask, self.question = weakref.ref(mask), question


_checked = _LastSeen()


def learn_starts(mask: torch.Tensor, batch: int, new_len: int) -> list[int]:
    """Return how many leading columns of each row no query of the first chunk can see.

    Args:
        mask: Bool or additive, [B or 1, H or 1, S, T]; T may be a static capacity.
        batch: B.
        new_len: S; columns beyond are not yet stored.
    """
    if mask.ndim == 4 and bool(visible_columns(mask[:, :, -1:, :1]).all()):
        return [0] * batch  # the last query, which sees the most, sees the first token
    visible = visible_columns(mask)[:, :new_len]
    # argmax gives the first maximum; a row that sees nothing is padding throughout.
    first = torch.where(visible.any(dim=1), visible.int().argmax(dim=1), new_len)
    starts: list[int] = first.expand(batch).tolist()
    return starts


def check_masks(
    store: PagedStore, mask: torch.Tensor | None, is_causal: bool, stored: int, kv_len: int
) -> None:
    """Check that a mask shows neither tokens that own no page nor tokens beyond the stored ones.

    Raises:
        PaddingRevivedError: A left-padding token became visible.
        CacheGapError: A token that was never stored is visible.
    """
    if mask is None:
        if store.is_padded:
            raise _revived(store, "no mask was given")
        if kv_len > stored and not is_causal:
            raise _gap(kv_len, stored)
        return
    starts = tuple(store.start_list()) if store.is_padded else ()
    question = (starts, stored, kv_len, _version(mask))
    if _checked.knows(mask, question):
        return
    if starts or kv_len > stored:
        visible = visible_columns(mask)
        if kv_len > stored and bool(visible[:, stored:].any()):
            raise _gap(kv_len, stored)
        rows = visible.expand(store.batch, -1)
        if any(bool(rows[b, :start].any()) for b, start in enumerate(starts) if start):
            raise _revived(store, "the mask makes it visible")
    _checked.remember(mask, question)


def _version(mask: torch.Tensor) -> int:
    """Return how often the mask was written; inference tensors do not count that."""
    return 0 if mask.is_inference() else mask._version


def _gap(kv_len: int, stored: int) -> CacheGapError:
    return CacheGapError(
        f"the mask of {kv_len} columns shows tokens beyond the {stored} that are stored; fill the "
        "cache from position 0 without gaps, and mask what is not yet filled"
    )


def _revived(store: PagedStore, how: str) -> PaddingRevivedError:
    return PaddingRevivedError(
        f"rows have {store.start_list()} left-padding tokens, which the first mask declared dead "
        f"and which are not stored, but {how} at a later step; pass the same attention_mask, "
        "grown by one column per new token, at every step"
    )
