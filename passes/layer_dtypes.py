"""Which format each layer's K and V are asked to have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Dtypes = str | Mapping[int | str, str]
"""One format for all layers, or {layer: format, "default": format}; -1 is the last layer."""

EXACT = "auto"
"""The model's own dtype."""


@dataclass(frozen=True)
class LayerDtypes:
    """Formats by layer, as the user has named them.

    Attributes:
        both: Of K and V.
        k: Of K alone, where it is another one.
        v: Of V alone.
        skipped: Layers stored exactly, whatever else is said about them.
    """

    both: Dtypes = EXACT
    k: Dtypes | None = None
    v: Dtypes | None = None
    skipped: tuple[int, ...] = ()

    def of(self, layer: int, count: int) -> tuple[str, str]:
        """Return the formats of K and V of layer `layer` of `count`."""
        if layer in self.skipped or layer - count in self.skipped:
            return EXACT, EXACT
        usual = _look_up(self.both, layer, count) or EXACT
        k, v = (_look_up(own, layer, count) or usual for own in (self.k, self.v))
        return k, v

    def names(self) -> set[str]:
        """Return every format that some layer may have."""
        named: set[str] = set()
        for dtypes in (self.both, self.k, self.v):
            if isinstance(dtypes, Mapping):
                named.update(dtypes.values())
            elif dtypes is not None:
                named.add(dtypes)
        return named

    def pairs(self) -> set[tuple[str, str]]:
        """Return every pair of formats of K and V that the options speak of."""
        named = self._named()
        other = max(map(abs, named), default=0) + 1
        return {self.of(layer, 0) for layer in (*named, other)}

    def unknown(self, count: int) -> list[int]:
        """Return the layers that are named though a model of `count` layers has none of them."""
        return sorted(n for n in self._named() if not -count <= n < count)

    def _named(self) -> set[int]:
        mappings = [d for d in (self.both, self.k, self.v) if isinstance(d, Mapping)]
        return {n for d in mappings for n in d if isinstance(n, int)} | set(self.skipped)


def _look_up(dtypes: Dtypes | None, layer: int, count: int) -> str | None:
    if dtypes is None or isinstance(dtypes, str):
        return dtypes
    named = dtypes.get(layer, dtypes.get(layer - count))
    return dtypes.get("default") if named is None else named
