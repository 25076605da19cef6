"""Products of decode steps through their own kernel: right, and never with old weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

import kvcompile
from kvcompile.passes.ir.remarks import forget_notices, notices
from kvcompile.reports import collect
from kvcompile.runtime import launch
from tests.support.compiled import assert_same_generation, compiled
from tests.support.tiny_models import VOCAB_SIZE, prompt, tiny_llama, tiny_qwen2

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]


def wide_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a Llama of 512 channels, whose weights are large enough for the kernel."""
    return tiny_llama(q_heads=32, kv_heads=8, dtype=dtype)


def rewritten(graphs: list[Any]) -> list[int]:
    """Return how many products were rewritten in each graph that has any."""
    remarks = [r for graph in graphs for r in graph.remarks if r.code == "KVC410"]
    counts = [int(remark.reason.split(";")[0].rsplit(" ", 1)[1]) for remark in remarks]
    return [count for count in counts if count]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_tokens(cache: str, batch: int) -> None:
    ids = torch.cat([prompt(20, seed=row) for row in range(batch)])
    with collect() as graphs:
        assert_same_generation(wide_llama(), ids, 24, cache_implementation=cache)
    # q, k, v, o of two layers and the head; of the prompt, only its last token goes to the head.
    assert rewritten(graphs) == [1, 9]


def test_with_inductor() -> None:
    with collect() as graphs:
        model = tiny_llama(q_heads=32, kv_heads=8, layers=1)
        assert_same_generation(model, prompt(20), 24, options={"inner_backend": "inductor"})
    assert rewritten(graphs) == [1, 5]


def test_biases() -> None:
    model = tiny_qwen2()
    wide = torch.nn.Linear(model.config.hidden_size, 65_536 // model.config.hidden_size)
    model.lm_head = wide.requires_grad_(False)
    with collect() as graphs:
        assert_close(decoded(compiled(model), model), decoded(model, model))
    assert rewritten(graphs) == [1]


def test_weights_that_change_after_compiling_are_seen() -> None:
    model, other = wide_llama(), tiny_llama(q_heads=32, kv_heads=8, seed=1)
    run = compiled(model)
    before = decoded(run, model)
    model.load_state_dict(other.state_dict())
    assert_close(decoded(run, model), decoded(other, other))
    with torch.no_grad():
        for weight in model.parameters():
            weight.data.mul_(1.25)  # moves neither the version of a tensor nor its address
    assert_close(decoded(run, model), decoded(model, model))
    assert not torch.allclose(decoded(run, model), before, atol=1e-2)


def test_two_models_keep_their_own_weights() -> None:
    first, second = wide_llama(), tiny_llama(q_heads=32, kv_heads=8, seed=1)
    runs = [(compiled(model), model) for model in (first, second)]
    for run, model in (*runs, *runs):
        assert_close(decoded(run, model), decoded(model, model))


def test_more_rows_than_the_graph_was_compiled_for() -> None:
    """A batch that became symbolic at 3 rows is later one of 20."""
    model = wide_llama()
    run = compiled(model)
    with collect() as graphs:
        for batch in (2, 3, 20):
            ids = torch.cat([prompt(12, seed=row) for row in range(batch)])
            assert_close(decoded(run, model, ids), decoded(model, model, ids))
    assert [graph.has_past for graph in graphs].count(True) == 2
    # The first step, both prompts at once later on, and steps of any batch.
    assert rewritten(graphs) == [9, 9, 9]


def test_the_option_leaves_products_to_the_inner_backend() -> None:
    with collect() as graphs:
        assert_same_generation(wide_llama(), prompt(20), 8, options={"gemv": False})
    assert rewritten(graphs) == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CPU_KERNELS", "reference")
    launch.forget_launchers()
    forget_notices()
    try:
        assert_same_generation(wide_llama(), prompt(20), 4)
    finally:
        launch.forget_launchers()
    assert "KVC501" in [remark.code for remark in notices()]


def test_explain_names_the_kernel() -> None:
    text = str(kvcompile.explain(wide_llama(), prompt(20)))
    assert "read their weights in order: 9" in text


@torch.no_grad()
def decoded(run: Any, model: PreTrainedModel, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of two given tokens after a prompt."""
    ids = prompt(20) if ids is None else ids
    cache = DynamicCache(config=copy.deepcopy(model.config))
    run(ids, past_key_values=cache)
    steps = [run((ids[:, i : i + 1] + 1) % VOCAB_SIZE, past_key_values=cache) for i in (0, 1)]
    return torch.cat([step.logits for step in steps], 1)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality but for the order of sums in float32."""
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
