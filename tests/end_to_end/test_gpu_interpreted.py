"""Whole models on GPU kernels, in Triton's interpreter: the CPU's runtime, other kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

pytest.importorskip("triton")

import kvcompile
from kvcompile.reports import collect
from kvcompile.runtime import launch
from kvcompile.runtime.handle import KVTensor
from tests.end_to_end.test_generate import left_padded
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.compiled import assert_same_generation, compiled, settings
from tests.support.tiny_models import prompt, tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox
from tests.support.variant_models import tiny_gemma2, tiny_gpt_oss

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVCOMPILE_TARGET", "gpu")
    launch.forget_launchers()
    yield
    launch.forget_launchers()


def layouts(cache: Any) -> set[str]:
    """Return the orders in which a cache's records lie."""
    handles = [layer.keys for layer in cache.layers]
    assert all(isinstance(handle, KVTensor) for handle in handles)
    return {handle.store.layout.order for handle in handles}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [[30], [20, 30]])
def test_exact_pages_give_the_same_tokens(cache: str, lengths: list[int]) -> None:
    """The second page of 32 tokens begins while decoding."""
    ids, mask = left_padded(lengths)
    model = tiny_llama(dtype=torch.float32)
    result = assert_same_generation(model, ids, 5, attention_mask=mask, cache_implementation=cache)
    assert layouts(result.past_key_values) == {"gpu16"}


@pytest.mark.parametrize(
    ("build", "rope"), [(tiny_llama, "rope16"), (tiny_gptj, "rope8i"), (tiny_neox, "rope4")]
)
def test_q_and_k_turn_in_the_kernels(build: Callable[[], PreTrainedModel], rope: str) -> None:
    with collect() as graphs:
        assert_same_generation(build(), prompt(14), 5)
    symbols = [symbol for site in graphs[-1].sites for symbol in site.kernels]
    assert symbols
    assert all(symbol.endswith(rope) for symbol in symbols)


@pytest.mark.parametrize(("build", "does"), [(tiny_gemma2, "cap2"), (tiny_gpt_oss, "sink")])
def test_caps_and_sinks(build: Callable[[], PreTrainedModel], does: str) -> None:
    with collect() as graphs:
        assert_same_generation(build(), prompt(14), 3)
    symbols = [symbol for site in graphs[-1].sites for symbol in site.kernels]
    assert any(f"_{does}" in symbol for symbol in symbols)


def test_beams_and_crops_are_edits_of_tables() -> None:
    model = tiny_gpt2()
    assert_same_beams(model, prompt(9))


def assert_same_beams(model: Any, ids: torch.Tensor) -> None:
    arguments = settings(6, num_beams=2, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, **arguments)
    result = compiled(model).generate(ids, **arguments)
    assert result.sequences.tolist() == expected.sequences.tolist()
    assert layouts(result.past_key_values) == {"gpu16"}


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantized_cache_gives_the_logits_of_the_processors_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same codes, in another order, multiplied in fp32: only sums differ.

    The page is quantized by the third step.
    """
    model, ids = tiny_llama(head_dim=32, layers=1), prompt(86)
    options = {
        "kv_cache_dtype": name,
        "page_size": 64,
        "residual_length": 16,
        "compute_dtype": "fp32",
    }
    found = []
    for target in ("gpu", "cpu"):
        monkeypatch.setenv("KVCOMPILE_TARGET", target)
        launch.forget_launchers()
        run = compiled(model, **options)
        with torch.no_grad():
            cache = run(ids[:, :81]).past_key_values
            logits = [run(ids[:, t : t + 1], past_key_values=cache).logits for t in range(81, 86)]
        assert cache.layers[0].keys.store.quantized.tolist() == [1]
        assert layouts(cache) == {f"{target}16"}
        assert kvcompile.memory_report(cache).materializations == {}
        found.append(torch.cat(logits, 1))
    exact = model(ids).logits[:, 81:]
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()
    assert (found[0] - exact).abs().max() > 1e-3 * exact.abs().max(), "nothing was quantized"


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_a_chunk_of_tokens_attends_to_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dense copy of the past is made; the chunk is exact to itself, and quantized afterwards."""
    model, ids = tiny_llama(head_dim=32, layers=1), prompt(76)
    options = {
        "kv_cache_dtype": name,
        "page_size": 32,
        "residual_length": 16,
        "compute_dtype": "fp32",
    }
    found, pages = [], []
    for target in ("gpu", "cpu"):
        monkeypatch.setenv("KVCOMPILE_TARGET", target)
        launch.forget_launchers()
        with monkeypatch.context() as patched:
            if target == "gpu":
                patched.setattr(launch, "gather", not_to_be_called)
            run = compiled(model, **options)
            with torch.no_grad():
                cache = run(ids[:, :50]).past_key_values
                logits = [run(ids[:, 50:75], past_key_values=cache).logits]
                logits.append(run(ids[:, 75:], past_key_values=cache).logits)
        assert layouts(cache) == {f"{target}16"}
        found.append(torch.cat(logits, 1))
        if name == "int8":
            pages.append([layer.keys.store.quantized.tolist() for layer in cache.layers])
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()
    if name == "int8":
        assert pages == [[[(76 - 4 - 16) // 32]]] * 2


def not_to_be_called(*_: object) -> torch.Tensor:
    raise AssertionError("the past was made dense")


def test_inductor_around_recorded_steps() -> None:
    """`mode` reaches Inductor, and steps around its code are recorded by us."""
    model: Any = tiny_llama(layers=1)
    ids = prompt(20)
    arguments = settings(4, cache_implementation="static")
    expected = model.generate(ids, **arguments).sequences
    counters.clear()
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="kvcompile", mode="reduce-overhead")
    result = run.generate(ids, **arguments)
    assert result.sequences.tolist() == expected.tolist()
    assert layouts(result.past_key_values) == {"gpu16"}
    assert counters["kvcompile"]["recorded steps"] == 1
