"""A trained model of 135 million parameters: the tokens of the unmodified one, from pages."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcompile.footprint import footprint
from tests.support.compiled import assert_same_generation, compiled
from tests.support.smollm2 import load_model, load_tokenizer, long_prompt

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo"),
]

INDUCTOR = {"inner_backend": "inductor"}
NEW_TOKENS = 256
PROMPTS = [
    "The with statement is used to wrap the execution of a block with methods defined by",
    "Why is the sky blue?",
    "In Python, a generator is",
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(torch.float32)


def test_one_sequence(model: PreTrainedModel) -> None:
    """Through Inductor from a cache that grows; the same tokens from a static one."""
    ids = long_prompt(200)
    found = assert_same_generation(model, ids, NEW_TOKENS, options=INDUCTOR)
    given = {"expected": found.sequences, "cache_implementation": "static"}
    assert_same_generation(model, ids, NEW_TOKENS, **given)


def test_left_padded_batch(model: PreTrainedModel) -> None:
    batch = load_tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    found = assert_same_generation(model, ids, 96, attention_mask=mask)
    expected = found.sequences[:, : ids.shape[1] + 48]
    given = {"attention_mask": mask, "cache_implementation": "static"}
    assert_same_generation(model, ids, 48, expected=expected, **given)


def test_bfloat16_logits() -> None:
    """Compiled errs no more than unmodified bfloat16 does against float32 with equal weights.

    Both run the same bfloat16 layers and differ only in the order of sums, so their errors are of
    one size: a quarter more in the mean square allows for chance over 24 x 49152 logits. Ten layers
    of the thirty show it.
    """
    model = load_model(torch.bfloat16, num_hidden_layers=10)
    eager = teacher_forced(model, model)
    paged = teacher_forced(compiled(model, **INDUCTOR), model)
    exact = teacher_forced(model.float(), model)
    eager_error = (eager - exact).square().mean()
    assert (paged - exact).square().mean() <= 1.25 * eager_error
    assert (paged - eager).square().mean() <= 2 * 1.25 * eager_error


def test_a_prompt_at_once_in_chunks_or_cropped(model: PreTrainedModel) -> None:
    """A prompt fed in chunks reads the quantized cache, fed at once it reads itself exactly.

    Cropped and fed once more, it goes on from what the pages that were cut decode to.
    """
    run = compiled(model, kv_cache_dtype="int4")
    length, first, new, gate = 640, 128, 12, 0.01
    ids, caches = long_prompt(length + new), []
    logits = []
    for chunk in (length, first):
        cache = DynamicCache(config=model.config)
        parts = [*ids[:, :length].split(chunk, dim=1), *ids[:, length:].split(1, dim=1)]
        with torch.no_grad():
            steps = [run(of_any_length(part), cache=cache).logits for part in parts]
        logits.append(torch.cat(steps, dim=1)[0, first:].double().log_softmax(-1))
        caches.append(cache)
    for cache in caches:
        taken = footprint(cache)
        assert taken.dense_states == 0
        assert taken.bits_in_pages <= 4.6
    with torch.no_grad():
        caches[1].crop(-(new + 200))  # into pages that are quantized
        parts = [ids[:, length - 200 : length], *ids[:, length:].split(1, dim=1)]
        steps = [run(of_any_length(part), cache=caches[1]).logits for part in parts]
    cropped = torch.cat(steps[1:], dim=1)[0].double().log_softmax(-1)
    at_once, chunked = logits
    steps_at_once = at_once[-new:]
    assert 0 < (steps_at_once.exp() * (steps_at_once - cropped)).sum(-1).mean() <= gate
    divergence = (at_once.exp() * (at_once - chunked)).sum(-1)
    assert 0 < divergence[:-new].mean() <= gate
    assert 0 < divergence[-new:].mean() <= gate


def of_any_length(ids: torch.Tensor) -> torch.Tensor:
    """Return tokens whose number is a symbol to Dynamo at once, unless there is one."""
    if ids.shape[1] > 1:
        torch._dynamo.maybe_mark_dynamic(ids, 1)
    return ids


@torch.no_grad()
def teacher_forced(run: Any, model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of 24 tokens after a prompt of 200, decoded one by one, float32."""
    ids, cache = long_prompt(224), DynamicCache(config=model.config)
    run(ids[:, :200], cache=cache)
    steps = [run(ids[:, i : i + 1], cache=cache).logits for i in range(200, 224)]
    return torch.cat(steps, dim=1).float()
