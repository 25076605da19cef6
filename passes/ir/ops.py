"""The operators of rewritten graphs: schemas and what they do to shapes.

The runtime implements them; passes insert them and inner compilers trace them. Letters: B batch,
S query tokens, T cached tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Defined by hand: `torch.library.custom_op` costs 14 us per call, this 1.5 us. PyTorch's functions
# for it carry no annotations.
library = torch.library.Library("kvcompile", "DEF")
# Whatever strides Inductor likes best. Held to those of the eager program, as it is by default, it
# computes mask and angles once more for each layer.
_ANY_STRIDES = (torch.Tag.flexible_layout,)
library.define(
    "append(Tensor k, Tensor v, Tensor(a!) state, SymInt past_len, Tensor? position, Tensor? mask)"
    " -> ()",
    tags=_ANY_STRIDES,
)
# One operator for both: a dispatch costs about as much time as writing a token.
library.define(
    "append_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) state, SymInt past_len,"
    " Tensor? position, Tensor? mask, bool is_causal, float scale, SymInt kv_len,"
    " Tensor? cos=None, Tensor? sin=None, bool rope_interleaved=False, *, float? softcap=None,"
    " Tensor? sinks=None) -> Tensor",
    tags=_ANY_STRIDES,
)
# What is only read may be read by several steps at once: no state that a compiler would clone.
library.define(
    "attend(Tensor q, Tensor state, Tensor? mask, bool is_causal, float scale, SymInt kv_len,"
    " int head_dim_vo, *, float? softcap=None, Tensor? sinks=None) -> Tensor",
    tags=_ANY_STRIDES,
)
# Over the new tokens alone, where scaled_dot_product_attention does not know what a model does.
library.define(
    "attend_dense(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, *,"
    " float? softcap=None, Tensor? sinks=None) -> Tensor",
    tags=_ANY_STRIDES,
)
library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.define(
    "materialize(Tensor anchor, SymInt[] sizes, ScalarType dtype, Device device) -> Tensor"
)

APPEND = torch.ops.kvcompile.append.default
APPEND_ATTEND = torch.ops.kvcompile.append_attend.default
ATTEND = torch.ops.kvcompile.attend.default
ATTEND_DENSE = torch.ops.kvcompile.attend_dense.default
LINEAR = torch.ops.kvcompile.linear.default
MATERIALIZE = torch.ops.kvcompile.materialize.default


@torch.library.register_fake("kvcompile::append", lib=library)  # type: ignore[untyped-decorator]
def _append_fake(
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    past_len: int,
    position: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    return None


@torch.library.register_fake("kvcompile::append_attend", lib=library)  # type: ignore[untyped-decorator]
def _append_attend_fake(  # noqa: PLR0913 - the schema
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
    return _result(q, v.shape[3])


@torch.library.register_fake("kvcompile::attend", lib=library)  # type: ignore[untyped-decorator]
def _attend_fake(  # noqa: PLR0913 - the schema
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
    return _result(q, head_dim_vo)


@torch.library.register_fake("kvcompile::attend_dense", lib=library)  # type: ignore[untyped-decorator]
def _attend_dense_fake(
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
    return _result(q, v.shape[3])


def _result(q: torch.Tensor, head_dim_vo: int) -> torch.Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, head_dim_vo).transpose(1, 2)


@torch.library.register_fake("kvcompile::linear", lib=library)  # type: ignore[untyped-decorator]
def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("kvcompile::materialize", lib=library)  # type: ignore[untyped-decorator]
def _materialize_fake(
    anchor: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return anchor.new_empty(sizes, dtype=dtype, device=device)
