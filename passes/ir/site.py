"""One attention of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import fx

MaskKind = Literal["none", "causal", "bool", "additive"]


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to scores beside the mask, or hides some of them.

    Attributes:
        node: Broadcasts to `[B, H, S, T]`, or to `[B * H, S, T]`.
        factor: What it is multiplied by.
        joined: Whether batch and heads are one dimension.
        hides: If it is a boolean mask beside an additive one: whether True hides, or shows.
    """

    node: fx.Node
    factor: float = 1.0
    joined: bool = False
    hides: bool | None = None


@dataclass(frozen=True, eq=False)
class Factor:
    """A tensor that scores are multiplied with, or divided by: the same for all keys.

    Attributes:
        node: Broadcasts to `[B, H, S, 1]`.
        divides: Whether scores are divided by it.
    """

    node: fx.Node
    divides: bool


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """`out = softmax(cap(scale * q kᵀ) + mask) v`, found in a graph.

    Letters: B batch, S query tokens, T key tokens, H query heads, K KV heads, D head dims.

    Attributes:
        index: Position among the graph's sites, in graph order.
        name: Module path, `model.layers.3.self_attn`, or `attention_3` where there is none.
        where: The user's source line, `modeling_llama.py:212`.
        pattern: The spelling that matched.
        out: The node that holds the result `[B, H, S, Dv]`.
        q: `[B, H, S, Dk]`.
        k: `[B, K, T, Dk]`, before its heads are repeated.
        v: `[B, K, T, Dv]`, before its heads are repeated.
        mask: The mask operand as the graph has it, or None.
        mask_kind: `bool`: True is visible, or hidden (below); `additive`: added to the scores.
        mask_hides: True if a True entry of a boolean mask hides the key (`masked_fill`).
        scale: Factor of the scores.
        softcap: The scaled scores become softcap * tanh(score / softcap), if it is given.
        sinks: `[H]`, a logit per query head that joins the softmax, or None.
        biases: What is added beside the mask.
        factors: Tensors that the scores are scaled by, before the cap.
    """

    index: int
    name: str
    where: str
    pattern: Literal["sdpa", "softmax"]
    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    mask_kind: MaskKind
    mask_hides: bool
    scale: float
    softcap: float | None = None
    sinks: fx.Node | None = None
    biases: tuple[Bias, ...] = ()
    factors: tuple[Factor, ...] = ()

    @property
    def beside(self) -> tuple[fx.Node, ...]:
        """The operands beside keys and values, which a rewritten attention has too."""
        others = (*(bias.node for bias in self.biases), *(f.node for f in self.factors))
        return tuple(n for n in (self.q, self.mask, self.sinks, *others) if n is not None)

    @property
    def num_q_heads(self) -> int:
        """Number of query heads H."""
        return int(self.q.meta["val"].shape[1])

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads K."""
        return int(self.k.meta["val"].shape[1])

    @property
    def head_dim_qk(self) -> int:
        """Dimension of a query and of a key."""
        return int(self.k.meta["val"].shape[3])

    @property
    def head_dim_vo(self) -> int:
        """Dimension of a value and of an output."""
        return int(self.v.meta["val"].shape[3])
