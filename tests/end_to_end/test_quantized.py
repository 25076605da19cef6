"""Generation from quantized pages, against the unmodified model on a cache that is decoded."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen2ForCausalLM, StaticCache

import kvcompile
from kvcompile.codegen.cpu.isa import detect_isa, has_integer_dot
from kvcompile.codegen.rotary import Rotary, rotary_table
from kvcompile.reports import collect
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.report import handles_in
from tests.support import tiny_models
from tests.support.compiled import compiled, count_compilations, exact_bytes, settings
from tests.support.emulated_cache import EmulatedCache, layout_of
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

EXACTLY = {"compute_dtype": "fp32"}
"""Decoding in registers is exact to rounding: whole generations must be the oracle's."""

BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "int1": 1, "fp8_e5m2": 8}


def options(k: str, v: str, **more: Any) -> dict[str, Any]:
    return {"k_cache_dtype": k, "v_cache_dtype": v, **EXACTLY, **more}


def assert_compressed(cache: object, model: PreTrainedModel, tokens: int, most: float) -> None:
    """Assert that pages are quantized: by their bytes, and that nothing was made dense."""
    report = kvcompile.memory_report(cache)
    assert report.layers
    assert not report.materializations
    assert report.stored > report.window > 0
    assert report.stored <= most * exact_bytes(model, tokens)


def first_layer(cache: DynamicCache) -> tuple[KVTensor, KVTensor, int]:
    """Return K and V of the first layer, and how many of its pages are quantized."""
    k, v = list(handles_in(cache.layers[0]))
    assert isinstance(k.store, QuantizedStore)
    return k, v, int(k.store.quantized[0])


def generated(model: PreTrainedModel, run: Any, ids: torch.Tensor, new: int, **more: Any) -> Any:
    return run.generate(ids, attention_mask=torch.ones_like(ids), **settings(new, **more))


@pytest.mark.parametrize(
    ("k", "v"),
    [("int8", "int8"), ("int4", "int4"), ("int4", "int2"), ("int3", "int1"), ("fp8_e5m2", "bf16")],
)
def test_the_same_tokens_as_attention_over_the_decoded_cache(k: str, v: str) -> None:
    """Through pages that are quantized by the prefill and others quantized while decoding."""
    model = tiny_llama()
    ids = prompt(150)
    oracle = EmulatedCache(model.config, layout_of(model.config, k, v))
    expected = generated(model, model, ids, 130, past_key_values=oracle)
    run = compiled(model, **options(k, v))
    found = generated(model, run, ids, 130)
    assert found.sequences.tolist() == expected.sequences.tolist()
    exact = model.generate(ids, attention_mask=torch.ones_like(ids), **settings(130))
    if k != "int8":
        # What a wider format would give is another text: the formats do make a difference.
        assert found.sequences.tolist() != exact.sequences.tolist()
    most = 0.95 if v == "bf16" else 0.45 + (BITS[k] + BITS[v]) / 64
    assert_compressed(found.past_key_values, model, 279, most)


@pytest.mark.skipif(not has_integer_dot(detect_isa()), reason="no integer products")
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2"])
def test_integer_products_are_close_to_decoding(dtype: str) -> None:
    model = tiny_llama(head_dim=64, q_heads=6, kv_heads=2)
    ids, more = prompt(300), prompt(40, seed=1)
    logits, kernels = {}, {}
    for compute in ("fp32", "int8"):
        run = compiled(model, kv_cache_dtype=dtype, compute_dtype=compute)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), collect() as graphs:
            run(ids, past_key_values=cache)
            steps = [run(more[:, i : i + 4], past_key_values=cache).logits for i in range(0, 40, 4)]
        logits[compute] = torch.cat(steps, 1)
        kernels[compute] = graphs[-1].sites[0].kernels[-1]
        assert_compressed(cache, model, 340, 0.8)
    assert kernels["fp32"].endswith("_xfp32")
    assert kernels["int8"].endswith("_xint8")
    error = (logits["fp32"] - logits["int8"]).abs().mean() / logits["fp32"].std()
    assert 0 < error < 0.05


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_padded_batch_reads_what_each_row_would_read_alone(cache: str) -> None:
    """Padding enters no page, so the pages of a row are the same in any batch."""
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    lengths = [200, 131, 150]
    ids = torch.zeros(3, 200, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 200 - length :] = prompt(length, seed=row)[0]
        mask[row, 200 - length :] = 1
    together = run.generate(
        ids, attention_mask=mask, **settings(80, cache_implementation=cache)
    ).sequences[:, 200:]
    for row, length in enumerate(lengths):
        oracle = EmulatedCache(model.config, layout_of(model.config, "int4", "int4"))
        alone = generated(model, model, prompt(length, seed=row), 80, past_key_values=oracle)
        assert together[row].tolist() == alone.sequences[0, length:].tolist()


def test_static_and_dynamic_caches_give_the_same_tokens() -> None:
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    ids = prompt(140)
    dynamic = generated(model, run, ids, 100)
    static = generated(model, run, ids, 100, cache_implementation="static")
    assert dynamic.sequences.tolist() == static.sequences.tolist()
    assert_compressed(dynamic.past_key_values, model, 239, 0.75)


