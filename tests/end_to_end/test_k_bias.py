"""Keys with a bias, which rotary embedding turns: kept apart from what is quantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

import kvcompile
from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.rotary import MEANS, Rotary, rotary_table
from kvcompile.reports import collect
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.report import handles_in
from tests.support.compiled import compiled
from tests.support.rotary import gains
from tests.support.tiny_models import prompt, tiny_gpt2, tiny_llama, tiny_nanogpt, tiny_qwen2

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

TOKENS = 400


def logits(model: Any, run: Any, chunk: int = 1) -> tuple[torch.Tensor, DynamicCache]:
    """Return log-probabilities after a prompt, chunk by chunk, and the cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        run(prompt(TOKENS), past_key_values=cache)
        more = prompt(40, seed=1).split(chunk, 1)
        found = [run(part, past_key_values=cache).logits for part in more]
    return torch.cat(found, 1).log_softmax(-1), cache


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def stores(cache: DynamicCache) -> list[QuantizedStore]:
    found = {id(handle.store): handle.store for handle in handles_in(cache)}
    assert all(isinstance(store, QuantizedStore) for store in found.values())
    return [store for store in found.values() if isinstance(store, QuantizedStore)]


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_a_large_bias_does_not_matter(dtype: str) -> None:
    """Kept apart, it leaves about the error of a small one; quantized with K, many times that."""
    found = {}
    for bias, separate in ((0.1, True), (40.0, True), (40.0, False)):
        model = tiny_qwen2(k_bias=bias)
        exact, _ = logits(model, model)
        run = compiled(model, kv_cache_dtype=dtype, separate_k_bias=separate)
        other, cache = logits(model, run)
        assert not kvcompile.memory_report(cache).materializations
        assert {store.layout.rotary is not None for store in stores(cache)} == {separate}
        found[bias, separate] = divergence(exact, other)
    assert found[40.0, True] < 4 * found[0.1, True]
    assert found[40.0, False] > 5 * found[40.0, True]


def test_of_more_biases_than_a_page_keeps_the_worst_are_kept() -> None:
    """All 32 pairs of a head have one; those that are left cost something, and far less."""
    model = tiny_qwen2(k_bias=40.0, head_dim=64)
    exact, dense = logits(model, model)
    found = {}
    for separate in (True, False):
        run = compiled(model, kv_cache_dtype="int8", separate_k_bias=separate)
        other, cache = logits(model, run)
        found[separate] = divergence(exact, other)
        if separate:
            kept = [store for store in stores(cache) if store.layout.rotary is not None]
    assert found[False] > 5 * found[True]
    assert found[True] < 0.01
    # The keys of the first layer do not depend on what the cache holds.
    layer: Any = dense.layers[0]
    keys, speeds = layer.keys, model.model.rotary_emb.inv_freq
    layout, pages = kept[0].layout, kept[0].pages.rows[0]
    assert layout.rotary == Rotary(64)
    for page, number in enumerate(pages):
        tokens = slice(4 + page * 64, 4 + page * 64 + 64)
        most = gains(Rotary(64), speeds, keys[0, :, tokens]).sort(descending=True)
        means = kept[0].arena.page(number).view(2, -1)[:, layout.mean_offset : layout.v_offset]
        words = means.contiguous().view(torch.int32).view(2, MEANS, 2)
        assert bool((words[..., 1] & ~0xFFF).ne(0).all()), "no place is empty"
        for head, chosen in enumerate((words[..., 0] & 0xFFF).tolist()):
            gain = most.values[head]
            assert float(gain[MEANS - 1] / gain[MEANS]) > 1.001, "no tie"
            assert chosen == most.indices[head, :MEANS].tolist()
    assert len(pages) == 5


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama, tiny_gpt2])
def test_prefill_and_decode_agree_on_what_they_found(make: Any) -> None:
    """Else the decode graph would not know the pages, and read the cache as a dense tensor."""
    run = compiled(make(), kv_cache_dtype="int4")
    with torch.no_grad(), collect() as graphs:
        cache = run(prompt(200)).past_key_values
        begun = stores(cache)
        run(prompt(1), past_key_values=cache)
    assert [graph.has_past for graph in graphs] == [False, True]
    prefill, decode = ([r.reason for r in g.remarks if r.code == "KVC300"] for g in graphs)
    assert prefill == decode
    assert len(begun) == 2
    for store, same in zip(begun, stores(cache), strict=True):
        assert store is same
        assert store.length == 201
        assert (store.layout.rotary is not None) == (make is tiny_qwen2)
    assert not kvcompile.memory_report(cache).materializations


