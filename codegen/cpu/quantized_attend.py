"""attend over quantized pages: what differs from exact pages alone.

A row is sinks, quantized pages and ring (see `codegen.layout.Window`). Its chunks are those of the
quantized tokens and, behind them, those of the exact pages; both kinds leave the same partials. The
fragments of each kind stand in a namespace of C++: `exact` holds the very text of the kernels over
exact pages, printed for pages of 16 tokens, and `quantized` that of the record's formats.
"""

from __future__ import annotations

from kvcompile.codegen.cpu import decode_fragments, fragments, integer_attend, panels
from kvcompile.codegen.cpu.pages import load_page_text
from kvcompile.codegen.cpu.rotary import mean_scores_text
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.cpu.variants import call_cap
from kvcompile.codegen.formats import TILE
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.source import Supported, Unsupported
from kvcompile.codegen.spec import KernelSpec

CHUNK = """
// the stored tokens of one chunk, and the pages that this thread reads after them
struct Chunk {
  const uint8_t* record[$chunk_pages];
  const uint8_t* ahead[$chunk_pages];
  int pages, tokens;  // tokens: up to the last one, with the empty slots before it
  int filled[$chunk_pages];  // tokens of each page
$first};
"""

CHUNK_FIRST = """  int64_t first[$chunk_pages];  // the first token of each page, counted in its row
"""

ROW = """
// the stored tokens of a row by where they lie, and the chunks they make: quantized ones first
struct Row {
  int64_t sinks, quantized, ring;   // tokens
  int64_t sink_pages, exact_pages;  // exact pages: those of the sinks, and all
  int64_t quantized_chunks, chunks;
};
static inline Row row_of(const Call& call, int64_t b) {
  const int64_t stored = std::max(call.kv_len - call.store.starts[b], int64_t(0));
  Row row;
  row.sinks = std::min(stored, int64_t($sinks));
  row.quantized = std::min(stored - row.sinks, int64_t(call.store.quantized[b]) * $page_size);
  row.ring = stored - row.sinks - row.quantized;
  row.sink_pages = (row.sinks + 15) / 16;
  row.exact_pages = row.sink_pages + (row.ring + 15) / 16;
  row.quantized_chunks = (row.quantized + $last_in_chunk) / $chunk;
  row.chunks = row.quantized_chunks + (row.exact_pages + $last_exact_page) / $exact_pages;
  return row;
}
static inline int64_t chunks_of(const Call& call, int64_t b) { return row_of(call, b).chunks; }
"""

CHUNKS = """
static inline void find_quantized(const Call& call, const Place& at, const Row& row,
                                  Chunk& chunk) {
  const int64_t first = at.chunk * $chunk;
  chunk.tokens = int(std::min(row.quantized - first, int64_t($chunk)));
  chunk.pages = (chunk.tokens + $last_slot) / $page_size;
  for (int i = 0; i < chunk.pages; ++i) {
    chunk.record[i] = call.store.record(at.b, first / $page_size + i, at.h);
$quantized_first  }
}
static inline void find_exact(const Call& call, const Place& at, const Row& row, Chunk& chunk) {
  const int64_t page = (at.chunk - row.quantized_chunks) * $exact_pages;
  // Entries for tokens that are quantized by now stand between those of the sinks and of the ring.
  const int64_t skipped = (call.store.quantized[at.b] - call.store.ring_from[at.b]) * $tiles;
  chunk.pages = int(std::min(row.exact_pages - page, int64_t($exact_pages)));
  for (int i = 0; i < chunk.pages; ++i) {
    const bool sink = page + i < row.sink_pages;
    const int64_t slot = (page + i - (sink ? 0 : row.sink_pages)) * 16;
    chunk.record[i] = call.store.exact_record(at.b, page + i + (sink ? 0 : skipped), at.h);
    chunk.filled[i] = int(std::min((sink ? row.sinks : row.ring) - slot, int64_t(16)));
    chunk.tokens = i * 16 + chunk.filled[i];
$exact_first  }
}
// returns whether the chunk is a quantized one
static inline bool find_chunk(const Call& call, const Place& at, Chunk& chunk) {
  const Row row = row_of(call, at.b);
  const bool quantized = at.chunk < row.quantized_chunks;
  if (quantized)
    find_quantized(call, at, row, chunk);
  else
    find_exact(call, at, row, chunk);
  return quantized;
}
"""

