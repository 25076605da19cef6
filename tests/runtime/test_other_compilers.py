"""Handles under Dynamo: no recompilation, and right numbers in graphs that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kvcompile.runtime.claim import claim
from kvcompile.runtime.handle import KVTensor
from tests.support.stores import PAGE, Filled, filled_store, new_tokens, push

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BACKENDS = ("eager", "aot_eager", "inductor")


def grow(case: Filled, tokens: int = 1) -> tuple[KVTensor, KVTensor]:
    store = claim(case.k, case.v)
    k, v = new_tokens(store.batch, tokens)
    push(store, k, v)
    case.k, case.v = KVTensor.of(store, "k"), KVTensor.of(store, "v")
    case.dense_k = torch.cat([case.dense_k, k], 2)
    case.dense_v = torch.cat([case.dense_v, v], 2)
    return case.k, case.v


def scores(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(dim=-1) @ v


@torch.no_grad()
def test_one_compilation_for_every_length_store_and_origin() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(scores, backend=counter)
    rows = torch.tensor([1, 1])
    for prompt in (19, 41):
        case = filled_store(prompt)
        q = torch.randn(2, 2, 1, 8)
        for _ in range(PAGE + 1):
            out = compiled(*grow(case), q)
            torch.testing.assert_close(out, scores(case.dense_k, case.dense_v, q))
        # Handles that crop, reorder, copy and torch.narrow make are handles like any other.
        makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda h: h[..., :-3, :],
            lambda h: h[:, :, :9],
            lambda h: h[..., :-3, :][..., :-3, :],
            lambda h: h.narrow(2, 0, 10),
            lambda h: torch.narrow(h, 2, 0, 11),
            lambda h: torch.split(h, 7, dim=2)[0],
            lambda h: h.index_select(0, rows),
            lambda h: h[rows, ...],
            lambda h: h.detach(),
            lambda h: h.clone(),
        ]
        for make in makers:
            out = compiled(make(case.k), make(case.v), q)
            torch.testing.assert_close(out, scores(make(case.dense_k), make(case.dense_v), q))
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_cropped_handle_is_not_a_view_and_goes_on_growing() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(scores, backend=counter)
    case = filled_store(30)
    q = torch.randn(2, 2, 1, 8)
    for _ in range(4):
        compiled(*grow(case, 5), q)
        case.k, case.v = case.k[..., :-2, :], case.v[..., :-2, :]
        case.dense_k, case.dense_v = case.dense_k[..., :-2, :], case.dense_v[..., :-2, :]
        assert not case.k._is_view()
        out = compiled(case.k, case.v, q)
        torch.testing.assert_close(out, scores(case.dense_k, case.dense_v, q))
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_static_handle_compiles_once() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(scores, backend=counter)
    for prompt in (3, 20):
        case = filled_store(prompt, capacity=40)
        for _ in range(3):
            push(claim(case.k, case.v), *new_tokens(2, 1))
            compiled(case.k, case.v, torch.randn(2, 2, 1, 8))
    assert counter.frame_count == 1


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda k, v: k * 2 + 1,
    "attention": lambda k, v: scores(k, v, k[:, :, -1:]),
    "reads twice": lambda k, v: (k.sum(), k.transpose(1, 2)[:, -1], v.shape[2]),
    "grows": lambda k, v: torch.cat([k, k[:, :, -1:]], dim=-2),
    "crops": lambda k, v: k[:, :, :7] + 1,
    "crops and returns": lambda k, v: k[:, :, :7],
    "selects rows": lambda k, v: v.index_select(0, torch.tensor([1, 0])),
    "passes through": lambda k, v: (k, v + 0),
    "split, narrow and chunk": lambda k, v: (
        k.split(4, dim=2)[1] + 0,
        v.narrow(2, 0, 3) * 1,
        k.chunk(2, dim=1)[1].clone(),
        k.repeat_interleave(2, dim=0) * 1,
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_graphs_of_other_compilers_read_right_numbers(backend: str, name: str) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    case = filled_store(19)
    for _ in range(2):
        grow(case)
        out, expected = compiled(case.k, case.v), function(case.dense_k, case.dense_v)
        out = torch.utils._pytree.tree_leaves(out)
        for a, b in zip(out, torch.utils._pytree.tree_leaves(expected), strict=True):
            torch.testing.assert_close(a + 0, b + 0)
    static = filled_store(5, capacity=32)
    expected = torch.utils._pytree.tree_leaves(function(static.dense_k, static.dense_v))
    out = torch.utils._pytree.tree_leaves(compiled(static.k, static.v))
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a + 0, b + 0)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_written_handle_is_read_from_what_was_written(backend: str) -> None:
    case = filled_store(19)
    case.k.fill_(2.5)
    crop = case.v[:, :, :10]
    crop[:, :, 3] = 1.0
    case.dense_k.fill_(2.5)
    case.dense_v[:, :, 3] = 1.0
    out = torch.compile(lambda k, v: (k * 2, v + 1), backend=backend)(case.k, case.v)
    torch.testing.assert_close(out[0], case.dense_k * 2)
    torch.testing.assert_close(out[1], case.dense_v + 1)


@torch.no_grad()
def test_dynamo_runs_writes_on_the_handle_itself() -> None:
    case = filled_store(5, capacity=32)

    def write(k: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        k.index_copy_(2, torch.tensor([5]), new)
        return k.sum()

    new = torch.randn(2, 2, 1, 8)
    out = torch.compile(write, backend="eager")(case.k, new)
    case.dense_k[:, :, 5:6] = new
    torch.testing.assert_close(out, case.dense_k.sum())
    assert torch.equal(case.k, case.dense_k)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_a_write_that_would_be_lost_is_a_named_error(backend: str) -> None:
    case = filled_store(5)
    compiled = torch.compile(lambda k: k.mul_(2), backend=backend)
    with pytest.raises(Exception, match=r"HandleWriteError.*|write would be lost"):
        compiled(case.k)


@torch.no_grad()
def test_passing_through_gives_the_same_store_back() -> None:
    case = filled_store(19)
    out, _ = torch.compile(lambda k, v: (k, v + 1), backend="aot_eager")(case.k, case.v)
    assert isinstance(out, KVTensor)
    assert out.store is case.store