def test_steps_and_chunks_and_copies_agree() -> None:
    model = tiny_qwen2(k_bias=12.0)
    run = compiled(model, kv_cache_dtype="int4", compute_dtype="fp32")
    one, cache = logits(model, run)
    four, _ = logits(model, run, chunk=4)
    assert (one - four).abs().max() < 1e-3
    table = {id(store.rotary_table) for store in stores(cache)}
    assert len(table) == 1, "the layers share their angles"
    copied = copy.deepcopy(cache)
    token = prompt(1, seed=2)
    with torch.no_grad():
        first = run(token, past_key_values=cache).logits
        assert torch.equal(run(token, past_key_values=copied).logits, first)


def test_a_cut_inside_a_page_decodes_the_bias_too() -> None:
    model = tiny_qwen2(k_bias=12.0)
    run = compiled(model, kv_cache_dtype="int8")
    cache, short = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids, more = prompt(300), prompt(10, seed=3)
    with torch.no_grad():
        run(ids, past_key_values=cache)
        cache.crop(-189)
        found = run(more, past_key_values=cache).logits.log_softmax(-1)
        run(ids[:, :111], past_key_values=short)
        expected = run(more, past_key_values=short).logits.log_softmax(-1)
    assert 0 < divergence(expected, found) < 0.01


def test_explain_says_what_was_done() -> None:
    said = {}
    for name, model in (("qwen2", tiny_qwen2()), ("llama", tiny_llama()), ("own", tiny_nanogpt())):
        run = compiled(model, kv_cache_dtype="int4")
        with torch.no_grad(), collect() as graphs:
            run(prompt(100))
        remarks = [r.reason for r in graphs[-1].remarks if r.code == "KVC300"]
        assert len(remarks) == 2
        said[name] = remarks[0]
    assert "K has a bias: its mean, which turns in 16 channels, is kept apart" in said["qwen2"]
    assert "bias" not in said["llama"]
    assert "quantized as it is" in said["own"]


def test_the_report_counts_the_angles_once() -> None:
    model = tiny_qwen2()
    tables = {}
    for separate in (True, False):
        run = compiled(model, kv_cache_dtype="int4", separate_k_bias=separate)
        _, cache = logits(model, run)
        tables[separate] = kvcompile.memory_report(cache).tables
    angles = 8 * 2 * 64 * 4
    assert tables[True] - tables[False] == angles


APART: dict[str, Any] = {"inner_backend": "eager", "kv_cache_dtype": "int4"}
WITHIN: dict[str, Any] = {**APART, "separate_k_bias": False}


def test_weights_and_angles_are_those_of_the_call() -> None:
    """Two models of one architecture share a graph; each has its own frequencies."""
    found = []
    torch._dynamo.reset()
    for theta in (10000.0, 100.0):
        model: Qwen2ForCausalLM = tiny_qwen2(k_bias=12.0)
        rotary: Any = model.model.rotary_emb
        rotary.inv_freq.copy_(theta ** -(torch.arange(8) / 8))
        exact, _ = logits(model, model)
        run = torch.compile(model, backend="kvcompile", options=APART)
        other, cache = logits(model, run)
        table = stores(cache)[0].rotary_table
        assert table is not None
        found.append(table)
        within, _ = logits(model, torch.compile(model, backend="kvcompile", options=WITHIN))
        assert divergence(exact, other) < divergence(exact, within) / 2
    assert not torch.equal(found[0], found[1])


def test_rows_that_turn_by_other_angles_are_not_joined_in_pages() -> None:
    """Layers may rotate differently; their records look alike, and mean other keys."""
    rotary = Rotary(64)
    layout = RecordLayout("int8", "int8", 64, 64, 64, window=Window("fp32", 4, 64), rotary=rotary)
    arenas = Arena(layout.page_bytes(2)), Arena(layout.exact.page_bytes(2))
    tables = [rotary_table(theta ** -(torch.arange(32) / 32), 64) for theta in (1e4, 1e6)]
    handles = []
    for table in (tables[0], tables[1], tables[0]):
        store = QuantizedStore(layout, 2, torch.float32, "cpu", arenas, batch=1, rotary_table=table)
        store.append(torch.randn(1, 2, 400, 64), torch.randn(1, 2, 400, 64), 0)
        store.commit(400)
        handles.append(KVTensor.of(store, "k"))
    dense = [handle + 0 for handle in handles]
    for others, in_pages in (([0, 1], False), ([0, 2], True)):
        joined = torch.cat([handles[i] for i in others], 0)
        assert isinstance(joined, KVTensor) == in_pages
        assert torch.equal(joined + 0, torch.cat([dense[i] for i in others], 0))
