"""Pasts used twice, mixed, swapped or read by others: as the unmodified function does it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvcompile
from kvcompile.backend import UnmatchedError
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.runtime.errors import CacheGapError
from kvcompile.runtime.handle import KVTensor
from tests.support.attentions import Sdpa, Softmax, Static
from tests.support.compiled import compiled
from tests.support.programs import Pair, qkv, static_handles
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Step = Callable[..., Any]
attention = Sdpa("expand").eval()


def prefilled(tokens: int = 7) -> tuple[Pair, Pair]:
    """Return one cache twice: as handles made by a compiled prefill, and dense."""
    q, k, v = qkv(tokens)
    with torch.no_grad():
        _, keys, values = compiled(attention)(q, k, v)
    assert isinstance(keys, KVTensor)
    return (keys, values), (keys.materialize(), values.materialize())


def assert_same(step: Step, *args: Any, dense: tuple[Any, ...] | None = None) -> Any:
    """Assert that a compiled function returns what the function itself returns."""
    forget_notices()
    with torch.no_grad():
        expected = step(*(dense if dense is not None else args))
        torch._dynamo.reset()
        options: Any = {"inner_backend": "eager", "verify": True}
        got = torch.compile(step, backend="kvcompile", options=options)(*args)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a + 0, b + 0)
    return got


def test_two_continuations_of_one_past_in_one_graph() -> None:
    def both(past: Pair, a: Any, b: Any) -> Any:
        return *attention(*a, past), *attention(*b, past)

    paged, dense = prefilled()
    a, b = qkv(1), qkv(1)
    assert_same(both, paged, a, b, dense=(dense, a, b))


def test_two_aliases_of_one_cache_in_one_graph() -> None:
    def both(one: Pair, two: Pair, a: Any, b: Any) -> Any:
        return *attention(*a, one), *attention(*b, two)

    paged, dense = prefilled()
    alias = paged[0][:], paged[1][:]
    a, b = qkv(1), qkv(1)
    assert_same(both, paged, alias, a, b, dense=(dense, dense, a, b))


def test_threads_that_share_a_prefix() -> None:
    model = tiny_llama()
    wrapper = compiled(model)
    ids, steps = prompt(20), 12
    prefix, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(2)

    def shallow(cache: DynamicCache) -> DynamicCache:
        copy = DynamicCache(config=model.config)
        for layer, (keys, values, *_) in zip(copy.layers, cache, strict=False):
            layer.keys, layer.values = keys, values  # type: ignore[union-attr]
            layer.is_initialized, layer.dtype, layer.device = True, keys.dtype, keys.device  # type: ignore[union-attr]
        return copy

    def run(number: int, model: Any, cache: DynamicCache) -> torch.Tensor:
        with torch.no_grad():
            token = torch.tensor([[number + 3]])
            logits = []
            for _ in range(steps):
                logits.append(model(token, cache=cache).logits[:, -1])
                token = logits[-1].argmax(-1, keepdim=True)
        return torch.cat(logits)

    with torch.no_grad():
        wrapper(ids, cache=prefix)
        model(ids, cache=plain)
    run(9, wrapper, shallow(prefix))  # compiles the decode graph

    def thread(number: int) -> None:
        barrier.wait()
        results[number] = run(number, wrapper, shallow(prefix))

    for _ in range(3):
        threads = [threading.Thread(target=thread, args=(n,)) for n in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for n in range(2):
            expected = run(n, model, shallow(plain))
            torch.testing.assert_close(results[n], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "read",
    [
        lambda past: past[1].narrow(2, 0, 1).sum(),
        lambda past: past[1].select(2, 0).sum(),
        lambda past: (past[0] * 2).sum(),
        lambda past: past[0].pow(2).mean(),
        lambda past: past[0].shape[2] * 1.0,
    ],
)
def test_another_reader_of_the_past(read: Callable[[Pair], Any]) -> None:
    def step(q: Any, k: Any, v: Any, past: Pair) -> Any:
        out, keys, values = attention(q, k, v, past)
        return out + read(past), keys, values

    paged, dense = prefilled()
    new = qkv(1)
    assert_same(step, *new, paged, dense=(*new, dense))


def test_swapped_and_repeated_pasts() -> None:
    paged, dense = prefilled()
    new = qkv(1)
    assert_same(attention, *new, paged[::-1], dense=(*new, dense[::-1]))
    one, plain = (paged[0], paged[0][:]), (dense[0], dense[0])
    assert_same(attention, *new, one, dense=(*new, plain))
    same = (paged[0], paged[0])
    assert_same(attention, *new, same, dense=(*new, (dense[0], dense[0])))


def test_one_handle_and_one_dense_tensor() -> None:
    paged, dense = prefilled()
    new = qkv(1)
    scaled = dense[0] * 1.5
    assert_same(attention, *new, (scaled, paged[1]), dense=(*new, (scaled, dense[1])))
    assert_same(attention, *new, (paged[0], dense[1]), dense=(*new, dense))


def test_a_past_of_another_dtype() -> None:
    """`cat` promotes; the cache the model returns is the wider one."""
    _, dense = prefilled()
    half = [x.to(torch.bfloat16) for x in dense]
    _, keys, values = _prefill_of(half)
    new = qkv(1)
    assert isinstance(keys, KVTensor)
    assert_same(attention, *new, (keys, values), dense=(*new, tuple(half)))


def _prefill_of(pair: list[torch.Tensor]) -> Any:
    q = torch.randn(2, 4, pair[0].shape[2], 8, dtype=pair[0].dtype)
    with torch.no_grad():
        torch._dynamo.reset()
        return compiled(attention)(q, -pair[0], -pair[1])


def test_a_query_of_another_dtype_under_autocast() -> None:
    def step(q: Any, k: Any, v: Any, past: Pair) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, past)

    pasts = [x.to(torch.bfloat16) for x in prefilled()[1]]
    _, keys, values = _prefill_of(pasts)
    q, k, v = qkv(1)
    new = q, k.to(torch.bfloat16), v.to(torch.bfloat16)
    assert_same(step, *new, (keys, values), dense=(*new, tuple(pasts)))


def test_a_cache_has_the_dtype_that_the_models_own_autocast_gives_it() -> None:
    weight = torch.randn(8, 8)

    def step(q: Any, k: Any, v: Any, past: Pair | None = None) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(*(torch.nn.functional.linear(x, weight) for x in (q, k, v)), past)

    compiled_step = compiled(step)
    with torch.no_grad():
        _, *pair = compiled_step(*qkv(8))
        _, *dense = step(*qkv(8))
        assert [x.dtype for x in pair] == [x.dtype for x in dense] == [torch.bfloat16] * 2
        assert all(isinstance(x, KVTensor) for x in pair)
        _, *pair = compiled_step(*qkv(1), tuple(pair))
    assert [x.dtype for x in pair] == [torch.bfloat16] * 2
    assert all(isinstance(x, KVTensor) for x in pair)


def test_masks_filled_in_place_and_masks_added_with_a_factor() -> None:
    class InPlace(Softmax):
        def mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill_(~mask, float("-inf"))

    class Factor(Softmax):
        def mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.add(scores, mask.to(scores.dtype), alpha=3)

    paged, dense = prefilled()
    mask = torch.rand(2, 1, 1, 8) > 0.4
    mask[..., 0] = True
    new = qkv(1)
    for model in (InPlace().eval(), Factor().eval()):
        assert_same(model, *new, paged, mask, dense=(*new, dense, mask))


def test_keys_that_are_changed_after_the_attention() -> None:
    def step(q: Any, k: Any, v: Any, past: Pair) -> Any:
        out, keys, values = attention(q, k, v, past)
        keys[..., :4].mul_(2)
        return out, keys, values

    paged, dense = prefilled()
    new = qkv(1)
    assert_same(step, *new, paged, dense=(*new, dense))


def test_copies_among_the_outputs_are_written_on_their_own() -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        out, keys, values = attention(q, k, v)
        return out, keys, values, keys.clone()

    got = assert_same(step, *qkv(5))
    before = got[1] + 0
    got[3].zero_()
    assert torch.equal(got[1] + 0, before)


def test_an_attention_whose_query_is_another_attention() -> None:
    def step(q: Any, one: Any, two: Any, past_one: Pair, past_two: Pair) -> Any:
        out, *first = attention(q, *one, past_one)
        out, *second = attention(out, *two, past_two)
        return out, *first, *second

    (paged_a, dense_a), (paged_b, dense_b) = prefilled(), prefilled(5)
    q, k, v = qkv(1)
    _, k2, v2 = qkv(1)
    args = q, (k, v), (k2, v2)
    assert_same(step, *args, paged_a, paged_b, dense=(*args, dense_a, dense_b))
    assert not [r for r in kvcompile.notices() if r.kind == "failed"]


def static_step(position: list[int], mask: torch.Tensor | None) -> tuple[Any, Any]:
    """Run one step on static buffers of 12 tokens, 4 stored: compiled and unmodified."""
    handles = static_handles(4, 12)
    dense = tuple(h.materialize() for h in handles)  # type: ignore[attr-defined]
    new = qkv(len(position))
    args = torch.tensor(position), mask
    with torch.no_grad():
        expected = Static("expand")(*new, dense, *args)
        torch._dynamo.reset()
        got = compiled(Static("expand").eval())(*new, handles, *args)
    return (got, *handles), (expected, *dense)


def visible(upto: int) -> torch.Tensor:
    return (torch.arange(12) < upto)[None, None, None]


@pytest.mark.parametrize(
    ("position", "mask"),
    [
        ([4], visible(5)),
        ([2], visible(3)),
        ([2], visible(4)),
        ([4], torch.where(visible(5), 0.0, -1e4)),
        ([4], torch.where(visible(5), 0.0, -1e9)),
        ([4], None),
        ([4, 5], visible(6).expand(1, 1, 2, 12)),
    ],
)
@pytest.mark.parametrize("inner_backend", ["eager", "inductor"])
def test_static_buffers(position: list[int], mask: Any, inner_backend: str) -> None:
    if inner_backend == "inductor" and mask is not None:
        pytest.skip("the rewritten graph does not depend on it")
    got, expected = static_step(position, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a + 0, b + 0)


@pytest.mark.parametrize(
    ("position", "mask", "message"),
    [
        ([5], visible(6), "appended to a cache of 4 tokens"),
        ([4, 6, 5], visible(7).expand(1, 1, 3, 12), "consecutive positions"),
        ([4], visible(9), "shows tokens beyond the 5"),
    ],
)
def test_static_buffers_refuse(position: list[int], mask: Any, message: str) -> None:
    with pytest.raises(CacheGapError, match=message):
        static_step(position, mask)


def test_a_static_prefill_must_hide_what_it_does_not_write() -> None:
    def prefill(q: Any, k: Any, v: Any, position: Any, mask: Any) -> Any:
        buffers = torch.zeros(2, 2, 12, 8), torch.zeros(2, 2, 12, 8)
        return Static("expand")(q, k, v, buffers, position, mask), *buffers

    mask = torch.ones(1, 1, 5, 12, dtype=torch.bool)
    with pytest.raises(CacheGapError, match="shows tokens beyond the 5"), torch.no_grad():
        compiled(prefill)(*qkv(5), torch.arange(5), mask)
    mask = torch.ones(5, 12, dtype=torch.bool).tril()[None, None]
    assert_same(prefill, *qkv(5), torch.arange(5), mask)


@pytest.mark.parametrize("make", [torch.zeros_like, lambda x: torch.full(x.shape, 0.0)])
def test_buffers_of_zeros_in_other_spellings(make: Callable[[Any], Any]) -> None:
    def prefill(like: Any, q: Any, k: Any, v: Any, position: Any, mask: Any) -> Any:
        buffers = make(like), make(like)
        return Static("expand")(q, k, v, buffers, position, mask), *buffers

    mask = torch.ones(5, 12, dtype=torch.bool).tril()[None, None]
    got = assert_same(prefill, torch.randn(2, 2, 12, 8), *qkv(5), torch.arange(5), mask)
    assert isinstance(got[1], KVTensor)


def test_strict_refuses_a_window_that_is_not_rewritten() -> None:
    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], -v], dim=2)
        return Sdpa().attend(q, k, v, None), k[:, :, 1:-1], v[:, :, 1:-1]

    past = tuple(torch.randn(2, 2, 9, 8) for _ in range(2))
    with pytest.raises(Exception, match="KVC20[69]") as caught, torch.no_grad():
        compiled(step, strict=True)(*qkv(1), past)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, UnmatchedError):
        error = error.__cause__ or error.__context__
    assert error is not None


def test_the_models_own_assertions_stay() -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        torch._assert_async((q < 100).all())
        return attention(q, k, v)

    q, k, v = qkv(5)
    assert_same(step, q, k, v)
    with pytest.raises(RuntimeError), torch.no_grad():
        compiled(step)(q + 1000, k, v)
