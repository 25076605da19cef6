"""`kv_cache_memory_bytes`: a step that finds no room fails as a whole, and can be repeated."""

import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvcompile
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.errors import CacheBudgetError
from tests.support.compiled import compiled, exact_bytes, settings
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS = 2
CHUNK = prompt(7)


def new_cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=400)
    return DynamicCache(config=model.config)


def until_full(feed: Any) -> tuple[int, CacheBudgetError]:
    """Feed until the budget is exceeded; return how often that went well, and the error."""
    for step in range(60):
        try:
            feed()
        except CacheBudgetError as error:
            return step, error
    raise AssertionError("the budget was never exceeded")


@torch.no_grad()
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [("static", "auto"), ("dynamic", "int4")])
def test_a_step_without_room_is_repeated_once_another_cache_has_died(
    kind: str, kv_cache_dtype: str
) -> None:
    model = tiny_llama(layers=LAYERS)
    limit = exact_bytes(model, 300) + 3
    options = {"kv_cache_memory_bytes": limit, "kv_cache_dtype": kv_cache_dtype}
    run = compiled(model, **options)
    others: list[Any] = []
    cache = new_cache(model, kind)

    def begin_another() -> None:
        another = new_cache(model, kind)
        run(prompt(64), cache=another)
        others.append(another)

    begun, _ = until_full(begin_another)
    assert begun >= 2
    with pytest.raises(CacheBudgetError) as caught:
        run(prompt(64), cache=cache)
    others.pop()
    # What was reserved is free again, though the error still holds the frames of the step.
    run(prompt(64), cache=cache)
    assert caught.value is not None

    before: list[int] = []

    def feed() -> None:
        report = kvcompile.memory_report(cache)
        before[:] = report.stored, report.slack
        run(CHUNK, cache=cache)

    fed, error = until_full(feed)
    assert f"kv_cache_memory_bytes is {limit:,}" in str(error)
    assert int(cache.get_seq_length()) == 64 + 7 * fed
    report = kvcompile.memory_report(cache)
    assert [report.stored, report.slack] == before
    assert report.allocated <= limit
    others.clear()
    found = run(CHUNK, cache=cache).logits
    assert int(cache.get_seq_length()) == 71 + 7 * fed
    assert kvcompile.memory_report(cache).materializations == {}
    cache = new_cache(model, kind)
    run(prompt(64), cache=cache)
    for _ in range(fed + 1):
        want = run(CHUNK, cache=cache).logits
    assert torch.equal(found, want)


@torch.no_grad()
def test_a_crop_of_another_cache_makes_room() -> None:
    model = tiny_llama(layers=LAYERS)
    run = compiled(model, kv_cache_memory_bytes=exact_bytes(model, 160))
    cache, other = (DynamicCache(config=model.config) for _ in range(2))
    run(prompt(64), cache=other)
    run(prompt(64), cache=cache)
    _, error = until_full(lambda: run(CHUNK, cache=cache))
    assert "About 160 tokens fit, of all rows of all caches together" in str(error)
    other.crop(-40)
    run(CHUNK, cache=cache)
    assert other.get_seq_length() == 24
    run(CHUNK, cache=other)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [("static", "auto"), ("dynamic", "int4")])
def test_a_cache_that_was_loaded_counts_from_its_first_step_on(
    kind: str, kv_cache_dtype: str
) -> None:
    model = tiny_llama(layers=LAYERS)
    limit = exact_bytes(model, 200)
    run = compiled(model, kv_cache_memory_bytes=limit, kv_cache_dtype=kv_cache_dtype)
    made = new_cache(model, kind)
    run(prompt(64), cache=made)
    cache, another = (pickle.loads(pickle.dumps(made)) for _ in range(2))
    assert torch.equal(run(CHUNK, cache=cache).logits, run(CHUNK, cache=made).logits)
    del made
    until_full(lambda: run(CHUNK, cache=cache))
    report = kvcompile.memory_report(cache)
    assert report.allocated <= limit
    assert report.materializations == {}
    with pytest.raises(CacheBudgetError):
        run(CHUNK, cache=another)
    assert int(another.get_seq_length()) == 64
    cache = None
    run(CHUNK, cache=another)


def test_generations_one_after_another_and_beams_need_no_more_than_their_tokens() -> None:
    """Four rows of 70 tokens are three pages each; each beam copies at most one before it goes."""
    model = tiny_llama(layers=LAYERS)
    limit = exact_bytes(model, 32 * (4 * 3 + 4))
    run = compiled(model, kv_cache_memory_bytes=limit)
    arguments = settings(8, num_beams=4)
    expected = model.generate(prompt(70), **arguments)
    for _ in range(2):
        found = run.generate(prompt(70), **arguments)
        assert torch.equal(found.sequences, expected.sequences)
        report = kvcompile.memory_report(found.past_key_values)
        assert report.allocated <= limit
        assert report.materializations == {}
        del found


@torch.no_grad()
def test_memory_that_runs_out_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says no: the machine, at the second layer, first in a prefill, then in a decode."""
    model = tiny_llama(layers=LAYERS)
    run = compiled(model)
    cache, plain = (DynamicCache(config=model.config) for _ in range(2))
    real = Arena._new_slab
    calls = 0

    def no_memory(self: Arena, pages: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, pages)

    # Every page is a slab, so that every layer asks for memory.
    monkeypatch.setattr(Arena, "_choose_shift", lambda self, pages: 0)
    monkeypatch.setattr(Arena, "_new_slab", no_memory)
    for ids in (prompt(64), CHUNK):
        calls = 0
        length = plain.get_seq_length()
        with pytest.raises(RuntimeError, match="can't allocate"):
            run(ids, cache=cache)
        assert cache.get_seq_length() == length
        found, want = run(ids, cache=cache).logits, model(ids, cache=plain).logits
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        assert cache.get_seq_length() == length + ids.shape[1]
