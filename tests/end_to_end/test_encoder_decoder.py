"""Encoder-decoders: self- and cross-attention caches in pages, the latter only read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import kvcompile
from tests.support.compiled import assert_paged, compiled, count_compilations, settings
from tests.support.tiny_models import prompt
from tests.support.tiny_seq2seq import (
    BYTES_PER_TOKEN,
    FRAMES,
    frames,
    tiny_bart,
    tiny_t5,
    tiny_whisper,
)

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]


def assert_same(
    model: Any, run: Any, ids: torch.Tensor | None, new_tokens: int, **more: Any
) -> Any:
    """Assert that a compiled model generates what the unmodified one does, and return that.

    Logits are compared too: tokens of random models repeat themselves.
    """
    arguments = settings(new_tokens, output_logits=True, **more)
    # generate repeats the rows of an encoder's outputs in place.
    expected = model.generate(ids, **copy.deepcopy(arguments))
    result = run.generate(ids, **arguments)
    assert result.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-3, atol=1e-3)
    return result


def padded(lengths: list[int], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts padded on one side to the longest, and their mask."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = slice(length) if side == "right" else slice(max(lengths) - length, None)
        ids[row, place], mask[row, place] = prompt(length, seed=row)[0], 1
    return ids, mask


def stored(result: Any) -> dict[str, list[tuple[int, int]]]:
    """Return rows and tokens of each layer of both caches."""
    caches = {"self": result.self_attention_cache, "cross": result.cross_attention_cache}
    return {
        name: [(layer.batch, layer.length) for layer in kvcompile.memory_report(cache).layers]
        for name, cache in caches.items()
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_t5(attention: str) -> None:
    """A learned bias in the mask of self-attention, or beside it, which the layers share."""
    model = tiny_t5(layers=2, attention=attention)
    run = compiled(model)
    with count_compilations() as compilations:
        result = assert_same(model, run, prompt(37), 20)
    # Dynamo takes a past of one token, the decoder's own first one, for a constant.
    assert compilations.count == 3
    # The last token is returned, never fed back.
    assert_paged(result.cache, 2 * BYTES_PER_TOKEN * (37 + 20))
    assert stored(result.cache) == {"self": [(1, 20)] * 2, "cross": [(1, 37)] * 2}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_right_padding_is_stored_and_hidden_by_the_mask(attention: str) -> None:
    model = tiny_t5(attention=attention)
    ids, mask = padded([9, 37, 20], "right")
    run = compiled(model)
    result = assert_same(model, run, ids, 8, attention_mask=mask, cache_implementation="static")
    assert_paged(result.cache, BYTES_PER_TOKEN * 3 * (37 + 8))


def test_beams_samples_and_encoder_outputs_on_left_padding() -> None:
    """One batch size: three compilations for all of it."""
    model: Any = tiny_bart()
    run = compiled(model)
    ids, mask = padded([9, 37], "left")
    with torch.no_grad():
        encoded = model.get_encoder()(ids, attention_mask=mask, return_dict=True)
    more = {"attention_mask": mask, "num_return_sequences": 2}
    most = BYTES_PER_TOKEN * 2 * (9 + 37 + 2 * 8)
    with count_compilations() as compilations:
        for given in ({"inputs": ids}, {"inputs": None, "encoder_outputs": encoded}):
            beams = assert_same(model, run, given.pop("inputs"), 8, num_beams=2, **given, **more)
            report = kvcompile.memory_report(beams.cache)
            assert report.materializations == {}
            assert report.stored <= most  # beams share the pages of their common past
        samples = []
        for sampler in (model, run):
            torch.manual_seed(3)
            samples.append(sampler.generate(ids, **settings(8, **more) | {"do_sample": True}))
        assert samples[1].sequences.tolist() == samples[0].sequences.tolist()
        assert_paged(samples[1].cache, most)
    assert compilations.count == 3


def test_static_caches_of_other_lengths() -> None:
    """A prompt that fills its buffer needs no mask; from the second length on sizes are symbols."""
    model = tiny_bart()
    run = compiled(model)
    counts = []
    for length in (20, 33, 50):
        with count_compilations() as compilations:
            result = assert_same(model, run, prompt(length), 8, cache_implementation="static")
        assert_paged(result.cache, BYTES_PER_TOKEN * (length + 8))
        counts.append(compilations.count)
    assert counts == [2, 2, 0]


def test_whisper() -> None:
    """Speech; a second recording compiles nothing."""
    model: Any = tiny_whisper()
    run = compiled(model)
    for seed, compilations in ((0, 3), (1, 0)):
        arguments = {"max_new_tokens": 8, "min_new_tokens": 8}
        expected = model.generate(frames(seed=seed), **arguments)
        # Whisper's generate makes a dense copy of a cache that it returns.
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with count_compilations() as counted:
            tokens = run.generate(frames(seed=seed), cache=cache, **arguments)
        assert tokens.tolist() == expected.tolist()
        assert counted.count == compilations
        assert_paged(cache, BYTES_PER_TOKEN * (FRAMES + 8))


def test_int4() -> None:
    """A batch and its rows alone read the same quantized pages, with beams too."""
    model: Any = tiny_t5()
    run = compiled(model, kv_cache_dtype="int4", page_size=32, residual_length=32)
    ids, mask = padded([180, 100], "left")
    more = settings(8, num_beams=2, num_return_sequences=2, output_logits=True)
    batch = run.generate(ids, attention_mask=mask, **more)
    assert kvcompile.memory_report(batch.cache).materializations == {}
    for row in range(2):
        again = torch.tensor([row, row])  # as many rows: no other graphs
        alone = run.generate(ids[again], attention_mask=mask[again], **more)
        mine = batch.sequences[2 * row : 2 * row + 2].tolist()
        assert alone.sequences.tolist() == mine * 2
    exact = model.generate(ids, attention_mask=mask, **more)
    assert not torch.equal(batch.logits[1], exact.logits[1])
    cross = kvcompile.memory_report(batch.cache.cross_attention_cache)
    # Sinks and ring are 4 and at least 32 tokens; what is between them fills pages.
    pages = [(180 - 36) // 32, (100 - 36) // 32]
    in_window = 280 - 32 * sum(pages)
    assert cross.window == BYTES_PER_TOKEN * in_window
