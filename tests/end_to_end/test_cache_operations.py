"""What users do with a cache between steps: the same result as on the model's own tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvcompile
from tests.support.compiled import (
    assert_paged,
    compiled,
    count_compilations,
    exact_bytes,
    settings,
)
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

Run = Callable[..., Any]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_second_generate(cache: str) -> None:
    """The first generation leaves nothing behind."""
    model = tiny_llama()
    arguments = settings(20, cache_implementation=cache)
    prompts = [prompt(20, seed=1), prompt(33, seed=2), prompt(20, seed=1)]
    expected = [model.generate(ids, **arguments).sequences.tolist() for ids in prompts]
    run = compiled(model)
    assert [run.generate(ids, **arguments).sequences.tolist() for ids in prompts] == expected


def test_prompt_lookup_crops() -> None:
    """Speculation attends with several queries and crops what was not accepted."""
    model = tiny_llama()
    ids = torch.cat([prompt(12)] * 3, dim=1)
    arguments = settings(30, prompt_lookup_num_tokens=4)
    expected = model.generate(ids, **arguments).sequences
    result = compiled(model).generate(ids, **arguments)
    assert result.sequences.tolist() == expected.tolist()
    assert kvcompile.memory_report(result.cache).materializations == {}


def test_prompt_lookup_after_two_prompt_lengths() -> None:
    """By now every length is symbolic: a crop that were a view of its handle would break Dynamo."""
    model = tiny_llama()
    run = compiled(model)
    for length in (9, 14):
        run.generate(prompt(length), **settings(4))
    ids = torch.cat([prompt(12)] * 3, dim=1)
    arguments = settings(30, prompt_lookup_num_tokens=4)
    expected = model.generate(ids, **arguments).sequences
    with count_compilations() as compilations:
        result = run.generate(ids, **arguments)
        assert result.sequences.tolist() == expected.tolist()
        few = compilations.count
        run.generate(torch.cat([prompt(15, seed=5)] * 3, dim=1), **arguments)
        # transformers calls the model with other arguments here: a prefill and a decode graph for
        # these, and one for several queries on a past, of any number.
        assert compilations.count == few <= 3
    assert kvcompile.memory_report(result.cache).materializations == {}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beam_search(cache: str) -> None:
    model = tiny_llama()
    arguments = settings(20, num_beams=3, cache_implementation=cache)
    expected = model.generate(prompt(20), **arguments).sequences
    result = compiled(model).generate(prompt(20), **arguments)
    assert result.sequences.tolist() == expected.tolist()
    assert kvcompile.memory_report(result.cache).materializations == {}


def test_beams_share_the_pages_of_their_prompt() -> None:
    model = tiny_llama()
    arguments = settings(4, num_beams=4)
    result = compiled(model).generate(prompt(320), **arguments)
    report = kvcompile.memory_report(result.cache)
    assert report.stored < 2 * exact_bytes(model, 320 + 4 * 4)


def feed(run: Run, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Run a model on more tokens of a sequence; return the last logits [B, vocabulary]."""
    with torch.no_grad():
        logits = run(ids, cache=cache).logits[:, -1]
    assert isinstance(logits, torch.Tensor)
    return logits


