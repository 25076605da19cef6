"""attend: attention of 1 to 16 query tokens over the pages of a store."""

from __future__ import annotations

from kvcompile.codegen.cpu import fragments, quantized_attend
from kvcompile.codegen.cpu.abi import mask_ctype, packed_text, signature_text
from kvcompile.codegen.cpu.glossary import glossary
from kvcompile.codegen.cpu.pages import (
    INCLUDES,
    is_exact,
    load_page_text,
    store_text,
    supports_pages,
)
from kvcompile.codegen.cpu.panels import (
    block_rows,
    exact_accumulate_calls,
    panel_accumulate,
    panel_scores,
)
from kvcompile.codegen.cpu.rope import ROPE_ARGUMENTS, rope_fields, rotate_text
from kvcompile.codegen.cpu.scalars import CTYPE, scalar_text
from kvcompile.codegen.cpu.shape import AttendShape
from kvcompile.codegen.cpu.text import join_sections, render
from kvcompile.codegen.cpu.variants import call_cap, cap_text, sink_argument, sink_field
from kvcompile.codegen.cpu.words import words_text
from kvcompile.codegen.source import KernelSource, Supported, Unsupported
from kvcompile.codegen.spec import MOST_QUERIES, KernelSpec

MOST_CHUNK = 4096

STRUCTS = """
#define UNROLL _Pragma("GCC unroll 32")

// ---- one call: the arguments, and what follows from them ------------------------------------
struct Call {
  Store store;
  const $ctype* q_BHSD;
  int64_t q_sb, q_sh, q_ss;
  $ctype* out_BHSD;
  int64_t o_sb, o_sh, o_ss;
$rope_fields$mask_fields$sink_field  int64_t num_kv_heads, query_len, kv_len, most_chunks;
  float* scratch;
  double scale;
};

// the result of one chunk before the merge: m[rows], l[rows], o[rows][$out_channels]
struct Partial {
  float *m, *l, *o;
};

$chunk_struct

// where a chunk lies
struct Place {
  int64_t b, h, chunk;
};

// what one thread works in
struct alignas(64) Workspace {
  float q[$panel_rows * $q_stride];
  float s[$panel_rows * $chunk];
$bias_field  int64_t b = -1, h = -1, row0 = -1;  // whose query is in q
};
"""

CHUNK = """
// the stored tokens of one chunk, and the pages that this thread reads after them
struct Chunk {
  const uint8_t* record[$chunk_pages];
  const uint8_t* ahead[$chunk_pages];
  int pages, tokens;
};
"""

MASK_FIELDS = """  const $mask_ctype* mask_BHST;
  int64_t m_sb, m_sh, m_ss, m_st;
"""

HEADING = "// ---- attention, in the order of the mathematics ----------------------------------"

CHUNKS_OF = """
static inline int64_t chunks_of(const Call& call, int64_t b) {
  const int64_t stored = call.kv_len - call.store.starts[b];
  return stored > 0 ? (stored + $last_in_chunk) / $chunk : 0;
}
"""

ITEMS = """
// items are numbered by row, then $order
static inline int64_t count_items(const Call& call) {
  int64_t items = 0;
  for (int64_t b = 0; b < call.store.batch; ++b) items += chunks_of(call, b) * call.num_kv_heads;
  return items;
}
static inline Place find_place(const Call& call, int64_t item) {
  int64_t b = 0, chunks = chunks_of(call, 0);
  while (item >= chunks * call.num_kv_heads) {
    item -= chunks * call.num_kv_heads;
    chunks = chunks_of(call, ++b);
  }
  return Place{b, $place};
}
"""
HEAD_BY_HEAD = {"order": "KV head, then chunk", "place": "item / chunks, item % chunks"}
# The records of a page lie side by side, and memory comes faster when they are read together:
# small ones above all. Exact ones are large, and taking up another query costs them more.
PAGE_BY_PAGE = {
    "order": "chunk, then KV head",
    "place": "item % call.num_kv_heads, item / call.num_kv_heads",
}

FIND_RECORDS = """
static inline int find_records(const Call& call, const Place& at, const uint8_t** record) {
  const int64_t first = at.chunk * $chunk, stored = call.kv_len - call.store.starts[at.b] - first;
  const int tokens = int(std::min(stored, int64_t($chunk)));
  for (int i = 0; i * $page_size < tokens; ++i)
    record[i] = call.store.record(at.b, first / $page_size + i, at.h);
  return tokens;
}
"""

