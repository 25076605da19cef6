"""Specs: everything that specialises a kernel, and the one string that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kvcompile.codegen.formats import Order, get_format
from kvcompile.codegen.rotary import Rotary

Op = Literal["append", "attend", "attend_latent", "gather"]
Target = Literal["cpu", "gpu"]
IsaName = Literal["avx512", "avx2", "portable", "ptx", "triton"]
DTypeName = Literal["fp32", "bf16", "fp16"]
MaskKind = Literal["none", "causal", "bool", "additive"]
Queries = Literal["one", "few", "many"]
Compute = Literal["fp32", "int8", "fp16"]

DEFAULT_CHUNK = 256
MOST_QUERIES = 16


class Spec(Protocol):
    """What every spec says."""

    @property
    def op(self) -> str:
        """What the kernel does."""
        ...

    @property
    def target(self) -> Target:
        """Which printer prints it."""
        ...

    @property
    def isa(self) -> IsaName:
        """Instructions it may use beyond those of its language."""
        ...

    @property
    def dtype(self) -> DTypeName:
        """Type of what it reads and writes."""
        ...

    @property
    def compute(self) -> Compute | None:
        """How it multiplies quantized numbers, if it does."""
        ...

    @property
    def symbol(self) -> str:
        """Name of the function, file, cache directory and test; no two specs share one."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A kernel that multiplies a few rows with weights as they lie: y = x W^T + bias.

    Attributes:
        isa: Vector instructions it may use.
        dtype: Type of x, W, bias and y; sums are fp32.
    """

    isa: IsaName
    dtype: DTypeName
    op: Literal["linear"] = "linear"
    target: Target = "cpu"
    compute: None = None

    @property
    def symbol(self) -> str:
        """Name of the function, file, cache directory and test."""
        return f"linear_{self.isa}_{self.dtype}"

    def __str__(self) -> str:
        return self.symbol


@dataclass(frozen=True, kw_only=True)
class MergeSpec:
    """A GPU kernel that joins the partial outputs of attend.

    Attributes:
        dtype: Type of the output.
        head_dim_vo: Channels of the output.
        q_heads_per_kv_head: Query heads that share a KV head.
        most_splits: The most partial outputs of a row, a power of two.
        sink_dtype: Type of the logits that join, one per query head, as in `KernelSpec`.
    """

    dtype: DTypeName
    head_dim_vo: int
    q_heads_per_kv_head: int
    most_splits: int
    sink_dtype: DTypeName | None = None
    op: Literal["merge_splits"] = "merge_splits"
    target: Target = "gpu"
    isa: IsaName = "triton"
    compute: None = None

    def __post_init__(self) -> None:
        """Check the splits.

        Raises:
            ValueError: They are no power of two.
        """
        if self.most_splits < 1 or self.most_splits & self.most_splits - 1:
            raise ValueError(f"most_splits must be a power of two, not {self.most_splits}")

    @property
    def symbol(self) -> str:
        """Name of the function, file, cache directory and test."""
        dims = f"d{self.head_dim_vo}_g{self.q_heads_per_kv_head}_n{self.most_splits}"
        dims += f"_{sink_symbol(self.sink_dtype, self.dtype)}" if self.sink_dtype else ""
        return f"{self.op}_{self.isa}_{self.dtype}_{dims}"

    def __str__(self) -> str:
        return self.symbol


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One specialised kernel over a page store.

    Attributes:
        op: What the kernel does. "attend_latent" attends over latents (multi-head latent attention,
            https://arxiv.org/abs/2405.04434): what is stored as K is the latent of a token, which
            all heads share and which is its value too, and what is stored as V is the part of its
            key that rotates. Its `q_heads_per_kv_head` are all heads.
        target: Which printer prints it.
        isa: Instructions it may use beyond those of its language: on a CPU those of its vectors, on
            a GPU inline PTX or none.
        dtype: Type of the query, of new K and V and of the output.
        k_format: Name of the format K is stored in.
        v_format: Name of the format V is stored in.
        head_dim_qk: Channels of a query and of a key.
        head_dim_vo: Channels of a value and of the output.
        page_size: Tokens in a page.
        layout: Order of the numbers inside a record.
        q_heads_per_kv_head: Query heads that share a KV head (attend only).
        mask: Kind of mask (attend only).
        mask_dtype: Type of an additive mask: `dtype` or "fp32" (additive masks only).
        queries: "one" query token, a "few": 1 to 16, decided at run time, or "many": any number,
            such as those of a chunk of a prompt (attend only).
        chunk: Stored tokens per partial result, a multiple of `page_size` (attend only).
        q_group_size: Channels of V that share a scale (quantized formats only).
        num_sink_tokens: First tokens of a row, which lie in exact pages (quantized formats only).
        compute: How attend multiplies quantized K and V: "fp32" decodes them in registers, "int8"
            rounds the query to int8 and the weights to 16 bits and multiplies integers, "fp16"
            multiplies codes with the scaled query and weights, rounded to fp16.
        softcap: Bound of the scores, cap * tanh(score / cap), positive (attend only; Gemma 2,
            https://arxiv.org/abs/2408.00118).
        sink_dtype: Type of a logit per query head that joins the softmax and is dropped behind it:
            `dtype` or "fp32" (attend only; gpt-oss, https://arxiv.org/abs/2508.10925). The logits
            are an argument.
        sliding_window: Most recent tokens that a query sees, itself included (attend only).
        slides: Whether rows may have stored tokens before column 0, which no query sees: their
            `starts` are below 0 then (attend only; sliding windows that leave tokens behind).
        rotary: How K rotates, if its turning mean is kept beside its codes.
        rope: How q and new K turn on their way in, if they come unrotated (append and attend only;
            RoFormer, https://arxiv.org/abs/2104.09864). Cosines and sines are arguments.
    """

    op: Op
    target: Target = "cpu"
    isa: IsaName
    dtype: DTypeName
    k_format: str
    v_format: str
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    layout: Order = "cpu16"
    q_heads_per_kv_head: int | None = None
    mask: MaskKind | None = None
    mask_dtype: DTypeName | None = None
    queries: Queries | None = None
    chunk: int | None = None
    q_group_size: int | None = None
    num_sink_tokens: int | None = None
    compute: Compute | None = None
    softcap: float | None = None
    sink_dtype: DTypeName | None = None
    sliding_window: int | None = None
    slides: bool = False
    rotary: Rotary | None = None
    rope: Rotary | None = None

    def __post_init__(self) -> None:
        """Reject fields that contradict each other.

        Raises:
            ValueError: A field of attend is missing, or is set for another op.
        """
        fields = ("q_heads_per_kv_head", "mask", "queries", "chunk")
        if self.is_attention:
            if self.chunk is None:
                object.__setattr__(self, "chunk", max(DEFAULT_CHUNK, self.page_size))
            missing = [name for name in fields if getattr(self, name) is None]
            if missing:
                raise ValueError(f"an attend spec needs {', '.join(missing)}")
        else:
            extra = [
                name
                for name in (*fields, "softcap", "sink_dtype", "sliding_window", "slides")
                if getattr(self, name) not in (None, False)
            ]
            if extra:
                raise ValueError(f"{', '.join(extra)} mean nothing to {self.op}")
        grouped = (self.q_group_size is not None, self.num_sink_tokens is not None)
        if any(grouped) != self.is_grouped or not (all(grouped) or not any(grouped)):
            raise ValueError("q_group_size and num_sink_tokens go with quantized formats")
        if (self.compute is not None) != (self.is_grouped and self.is_attention):
            raise ValueError("compute goes with attend over quantized formats, and only with it")
        if (self.target == "gpu") != (self.layout == "gpu16"):
            raise ValueError(f"target {self.target} does not go with layout {self.layout}")
        if (self.target == "gpu") != (self.isa in ("ptx", "triton")):
            raise ValueError(f"target {self.target} does not go with isa {self.isa}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, not {self.softcap}")
        if self.rotary is not None and not get_format(self.k_format).is_grouped:
            raise ValueError("rotary goes with quantized keys, and only with them")
        if self.rope is not None:
            if self.op not in ("append", "attend"):
                raise ValueError(f"rope means nothing to {self.op}")
            if self.rope.dim > self.head_dim_qk:
                raise ValueError(f"{self.rope.dim} of {self.head_dim_qk} channels cannot turn")
        if (self.mask == "additive") != (self.mask_dtype is not None):
            raise ValueError("mask_dtype goes with an additive mask, and only with it")

    @property
    def is_attention(self) -> bool:
        """Whether it attends."""
        return self.op in ("attend", "attend_latent")

    @property
    def is_grouped(self) -> bool:
        """Whether K or V is stored in pages that are quantized as a whole."""
        return get_format(self.k_format).is_grouped or get_format(self.v_format).is_grouped

    @property
    def symbol(self) -> str:
        """Name of the function, file, cache directory and test; no two specs share one."""
        dims = f"d{self.head_dim_qk}"
        if self.head_dim_vo != self.head_dim_qk:
            dims += f"v{self.head_dim_vo}"
        parts = [self.op, self.isa, self.dtype, f"k{self.k_format}", f"v{self.v_format}", dims]
        if self.is_attention:
            assert self.mask is not None
            mask: str = self.mask
            if self.mask_dtype not in (None, self.dtype):
                mask += f"_m{self.mask_dtype}"
            queries = {"one": "q1", "few": f"q{MOST_QUERIES}", None: "", "many": "qn"}[self.queries]
            parts += [f"g{self.q_heads_per_kv_head}", f"p{self.page_size}", mask, queries]
            if self.chunk != max(DEFAULT_CHUNK, self.page_size):
                parts.append(f"t{self.chunk}")
        else:
            parts.append(f"p{self.page_size}")
        if self.is_grouped:
            parts.append(f"c{self.q_group_size}_s{self.num_sink_tokens}")
            parts += [self.rotary.symbol] if self.rotary else []
            parts += [f"x{self.compute}"] if self.compute else []
        if self.softcap is not None:
            cap = repr(float(self.softcap)).removesuffix(".0")
            parts.append("cap" + cap.replace(".", "_").replace("-", "m").replace("+", ""))
        parts += [sink_symbol(self.sink_dtype, self.dtype)] if self.sink_dtype else []
        parts += [f"w{self.sliding_window}"] if self.sliding_window is not None else []
        parts += ["slides"] if self.slides else []
        parts += [f"rope{self.rope.size}"] if self.rope else []
        return "_".join(parts)

    def __str__(self) -> str:
        return self.symbol


def sink_symbol(sink_dtype: DTypeName, dtype: DTypeName) -> str:
    """Return the part of a symbol that says that logits join, and of which type they are."""
    return "sink" if sink_dtype == dtype else f"sink{sink_dtype}"