def crop(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Step, drop seven tokens, go on with others."""
    cache = DynamicCache(config=model.config)
    feed(run, cache, prompt(40))
    feed(run, cache, prompt(1, seed=3))
    cache.crop(-7)
    return [feed(run, cache, prompt(n, seed=4 + n)) for n in (1, 3, 1)]


def fork(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Copy a cache and let both copies go on, taking turns."""
    one = DynamicCache(config=model.config)
    feed(run, one, prompt(40))
    other = copy.deepcopy(one)
    return [
        feed(run, cache, prompt(1, seed=seed))
        for seed, cache in enumerate([one, other, one, other, other])
    ]


def repeat(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Make three rows of one, then keep two of them."""
    cache = DynamicCache(config=model.config)
    feed(run, cache, prompt(40))
    cache.batch_repeat_interleave(3)
    first = feed(run, cache, prompt(1, batch=3, seed=1))
    cache.batch_select_indices(torch.tensor([2, 0]))
    return [first, feed(run, cache, prompt(1, batch=2, seed=2))]


def reorder(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Permute the rows twice, once with a row taken twice."""
    cache = DynamicCache(config=model.config)
    feed(run, cache, prompt(40, batch=3))
    steps = []
    for seed, order in enumerate(([2, 0, 1], [1, 1, 0])):
        cache.reorder_cache(torch.LongTensor(order))
        steps.append(feed(run, cache, prompt(1, batch=3, seed=seed)))
    return steps


def rows(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Slice the rows of one cache, join them with those of another, and show one row twice."""
    steps = []
    cache, other = (DynamicCache(config=model.config) for _ in range(2))
    steps.append(feed(run, cache, prompt(40, batch=3)))
    steps.append(feed(run, other, prompt(40, batch=1, seed=3)))
    edit(cache, lambda x: x[1:])
    steps.append(feed(run, cache, prompt(1, batch=2, seed=1)))
    edit(other, lambda x: x.expand(2, -1, -1, -1))
    steps.append(feed(run, other, prompt(1, batch=2, seed=2)))
    for layer, more in zip(cache.layers, other.layers, strict=True):
        layer.keys = torch.cat([layer.keys, more.keys])  # type: ignore[union-attr, list-item]
        layer.values = torch.cat([layer.values, more.values])  # type: ignore[union-attr, list-item]
    steps.append(feed(run, cache, prompt(1, batch=4, seed=4)))
    report = kvcompile.memory_report(cache)
    assert not report.materializations
    assert not report.dense
    # The row that is shown twice shares its first page, of 32 tokens.
    assert run is model or report.stored == exact_bytes(model, 4 * 42 - 32)
    return steps


def edit(cache: DynamicCache, change: Callable[[Any], Any]) -> None:
    """Change K and V of every layer."""
    for layer in cache.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)  # type: ignore[union-attr]


def turns(run: Run, model: PreTrainedModel) -> list[torch.Tensor]:
    """Three turns of a conversation, of many tokens each."""
    cache = DynamicCache(config=model.config)
    return [feed(run, cache, prompt(n, seed=n)) for n in (40, 1, 30, 1, 17, 1, 16, 1)]


@pytest.mark.parametrize(
    "scenario", [crop, fork, repeat, reorder, rows, turns], ids=lambda f: f.__name__
)
def test_operation(scenario: Callable[[Run, PreTrainedModel], list[torch.Tensor]]) -> None:
    model = tiny_llama()
    expected = scenario(model, model)
    found = scenario(compiled(model), model)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_copy_of_a_static_cache_only_whose_keys_were_written() -> None:
    """The keys of the copy are dense and its values in pages; both go on in pages."""
    model = tiny_llama()
    found = []
    for run in (model, compiled(model)):
        cache: Any = StaticCache(config=model.config, max_cache_len=64)
        run(prompt(20), cache=cache)
        cache.layers[0].keys.mul_(2.0)
        cache = copy.deepcopy(cache)
        found.append([run(prompt(1, seed=step), cache=cache).logits for step in range(2)])
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    report = kvcompile.memory_report(cache)
    assert (report.dense, report.stored) == (0, exact_bytes(model, 22))


def test_crop_gives_pages_back() -> None:
    """With the next step: until then the longer cache may still be wanted."""
    model = tiny_llama()
    run, cache = compiled(model), DynamicCache(config=model.config)
    feed(run, cache, prompt(200))
    feed(run, cache, prompt(1))
    cache.crop(-150)
    feed(run, cache, prompt(1))
    assert_paged(cache, exact_bytes(model, 52))


def test_a_cache_that_dies_gives_its_memory_back() -> None:
    """Generations do not add up."""
    model = tiny_llama()
    run = compiled(model)
    sizes = [
        kvcompile.memory_report(run.generate(prompt(64), **settings(8)).past_key_values).allocated
        for _ in range(4)
    ]
    assert sizes == sizes[:1] * 4
