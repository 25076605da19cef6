"""Kernels that turn q and new K on their way in, against rotation before the call: bit by bit.

The reference turns in fp32, pair by pair, and rounds to the model's dtype once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kvcompile.codegen.cpu.isa import available_isas
from kvcompile.codegen.formats import Order
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import DTypeName
from kvcompile.passes.ir.remarks import forget_notices, notices
from kvcompile.runtime import launch
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.rope import Rope, rotate
from kvcompile.runtime.store import PagedStore
from tests.support.numerics import DTYPES

pytestmark = pytest.mark.compiler

HEADS, GROUP, BATCH = 2, 3, 2
GPU = "gpu"
TARGETS = [*available_isas(), "torch"]
if importlib.util.find_spec("triton"):
    from tests.support import triton_interpreter  # noqa: F401 -- repairs it first

    TARGETS.append(GPU)


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test on the kernels of each instruction set, in plain torch, and on GPU kernels."""
    name: str = request.param
    if name == "torch":
        monkeypatch.setenv("KVCOMPILE_CPU_KERNELS", "reference")
    elif name != GPU:
        monkeypatch.setenv("KVCOMPILE_ISA", name)
    launch.forget_launchers()
    forget_notices()
    yield name
    assert [n.code for n in notices()] == (["KVC501"] if name == "torch" else [])
    launch.forget_launchers()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A store, and how its keys turn."""

    k: str
    v: str
    dtype: DTypeName
    dims: tuple[int, int]
    rotary: Rotary

    def __str__(self) -> str:
        k_dim, v_dim = self.dims
        return f"{self.dtype}_k{self.k}_v{self.v}_d{k_dim}v{v_dim}_{self.rotary.symbol}"

    def store(self, target: str) -> PagedStore:
        """Return an empty store."""
        order: Order = "gpu16" if target == GPU else "cpu16"
        dtype = DTYPES[self.dtype]
        if self.k in DTYPES and self.v in DTYPES:
            layout = RecordLayout(self.k, self.v, *self.dims, 16, order=order)
            arena = Arena(layout.page_bytes(HEADS))
            return PagedStore(layout, HEADS, dtype, "cpu", arena, batch=BATCH)
        window = Window(self.dtype, 4, 16)
        layout = RecordLayout(self.k, self.v, *self.dims, 64, window=window, order=order)
        arenas = Arena(layout.page_bytes(HEADS)), Arena(layout.exact.page_bytes(HEADS))
        store = QuantizedStore(layout, HEADS, dtype, "cpu", arenas, batch=BATCH)
        store.compute = "fp16" if target == GPU and self.dtype != "fp32" else "fp32"
        return store


CASES = [
    Case(k="bf16", v="bf16", dtype="bf16", dims=(64, 64), rotary=Rotary(64)),
    Case(k="bf16", v="bf16", dtype="bf16", dims=(40, 24), rotary=Rotary(16, interleaved=True)),
    Case(k="fp32", v="fp32", dtype="fp32", dims=(48, 48), rotary=Rotary(36)),
    Case(k="fp32", v="fp32", dtype="fp32", dims=(32, 32), rotary=Rotary(32, interleaved=True)),
    Case(k="fp16", v="fp16", dtype="fp16", dims=(80, 80), rotary=Rotary(20)),
    Case(k="int8", v="int8", dtype="fp32", dims=(32, 32), rotary=Rotary(32)),
    Case(k="int4", v="bf16", dtype="bf16", dims=(64, 32), rotary=Rotary(24, interleaved=True)),
    Case(k="bf16", v="int4", dtype="bf16", dims=(96, 64), rotary=Rotary(48)),
]
OF_TARGET = {
    # In Triton's interpreter a case takes seconds: one of each kind of record.
    GPU: [CASES[0], *CASES[5:]],
    # Loops in the place of vectors: each type, order of channels and kind of record.
    "portable": [CASES[1], *CASES[4:]],
}


def turned(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return q or K with the pairs of its channels turned in fp32 and rounded once."""
    first, second = rope.rotary.channels(torch.arange(rope.rotary.pairs))
    a, b = x[..., first].float(), x[..., second].float()
    cos, sin = rope.cos.float(), rope.sin.float()
    out = x.clone()
    out[..., first] = (a * cos[..., first] - b * sin[..., first]).to(x.dtype)
    out[..., second] = (b * cos[..., second] + a * sin[..., second]).to(x.dtype)
    return out