QUANTIZED_FIRST = """
    chunk.filled[i] = std::min($page_size, chunk.tokens - i * $page_size);
    chunk.first[i] = $sinks + first + i * $page_size;
"""
EXACT_FIRST = "    chunk.first[i] = slot + (sink ? 0 : row.sinks + row.quantized);\n"

BURY = """
// the empty slots behind the last sink: dead, whatever their scores are
static inline void bury(const Chunk& chunk, int rows, float* s) {
  for (int page = 0; page + 1 < chunk.pages; ++page)
    for (int r = 0; r < rows; ++r)
      for (int t = chunk.filled[page]; t < 16; ++t) s[r * $chunk + page * 16 + t] = -INFINITY;
}
"""

ATTEND_CHUNK = """
static void attend_chunk(const Call& call, int64_t item, int64_t items, Workspace& work) {
  const Place at = find_place(call, item);
  Chunk chunk, next;
  const bool quantized = find_chunk(call, at, chunk);
  std::copy_n(chunk.record, chunk.pages, chunk.ahead);
  if (item + 1 < items) {
    find_chunk(call, find_place(call, item + 1), next);
    std::copy_n(next.record, next.pages, chunk.ahead);
  }
  const Partial out = partial(call, at.b, at.h, at.chunk);
  const int64_t rows = $rows;
  for (int64_t row0 = 0; row0 < rows; row0 += $panel_rows) {
    const int count = int(std::min(rows - row0, int64_t($panel_rows)));
    if (work.b != at.b || work.h != at.h || work.row0 != row0) {
      load_query(call, at.b, at.h, row0, count, work.q);
      work.b = at.b, work.h = at.h, work.row0 = row0;
    }
    if (quantized)$open
      quantized::panel_scores(chunk, count, work.q, work.s);
$mean    ${close}else
      exact::panel_scores(chunk, count, work.q, work.s);
$cap$mask$bury    for (int r = 0; r < count; ++r)
      online_softmax(work.s + r * $chunk, chunk.tokens, out.m[row0 + r], out.l[row0 + r]);
    if (quantized)
      quantized::panel_accumulate(chunk, count, work.s, out.o + row0 * $out_channels);
    else
      exact::panel_accumulate(chunk, count, work.s, out.o + row0 * $out_channels);
  }
}
"""

MASK_PAGES = """    for (int page = 0; page < chunk.pages; ++page)
      mask(call, at.b,$head row0, count, chunk.first[page], chunk.filled[page], work.bias,
           work.s + page * (quantized ? $page_size : 16));
"""


HIDE_PAGES = """    for (int page = 0; page < chunk.pages; ++page)
      hide(call, at.b, chunk.first[page], chunk.filled[page], count,
           work.s + page * (quantized ? $page_size : 16));
"""


MEAN_SCORES = """\
      quantized::panel_mean_scores(call.store.rotary, chunk, count, work.q, work.s);
"""


def supports(spec: KernelSpec) -> Supported | Unsupported:
    """Say whether the multiplication that `spec` asks for can be printed."""
    if spec.compute != "int8":
        return Supported()
    layout = AttendShape(spec).layout
    for role in ("k", "v"):
        name = layout.format(role).name
        if not isinstance(layout.format(role), IntegerFormat):
            return Unsupported(f"compute int8 with {role} in {name}", "Choose compute fp32.")
    if spec.isa != "avx512":
        return Unsupported(f"compute int8 for {spec.isa}", "Choose avx512, or compute fp32.")
    return Supported()


def _needs_tokens(spec: KernelSpec) -> bool:
    """Whether a chunk has to know which tokens its pages hold."""
    return spec.mask != "none" or spec.slides


def chunk_text(shape: AttendShape) -> str:
    """Print the struct of a chunk, which holds pages of either kind."""
    pages = shape.chunk // TILE
    first = render(CHUNK_FIRST, chunk_pages=pages) + "\n" if _needs_tokens(shape.spec) else ""
    return render(CHUNK, chunk_pages=pages, first=first)


