"""Models with soft caps, sink logits and biases: the unmodified model's tokens, from pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvcompile
from tests.end_to_end.test_generate import CACHES, left_padded
from tests.support.compiled import (
    assert_paged,
    assert_same_generation,
    compiled,
    exact_bytes,
    settings,
)
from tests.support.tiny_models import prompt
from tests.support.variant_models import tiny_gemma2, tiny_gpt_oss

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": tiny_gemma2,
    "gpt-oss": tiny_gpt_oss,
}


@CACHES
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches(name: str, cache: str) -> None:
    model = MODELS[name]()
    ids, mask = left_padded([9, 33, 20])
    more: dict[str, Any] = {"attention_mask": mask, "cache_implementation": cache}
    assert_same_generation(model, ids, 24, **more)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_many_queries(name: str) -> None:
    """More queries than kernels take attend to a dense copy, and must do the same to scores."""
    model, ids = MODELS[name](), prompt(70)
    wrapper = compiled(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    start = 0
    with torch.no_grad():
        for size in (30, 24):
            chunk = ids[:, start : start + size]
            want = model(chunk, cache=caches[0]).logits
            got = wrapper(chunk, cache=caches[1]).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            start += size
            assert_paged(caches[1], exact_bytes(model, start))


def test_sink_logits_are_read_at_run_time() -> None:
    """They are weights: what is compiled serves the model after they have changed, too."""
    model, ids = tiny_gpt_oss(), prompt(20)
    run = compiled(model)
    before = assert_same_generation(model, ids, 8, run=run)
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks.fill_(8.0)
    after = assert_same_generation(model, ids, 8, run=run)
    assert before.sequences.tolist() != after.sequences.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_int4(name: str) -> None:
    model = MODELS[name]()
    run: Any = compiled(model, kv_cache_dtype="int4", page_size=16, q_group_size=16)
    result = run.generate(prompt(150), **settings(8))
    report = kvcompile.memory_report(result.past_key_values)
    assert report.materializations == {}
    assert report.stored < 0.7 * exact_bytes(model, 157)
