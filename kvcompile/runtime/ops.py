"""The operators that a rewritten graph calls.

Those of a cache get a state tensor, find its store by word 7 and leave everything else to the
store: a compiler may hand over a clone of the state tensor, whose addresses are out of date.
Letters: B batch, S query tokens, T cached tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvcompile.codegen.spec import MOST_QUERIES
from kvcompile.codegen.state import KEY
from kvcompile.passes.ir.ops import MATERIALIZE, library
from kvcompile.runtime import launch
from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.linear import linear
from kvcompile.runtime.masks import check_masks, check_unwritten, learn_starts
from kvcompile.runtime.registry import find, read_anchor
from kvcompile.runtime.rope import Rope, rope_of, rotate
from kvcompile.runtime.store import PagedStore
from kvcompile.runtime.variant import PLAIN, Variant

_REGISTRY_WORD = 8 * KEY


def _store_of(state: torch.Tensor) -> PagedStore:
    source = find(ctypes.c_int64.from_address(state.data_ptr() + _REGISTRY_WORD).value)
    assert isinstance(source, PagedStore)
    return source


def _first_position(position: torch.Tensor, new_len: int) -> int:
    """Return the first of `new_len` consecutive positions.

    Raises:
        CacheGapError: If they do not follow one another.
    """
    if position.device.type != "cpu":
        position = _on_host(position)
    if position.dtype != torch.int64 or position.numel() != new_len:
        position = position.to(torch.int64).expand(new_len)
    first = ctypes.c_int64.from_address(position.data_ptr()).value
    if new_len > 1 and not torch.equal(position, torch.arange(first, first + new_len)):
        raise CacheGapError(
            f"positions {position.tolist()} were given for {new_len} new tokens; a cache in pages "
            "needs consecutive positions"
        )
    return first


_last_positions: list[tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = []


def _on_host(position: torch.Tensor) -> torch.Tensor:
    """Return positions in main memory; the layers of a step, which share them, wait once.

    Threads share the list: it is read and replaced in one piece, and an entry is of use only to
    whoever has the very same tensor.
    """
    if position.is_inference():  # it has no version to know it by
        return position.cpu()
    if _last_positions:
        ref, version, host = _last_positions[0]
        if ref() is position and position._version == version:
            return host
    host = position.cpu()
    _last_positions[:] = [(weakref.ref(position), position._version, host)]
    return host


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    past_len: int,
    position: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Write K and V [B, K, S, D] at `position`, or else at `past_len`."""
    if k.shape[2]:
        store = _store_of(state)
        store.append(k, v, _begin(store, k.shape[2], past_len, position, mask))
        _hand_back(store, state)


