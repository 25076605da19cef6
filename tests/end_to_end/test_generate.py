"""`generate` of unmodified transformers models: the same tokens, from pages."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.support import tiny_models
from tests.support.compiled import assert_same_generation, compiled
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

CACHES = pytest.mark.parametrize("cache", ["dynamic", "static"])


def left_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of several lengths, padded on the left, and their mask, both [B, longest]."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=row)[0]
        mask[row, width - length :] = 1
    return ids, mask


@CACHES
@pytest.mark.parametrize(
    "build", [tiny_llama, tiny_models.tiny_qwen2, tiny_models.tiny_gpt2], ids=lambda f: f.__name__
)
def test_families(build: Callable[[], PreTrainedModel], cache: str) -> None:
    assert_same_generation(build(), prompt(11), 24, cache_implementation=cache)


@pytest.mark.parametrize(
    ("cache", "lengths"),
    [("dynamic", [2, 1, 15, 16, 17, 31, 32, 33, 64, 65, 200]), ("static", [2, 1, 31, 33, 64])],
    ids=["dynamic", "static"],
)
def test_prompt_lengths(lengths: list[int], cache: str) -> None:
    """Around a page of 32 tokens and a tile of 16, and through both while decoding."""
    model = tiny_llama()
    run = compiled(model)
    for length in lengths:
        assert_same_generation(model, prompt(length), 36, run=run, cache_implementation=cache)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (5, 1), (12, 2), (7, 1), (9, 1)]
)
def test_query_heads_per_kv_head(q_heads: int, kv_heads: int) -> None:
    model = tiny_llama(q_heads=q_heads, kv_heads=kv_heads, layers=1)
    assert_same_generation(model, prompt(20), 24)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 128])
def test_head_dims(head_dim: int) -> None:
    assert_same_generation(tiny_llama(head_dim=head_dim, layers=1), prompt(20), 24)


@CACHES
def test_attention_spelled_as_matmul_and_softmax(cache: str) -> None:
    model = tiny_llama(attention="eager")
    assert_same_generation(model, prompt(20), 24, cache_implementation=cache)


@CACHES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_batch(attention: str, cache: str) -> None:
    """Padding takes no page: `assert_same_generation` counts only the visible tokens' bytes."""
    model = tiny_llama(attention=attention)
    run = compiled(model)
    for lengths in ([9, 33, 20], [40, 1, 40], [32, 64, 2]):
        ids, mask = left_padded(lengths)
        assert_same_generation(
            model, ids, 24, run=run, attention_mask=mask, cache_implementation=cache
        )


@CACHES
def test_batch_without_padding(cache: str) -> None:
    assert_same_generation(tiny_llama(), prompt(20, batch=3), 24, cache_implementation=cache)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(page_size: int) -> None:
    options = {"page_size": page_size}
    assert_same_generation(tiny_llama(layers=1), prompt(100), 40, options=options)


@pytest.mark.slow
@CACHES
def test_with_inductor(cache: str) -> None:
    """The default: what is left of the graph goes to Inductor."""
    options = {"inner_backend": "inductor"}
    assert_same_generation(
        tiny_llama(layers=1), prompt(20), 40, options=options, cache_implementation=cache
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits(dtype: torch.dtype) -> None:
    """Against float32 with the same weights, compiled errs no more than unmodified plus rounding.

    Both sum the same products in another order. One unit in the last place of the largest logit is
    what the final rounding alone can add.
    """
    model = tiny_llama(dtype=dtype)
    ids = prompt(60)
    with torch.no_grad():
        eager = teacher_forced(model, model, ids)
        paged = teacher_forced(compiled(model), model, ids)
        exact = teacher_forced(model.float(), model, ids)
    rounding = exact.abs().max() * torch.finfo(dtype).eps
    assert (paged - exact).abs().max() <= 2 * (eager - exact).abs().max() + rounding
    assert (paged - exact).square().mean() <= 1.5 * (eager - exact).square().mean() + rounding**2


def teacher_forced(run: torch.nn.Module, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of every token after the first half, decoded one by one, float32."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    half = ids.shape[1] // 2
    run(ids[:, :half], cache=cache)
    steps = [run(ids[:, i : i + 1], cache=cache).logits for i in range(half, ids.shape[1])]
    return torch.cat(steps, dim=1).float()
