"""What goes wrong from outside: the right result or an error with a name, and the cache usable."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.passes.pipeline import PIPELINE
from kvcompile.runtime import launch
from kvcompile.runtime.handle import KVTensor
from tests.support.attentions import Pair, Sdpa
from tests.support.compiled import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODEL = Sdpa().eval()
HEADS, KV_HEADS, DIM = 4, 2, 16
PAGE, SINKS = 64, 4


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    forget_notices()
    with torch.no_grad():
        yield


def said() -> list[str]:
    return [remark.code for remark in kvcompile.notices()]


def qkv(
    tokens: int, *, batch: int = 2, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (HEADS, kv_heads, kv_heads)
    q, k, v = (torch.randn(batch, h, tokens, DIM).to(dtype) for h in heads)
    return q, k, v


def same_step(run: Any, past: Pair, dense: Pair, tokens: int = 1) -> tuple[Pair, Pair]:
    """Take a step with both; assert that the results are equal; return both pasts."""
    new = qkv(tokens, batch=dense[0].shape[0])
    out, *paged = run(*new, past)
    want, *plain = MODEL(*new, dense)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, equal_nan=True)
    k, v = paged
    assert isinstance(k, KVTensor)
    assert isinstance(v, KVTensor)
    return (k, v), (plain[0], plain[1])


def begun(run: Any, new: Any) -> tuple[Pair, Pair]:
    """Return the paged and the dense past of a prefill."""
    _, *paged = run(*new)
    _, *dense = MODEL(*new)
    return (paged[0], paged[1]), (dense[0], dense[1])


def test_a_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Any) -> Any:
        raise KernelCompilationError("nonsense at line 7")

    monkeypatch.setattr(launch, "load", fail)
    launch.forget_launchers()
    try:
        run = compiled(MODEL)
        past, dense = same_step(run, *begun(run, qkv(40)))
    finally:
        launch.forget_launchers()
    (remark,) = [remark for remark in kvcompile.notices() if remark.code == "KVC501"]
    assert "nonsense at line 7" in remark.reason
    assert kvcompile.memory_report(past).materializations == {}
    monkeypatch.undo()
    same_step(run, past, dense)  # the kernels, once they can be had


def test_a_pass_that_leaves_a_wrong_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(PIPELINE[-1]), "run", lambda *args: None)
    run, new = compiled(MODEL), qkv(40)
    out, k, _ = run(*new)
    torch.testing.assert_close(out, MODEL(*new)[0])
    assert not isinstance(k, KVTensor)
    assert "KVC002" in said()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_exact_cache_treats_nan_and_inf_as_the_model_does(bad: float) -> None:
    run = compiled(MODEL)
    q, k, v = qkv(40, batch=3)
    k[0, 1, 7, 3] = bad
    v[1, 0, 39, 2] = bad
    past, dense = begun(run, (q, k, v))
    past, dense = same_step(run, past, dense)
    for handle, tensor in zip(past, dense, strict=True):
        assert isinstance(handle, KVTensor)
        assert torch.equal(handle.materialize().nan_to_num(7), tensor.nan_to_num(7))
    same_step(run, past, dense)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("kv_cache_dtype", ["int4", "fp8"])
def test_nan_and_inf_stay_in_their_page_of_a_quantized_cache(
    kv_cache_dtype: str, bad: float
) -> None:
    run = compiled(MODEL, kv_cache_dtype=kv_cache_dtype)
    clean = qkv(300, batch=2)
    q, k, v = (x.clone() for x in clean)
    k[0, 1, SINKS + PAGE + 7, 3] = bad
    v[0, 1, SINKS + PAGE + 7, 2] = bad
    steps = [qkv(1) for _ in range(2)]
    outs, dense, pasts = [], [], []
    for new in (clean, (q, k, v)):
        _, *past = run(*new)
        for step in steps:
            out, *past = run(*step, tuple(past))
        outs.append(out)
        dense.append([handle.materialize() for handle in past])
        pasts.append(past)
    # The other row, and in its own row the query heads of the other KV head, see no difference.
    assert torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(outs[0][0, :2], outs[1][0, :2])
    others = torch.ones(2, KV_HEADS, 302, dtype=torch.bool)
    others[0, 1, SINKS + PAGE : SINKS + 2 * PAGE] = False
    for good, other in zip(*dense, strict=True):
        assert torch.equal(good[others], other[others])
    # Of K a channel of the page shares a scale, of V the channels of the token.
    keys, values = (good == other for good, other in zip(*dense, strict=True))
    page = slice(SINKS + PAGE, SINKS + 2 * PAGE)
    assert keys[0, 1, page].all(0).tolist() == [channel != 3 for channel in range(DIM)]
    assert values[0, 1, page].all(1).tolist() == [token != 7 for token in range(PAGE)]
    assert outs[1][0, 2:].isnan().all(), "nobody is told a number where there is none"
    assert all(
        kvcompile.memory_report(past).materializations == {"materialize": 2} for past in pasts
    )


def test_no_rows_and_no_new_tokens() -> None:
    run = compiled(MODEL)
    past, dense = begun(run, qkv(40))
    past, dense = same_step(run, past, dense, tokens=0)
    same_step(run, past, dense)
    empty, plain = begun(run, qkv(40, batch=0))
    empty, plain = same_step(run, empty, plain)
    assert empty[0].shape == (0, KV_HEADS, 41, DIM)
    same_step(run, past, dense)


def test_a_dtype_that_changes_between_steps() -> None:
    """`cat` gives the wider dtype, in which the query is not: the model itself refuses."""
    run = compiled(MODEL)
    past, dense = begun(run, qkv(40))
    past, dense = same_step(run, past, dense)
    narrow = qkv(1, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        MODEL(*narrow, dense)
    with pytest.raises(Exception, match="same dtype"):
        run(*narrow, past)
    same_step(run, past, dense)


def test_a_handle_of_a_model_with_other_heads() -> None:
    run = compiled(MODEL)
    past, dense = begun(run, qkv(40))
    past, dense = same_step(run, past, dense)
    with pytest.raises(Exception, match="[Ss]izes? of tensors? must match|not equal|mismatch"):
        run(*qkv(1, kv_heads=1), past)
    same_step(run, past, dense)


@pytest.mark.parametrize(("first", "second"), [("auto", "int4"), ("int4", "auto")])
def test_a_cache_that_goes_on_under_other_options(first: str, second: str) -> None:
    """It is read once and stored anew; whoever made it can go on with it too."""
    make = compiled(MODEL, kv_cache_dtype=first)
    resume = torch.compile(
        MODEL, backend="kvcompile", options={"inner_backend": "eager", "kv_cache_dtype": second}
    )
    _, *past = make(*qkv(300))
    step, after = qkv(1), qkv(1)
    dense = [handle.materialize() for handle in past]
    want, *_ = MODEL(*step, tuple(dense))
    out, *other = resume(*step, tuple(past))
    torch.testing.assert_close(out, want, atol=0.2 if second == "int4" else 1e-5, rtol=1e-5)
    assert [layer.length for layer in kvcompile.memory_report(other).layers] == [301]
    bytes_ = {
        name: kvcompile.memory_report(c).stored for name, c in ((first, past), (second, other))
    }
    assert bytes_["int4"] < bytes_["auto"] / 2
    assert kvcompile.memory_report(other).materializations == {}
    again, *_ = make(*step, tuple(past))
    torch.testing.assert_close(again, want, atol=0.05 if first == "int4" else 1e-5, rtol=1e-5)
    resume(*after, tuple(other))


def test_a_handle_keeps_what_it_stands_for() -> None:
    run = compiled(MODEL)
    past, dense = begun(run, qkv(40))
    handle, expected = past[0], dense[0]
    del past, run
    torch._dynamo.reset()
    gc.collect()
    assert isinstance(handle, KVTensor)
    assert torch.equal(handle.materialize(), expected)