def _begin(
    store: PagedStore,
    new_len: int,
    past_len: int,
    position: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> int:
    """Prepare to append `new_len` >= 1 tokens; return the position of the first one.

    With a mask, or over left padding, whoever appends from position 0 begins anew: what was stored
    is dropped, and the mask says what is left padding from now on.
    """
    if position is not None:
        known = None if store.step is None else store.step.position
        past_len = _first_position(position, new_len) if known is None else known
    if past_len == 0 and (mask is not None or store.is_padded or store.hidden):
        store.clear()
        if mask is None:
            store.set_starts([0] * store.batch)
        else:
            if position is not None:
                check_unwritten(mask, new_len)
            store.set_starts(learn_starts(mask, store.batch, new_len))
    return past_len


def _hand_back(store: PagedStore, state: torch.Tensor) -> None:
    """Show what an append has changed to who gave the state."""
    if state.data_ptr() != store.state.data_ptr():
        # A compiler that clones what an operator mutates copies the clone back over the original.
        state.copy_(store.state)


def _append_attend(  # noqa: PLR0913 - the schema
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    past_len: int,
    position: torch.Tensor | None,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    kv_len: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append K and V, then attend with q over all tokens up to the new ones.

    Args:
        q: Queries [B, H, S', Dk]; as a rule those of the new tokens, S' = S.
        k: [B, K, S, Dk].
        v: [B, K, S, Dv].
        state: State of the store.
        past_len: Tokens before the new ones, unless `position` is given.
        position: int64[S], their positions.
        mask: None, bool or additive, [B or 1, H or 1, S', kv_len].
        is_causal: PyTorch's flag: query s sees tokens 0 .. s.
        scale: Factor on the scores.
        kv_len: Tokens that the attention looks at, and columns of the mask; as a rule the capacity
            of a static cache.
        cos: [B or 1, 1, S, R], what the first R channels of q and k turn by, if they come
            unrotated; S' is S then.
        sin: The same.
        rope_interleaved: Which channels turn together, see `Rope`.
        softcap: Bound of the scores, see `Variant`.
        sinks: [H], logits that join the softmax.

    Returns:
        [B, H, S', Dv], in memory [B, S', H, Dv].
    """
    store = _store_of(state)
    new_len, queries = k.shape[2], q.shape[2]
    rope = None
    if cos is not None and sin is not None:
        rope = rope_of(cos, sin, rope_interleaved)
        if queries > MOST_QUERIES:
            # The attention of a chunk takes much longer than turning it.
            q, k, rope = rotate(q, rope), rotate(k, rope), None
    if new_len:
        past_len = _begin(store, new_len, past_len, position, mask)
        store.append(k, v, past_len, attends=True, rope=rope)
        _hand_back(store, state)
    stored = past_len + new_len
    if position is not None:
        # A static buffer shows its later tokens too, as far as it is read and the mask lets it.
        stored = min(max(stored, store.length), kv_len)
    variant = PLAIN if softcap is None and sinks is None else Variant(softcap, sinks)
    return _attend_stored(store, q, mask, is_causal, scale, (stored, kv_len), rope, variant)


def _attend(  # noqa: PLR0913 - the schema
    q: torch.Tensor,
    state: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    kv_len: int,
    head_dim_vo: int,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with q [B, H, S, Dk] over a store that is only read; see `_append_attend`."""
    store = _store_of(state)
    assert store.layout.head_dim_vo == head_dim_vo
    lengths = min(store.length, kv_len), kv_len
    variant = PLAIN if softcap is None and sinks is None else Variant(softcap, sinks)
    return _attend_stored(store, q, mask, is_causal, scale, lengths, None, variant)


def _attend_stored(
    store: PagedStore,
    q: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    lengths: tuple[int, int],
    rope: Rope | None,
    variant: Variant,
) -> torch.Tensor:
    """Attend over the first tokens of a store.

    Args:
        store: The store; what was appended need not be committed.
        q: Queries [B, H, S, Dk].
        mask: None, bool or additive, [B or 1, H or 1, S, columns].
        is_causal: PyTorch's flag.
        scale: Factor on the scores.
        lengths: Tokens that are stored, and columns of the mask.
        rope: What q turns by on its way in, if it comes unrotated.
        variant: What the attention does beside scaling and masking.
    """
    queries, (stored, kv_len) = q.shape[2], lengths
    if not queries or not stored:
        batch, heads = q.shape[:2]
        return q.new_zeros(batch, queries, heads, store.layout.head_dim_vo).transpose(1, 2)
    step = store.step  # another step that reads the same store may end meanwhile
    if mask is not None and step is not None:
        step.watch.look(store, mask, stored)
    elif mask is not None or store.is_padded or kv_len > stored:
        check_masks(store, mask, is_causal, stored, kv_len)
    if launch.reads_pages(store, queries):
        return launch.attend(store, q, mask, is_causal, scale, stored, rope, variant)
    k, v = store.dense_for_chunk(stored)
    if mask is not None and mask.shape[-1] > stored:
        mask = mask[..., :stored]
    if variant is not PLAIN:
        return variant.attend(q, k, v, mask, is_causal, scale)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with q [B, H, S, Dk] over dense K and V; see `Variant.attend`."""
    return Variant(softcap, sinks).attend(q, k, v, mask, is_causal, scale)


def _materialize(
    anchor: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the dense tensor of the given sizes that an anchor stands for."""
    key, role, begin = read_anchor(ctypes.c_int64.from_address(anchor.data_ptr()).value)
    source = find(key)
    length = sizes[source.token_dim_of(role)]
    return source.materialize(role, length, "kvcompile.materialize", begin)


# State and anchor lie in main memory, wherever the pages are.
for device_key in ("CPU", "CUDA"):
    library.impl("append", _append, device_key)
    library.impl("append_attend", _append_attend, device_key)
    library.impl("attend", _attend, device_key)
    library.impl("attend_dense", _attend_dense, device_key)
library.impl("linear", linear, "CPU")
library.impl("materialize", _materialize, "CPU")


def materialize(
    anchor: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Read a handle inside a graph that is being traced: one opaque operator."""
    dense: torch.Tensor = MATERIALIZE(anchor, list(sizes), dtype, device)
    return dense