ATTEND_CHUNK = """
static void attend_chunk(const Call& call, int64_t item, int64_t items, Workspace& work) {
  const Place at = find_place(call, item);
  Chunk chunk;
  chunk.tokens = find_records(call, at, chunk.record);
  chunk.pages = (chunk.tokens + $last_slot) / $page_size;
  std::copy_n(chunk.record, chunk.pages, chunk.ahead);
  if (item + 1 < items) find_records(call, find_place(call, item + 1), chunk.ahead);
  const Partial out = partial(call, at.b, at.h, at.chunk);
  const int64_t rows = $rows;
  for (int64_t row0 = 0; row0 < rows; row0 += $panel_rows) {
    const int count = int(std::min(rows - row0, int64_t($panel_rows)));
    if (work.b != at.b || work.h != at.h || work.row0 != row0) {
      load_query(call, at.b, at.h, row0, count, work.q);
      work.b = at.b, work.h = at.h, work.row0 = row0;
    }
    panel_scores(chunk, count, work.q, work.s);
$cap$mask    for (int r = 0; r < count; ++r)
      online_softmax(work.s + r * $chunk, chunk.tokens, out.m[row0 + r], out.l[row0 + r]);
    panel_accumulate(chunk, count, work.s, out.o + row0 * $out_channels);
  }
}
"""

RUN = """
// what each thread of a team does: a run of items, then a run of output rows
static void attend_items(const Call& call) {
  const int64_t items = count_items(call), rows = $rows, heads = call.num_kv_heads;
  const int64_t out_rows = call.store.batch * heads * rows;
  Workspace work;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < items; ++item) attend_chunk(call, item, items, work);
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < out_rows; ++row)
    merge_splits(call, row / rows / heads, row / rows % heads, row % rows);
}
"""

LONGEST = """\
  // with the tokens before column 0
  const Store rows(state);
  int64_t longest = kv_len;
  for (int64_t b = 0; b < rows.batch; ++b) longest = std::max(longest, kv_len - rows.starts[b]);
"""

MAIN = """
extern "C" int64_t ${symbol}_scratch_bytes(
    int64_t batch, int64_t num_kv_heads, int64_t query_len, int64_t kv_len) {
  const int64_t rows = query_len * $group, chunks = $most_chunks;
  const int64_t floats = (2 * rows + 15) / 16 * 16 + rows * $out_channels;
  return batch * num_kv_heads * chunks * floats * 4;
}

$signature
  if ($bad_query_len || kv_len < 0 || num_kv_heads < 1) return 1;
$before  const Call call{Store(state), q_BHSD, q_sb, q_sh, q_ss, out_BHSD, o_sb, o_sh, o_ss,
$rope_arguments$mask_arguments$sink_argument                  num_kv_heads, query_len, kv_len,
                  $chunks, scratch, scale};
  if (threads > 1 && call.store.batch * num_kv_heads * kv_len * query_len > 768) {
#pragma omp parallel num_threads(int(threads))
    attend_items(call);
  } else {
    attend_items(call);
  }
  return 0;
}
"""


class AttendGenerator:
    """Prints attend kernels."""

    def supports(self, spec: KernelSpec) -> Supported | Unsupported:
        """Say whether `spec` can be printed, and if not, why."""
        pages = supports_pages(spec)
        if isinstance(pages, Unsupported):
            return pages
        shape = AttendShape(spec)
        if shape.chunk % spec.page_size or not 0 < shape.chunk <= MOST_CHUNK:
            hint = f"Choose a multiple of page_size {spec.page_size}, at most {MOST_CHUNK}."
            return Unsupported(f"chunk {shape.chunk}", hint)
        if not 1 <= shape.group <= 256:
            return Unsupported(
                f"{shape.group} query heads per KV head", "1 to 256 of them are printed."
            )
        if spec.mask_dtype not in (None, "fp32", spec.dtype):
            return Unsupported(
                f"a {spec.mask_dtype} mask with {spec.dtype} queries",
                f"Convert the mask to fp32 or {spec.dtype}.",
            )
        if spec.sink_dtype not in (None, "fp32", spec.dtype):
            return Unsupported(
                f"{spec.sink_dtype} sink logits with {spec.dtype} queries",
                f"Convert them to fp32 or {spec.dtype}.",
            )
        if spec.queries == "many":
            return Unsupported("many query tokens on a CPU", f"At most {MOST_QUERIES} are printed.")
        if spec.sliding_window is not None:
            hint = "Only GPU kernels are printed with it."
            return Unsupported("a sliding window on a CPU", hint)
        return quantized_attend.supports(spec)

    def generate(self, spec: KernelSpec) -> KernelSource:
        """Print the kernel of `spec`."""
        shape = AttendShape(spec)
        body = _quantized_body if spec.is_grouped else _exact_body
        text = join_sections(
            glossary(shape),
            INCLUDES,
            *_vocabulary(shape),
            store_text(spec),
            *body(shape),
            fragments.merge_splits(shape),
            render(RUN, rows=fragments.rows_expression(shape)),
            _main(shape),
            packed_text(spec),
        )
        return KernelSource(spec, text)


