"""Stages of a program: what has been established about it, in order."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """How far a program has come; `verify` holds the invariant of each stage."""

    CAPTURED = 0
    """Dynamo's graph of torch operators; handle placeholders carry handle fakes."""
    CANONICAL = 1
    """Pre-dispatch ATen only; every placeholder is a plain fake tensor or a size."""
    MATCHED = 2
    """Every attention found is an `AttentionSite`; the graph is unchanged."""
    INFERRED = 3
    """Every site whose K and V are cached has a `CacheStream`."""
    PLANNED = 4
    """Every stream has a `StreamPlan`: format, page layout, bytes."""
    REWRITTEN = 5
    """Only `kvcompile::` operators touch a planned stream; states are inputs, not outputs."""
    LOWERED = 6
    """Every `kvcompile::` operator has a `KernelSpec`; metadata is clean enough to be cached."""
