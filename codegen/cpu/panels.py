"""Panels of rows over the pages of a chunk: what calls the fragments scores and accumulate."""

from __future__ import annotations

from kvcompile.codegen.cpu.shape import MOST_BLOCK_ROWS, AttendShape
from kvcompile.codegen.cpu.text import render

PANEL_SCORES = """
// scores of a panel: a page is read once from memory, by every block of rows from the L1 cache
static void panel_scores(const Chunk& chunk, int rows, const float* q, float* s) {
  for (int page = 0; page < chunk.pages; ++page) {
    const uint8_t* record = chunk.record[page];
    const int tokens = $page_tokens;
    for (int row = 0; row < rows;) {
      const float* qq = q + row * $q_stride;
      float* ss = s + row * $chunk + page * $page_size;
$blocks
    }
  }
}
"""

PANEL_ACCUMULATE = """
static void panel_accumulate(const Chunk& chunk, int rows, const float* p, float* o) {
$prologue  for (int row = 0; row < rows;) {
    const float* pp = p + row * $chunk;
    float* oo = o + row * $out_channels;
$blocks
  }
}
"""

BLOCK_ROWS = """
// rows are taken in the fewest blocks of at most $most, as even as possible
static inline int block_rows(int left) {
  const int blocks = (left + $last) / $most;
  return (left + blocks - 1) / blocks;
}
"""

Calls = dict[int, list[str]]
"""Per size of a block of rows: the statements that work on it."""


def block_rows(shape: AttendShape) -> str:
    """Print how a panel is cut into blocks, unless there is only one size."""
    if len(shape.block_sizes()) == 1:
        return ""
    return render(BLOCK_ROWS, most=MOST_BLOCK_ROWS, last=MOST_BLOCK_ROWS - 1)


def panel_scores(shape: AttendShape) -> str:
    """Print panel_scores over a fragment `scores<rows, chains>`."""
    calls = {
        rows: [f"scores<{rows}, {shape.chains(rows)}>(record, tokens, row == 0, qq, ss);"]
        for rows in shape.block_sizes()
    }
    return render(
        PANEL_SCORES,
        page_size=shape.layout.page_size,
        page_tokens=shape.page_tokens,
        q_stride=shape.q_stride,
        chunk=shape.chunk,
        blocks=switch_rows(" " * 6, calls),
    )


def panel_accumulate(shape: AttendShape, calls: Calls, prologue: str = "") -> str:
    """Print panel_accumulate.

    Args:
        shape: The literals.
        calls: Statements on `chunk`, the block's weights `pp` and its result `oo`; the first
            block of rows has `row == 0`.
        prologue: Declarations, whole lines.
    """
    return render(
        PANEL_ACCUMULATE,
        prologue=prologue,
        chunk=shape.chunk,
        out_channels=shape.out_channels,
        blocks=switch_rows(" " * 4, calls),
    )


def exact_accumulate_calls(shape: AttendShape) -> Calls:
    """Return the calls of the fragment `accumulate` for exact V."""
    return {rows: _exact_calls(shape, rows) for rows in shape.block_sizes()}


def _exact_calls(shape: AttendShape, rows: int) -> list[str]:
    calls = [("accumulate", vectors, channel) for channel, vectors in shape.channel_blocks(rows)]
    if shape.half_channel is not None:
        calls.append(("half_accumulate", 1, shape.half_channel))
    # What is fetched on the way is fetched once: by the first block of rows and channels.
    fetch = ["row == 0"] + ["false"] * (len(calls) - 1)
    return [
        f"{name}<{rows}, {vectors}>(chunk, pp, {channel}, {once}, oo);"
        for (name, vectors, channel), once in zip(calls, fetch, strict=True)
    ]


def switch_rows(indent: str, calls: Calls) -> str:
    """Print the calls for a block of rows: a switch over its size if several can occur."""
    if len(calls) == 1:
        ((size, statements),) = calls.items()
        return "\n".join(indent + line for line in [*statements, f"row += {size};"])
    lines = ["const int block = block_rows(rows - row);", "switch (block) {"]
    for size, statements in calls.items():
        lines.append(f"  case {size}:")
        lines += [f"    {statement}" for statement in [*statements, "break;"]]
    lines += ["}", "row += block;"]
    return "\n".join(indent + line for line in lines)
