"""Masks on a device, looked at without waiting for it: what is wrong is told some step later.

A mask in main memory is checked before anything is attended to, see `masks.check_masks`. To read
one from a device would stop every step until all kernels before it are done.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kvcompile.runtime.errors import CacheGapError, PaddingRevivedError
from kvcompile.runtime.masks import HIDDEN, is_visible

if TYPE_CHECKING:
    from kvcompile.runtime.store import PagedStore

GAP, REVIVED = 0, 1


class MaskWatch:
    """Remembers on a device whether a mask showed tokens that are not stored.

    The steps of one graph share it, in whichever threads they run.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing seen."""
        self._seen = torch.zeros(2, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._told = torch.zeros(2, dtype=torch.int32, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        # Held until the step is over, so that no other mask can come to lie in its place.
        self._last: tuple[torch.Tensor, int, list[int]] | None = None
        self._lock = threading.Lock()

    def look(self, store: PagedStore, mask: torch.Tensor, stored: int) -> None:
        """Look at a mask [B or 1, H or 1, S, T], once for the layers that share it.

        Args:
            store: What is attended to.
            mask: Bool or additive.
            stored: Tokens that can be attended to; columns beyond were never written.
        """
        with self._lock:
            starts = store.start_list()
            if self._last is not None:
                same, its_stored, its_starts = self._last
                # Inductor makes each layer a view of its own of the one mask.
                if same.is_set_to(mask) and its_stored == stored and its_starts == starts:
                    return
            self._last = mask, stored, starts
            tables = store.device_tables
            column = torch.arange(mask.shape[-1], device=mask.device)
            shown = mask if mask.dtype == torch.bool else mask > HIDDEN
            unwritten = shown & (column >= tables.number("kv_len", stored))
            padding = column < tables.counts("starts", store.starts)[:, None, None, None]
            revived = is_visible(mask) & padding
            self._seen += torch.stack([unwritten.any(), revived.any()])

    def send(self) -> None:
        """Ask for what was seen; the answer comes when the device gets to it."""
        with self._lock:
            self._told.copy_(self._seen, non_blocking=True)
            if self._event is not None:
                self._event.record()

    def begin(self) -> None:
        """Begin a step: tell what has arrived by now, once.

        Raises:
            CacheGapError: A token that was never stored was visible.
            PaddingRevivedError: A left-padding token was visible.
        """
        with self._lock:
            # A step that failed may be repeated with the very same masks.
            self._last = None
            if self._event is not None and not self._event.query():
                return
            gap, revived = self._told.tolist()
            if not gap and not revived:
                return
            self._seen.zero_()
            self._told.zero_()
        step = "in an earlier step a mask on the device made"
        after = "its tokens and what followed from them are not to be trusted"
        if gap:
            raise CacheGapError(
                f"{step} tokens visible that were never stored; {after}; fill the cache from "
                "position 0 without gaps, and mask what is not yet filled"
            )
        raise PaddingRevivedError(
            f"{step} left padding visible, which the first mask declared dead and which is not "
            f"stored; {after}; pass the same attention_mask, grown by one column per new token, "
            "at every step"
        )
