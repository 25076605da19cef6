"""Models with soft caps, sink logits and biases: the unmodified model's tokens, from pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvcompile
from tests.end_to_end.test_generate import left_padded
from tests.support.compiled import (
    assert_same_generation,
    compiled,
    exact_bytes,
    settings,
)
from tests.support.tiny_models import prompt
from tests.support.variant_models import (
    tiny_bloom,
    tiny_falcon,
    tiny_gemma2,
    tiny_gpt_oss,
    tiny_mpt,
)

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": tiny_gemma2,
    "gpt-oss": tiny_gpt_oss,
    "bloom": tiny_bloom,
    "mpt": tiny_mpt,
    "falcon": tiny_falcon,
}
SEVERAL = ["gemma2", "gpt-oss", "bloom"]


@pytest.mark.parametrize(
    ("name", "cache"), [*((name, "dynamic") for name in MODELS), *((n, "static") for n in SEVERAL)]
)
def test_padded_batches(name: str, cache: str) -> None:
    """With static caches MPT breaks Dynamo's graph, and Falcon's ALiBi fails unmodified."""
    model = MODELS[name]()
    ids, mask = left_padded([9, 33, 20])
    more: dict[str, Any] = {
        "attention_mask": mask,
        "cache_implementation": cache,
        "output_logits": True,
    }
    unmodified: Any = model
    expected = unmodified.generate(ids, **settings(12, **more))
    result = assert_same_generation(model, ids, 12, expected=expected.sequences, **more)
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_int4() -> None:
    model = tiny_gpt_oss()
    run: Any = compiled(model, kv_cache_dtype="int4", page_size=16, q_group_size=16)
    result = run.generate(prompt(150), **settings(8))
    report = kvcompile.memory_report(result.past_key_values)
    assert report.materializations == {}
    assert report.stored < 0.7 * exact_bytes(model, 157)
