"""Sliding-window layers: the tokens of the model, and no more bytes than the window needs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvcompile
from kvcompile.runtime.handle import KVTensor
from tests.support.compiled import compiled, count_compilations, settings
from tests.support.sliding_models import FAMILIES, Make, gemma3, mistral
from tests.support.tiny_models import prompt

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

WINDOW = 40
PAGE = 16


def empty(model: PreTrainedModel) -> Any:
    return DynamicCache(config=model.config)


def generated(model: Any, ids: torch.Tensor, tokens: int, **more: Any) -> Any:
    return model.generate(ids, **settings(tokens, **more))


def paged(cache: Any) -> None:
    """Assert that every state is a handle, and that none was needed as a dense tensor."""
    for layer in cache.layers:
        assert isinstance(layer.keys, KVTensor)
        assert isinstance(layer.values, KVTensor)
    assert kvcompile.memory_report(cache).materializations == {}


def stored_bytes(cache: Any) -> int:
    """Return the bytes of the first layer's tokens."""
    parts = kvcompile.memory_report(cache).layers[0].bytes
    return parts.codes + parts.window


def padded(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of different lengths, padded from the left, and their mask."""
    ids = prompt(tokens, batch=batch)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 5 * row] = 0
    return ids * mask, mask


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_the_tokens_of_the_model(make: Make) -> None:
    """Prompts that fill the window and that do not, alone and padded, growing and static."""
    model = make(WINDOW, 2)
    for batch, tokens, kind in ((1, 20, None), (3, 60, None), (1, 20, "static"), (3, 60, "static")):
        run = compiled(model, page_size=PAGE, strict=True)
        ids, mask = padded(batch, tokens)
        more: dict[str, Any] = {"attention_mask": mask, "cache_implementation": kind}
        expected = generated(model, ids, 60, **more)
        found = generated(run, ids, 60, **more)
        assert torch.equal(found.sequences, expected.sequences)
        paged(found.past_key_values)
        for layer, dense in zip(
            found.past_key_values.layers, expected.past_key_values.layers, strict=True
        ):
            assert layer.keys.shape == dense.keys.shape


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_bytes_stay_what_the_window_needs(dtype: str) -> None:
    """Ten windows long: never more than window, page and ring; the pool gets the rest back."""
    window, residual, sinks = 64, 16, 4
    model = gemma3(window, 2)
    run = compiled(
        model, page_size=PAGE, kv_cache_dtype=dtype, residual_length=residual, num_sink_tokens=sinks
    )
    cache = empty(model)
    ids, held = prompt(30), []
    with torch.no_grad():
        for step in range(10 * window):
            out = run(ids if step == 0 else ids[:, -1:], past_key_values=cache)
            ids = out.logits[:, -1:].argmax(-1)
            if step > 2 * window:
                held.append(stored_bytes(cache))
    paged(cache)
    store = cache.layers[0].keys.store
    exact = store.layout.exact if dtype == "int4" else store.layout
    quantized = store.layout.record_bytes / PAGE
    of_token = exact.record_bytes / exact.page_size
    bound = (window + PAGE) * (quantized if dtype == "int4" else of_token)
    if dtype == "int4":
        bound += (residual + PAGE + 16) * of_token
    bound *= store.num_kv_heads
    assert max(held) <= bound
    # The same bytes again whenever a page is given back: nothing creeps.
    assert held[0] == held[16 * PAGE]


def test_crossing_the_window_compiles_at_most_three_times() -> None:
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE)
    with count_compilations() as compilations:
        generated(run, prompt(20), 12)
    assert compilations.count == 2
    with count_compilations() as compilations:
        generated(run, prompt(20), 60)
    assert compilations.count <= 3
    with count_compilations() as compilations:
        generated(run, prompt(25), 200)
        generated(run, prompt(60, seed=1), 100)
    assert compilations.count <= 2  # a second length, and a prompt that fills the window


@pytest.mark.parametrize("how", ["beams", "lookup", "samples"])
def test_ways_of_generating(how: str) -> None:
    """Beams reorder rows of a window; prompt lookup takes tokens back that had slid out of it."""
    options: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 3},
        "lookup": {"prompt_lookup_num_tokens": 4},
        "samples": {"do_sample": True, "num_return_sequences": 2},
    }
    model = gemma3(WINDOW, 2)
    run = compiled(model, page_size=PAGE, strict=True)
    ids = prompt(8).repeat(1, 7)
    torch.manual_seed(0)
    expected = generated(model, ids, 50, **options[how])
    torch.manual_seed(0)
    found = generated(run, ids, 50, **options[how])
    assert torch.equal(found.sequences, expected.sequences)
    paged(found.past_key_values)


def steps(run: Any, ids: torch.Tensor, cache: Any, count: int) -> list[int]:
    """Return the tokens of some greedy steps."""
    tokens = []
    with torch.no_grad():
        for _ in range(count):
            ids = run(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    return tokens


def test_copies_of_a_window_go_apart() -> None:
    """An old copy keeps the tokens that the window has left behind since, and goes on from them."""
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE)
    cache, dense = (empty(model) for _ in range(2))
    ids = prompt(60)
    first = steps(run, ids, cache, 5)
    assert steps(model, ids, dense, 5) == first
    old, old_dense = copy.copy(cache), copy.copy(dense)
    old.layers = [copy.copy(layer) for layer in cache.layers]
    old_dense.layers = [copy.copy(layer) for layer in dense.layers]
    saved = copy.deepcopy(cache)
    token = torch.tensor([[first[-1]]])
    further = steps(model, token, dense, 50)
    assert steps(run, token, cache, 50) == further
    for layer, same in zip(old.layers, old_dense.layers, strict=True):
        torch.testing.assert_close(layer.keys.materialize(), same.keys, atol=1e-5, rtol=1e-5)
    other = torch.tensor([[7]])
    assert steps(run, other, old, 30) == steps(model, other, old_dense, 30)
    assert steps(run, token, saved, 50) == further
    assert set(kvcompile.memory_report(saved).materializations) == {"materialize"}  # above


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_a_window_is_saved_and_joined(dtype: str) -> None:
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE, kv_cache_dtype=dtype, residual_length=16)
    caches = [empty(model) for _ in range(2)]
    firsts = [steps(run, prompt(60, seed=n), cache, 20 + 7 * n) for n, cache in enumerate(caches)]
    file = io.BytesIO()
    torch.save([(layer.keys, layer.values) for layer in caches[0].layers], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    joined = [
        [
            torch.cat([getattr(cache.layers[n], name) for cache in caches])
            for name in ("keys", "values")
        ]
        for n in range(2)
    ]
    for (k, v), layer in zip(loaded, caches[0].layers, strict=True):
        assert isinstance(k, KVTensor)
        assert torch.equal(k.materialize(), layer.keys.materialize())
        assert torch.equal(v.materialize(), layer.values.materialize())
    for n, (k, v) in enumerate(joined):
        assert isinstance(k, KVTensor)
        assert isinstance(v, KVTensor)
        assert k.store is v.store
        for row, cache in enumerate(caches):
            assert torch.equal(k.materialize()[row], cache.layers[n].keys.materialize()[0])
    again = copy.deepcopy(caches[0])
    for (k, v), layer in zip(loaded, again.layers, strict=True):
        layer.keys, layer.values = k, v
    token = torch.tensor([[firsts[0][-1]]])
    assert steps(run, token, again, 30) == steps(run, token, caches[0], 30)


def test_eager_code_slides_on_pages() -> None:
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE)
    cache, dense = (empty(model) for _ in range(2))
    first = steps(run, prompt(60), cache, 5)
    assert steps(model, prompt(60), dense, 5) == first
    token = torch.tensor([[first[-1]]])
    expected = steps(model, token, dense, 60)
    assert steps(model, token, cache, 60) == expected
    assert all(isinstance(layer.keys, KVTensor) for layer in cache.layers)
    store = cache.layers[0].keys.store
    assert sum(len(h.filled) for h in store.holdings()) <= -(-WINDOW // PAGE) + 1
    assert stored_bytes(cache) <= (WINDOW + PAGE) * 2 * store.layout.record_bytes // PAGE
    # Chunks of a prompt, and back to compiled steps.
    with torch.no_grad():
        for chunk in prompt(90, seed=3).split(30, dim=1):
            found = run(chunk, past_key_values=cache).logits
            wanted = model(chunk, past_key_values=dense).logits
            torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_pages_given_back_change_nothing(dtype: str) -> None:
    """A cache whose old tokens somebody still holds keeps its pages, and computes the same."""
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE, kv_cache_dtype=dtype, residual_length=16)
    caches = [empty(model) for _ in range(2)]
    ids, held, pages = prompt(10, batch=2), [], []
    with torch.no_grad():
        for step in range(100):
            logits = [run(ids, past_key_values=cache).logits for cache in caches]
            torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
            ids = logits[0][:, -1:].argmax(-1)
            if step == 1:
                held = [(layer.keys, layer.values) for layer in caches[0].layers]
        for cache in caches:
            holdings = cache.layers[0].keys.store.holdings()
            pages.append(len(holdings[0].filled))
    assert pages[0] > pages[1]
    assert held[0][0].shape[2] == 11


def static(model: PreTrainedModel) -> Any:
    return StaticCache(config=model.config, max_cache_len=400)


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_a_static_window_holds_no_more_than_a_growing_one(dtype: str) -> None:
    model = mistral(WINDOW)
    options = {"page_size": PAGE, "kv_cache_dtype": dtype, "residual_length": 16}
    growing, buffers, dense = empty(model), static(model), static(model)
    ids = prompt(30)
    run = compiled(model, **options)
    steps(run, ids, growing, 120)
    run = compiled(model, **options)
    first = steps(run, ids, buffers, 4)
    if dtype == "auto":
        assert steps(model, ids, dense, 4) == first
    with torch.no_grad():
        for count in (20, 1, 60, 1):  # fills the window, and goes on in it
            ids = prompt(count, seed=count)
            found, expected = (
                r(ids, past_key_values=c).logits for r, c in ((run, buffers), (model, dense))
            )
            if dtype == "auto":
                torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    steps(run, prompt(1), buffers, 34)
    paged(buffers)
    store = buffers.layers[0].keys.store
    assert store.k_len == WINDOW
    assert store.hidden < PAGE + 4
    assert abs(stored_bytes(buffers) - stored_bytes(growing)) <= 2 * store.arena.page_bytes


def test_a_static_window_is_reset_and_a_failed_step_repeated() -> None:
    model = mistral(WINDOW)
    run = compiled(model, page_size=PAGE)
    cache, dense = static(model), static(model)
    assert steps(run, prompt(60), cache, 20) == steps(model, prompt(60), dense, 20)
    token = torch.tensor([[5]])
    store = cache.layers[1].keys.store
    before = store.origin, store.k_len, store.start_list()
    append, calls = store.append, []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise RuntimeError("no step")

    store.append = fails
    with pytest.raises(RuntimeError, match="no step"), torch.no_grad():
        run(token, past_key_values=cache)
    store.append = append
    assert (store.origin, store.k_len, store.start_list()) == before
    assert steps(run, token, cache, 50) == steps(model, token, dense, 50)
    for layers in (cache, dense):
        layers.reset()
    assert steps(run, prompt(10, seed=2), cache, 60) == steps(model, prompt(10, seed=2), dense, 60)
    paged(cache)
