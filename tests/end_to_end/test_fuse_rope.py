"""Models whose q and k turn inside the kernels, against the same models that turn them before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import kvcompile
from kvcompile.codegen.rotary import Rotary
from kvcompile.reports import collect
from tests.end_to_end.test_generate import left_padded
from tests.support.compiled import assert_same_generation, compiled
from tests.support.tiny_models import prompt, tiny_gptj, tiny_llama, tiny_neox

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

Build = Callable[..., PreTrainedModel]
MODELS: dict[str, tuple[Build, Rotary]] = {
    "llama": (tiny_llama, Rotary(16)),
    "gptj": (tiny_gptj, Rotary(8, interleaved=True)),
    "neox": (tiny_neox, Rotary(4)),
}
FORMATS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"kv_cache_dtype": "int8", "residual_length": 16, "page_size": 32},
}
CASES = [
    ("llama", "exact", "dynamic"),
    ("llama", "int8", "static"),
    ("gptj", "exact", "static"),
    ("gptj", "int8", "dynamic"),
    ("neox", "exact", "dynamic"),
    ("neox", "int8", "static"),
]
"""Each model with each format, and both caches with each model and each format."""

LENGTH = 40
ONE_BY_ONE = (LENGTH, *[1] * 9)
PARTS = (*ONE_BY_ONE, 5, 5, *[1] * 11)
"""Tokens that are fed at once."""


def steps(
    model: PreTrainedModel,
    cache: str,
    rotary: Rotary | None,
    parts: Sequence[int] = PARTS,
    **options: Any,
) -> torch.Tensor:
    """Feed a prompt and what follows it in parts; return the logits after the prompt.

    Args:
        model: The model.
        cache: Kind of cache.
        rotary: What must turn inside, in each layer, or None if nothing must.
        parts: Tokens of the prompt and of each step after it.
        **options: Options of the backend.
    """
    ids, mask = left_padded([sum(parts), sum(parts) - 7])
    run = compiled(model, fuse_rope=rotary is not None, **options)
    past: Any = DynamicCache(config=model.config)
    if cache == "static":
        past = StaticCache(config=model.config, max_cache_len=96)
    logits, first = [], 0
    with torch.no_grad(), collect() as graphs:
        for new in parts:
            end = first + new
            # Strides are sizes to Dynamo, which would compile anew where a slice is all there is.
            now, seen = ids[:, first:end].contiguous(), mask[:, :end].contiguous()
            out = run(now, attention_mask=seen, past_key_values=past)
            past = out.past_key_values
            logits.append(out.logits)
            first = end
    assert kvcompile.memory_report(past).materializations == {}
    symbols = {symbol for graph in graphs for site in graph.sites for symbol in site.kernels}
    attends = {symbol for symbol in symbols if symbol.startswith("attend")}
    assert attends
    if rotary is None:
        assert not any("rope" in symbol for symbol in symbols)
    else:
        assert all(symbol.endswith(f"_rope{rotary.size}") for symbol in attends)
    return torch.cat(logits[1:], 1)


@pytest.mark.parametrize(("name", "kind", "cache"), CASES)
def test_fp32_gives_the_same_logits(name: str, kind: str, cache: str) -> None:
    """Bit by bit: the kernels add the products that operators add, in fp32, each rounded.

    In one layer; two turn by the same angles in the test of tokens below.
    """
    build, rotary = MODELS[name]
    model = build(layers=1)
    inside = steps(model, cache, rotary, **FORMATS[kind])
    before = steps(model, cache, None, **FORMATS[kind])
    assert torch.equal(inside, before)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_as_the_unmodified_model(name: str) -> None:
    build, _ = MODELS[name]
    assert_same_generation(build(), prompt(20), 30, options={"fuse_rope": True})


def test_inductor_rounds_where_the_kernels_do() -> None:
    """In bf16, where eager operators round every product: bit by bit.

    GPT-J looks its angles up. Models that compute theirs round them to bf16, which Inductor leaves
    out where it turns q and k in the same kernel.
    """
    build, rotary = MODELS["gptj"]
    model = build(dtype=torch.bfloat16, layers=1)
    inside, before = (
        steps(model, "dynamic", turns, ONE_BY_ONE, inner_backend="inductor")
        for turns in (rotary, None)
    )
    assert torch.equal(inside, before)
