"""Reading the pages of a store and doing nothing else: what attention over them can hope for.

Memory that is read in one long run comes faster than pages in the order of a block table, because
the processor fetches ahead within a run and not from one page to the next. This is the other end:
whole pages, in order of the table, one prefetch per cache line ahead of the reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from kvcompile.codegen.cpu.compile import compile_text
from kvcompile.codegen.cpu.isa import ISAS, detect_isa
from kvcompile.runtime.page_table import HOLE
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore

LINE = 64
TEXT = """
// the sum of the words of `count` pages, each of `bytes` bytes, a multiple of 64
#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" uint64_t read_pages(
    const uint8_t* const* pages, int64_t count, int64_t bytes, int64_t threads) {
  constexpr int64_t AHEAD = 4096;
  uint64_t total = 0;
#pragma omp parallel for num_threads(int(threads)) reduction(+ : total) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t *page = pages[i], *next = pages[std::min(i + 1, count - 1)];
    uint64_t sums[8] = {};
    for (int64_t at = 0; at < bytes; at += 64) {
      const int64_t ahead = at + AHEAD;
      __builtin_prefetch(ahead < bytes ? page + ahead : next + (ahead - bytes) % bytes, 0, 2);
      uint64_t words[8];
      memcpy(words, page + at, sizeof words);
      for (int lane = 0; lane < 8; ++lane) sums[lane] += words[lane];
    }
    for (int lane = 0; lane < 8; ++lane) total += sums[lane];
  }
  return total;
}
"""


def new_reader(store: PagedStore) -> Callable[[], int]:
    """Return a call that reads every page of a store once.

    Args:
        store: The store; it must not change as long as the call is in use.

    Returns:
        A call that returns the sum of the pages' 8-byte words modulo 2^64, so that no compiler can
        leave out a read. What lies behind the last whole cache line of a page is not read.
    """
    tables = [store.pages]
    if isinstance(store, QuantizedStore):
        tables.append(store.exact)
    read = _library().read_pages
    threads = torch.get_num_threads
    parts: list[tuple[ctypes.Array[ctypes.c_void_p], int, int]] = []
    for table in tables:
        arena = table.arena
        pages = [page for row in table.rows for page in row if page != HOLE]
        addresses = [arena.page(page).data_ptr() for page in pages]
        parts.append(
            (
                (ctypes.c_void_p * len(pages))(*addresses),
                len(pages),
                arena.page_bytes // LINE * LINE,
            )
        )

    def call() -> int:
        return sum(int(read(*part, threads())) for part in parts) % 2**64

    return call


def _library() -> ctypes.CDLL:
    flags = ISAS[detect_isa()].flags
    library = ctypes.CDLL(str(compile_text("read_pages", TEXT, flags)))
    library.read_pages.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
    library.read_pages.restype = ctypes.c_uint64
    return library