def namespaces(shape: AttendShape) -> str:
    """Print scores and accumulate for both kinds of pages."""
    return join_sections(
        panels.block_rows(shape),
        "// ---- exact pages: sinks and ring\nnamespace exact {",
        _exact_panels(shape.window),
        "}  // namespace exact",
        "// ---- quantized pages\nnamespace quantized {",
        _quantized_panels(shape),
        mean_scores_text(shape),
        "}  // namespace quantized",
    )


def _exact_panels(shape: AttendShape) -> str:
    """Print scores and accumulate over exact words, and what calls them."""
    return join_sections(
        load_page_text(shape.layout, shape.isa),
        fragments.scores(shape),
        panels.panel_scores(shape),
        fragments.accumulate(shape),
        panels.panel_accumulate(shape, panels.exact_accumulate_calls(shape)),
    )


def attend_chunk(shape: AttendShape) -> str:
    """Print how the chunks of a row are found, and what is done with one."""
    spec, counted = shape.spec, _needs_tokens(shape.spec)
    assert spec.num_sink_tokens is not None
    literals = {
        "sinks": spec.num_sink_tokens,
        "page_size": spec.page_size,
        "tiles": spec.page_size // TILE,
        "last_slot": spec.page_size - 1,
        "chunk": shape.chunk,
        "last_in_chunk": shape.chunk - 1,
        "exact_pages": shape.chunk // TILE,
        "last_exact_page": shape.chunk // TILE - 1,
    }
    mask = ""
    if spec.mask == "none" and spec.slides:
        mask = render(HIDE_PAGES, page_size=spec.page_size) + "\n"
    elif counted:
        head = "" if spec.mask == "causal" else " at.h,"
        mask = render(MASK_PAGES, head=head, page_size=spec.page_size) + "\n"
    # Sinks that fill their pages leave no empty slot in front of the ring.
    empty = bool(literals["sinks"] % TILE)
    return join_sections(
        render(
            CHUNKS,
            quantized_first=render(QUANTIZED_FIRST, **literals) + "\n" if counted else "",
            exact_first=EXACT_FIRST if counted else "",
            **literals,
        ),
        render(BURY, chunk=shape.chunk) if empty else "",
        render(
            ATTEND_CHUNK,
            rows=fragments.rows_expression(shape),
            panel_rows=shape.panel_rows,
            chunk=shape.chunk,
            out_channels=shape.out_channels,
            cap=call_cap(spec),
            mask=mask,
            mean=MEAN_SCORES if spec.rotary is not None else "",
            open=" {" if spec.rotary is not None else "",
            close="} " if spec.rotary is not None else "",
            bury="    if (!quantized) bury(chunk, count, work.s);\n" if empty else "",
        ),
    )


def row_text(shape: AttendShape) -> str:
    """Print the chunks of a row."""
    return render(
        ROW,
        sinks=shape.spec.num_sink_tokens,
        page_size=shape.spec.page_size,
        chunk=shape.chunk,
        last_in_chunk=shape.chunk - 1,
        exact_pages=shape.chunk // TILE,
        last_exact_page=shape.chunk // TILE - 1,
    )


def _quantized_panels(shape: AttendShape) -> str:
    layout, isa = shape.layout, shape.isa
    if shape.spec.compute == "int8":
        return join_sections(
            integer_attend.scores_text(shape), integer_attend.accumulate_text(shape)
        )
    coded_v = layout.format("v").is_grouped
    calls = (
        decode_fragments.decode_accumulate_calls(shape)
        if coded_v
        else panels.exact_accumulate_calls(shape)
    )
    return join_sections(
        load_page_text(layout, isa),
        decode_fragments.decode_scores(shape)
        if layout.format("k").is_grouped
        else fragments.scores(shape),
        panels.panel_scores(shape),
        decode_fragments.decode_accumulate(shape) if coded_v else fragments.accumulate(shape),
        panels.panel_accumulate(shape, calls, "  Weights weights;\n" if coded_v else ""),
    )
