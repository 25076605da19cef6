"""The numbers of one attend kernel: register blocks, panels and buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcompile.codegen.cpu.isa import ISAS, Isa
from kvcompile.codegen.cpu.pages import record_layout
from kvcompile.codegen.formats.base import round_up
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.spec import MOST_QUERIES, KernelSpec

MOST_BLOCK_ROWS = 6
MOST_PANEL_ROWS = 24


def split_evenly(count: int, most: int) -> list[int]:
    """Split `count` into the fewest parts of at most `most`, as even as possible, larger first."""
    parts = []
    while count > 0:
        left = -(-count // most)
        parts.append(-(-count // left))
        count -= parts[-1]
    return parts


@dataclass(frozen=True)
class AttendShape:
    """Literals of an attend kernel, for the pages of one kind.

    A *row* is one query token of one query head. The rows of a KV head are taken in panels
    (their scores stay on the stack), a panel in blocks (their sums stay in registers).

    Attributes:
        spec: The kernel.
        of_window: Whether the pages are the exact ones beside quantized pages.
    """

    spec: KernelSpec
    of_window: bool = False

    @property
    def layout(self) -> RecordLayout:
        """The layout of the records."""
        layout = record_layout(self.spec)
        return layout.exact if self.of_window else layout

    @property
    def window(self) -> AttendShape:
        """The same kernel's literals for the exact pages beside quantized ones."""
        return replace(self, of_window=True)

    @property
    def isa(self) -> Isa:
        """The instruction set."""
        return ISAS[self.spec.isa]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        assert self.spec.q_heads_per_kv_head is not None
        return self.spec.q_heads_per_kv_head

    @property
    def chunk(self) -> int:
        """Stored tokens per partial result."""
        assert self.spec.chunk is not None
        return self.spec.chunk

    @property
    def most_rows(self) -> int:
        """Rows of a KV head: exact for one query token, an upper bound for a few."""
        return self.group if self.spec.queries == "one" else self.group * MOST_QUERIES

    @property
    def panel_rows(self) -> int:
        """Rows of the largest panel."""
        return max(self.panels())

    def panels(self) -> list[int]:
        """Return the panel sizes of `most_rows` rows."""
        return split_evenly(self.most_rows, MOST_PANEL_ROWS)

    def block_sizes(self) -> list[int]:
        """Return every block size that can occur, largest first."""
        if self.spec.queries == "few":
            return list(range(min(MOST_BLOCK_ROWS, self.most_rows), 0, -1))
        sizes = {size for panel in self.panels() for size in split_evenly(panel, MOST_BLOCK_ROWS)}
        return sorted(sizes, reverse=True)

    @property
    def k_channels(self) -> int:
        """Channels of a stored key."""
        return self.layout.format("k").channels(self.layout.part("k"))

    @property
    def q_stride(self) -> int:
        """Floats of a query row: its channels, and zeros for the pad channels of any record."""
        widest = replace(self, of_window=False).k_channels
        return max(widest, self.window.k_channels) if self.spec.is_grouped else widest

    @property
    def v_channels(self) -> int:
        """Channels of a stored value."""
        return self.layout.format("v").channels(self.layout.part("v"))

    @property
    def v_offset(self) -> int:
        """Offset of V in a record, in bytes."""
        return self.layout.v_offset

    @property
    def v_token_bytes(self) -> int:
        """Bytes of V per token of a record."""
        return self.layout.v_bytes // self.layout.page_size

    @property
    def page_tokens(self) -> str:
        """The C++ expression for how many tokens page `page` of a chunk holds."""
        if self.of_window:
            return "chunk.filled[page]"
        size = self.layout.page_size
        return f"std::min({size}, chunk.tokens - page * {size})"

    @property
    def out_channels(self) -> int:
        """Channels of a row of a partial result: whole vectors of any instruction set."""
        return round_up(self.v_channels, 16)

    def chains(self, rows: int) -> int:
        """Return the running sums per row in scores: enough of them to hide the FMA latency."""
        chains = 2
        while chains * rows < 6 and chains < 8:
            chains *= 2
        return chains

    def channel_blocks(self, rows: int) -> list[tuple[int, int]]:
        """Return (first channel, vectors) of the blocks whose sums fit the registers."""
        lanes = self.isa.lanes
        blocks, channel = [], 0
        for vectors in split_evenly(
            self.v_channels // lanes, max(1, self.isa.accumulators // rows)
        ):
            blocks.append((channel, vectors))
            channel += vectors * lanes
        return blocks

    @property
    def half_channel(self) -> int | None:
        """First channel of the half vector that rows of V end in, if they do."""
        rest = self.v_channels % self.isa.lanes
        return self.v_channels - rest if rest else None
