"""Launching on tensors: kernels where they can be had, else plain torch and one remark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvcompile.codegen.cpu.compile import forget_loaded
from kvcompile.passes.ir.remarks import forget_notices, notices
from kvcompile.runtime import launch
from kvcompile.runtime.variant import Variant
from tests.support.fake_store import Role
from tests.support.numerics import Case, Problem

CASE = Case(group=2, dims=(20, 12))


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test on kernels, and again in plain torch."""
    if request.param == "torch":
        monkeypatch.setenv("KVCOMPILE_CPU_KERNELS", "reference")
    launch.forget_launchers()
    forget_notices()
    yield request.param
    assert [n.code for n in notices()] == (["KVC501"] if request.param == "torch" else [])
    launch.forget_launchers()


def attend(given: Problem) -> torch.Tensor:
    more = (given.scale, given.kv_len, None, Variant(given.softcap, given.sinks))
    out = launch.attend(given.store, given.q, given.mask, given.causal, *more)
    assert out.transpose(1, 2).is_contiguous()
    return out


@pytest.mark.compiler
@pytest.mark.usefixtures("path")
def test_append_attend_and_gather() -> None:
    starts, tokens = (0, 11), 70
    store = CASE.empty_store(tokens + 4, starts)
    k, v = CASE.new_tokens(2, tokens)
    launch.append(store, k[:, :, :50], v[:, :, :50], 0)
    launch.append(store, k[:, :, 50:], None, 50)
    launch.append(store, None, v[:, :, 50:], 50)
    launch.append(store, None, None, 70)
    dense_of: dict[Role, torch.Tensor] = {"k": k, "v": v}
    for role, dense in dense_of.items():
        expected = dense.clone()
        expected[1, :, :11] = 0
        assert torch.equal(launch.gather(store, role, 0, tokens), expected)
        assert torch.equal(launch.gather(store, role, 5, 40), expected[:, :, 5:40])
        assert launch.gather(store, role, 3, 3).shape[2] == 0
    for queries in (1, 5):
        q = CASE.new_queries(2, queries)
        given = Problem(store, q, tokens)
        given.check(attend(given))
        given = Problem(store, q, 40, causal=True)
        given.check(attend(given))


@pytest.mark.compiler
@pytest.mark.usefixtures("path")
def test_each_variant_has_its_kernel() -> None:
    """One store and the same shapes: caps and types of sink logits tell kernels apart."""
    store, q = CASE.filled_store(60), CASE.new_queries(1, 1)
    plain = Problem(store, q, 60)
    sinks = torch.linspace(-1, 2, 8)[::2]
    variants = [
        replace(plain, softcap=1.5),
        replace(plain, softcap=0.5),
        replace(plain, sinks=sinks),
        replace(plain, sinks=sinks.bfloat16()),
        replace(plain, sinks=sinks.half(), softcap=1.5),
    ]
    for given in (plain, *variants, plain):
        given.check(attend(given))
    outs = torch.stack([attend(given) for given in (plain, *variants)])
    assert len(outs.unique(dim=0)) >= 5  # sinks of bf16 may round to those of fp32
    with pytest.raises(ValueError, match=r"\(3,\) sink logits for 4 query heads"):
        attend(replace(plain, sinks=sinks[:3]))


@pytest.mark.compiler
@pytest.mark.usefixtures("path")
def test_masks_of_every_dtype_and_shape() -> None:
    store, q = CASE.filled_store(60, (0, 7)), CASE.new_queries(2, 2)
    masks = [
        torch.rand(60) > 0.3,
        torch.rand(2, 60) > 0.3,
        torch.rand(2, 1, 2, 64) > 0.3,
        torch.rand(1, 4, 1, 60) > 0.3,
        torch.ones(2, 1, 2, 1, dtype=torch.bool),
        torch.randn(2, 60),
        torch.randn(2, 1, 2, 64).bfloat16(),
        torch.randn(2, 1, 2, 60, dtype=torch.float64).float().double(),
        torch.randn(2, 1, 2, 60).half(),
    ]
    for mask in masks:
        given = Problem(store, q, 60, mask)
        given.check(attend(given))


@pytest.mark.compiler
@pytest.mark.usefixtures("path")
def test_inputs_of_any_strides() -> None:
    store, reference = (CASE.empty_store(40) for _ in range(2))
    k, v = CASE.new_tokens(1, 40)
    launch.append(reference, k, v, 0)
    turned = v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    launch.append(store, k.mT.contiguous().mT, turned, 0)
    for role in ("k", "v"):
        assert torch.equal(store.stored(role, 40), reference.stored(role, 40))
    q = CASE.new_queries(1, 3)
    given = Problem(store, q, 40)
    assert torch.equal(attend(given), attend(Problem(store, q.mT.contiguous().mT, 40)))


@pytest.mark.compiler
def test_senseless_calls_are_refused() -> None:
    store = CASE.filled_store(40)
    k, v = CASE.new_tokens(1, 40)
    q = CASE.new_queries(1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        launch.append(store, k[:, :1], v, 0)
    with pytest.raises(ValueError, match="do not go with the keys"):
        launch.append(store, k, v[:, :, 1:], 0)
    with pytest.raises(ValueError, match="do not share 2 KV heads"):
        launch.attend(store, q[:, :3], None, False, 1.0, 40)
    with pytest.raises(ValueError, match="do not fit"):
        launch.attend(store, CASE.new_queries(1, 17), None, False, 1.0, 40)
    with pytest.raises(ValueError, match="does not broadcast"):
        launch.attend(store, q, torch.ones(1, 1, 2, 39, dtype=torch.bool), False, 1.0, 40)
    with pytest.raises(ValueError, match="does not broadcast"):
        launch.attend(store, q, torch.ones(1, 1, 3, 40, dtype=torch.bool), False, 1.0, 40)
    with pytest.raises(ValueError, match="either causal or has a mask"):
        launch.attend(store, q, torch.ones(1, 1, 2, 40, dtype=torch.bool), True, 1.0, 40)


@pytest.mark.parametrize(
    ("variable", "value"), [("CXX", "no-such-compiler"), ("KVCOMPILE_ISA", "sse9")]
)
def test_without_a_kernel_one_remark_and_the_same_numbers(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    forget_loaded()
    launch.forget_launchers()
    forget_notices()
    store = CASE.empty_store(40)
    k, v = CASE.new_tokens(1, 40)
    launch.append(store, k, v, 0)
    assert torch.equal(launch.gather(store, "k", 0, 40), k)
    given = Problem(store, CASE.new_queries(1, 1), 40)
    given.check(attend(given))
    (remark,) = notices()
    assert remark.code == "KVC501"
    assert value in remark.reason
    assert not launch.prepare(CASE.spec("portable", "append")) or variable == "KVCOMPILE_ISA"
    launch.forget_launchers()


def test_float64_runs_in_plain_torch() -> None:
    launch.forget_launchers()
    forget_notices()
    store = CASE.filled_store(40)
    q = CASE.new_queries(1, 1).double()
    out = launch.attend(store, q, None, False, 0.2, 40)
    assert out.dtype is torch.float64
    assert [n.code for n in notices()] == ["KVC501"]
    launch.forget_launchers()
