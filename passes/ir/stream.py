"""What one attention site caches, and how the graph updates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import fx

UpdateKind = Literal[
    "fresh", "cat", "index_copy", "fresh_index_copy", "slide", "fresh_slide", "read"
]


@dataclass(frozen=True, eq=False)
class StateUpdate:
    """How K or V of one site comes out of its cached state and the new tokens.

    Attributes:
        kind: `fresh`: no past, the new tokens are the state; `cat`: past and new, concatenated;
            `index_copy`: new tokens written into a buffer that is an input; `fresh_index_copy`:
            the same into a buffer of zeros made in this graph; `slide`: a buffer that is an input
            takes the last of its tokens and the new ones; `fresh_slide`: a buffer of zeros made in
            this graph takes the last of the new tokens; `read`: the state is an input that
            nothing is added to, as K and V of an encoder are: it stands for new and past too.
        state: The node that holds the updated state.
        new: The new tokens, laid out like the state.
        past: The placeholder of the past state, or None.
        position: Positions `[S]` the new tokens are written to, or None.
        token_dim: Dimension of the state that grows: 2 in `[B, K, T, D]`, 1 in `[B, T, K, D]`.
        outputs: Positions among the graph's outputs that hold the state.
        prefix: The slice of a static buffer from its first token on that the attention reads, or
            None if it reads the whole state.
        kept: How many of the last tokens are handed on: a sliding window leaves the others behind.
            None if all are.
        past_seen: How many of the last past tokens the attention reads, or None if it reads all.
        past_part: The part of a buffer that slides which the attention reads before the new tokens.
    """

    kind: UpdateKind
    state: fx.Node
    new: fx.Node
    past: fx.Node | None
    position: fx.Node | None
    token_dim: int
    outputs: tuple[int, ...]
    prefix: fx.Node | None = None
    kept: int | None = None
    past_seen: int | None = None
    past_part: fx.Node | None = None

    @property
    def slides(self) -> bool:
        """Whether it is a buffer of fixed length that its first tokens leave."""
        return self.kind in ("slide", "fresh_slide")


@dataclass(frozen=True, eq=False)
class CacheStream:
    """The cached K and V of one site.

    Attributes:
        site: Index of the site.
        k: Update of the keys.
        v: Update of the values; same kind as `k`.
    """

    site: int
    k: StateUpdate
    v: StateUpdate

    @property
    def is_static(self) -> bool:
        """Whether the state is a buffer of fixed length that is written at given positions."""
        return self.k.position is not None or self.k.slides

    @property
    def only_read(self) -> bool:
        """Whether the graph adds nothing to the state."""
        return self.k.kind == "read"

    @property
    def slides(self) -> bool:
        """Whether tokens leave the state, or the attention's sight, as others are added."""
        return self.k.kept is not None or self.k.past_seen is not None

    @property
    def has_past(self) -> bool:
        """Whether the graph is given an earlier state."""
        return self.k.past is not None