def test_paths_that_read_the_same_cache_give_the_same_tokens() -> None:
    """A copied cache, rows of a batch, and beams that all take the same continuation."""
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    ids, more = prompt(200), prompt(70, seed=3)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        run(ids, past_key_values=cache)
        copies = copy.deepcopy(cache)
        wide = copy.deepcopy(cache)
        wide.batch_repeat_interleave(3)
        wide.reorder_cache(torch.LongTensor([2, 0, 1]))
        one, two, three = [], [], []
        for i in range(70):
            token = more[:, i : i + 1]
            one.append(run(token, past_key_values=cache).logits)
            two.append(run(token, past_key_values=copies).logits)
            three.append(run(token.expand(3, 1), past_key_values=wide).logits)
    assert torch.equal(torch.cat(one), torch.cat(two))
    for row in torch.stack(three).unbind(1):
        assert torch.allclose(row[:, 0], torch.cat(one)[:, 0], atol=1e-4)
    assert_compressed(wide, model, 3 * 270, 0.75)


def test_crop_within_the_ring_changes_no_page() -> None:
    """Speculative decoding: a few tokens are written, rejected, and others take their place."""
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    ids, more = prompt(200), prompt(90, seed=4)
    straight, cropped = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (straight, cropped):
            run(ids, past_key_values=cache)
        for i in range(0, 90, 3):
            right = more[:, i : i + 3].contiguous()  # strides are sizes to Dynamo
            run(torch.cat([right[:, :1], prompt(5, seed=i)], 1), past_key_values=cropped)
            cropped.crop(-6)
            run(right, past_key_values=straight)
            run(right, past_key_values=cropped)
    # K and V of the first layer follow from the tokens alone: every bit of them is the same.
    (k, v, pages), others = first_layer(straight), first_layer(cropped)
    assert pages == others[2] > 0
    assert_compressed(cropped, model, 290, 0.75)
    assert torch.equal(k + 0, others[0] + 0)
    assert torch.equal(v + 0, others[1] + 0)


def test_crop_into_pages_goes_on_with_what_they_decode_to() -> None:
    model = tiny_llama()
    run = compiled(model, **options("int8", "int8"))
    ids, more = prompt(300), prompt(20, seed=5)
    cache, short = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        run(ids, past_key_values=cache)
        cache.crop(-189)
        assert cache.get_seq_length() == 111
        found = run(more, past_key_values=cache).logits
        run(ids[:, :111], past_key_values=short)
        expected = run(more, past_key_values=short).logits
    error = (found - expected).abs().max() / expected.std()
    assert 0 < error < 0.25


def test_chunks_of_a_prompt_are_close_to_the_prompt_at_once() -> None:
    model = tiny_llama()
    run = compiled(model, **options("int8", "int8"))
    ids, more = prompt(400), prompt(8, seed=6)
    last = []
    for chunk in (400, 100):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in ids.split(chunk, 1):
                run(part, past_key_values=cache)
            last.append(run(more, past_key_values=cache).logits.log_softmax(-1))
        assert_compressed(cache, model, 408, 0.6)
    kl = (last[0].exp() * (last[0] - last[1])).sum(-1).mean()
    assert kl < 0.01


def test_a_chunk_of_a_prompt_sees_what_was_stored_before_it_and_itself_exactly() -> None:
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    oracle = EmulatedCache(model.config, layout_of(model.config, "int4", "int4"))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (*prompt(520).split(130, 1), prompt(3, seed=7)):
            found = run(part, past_key_values=cache).logits
            expected = model(part, past_key_values=oracle).logits
            # A number at the border of two codes may take either: 1e-4 allows for some.
            assert (found - expected).abs().max() <= 1e-4 * expected.std()
    assert_compressed(cache, model, 523, 0.6)


def test_layers_can_be_stored_otherwise() -> None:
    model = tiny_llama(layers=3)
    run = compiled(
        model,
        kv_cache_dtype={"default": "int4", 1: "int8"},
        kv_cache_dtype_skip_layers=[-1],
        **EXACTLY,
    )
    with collect() as graphs:
        generated(model, run, prompt(80), 4)
    formats = [[site.format for site in graph.sites] for graph in graphs]
    assert formats == [["int4/int4", "int8/int8", "fp32/fp32"]] * 2


def test_a_model_with_biases_on_k() -> None:
    """Every family goes through the same oracle; Qwen2 has biases, GPT-2 no rotary positions."""
    for build in (tiny_models.tiny_qwen2, tiny_models.tiny_gpt2):
        model = build()
        ids = prompt(150)
        layout, angles = layout_of(model.config, "int8", "int8"), None
        if isinstance(model, Qwen2ForCausalLM):
            layout = replace(layout, rotary=Rotary(layout.head_dim_qk))
            angles = rotary_table(model.model.rotary_emb.inv_freq, layout.page_size)
        oracle = EmulatedCache(model.config, layout, rotary_table=angles)
        expected = generated(model, model, ids, 60, past_key_values=oracle)
        run = compiled(model, **options("int8", "int8"))
        found = generated(model, run, ids, 60)
        assert found.sequences.tolist() == expected.sequences.tolist()


def test_two_compilations() -> None:
    model = tiny_llama()
    run = compiled(model, kv_cache_dtype="int4")
    with count_compilations() as first:
        generated(model, run, prompt(100), 150)
        assert first.count == 2
        generated(model, run, prompt(100, seed=1), 150)
        assert first.count == 2


def test_a_static_cache_that_is_filled_anew_sees_its_prompt_exactly() -> None:
    model = tiny_llama()
    run = compiled(model, **options("int4", "int4"))
    cache = StaticCache(config=model.config, max_cache_len=256)
    ids = prompt(200)
    with torch.no_grad():
        for _ in range(2):
            found = run(ids, past_key_values=cache).logits
            expected = model(ids).logits
            assert (found - expected).abs().max() <= 1e-4 * expected.std()
            run(prompt(1), past_key_values=cache)
            cache.reset()
