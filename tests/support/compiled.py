"""Run a model twice, unmodified and compiled, and compare what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import kvcompile

FAST = {"inner_backend": "eager"}
"""Options for tests of tokens: Inductor's seconds per graph prove nothing about a cache."""


@dataclass
class Compilations:
    """How many graphs Dynamo compiled inside the block, and after it."""

    before: int

    @property
    def count(self) -> int:
        return int(counters["stats"]["unique_graphs"]) - self.before


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count Dynamo's compilations from here on."""
    yield Compilations(int(counters["stats"]["unique_graphs"]))


def compiled(model: Any, **options: Any) -> Any:
    """Return the model compiled as a user compiles it, by default without Inductor."""
    torch._dynamo.reset()
    return torch.compile(model, backend="kvcompile", options=FAST | options)


def settings(new_tokens: int, **more: Any) -> dict[str, Any]:
    """Return arguments of a greedy `generate` of exactly `new_tokens` that returns its cache."""
    return {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        **more,
    }


def exact_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes that K and V of `tokens` tokens take in all layers, in the model's dtype.

    Args:
        model: A transformers decoder.
        tokens: Stored tokens, summed over the rows of the batch.
    """
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    return int(per_token * tokens)


def assert_paged(cache: object, expected_bytes: int) -> None:
    """Assert that a cache lies in pages, all of it, and that no step made it dense.

    Args:
        cache: What the compiled model returned.
        expected_bytes: Exact size of the stored tokens.
    """
    report = kvcompile.memory_report(cache)
    assert report.stored == expected_bytes
    assert report.allocated >= expected_bytes
    assert report.materializations == {}


def assert_same_generation(
    model: PreTrainedModel,
    ids: torch.Tensor,
    new_tokens: int,
    *,
    options: dict[str, Any] | None = None,
    run: Any = None,
    expected: torch.Tensor | None = None,
    **more: Any,
) -> Any:
    """Assert that the compiled model generates the unmodified model's tokens, from pages.

    Args:
        model: A transformers decoder.
        ids: Prompts, int64 [B, S]; every token counts as visible unless a mask is given.
        new_tokens: How many tokens to generate.
        options: Options of the backend.
        run: The compiled model, to compile it once for several calls; else it is compiled anew.
        expected: What the unmodified model generates, int64 [B, S + new_tokens], where that is
            known already.
        **more: Further arguments of `generate`.

    Returns:
        What the compiled model's `generate` returned.
    """
    mask = more.pop("attention_mask", torch.ones_like(ids))
    arguments = settings(new_tokens, attention_mask=mask, **more)
    if expected is None:
        unmodified: Any = model
        expected = unmodified.generate(ids, **arguments).sequences
    if run is None:
        run = compiled(model, **(options or {}))
    result = run.generate(ids, **arguments)
    assert result.sequences.tolist() == expected.tolist()
    # The last token is returned, never fed back: it is not in the cache.
    stored = int(mask.sum()) + len(ids) * (new_tokens - 1)
    assert_paged(result.cache, exact_bytes(model, stored))
    return result
