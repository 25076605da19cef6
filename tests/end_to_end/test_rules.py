"""What must hold whatever the model does: weights, failures, falling back, passing through."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

import kvcompile
from kvcompile.backend import UnmatchedError
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.passes.pipeline import PassError
from kvcompile.passes.plan_formats import PlanFormats
from kvcompile.runtime import launch
from kvcompile.runtime.handle import KVTensor
from tests.support.attentions import Sdpa, Softmax, Window
from tests.support.compiled import assert_paged, compiled, exact_bytes, settings
from tests.support.programs import past, qkv
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _no_notices() -> None:
    forget_notices()


def said() -> list[str]:
    return [remark.code for remark in kvcompile.notices()]


def generate(model: Any, ids: torch.Tensor, new_tokens: int = 12) -> torch.Tensor:
    with torch.no_grad():
        sequences: torch.Tensor = model.generate(ids, **settings(new_tokens)).sequences
    return sequences


def test_two_instances_with_different_weights() -> None:
    ids = prompt(9)
    first, second = tiny_llama(seed=1), tiny_llama(seed=2)
    expected = [generate(first, ids), generate(second, ids)]
    assert not torch.equal(*expected)
    wrappers = [
        compiled(first),
        torch.compile(second, backend="kvcompile", options={"inner_backend": "eager"}),
    ]
    for _ in range(2):
        for wrapper, tokens in zip(wrappers, expected, strict=True):
            assert torch.equal(generate(wrapper, ids), tokens)


@pytest.mark.parametrize("inner_backend", ["eager", "inductor"])
def test_weights_loaded_after_compiling(inner_backend: str) -> None:
    ids = prompt(9)
    model, other = (tiny_llama(layers=1, seed=seed) for seed in (1, 2))
    wrapper = compiled(model, inner_backend=inner_backend)
    assert torch.equal(generate(wrapper, ids, 4), generate(model, ids, 4))
    expected = generate(other, ids, 4)
    model.load_state_dict(other.state_dict())
    assert torch.equal(generate(wrapper, ids, 4), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(generate(wrapper, ids, 4), generate(model, ids, 4))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_step_that_fails_between_layers_can_be_retried(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    model, ids = tiny_llama(layers=3), prompt(9)
    wrapper = compiled(model)
    expected_cache, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    token = torch.tensor([[5]])
    with torch.no_grad():
        model(ids, cache=expected_cache)
        wrapper(ids, cache=cache)
        wrapper(token, cache=cache)
        model(token, cache=expected_cache)
        real, calls = launch.attend, [0]

        def fail(*args: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == failing + 1:
                raise MemoryError("while attending")
            return real(*args)

        monkeypatch.setattr(launch, "attend", fail)
        with pytest.raises(MemoryError, match="while attending"):
            wrapper(token, cache=cache)
        assert cache.get_seq_length() == 10
        monkeypatch.setattr(launch, "attend", real)
        got = wrapper(token, cache=cache).logits
        want = model(token, cache=expected_cache).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 11


def test_at_the_recompile_limit_the_model_goes_on_in_eager_mode_on_pages() -> None:
    model, ids = tiny_llama(), prompt(9)
    expected = generate(model, ids)
    wrapper = compiled(model)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        result = wrapper.generate(ids, **settings(12))
    assert torch.equal(result.sequences, expected)
    assert "KVC502" in said()
    layer = result.past_key_values.layers[0]
    assert isinstance(layer.keys, KVTensor)
    assert layer.keys.store is not None
    assert layer.keys.store.k_len == layer.keys.store.v_len == 20


def test_an_input_that_requires_grad_is_passed_through() -> None:
    model, ids = tiny_llama(), prompt(9)
    out = compiled(model)(ids)
    assert not isinstance(out.past_key_values.layers[0].keys, KVTensor)
    out.logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    assert said() == ["KVC001"]


def test_grad_mode_alone_is_no_reason_to_pass_through() -> None:
    model, ids = tiny_llama().requires_grad_(False), prompt(9)
    out = compiled(model)(ids)
    assert isinstance(out.past_key_values.layers[0].keys, KVTensor)
    assert not said()


def test_a_failing_pass_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), prompt(9)
    expected = generate(model, ids)

    def fail(*args: object) -> None:
        raise ZeroDivisionError("in a pass")

    monkeypatch.setattr(PlanFormats, "run", fail)
    assert torch.equal(generate(compiled(model), ids), expected)
    assert "KVC002" in said()
    with pytest.raises(Exception, match="pass plan-formats: ZeroDivisionError") as caught:
        generate(compiled(model, strict=True), ids)
    assert _has(caught.value, PassError)


def _has(error: BaseException | None, kind: type) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.mark.parametrize("model", [Softmax("sigmoid"), Window()])
def test_what_is_not_matched_runs_as_written(model: torch.nn.Module) -> None:
    args = (*qkv(1), past(7), torch.ones(2, 1, 1, 8, dtype=torch.bool))
    with torch.no_grad():
        expected = model.eval()(*args)
        got = compiled(model)(*args)
    for a, b in zip(got, expected, strict=True):
        assert not isinstance(a, KVTensor)
        torch.testing.assert_close(a, b)
    (remark,) = [r for r in kvcompile.notices() if r.kind == "missed"]
    assert remark.where.startswith("attentions.py:")
    with pytest.raises(Exception, match=remark.code) as caught, torch.no_grad():
        compiled(model, strict=True)(*args)
    assert _has(caught.value, UnmatchedError)


def test_a_handle_given_to_a_graph_that_is_not_rewritten() -> None:
    """A cache made by one model, read by a function of another kind."""
    model = Sdpa().eval()
    q, k, v = qkv(5)
    with torch.no_grad():
        _, keys, values = compiled(model)(q, k, v)
        assert isinstance(keys, KVTensor)
        step = torch.compile(
            lambda a, b: (a * 2).sum() + b.amax(),
            backend="kvcompile",
            options={"inner_backend": "eager"},
        )
        got = step(keys, values)
    torch.testing.assert_close(got, (-k * 2).sum() + (-v).amax())


def test_a_dense_past_is_adopted() -> None:
    """A cache that was filled without kvcompile goes on in pages."""
    model, ids = tiny_llama(), prompt(9)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    token = torch.tensor([[5]])
    with torch.no_grad():
        for cache in caches:
            model(ids, cache=cache)
        want = model(token, cache=caches[0]).logits
        got = compiled(model)(token, cache=caches[1]).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    keys, dense = (next(iter(cache))[0] for cache in reversed(caches))
    assert isinstance(keys, KVTensor)
    torch.testing.assert_close(keys.materialize(), dense)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("sizes", [(9, 1, 5, 16, 17, 22), (15, 16, 16, 23), (3, 40, 27)])
def test_steps_with_several_tokens(sizes: tuple[int, ...]) -> None:
    """Speculative verification (few queries) and chunked prefill (many) on one cache."""
    model = tiny_llama()
    ids = prompt(70)
    wrapper = compiled(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        start = 0
        for size in sizes:
            chunk = ids[:, start : start + size]
            want = model(chunk, cache=caches[0]).logits
            got = wrapper(chunk, cache=caches[1]).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            start += size
            assert_paged(caches[1], exact_bytes(model, start))


def test_logs_say_a_miss_once() -> None:
    args = (*qkv(1), past(7), torch.ones(2, 1, 1, 8, dtype=torch.bool))
    with torch.no_grad():
        compiled(Softmax("sigmoid").eval())(*args)
        compiled(Softmax("sigmoid").eval())(*args)
    assert said().count("KVC112") == 1


def test_without_triton_caches_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_TARGET", "gpu")
    monkeypatch.setattr("kvcompile.runtime.targets.find_spec", lambda _: None)
    model, ids = tiny_llama(), prompt(9)
    expected = generate(model, ids, 4)
    run = compiled(model)
    assert torch.equal(generate(run, ids, 4), expected)
    (remark,) = [remark for remark in kvcompile.notices() if remark.code == "KVC303"]
    assert "Triton, which is not installed" in remark.reason
    assert "KVC501" not in said(), "no plain torch stands in for anything"