def angles(case: Case, first: int, tokens: int, *, shared: bool) -> Rope:
    """Return cosines and sines, all unrelated: nothing is assumed about their halves."""
    rows, dtype = 1 if shared else BATCH, DTYPES[case.dtype]
    random = torch.Generator().manual_seed(first)
    sizes = (rows, tokens, 1, case.rotary.dim)
    cos, sin = (torch.randn(sizes, generator=random).to(dtype).transpose(1, 2) for _ in "cs")
    return Rope(cos, sin, case.rotary.interleaved)


def tokens_of(case: Case, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Return q or K or V [B, H, S, D], a strided view as a projection leaves it."""
    x = torch.randn(BATCH, tokens, heads, dim + 2).to(DTYPES[case.dtype])
    return x[..., 1:-1].transpose(1, 2)


@pytest.mark.parametrize(
    ("target", "case"),
    [(t, case) for t in TARGETS for case in OF_TARGET.get(t, CASES)],
    ids=str,
    indirect=["target"],
)
def test_what_turns_inside_is_what_turned_before(case: Case, target: str) -> None:
    inside, before = case.store(target), case.store(target)
    for store in (inside, before):
        store.set_starts([0, 5])
    past_len = 0
    # Past residual length and page size, so that pages are quantized from the ring and from new K.
    for step, tokens in enumerate([1, 9, 80, 3, 1]):
        rope = angles(case, past_len, tokens, shared=step % 2 == 0)
        k, v = (tokens_of(case, HEADS, tokens, dim) for dim in case.dims)
        inside.append(k, v, past_len, rope=rope)
        before.append(turned(k, rope), v, past_len)
        past_len += tokens
        for role in ("k", "v"):
            mine, its = (launch.gather(store, role, 0, past_len) for store in (inside, before))
            assert torch.equal(mine, its)
        if tokens <= 16:
            q = tokens_of(case, GROUP * HEADS, tokens, case.dims[0])
            mine = launch.attend(inside, q, None, False, 0.3, past_len, rope)
            its = launch.attend(before, turned(q, rope), None, False, 0.3, past_len)
            assert torch.equal(mine, its)
        for store in (inside, before):
            store.commit(past_len)
    unturned = launch.attend(before, q, None, False, 0.3, past_len)
    assert not torch.equal(mine, unturned)
    if isinstance(inside, QuantizedStore):
        assert inside.quantized.min() > 0, "nothing was quantized"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotation_in_torch_is_the_same(case: Case) -> None:
    rope = angles(case, 0, 7, shared=False)
    x = tokens_of(case, HEADS, 7, case.dims[0])
    assert torch.equal(rotate(x, rope), turned(x, rope))


def test_angles_of_other_tokens_are_refused() -> None:
    case = CASES[0]
    store = case.store("cpu")
    k, v = (tokens_of(case, HEADS, 3, dim) for dim in case.dims)
    rope = angles(case, 0, 3, shared=False)
    for cos, sin in (
        (rope.cos, rope.sin[:1]),
        (rope.cos, rope.sin.float()),
        (rope.cos.expand(BATCH, HEADS, 3, -1), rope.sin.expand(BATCH, HEADS, 3, -1)),
    ):
        with pytest.raises(ValueError, match="do not go with"):
            Rope(cos, sin, interleaved=False)
    for x in (rope.cos[:, :, :2], rope.cos.float(), rope.cos.repeat(1, 1, 1, 2)):
        with pytest.raises(ValueError, match="are not those of"):
            launch.append(store, k, v, 0, Rope(x, x, interleaved=False))
