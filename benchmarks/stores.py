"""What the attention benchmark attends over: layers of K and V, dense and in scattered pages.

Letters: B batch, H query heads, K KV heads, T tokens, D channels of a head.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.arguments import DTYPES
from kvcompile.backend import pass_options
from kvcompile.codegen.formats.integer import IntegerFormat
from kvcompile.codegen.layout import RecordLayout
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import Compute
from kvcompile.format_requests import FormatRequest
from kvcompile.options import OptionError, parse_options
from kvcompile.passes.plan_formats import plan_layout
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore
from tests.support.rotary import angles, frequencies

MOST_LAYERS = 30
COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Shape:
    """The heads of one attention.

    Attributes:
        num_q_heads: H.
        num_kv_heads: K, a divisor of H.
        head_dim: D.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape written as `H/K/D`, such as `9/3/64`.

        Raises:
            ValueError: It is written otherwise, or K does not divide H.
        """
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)", text)
        if found is None:
            raise ValueError(f"{text!r} is no shape: write query heads/KV heads/channels, 9/3/64")
        shape = cls(*map(int, found.groups()))
        if shape.num_q_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_kv_heads} KV heads do not share {shape.num_q_heads}")
        return shape

    def __str__(self) -> str:
        return f"{self.num_q_heads}q/{self.num_kv_heads}kv D{self.head_dim}"


@dataclass(frozen=True)
class Setting:
    """One attention at one length.

    Attributes:
        shape: Heads.
        dtype: Of queries and of dense K and V; a name of `DTYPES`.
        batch: B.
        context: T.
    """

    shape: Shape
    dtype: str
    batch: int
    context: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def dense_bytes(self) -> int:
        """Bytes of one layer's dense K and V."""
        tokens = self.batch * self.context * self.shape.num_kv_heads
        return tokens * 2 * self.shape.head_dim * self.torch_dtype.itemsize

    @property
    def layers(self) -> int:
        """How many layers calls rotate over: 512 MiB of dense K and V, but at most 30."""
        return min(MOST_LAYERS, -(-COLD_BYTES // self.dense_bytes))

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}, batch {self.batch}, {self.context:,} tokens"


@dataclass(frozen=True)
class PagedFormat:
    """A format of pages, and the ways to compute with it.

    Attributes:
        label: What the user wrote.
        layout: How a record stores tokens.
        computes: Ways of multiplying; (None,) if K and V are exact.
    """

    label: str
    layout: RecordLayout
    computes: tuple[Compute | None, ...]

    def name(self, compute: Compute | None) -> str:
        """Return the candidate's name."""
        return self.label if len(self.computes) == 1 else f"{self.label}, compute {compute}"

    def bytes_of(self, setting: Setting) -> int:
        """Return about the bytes of one layer, the few exact tokens left out."""
        pages = setting.batch * -(-setting.context // self.layout.page_size)
        return pages * self.layout.page_bytes(setting.shape.num_kv_heads)


def paged_format(
    request: FormatRequest, shape: Shape, dtype: torch.dtype, computes: Sequence[Compute]
) -> PagedFormat:
    """Return a format as the backend would plan it for one attention.

    Args:
        request: What the user asked for; the same in all layers.
        shape: Heads.
        dtype: Of the model.
        computes: Ways of multiplying quantized numbers to compare, as far as the format and the
            processor have them; those of `request` come first.

    Raises:
        OptionError: The processor or the format has none of them.
    """
    options = pass_options(parse_options(request.options))
    dims = (shape.head_dim, shape.head_dim)
    layout = plan_layout(options.dtypes.of(0, 1), dtype, dims, options)
    if layout.window is None:
        return PagedFormat(request.label, layout, (None,))
    integers = all(isinstance(layout.format(role), IntegerFormat) for role in ("k", "v"))
    possible = {"fp32", "int8"} if integers and options.has_integer_dot else {"fp32"}
    asked = computes if options.compute_dtype == "auto" else [options.compute_dtype]
    found = tuple(c for c in computes if c in possible and c in asked)
    if not found:
        raise OptionError(f"format {request.label!r} cannot be computed in {', '.join(asked)}")
    return PagedFormat(request.label, layout, found)


BIAS = 8.0
"""Length of the bias of K in each pair of channels; the keys' own is about 1."""


def with_mean(paged: PagedFormat) -> PagedFormat:
    """Return a format of quantized keys as it is for a model whose keys have a bias."""
    layout = replace(paged.layout, rotary=Rotary(paged.layout.head_dim_qk // 2 * 2))
    return PagedFormat(f"{paged.label} of biased K", layout, paged.computes)


@dataclass(frozen=True)
class Dense:
    """Dense K and V of one layer, and a query.

    Attributes:
        q: [B, H, 1, D].
        k: [B, K, T, D], contiguous.
        v: [B, K, T, D], contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def new_dense(setting: Setting) -> list[Dense]:
    """Return random K, V and queries of every layer."""
    shape, dtype = setting.shape, setting.torch_dtype
    kv = (setting.batch, shape.num_kv_heads, setting.context, shape.head_dim)
    q = (setting.batch, shape.num_q_heads, 1, shape.head_dim)
    sizes = (q, kv, kv)
    return [
        Dense(*(torch.randn(size, dtype=dtype) for size in sizes)) for _ in range(setting.layers)
    ]


def new_stores(setting: Setting, layout: RecordLayout, dense: Sequence[Dense]) -> list[PagedStore]:
    """Return every layer's K and V in pages, which lie in random order over one arena."""
    pages = setting.batch * -(-setting.context // layout.page_size)
    arena = _scattered_arena(layout, setting, pages)
    exact = None
    if layout.window is not None:
        tokens = layout.window.residual_length + layout.page_size
        exact_pages = layout.window.sink_pages + -(-tokens // layout.exact.page_size)
        exact = _scattered_arena(layout.exact, setting, setting.batch * exact_pages)
    return [_filled(setting, layout, arena, exact, layer) for layer in dense]


def _scattered_arena(layout: RecordLayout, setting: Setting, pages: int) -> Arena:
    """Return an arena that hands out the pages of every layer in random order."""
    arena = Arena(layout.page_bytes(setting.shape.num_kv_heads), stores=setting.layers)
    free = arena.allocate(pages * setting.layers)
    random.Random(0).shuffle(free)
    arena.release(free)
    return arena


def _filled(
    setting: Setting, layout: RecordLayout, arena: Arena, exact: Arena | None, layer: Dense
) -> PagedStore:
    heads, dtype, batch = setting.shape.num_kv_heads, setting.torch_dtype, setting.batch
    store: PagedStore
    if exact is None:
        store = PagedStore(layout, heads, dtype, "cpu", arena, batch=batch)
    else:
        if layout.rotary is not None:
            layer = replace(layer, k=_biased(layer.k, frequencies(layout.rotary)))
        table = angles(layout.rotary, layout.page_size)
        store = QuantizedStore(
            layout, heads, dtype, "cpu", (arena, exact), batch=batch, rotary_table=table
        )
    store.append(layer.k, layer.v, 0)
    store.commit(setting.context)
    return store


def _biased(k: torch.Tensor, speeds: torch.Tensor) -> torch.Tensor:
    """Return keys [B, K, T, D] with a bias in all pairs that turn: a page keeps all it can."""
    phase = torch.outer(torch.arange(k.shape[2]), speeds)
    turned = BIAS * torch.cat([phase.cos(), phase.sin()], -1)
    return torch.cat([k[..., : 2 * len(speeds)] + turned, k[..., 2 * len(speeds) :]], -1).to(
        k.dtype
    )