def _vocabulary(shape: AttendShape) -> list[str]:
    """Return the texts of vector and scalar functions."""
    spec, isa = shape.spec, shape.isa
    storage = {name for name in (spec.k_format, spec.v_format) if is_exact(name)}
    shapes = [shape]
    if spec.is_grouped:
        storage.add(spec.dtype)
        shapes.append(shape.window)
    scalars: set[str] = {name for name in (spec.dtype, spec.mask_dtype, spec.sink_dtype) if name}
    if not isa.f16c:
        scalars |= storage
    texts = [
        isa.vector_text(
            storage,
            masked=spec.mask != "none",
            half=any(s.half_channel is not None for s in shapes),
        ),
        scalar_text(scalars, f16c=isa.f16c),
    ]
    # Without F16C the vectors are made of the scalar conversions.
    texts = texts if isa.f16c else texts[::-1]
    return texts + ([words_text(shape)] if spec.is_grouped else [])


def _exact_body(shape: AttendShape) -> list[str]:
    """Return the sections from the words of a page to what is done with one chunk."""
    literals = {
        "chunk": shape.chunk,
        "last_in_chunk": shape.chunk - 1,
        "last_slot": shape.spec.page_size - 1,
        "page_size": shape.spec.page_size,
    }
    mask = ""
    if shape.spec.mask != "none":
        head = "" if shape.spec.mask == "causal" else " at.h,"
        mask = (
            f"    mask(call, at.b,{head} row0, count, at.chunk * {shape.chunk}, chunk.tokens,\n"
            "         work.bias, work.s);\n"
        )
    elif shape.spec.slides:
        mask = f"    hide(call, at.b, at.chunk * {shape.chunk}, chunk.tokens, count, work.s);\n"
    chunk = render(CHUNK, chunk_pages=shape.chunk // shape.spec.page_size)
    return [
        load_page_text(shape.layout, shape.isa),
        _structs(shape, chunk),
        HEADING,
        rotate_text(shape.spec),
        fragments.load_query(shape),
        fragments.scores(shape),
        cap_text(shape),
        fragments.mask(shape),
        fragments.online_softmax(shape),
        fragments.accumulate(shape),
        fragments.store_partial(shape),
        block_rows(shape),
        panel_scores(shape),
        panel_accumulate(shape, exact_accumulate_calls(shape)),
        render(CHUNKS_OF, **literals),
        render(ITEMS, **HEAD_BY_HEAD).strip("\n") + "\n" + render(FIND_RECORDS, **literals),
        render(
            ATTEND_CHUNK,
            rows=fragments.rows_expression(shape),
            panel_rows=shape.panel_rows,
            cap=call_cap(shape.spec),
            mask=mask,
            out_channels=shape.out_channels,
            **literals,
        ),
    ]


def _quantized_body(shape: AttendShape) -> list[str]:
    """Return the sections from the words of a page to what is done with one chunk."""
    return [
        _structs(shape, quantized_attend.chunk_text(shape)),
        HEADING,
        rotate_text(shape.spec),
        fragments.load_query(shape),
        cap_text(shape),
        fragments.mask(shape),
        fragments.online_softmax(shape),
        fragments.store_partial(shape),
        quantized_attend.namespaces(shape),
        quantized_attend.row_text(shape),
        render(ITEMS, **PAGE_BY_PAGE),
        quantized_attend.attend_chunk(shape),
    ]


def _structs(shape: AttendShape, chunk: str) -> str:
    fields, bias = "", ""
    if shape.spec.mask in ("bool", "additive"):
        fields = render(MASK_FIELDS, mask_ctype=mask_ctype(shape.spec)) + "\n"
    if shape.spec.mask != "none":
        bias = f"  float bias[{shape.chunk}];\n"
    return render(
        STRUCTS,
        ctype=CTYPE[shape.spec.dtype],
        rope_fields=rope_fields(shape.spec),
        mask_fields=fields,
        sink_field=sink_field(shape.spec),
        bias_field=bias,
        out_channels=shape.out_channels,
        chunk_struct=chunk,
        panel_rows=shape.panel_rows,
        q_stride=shape.q_stride,
        chunk=shape.chunk,
    )


def _main(shape: AttendShape) -> str:
    spec = shape.spec
    one = spec.queries == "one"
    has_mask = spec.mask in ("bool", "additive")
    ignored = ""
    if not has_mask:
        ignored = "  (void)mask_BHST, (void)m_sb, (void)m_sh, (void)m_ss, (void)m_st;\n"
    if spec.mask == "causal":
        ignored += "  kv_len = std::min(kv_len, query_len);  // no query token sees further\n"
    return render(
        MAIN,
        symbol=spec.symbol,
        signature=signature_text(spec),
        group=shape.group,
        most_chunks=fragments.most_chunks(shape, "kv_len"),
        chunks=fragments.most_chunks(shape, "longest" if spec.slides else "kv_len"),
        out_channels=shape.out_channels,
        bad_query_len="query_len != 1" if one else "query_len < 1 || query_len > 16",
        before=ignored + (LONGEST if spec.slides else ""),
        rope_arguments="" if spec.rope is None else ROPE_ARGUMENTS,
        sink_argument=sink_argument(spec),
        mask_arguments=f"{' ' * 18}mask_BHST, m_sb, m_sh, m_ss, m_st,\n" if has_mask else "",
    )
