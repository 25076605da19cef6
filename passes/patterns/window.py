"""Sliding windows: of a state that has grown, the last tokens are handed on, or read."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.patterns.layout import fixed, is_suffix_slice, peel


def positions_of(outputs: tuple[object, ...], node: fx.Node) -> tuple[int, ...]:
    """Return where a node is among the outputs, as it is or under another name."""
    return tuple(
        i
        for i, out in enumerate(outputs)
        if isinstance(out, fx.Node) and (out is node or peel(out) is node)
    )


def kept_part(
    outputs: tuple[object, ...], state: fx.Node, token_dim: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return how many of the last tokens of a state are outputs, and where among these."""
    for user in state.users:
        if peel(user) is peel(state):
            kept, found = kept_part(outputs, user, token_dim)
            if found:
                return kept, found
        if is_suffix_slice(user, token_dim) and (found := positions_of(outputs, user)):
            kept = fixed(user.meta["val"].shape[token_dim])
            return (None, ()) if kept is None else (kept, found)
    return None, ()


def past_in(suffix: fx.Node, new: fx.Node, token_dim: int) -> int | None:
    """Return how many past tokens are in the end of a state that the attention reads."""
    seen, added = (node.meta["val"].shape[token_dim] for node in (suffix, new))
    return fixed(seen - added)


def is_handed_on(user: fx.Node, state: fx.Node, token_dim: int, output: fx.Node) -> bool:
    """Whether a reader of a state is the part of it that the graph returns, and nothing else."""
    is_same = peel(user) is state
    if set(user.users) == {output}:
        return is_same or is_suffix_slice(user, token_dim)
    return (
        is_same
        and bool(user.users)
        and all(is_handed_on(further, state, token_dim, output) for further in user.users)
    )
