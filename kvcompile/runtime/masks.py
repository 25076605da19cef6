"""What masks say about left padding, and what they must not say later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.errors import CacheGapError, PaddingRevivedError

if TYPE_CHECKING:
    from kvcompile.runtime.store import PagedStore


HIDDEN = -1e4
"""A score lowered by this weighs nothing after the softmax."""


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as bool.

    Of an additive mask, a value at or below half the most negative number of its dtype is dead.
    """
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def visible_columns(mask: torch.Tensor) -> torch.Tensor:
    """Return bool[B or 1, T]: columns that at least one head and query of a row can see."""
    visible = is_visible(mask)
    while visible.ndim < 4:
        visible = visible.unsqueeze(0)
    return visible.any(dim=2).any(dim=1)


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
    if kv_len > stored:
        check_unwritten(mask, stored)
    if store.is_padded:
        padding = store.padding
        if bool((is_visible(mask[..., : padding.shape[3]]) & padding).any()):
            raise _revived(store, "the mask makes it visible")


def check_unwritten(mask: torch.Tensor, stored: int) -> None:
    """Check that a mask hides the tokens of a static buffer that were never written.

    Raises:
        CacheGapError: It shows one of them.
    """
    later = mask[..., stored:]
    if bool((later if later.dtype == torch.bool else later > HIDDEN).any()):
        raise _gap(mask.shape[-1], stored)


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
