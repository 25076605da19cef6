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
library.define(
    "append(Tensor k, Tensor v, Tensor(a!) state, SymInt past_len, Tensor? position, Tensor? mask,"
    " bool attends=False) -> ()"
)
library.define(
    "attend(Tensor q, Tensor state, SymInt past_len, Tensor? position, Tensor? mask,"
    " bool is_causal, float scale, SymInt kv_len, SymInt? head_dim_vo=None) -> Tensor"
)
library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
library.define("materialize(Tensor anchor, SymInt[] sizes, ScalarType dtype) -> Tensor")

APPEND = torch.ops.kvcompile.append.default
ATTEND = torch.ops.kvcompile.attend.default
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
    attends: bool = False,
) -> None:
    return None


@torch.library.register_fake("kvcompile::attend", lib=library)  # type: ignore[untyped-decorator]
def _attend_fake(  # noqa: PLR0913 - the schema
    q: torch.Tensor,
    state: torch.Tensor,
    past_len: int,
    position: torch.Tensor | None,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    kv_len: int,
    head_dim_vo: int | None = None,
) -> torch.Tensor:
    batch, heads, queries, head_dim_qk = q.shape
    dim = head_dim_qk if head_dim_vo is None else head_dim_vo
    return q.new_empty(batch, queries, heads, dim).transpose(1, 2)


@torch.library.register_fake("kvcompile::linear", lib=library)  # type: ignore[untyped-decorator]
def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.register_fake("kvcompile::materialize", lib=library)  # type: ignore[untyped-decorator]
def _materialize_fake(
    anchor: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return anchor.new_empty(sizes, dtype=dtype)
