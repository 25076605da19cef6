"""Every way in which transformers generates: the unmodified model's tokens, always from pages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import kvcompile
from kvcompile.passes.ir.remarks import forget_notices
from tests.support.compiled import compiled, count_compilations, exact_bytes, settings
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

Tokens = tuple[torch.Tensor, object]
Run = Any  # a model, or the same compiled


def generated(run: Run, ids: torch.Tensor, new_tokens: int = 16, **more: Any) -> Tokens:
    """Return sequences [B, S] and the cache, with the same random numbers at every call."""
    torch.manual_seed(1)
    result = run.generate(ids, **(settings(new_tokens) | more))
    return result.sequences, result.cache


def sampling(run: Run, model: PreTrainedModel) -> Tokens:
    """Three samples of one prompt."""
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
    return generated(run, prompt(20), num_return_sequences=3, **how)


def sampled_beams(run: Run, model: PreTrainedModel) -> Tokens:
    """Beams that are drawn, two of which are returned, of a batch of two prompts."""
    ids = prompt(20, batch=2)
    return generated(run, ids, num_beams=4, do_sample=True, num_return_sequences=2)


def processed_logits(run: Run, model: PreTrainedModel) -> Tokens:
    """What looks at the tokens and scores of every step."""
    more: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    return generated(run, prompt(20), output_scores=True, output_hidden_states=True, **more)


def assisted_by_a_smaller_model(run: Run, model: PreTrainedModel) -> Tokens:
    """Its guesses are verified several at once, and cut off where they were wrong."""
    return generated(run, prompt(20), assistant_model=tiny_llama(layers=1, seed=0))


def prefill_in_chunks(run: Run, model: PreTrainedModel) -> Tokens:
    return generated(run, prompt(45), prefill_chunk_size=20)


def prefill_in_chunks_of_a_static_cache(run: Run, model: PreTrainedModel) -> Tokens:
    """Such a cache has its buffers before there is a graph: they have to be given away."""
    cache = StaticCache(config=model.config, max_cache_len=70)
    config: Any = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(1, heads, dim, model.dtype, model.device)
    if run is not model:
        assert kvcompile.adopt(cache) == ("layers.0.keys", "layers.0.values")
    return generated(run, prompt(45), prefill_chunk_size=20, cache=cache)


def embeddings(run: Run, model: PreTrainedModel) -> Tokens:
    """A prompt that never was tokens."""
    embedded = model.get_input_embeddings()(prompt(20)).detach()
    torch.manual_seed(1)
    result = run.generate(inputs_embeds=embedded, **settings(16))
    return result.sequences, result.cache


class _Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class _Long(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 30)


def streaming(run: Run, model: PreTrainedModel) -> Tokens:
    """Token by token to a listener, until a criterion says that it is enough."""
    heard = _Heard()
    more = {"streamer": heard, "stopping_criteria": [_Long()], "min_new_tokens": 0}
    sequences, cache = generated(run, prompt(20), 60, **more)
    assert sequences.shape == (1, 30)
    assert heard.tokens == [*sequences[0].tolist(), -1]
    return sequences, cache


def conversation(run: Run, model: PreTrainedModel) -> Tokens:
    """Three turns on one cache, each of which is given all that was said."""
    cache, said = DynamicCache(config=model.config), prompt(20)
    for turn in range(3):
        said, _ = generated(run, torch.cat([said, prompt(9, seed=turn)], 1), 8, cache=cache)
    return said, cache


def copied_prompt(run: Run, model: PreTrainedModel, capacity: int | None) -> Tokens:
    """One prompt, prefilled once, and many continuations of copies of its cache."""
    start = prompt(70)
    filled: DynamicCache | StaticCache = DynamicCache(config=model.config)
    if capacity is not None:
        filled = StaticCache(config=model.config, max_cache_len=capacity)
    with torch.no_grad():
        run(start, cache=filled)
    copies = [copy.deepcopy(filled) for _ in range(4)]
    ends = [torch.cat([start, prompt(3, seed=seed)], 1) for seed in range(4)]
    said = [generated(run, ids, 8, cache=own) for ids, own in zip(ends, copies, strict=True)]
    return torch.cat([sequences for sequences, _ in said]), copies


def another_batch(run: Run, model: PreTrainedModel) -> Tokens:
    """The batch grows and shrinks from one generation to the next."""
    said = [generated(run, prompt(20, batch=batch), 6) for batch in (1, 3, 2)]
    return torch.cat([sequences for sequences, _ in said]), [cache for _, cache in said]


MODES = [
    sampling,
    sampled_beams,
    processed_logits,
    assisted_by_a_smaller_model,
    prefill_in_chunks,
    prefill_in_chunks_of_a_static_cache,
    embeddings,
    streaming,
    conversation,
    another_batch,
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_mode(mode: Callable[[Run, PreTrainedModel], Tokens]) -> None:
    model = tiny_llama(layers=1)
    expected, _ = mode(model, model)
    found, cache = mode(compiled(model), model)
    assert found.tolist() == expected.tolist()
    report = kvcompile.memory_report(cache)
    assert report.materializations == {}
    assert report.dense == 0
    assert report.stored > 0


@pytest.mark.parametrize("capacity", [None, 128])
def test_a_copied_prompt_is_stored_once(capacity: int | None) -> None:
    """Pages of 32 tokens: the last one of the prompt, which continuations write to, is copied."""
    model = tiny_llama(layers=1)
    expected, _ = copied_prompt(model, model, capacity)
    found, copies = copied_prompt(compiled(model), model, capacity)
    assert found.tolist() == expected.tolist()
    report = kvcompile.memory_report(copies)
    assert report.materializations == {}
    own = 70 + 3 + 8 - 1 - 64
    assert report.stored == exact_bytes(model, 64 + 4 * own)


def test_beams_of_a_long_generation_share_what_they_have_in_common() -> None:
    """512 tokens by four beams: nothing is made dense, and the prompt is stored once."""
    model = tiny_llama(layers=1)
    arguments = settings(512, num_beams=4)
    expected = model.generate(prompt(320), **arguments).sequences
    result: Any = compiled(model).generate(prompt(320), **arguments)
    assert result.sequences.tolist() == expected.tolist()
    report = kvcompile.memory_report(result.cache)
    assert report.materializations == {}
    assert report.stored < exact_bytes(model, 320 + 4 * 512)


def test_attention_weights_are_given_by_the_model_itself() -> None:
    """They need the whole matrix of scores: such a call runs as written, and says why."""
    model = tiny_llama(attention="eager")
    forget_notices()
    ids = prompt(20)
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        found = compiled(model)(ids, output_attentions=True)
    torch.testing.assert_close(found.attentions, expected.attentions)
    assert [remark for remark in kvcompile.notices() if remark.kind == "missed"]


def test_prompt_lookup_compiles_nothing_after_a_warm_up() -> None:
    """Whatever the number of guesses, of those that are right, and of tokens in the prompt."""
    model = tiny_llama(layers=1)
    run = compiled(model)
    arguments = settings(40, prompt_lookup_num_tokens=4)

    def repeated(length: int) -> torch.Tensor:
        return torch.cat([prompt(length, seed=length)] * 3, dim=1)

    for length in (5, 9):
        run.generate(repeated(length), **arguments)
    with count_compilations() as compilations:
        for length in (6, 12, 21, 33):
            found = run.generate(repeated(length), **arguments)
            expected = model.generate(repeated(length), **arguments)
            assert found.sequences.tolist() == expected.sequences.tolist()
            assert kvcompile.memory_report(found.cache).materializations == {}
    assert compilations.count == 0
