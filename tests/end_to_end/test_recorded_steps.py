"""Decode steps that are recorded once and replayed, on an emulated CUDA graph.

The emulation does again what a graph would do again, on the same tensors, and nothing else: the
host's code runs while a step is recorded, and a read of what a device holds stops the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

pytest.importorskip("triton")

import kvcompile
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.runtime import launch
from kvcompile.runtime.errors import CacheFullError, CacheGapError
from kvcompile.runtime.mask_watch import MaskWatch
from kvcompile.runtime.step_tables import StepTables
from tests.end_to_end.test_generate import left_padded
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.compiled import compiled, settings
from tests.support.emulated_graph import EmulatedGraph, emulated_graphs
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

INT8 = {"kv_cache_dtype": "int8", "page_size": 32, "residual_length": 16, "compute_dtype": "fp32"}
CAPACITY = 80


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatedGraph]]:
    """Give the graphs that were recorded."""
    monkeypatch.setenv("KVCOMPILE_TARGET", "gpu")
    launch.forget_launchers()
    forget_notices()
    with emulated_graphs(monkeypatch) as made:
        yield made
    launch.forget_launchers()


def said() -> list[str]:
    return [remark.code for remark in kvcompile.notices()]


class Chat:
    """A model and a static cache, one token at a time."""

    def __init__(self, run: Any, config: Any, *, capacity: int = CAPACITY) -> None:
        self.run = run
        self.cache: Any = StaticCache(config=config, max_cache_len=capacity)

    def say(self, tokens: torch.Tensor, seen: int) -> torch.Tensor:
        """Return the logits of the last of some tokens [1, S], which see the first `seen`."""
        capacity = self.cache.layers[0].max_cache_len
        mask = torch.zeros(1, 1, tokens.shape[1], capacity, dtype=torch.bool)
        mask[..., :seen] = torch.ones(tokens.shape[1], seen).tril(seen - tokens.shape[1]).bool()
        with torch.no_grad():
            out = self.run(tokens, past_key_values=self.cache, attention_mask=mask)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def fill(self, tokens: torch.Tensor, prefilled: int) -> list[torch.Tensor]:
        """Prefill with the first tokens, then give the others one by one; return their logits."""
        self.say(tokens[:, :prefilled], prefilled)
        return self.tell(tokens, prefilled)

    def tell(self, tokens: torch.Tensor, first: int) -> list[torch.Tensor]:
        """Return the logits of the tokens from `first` on, given one by one."""
        return [self.say(tokens[:, t : t + 1], t + 1) for t in range(first, tokens.shape[1])]


@pytest.mark.parametrize(
    ("options", "longest"), [({"page_size": 16}, 47), (INT8, 50)], ids=["exact", "int8"]
)
def test_one_recording_serves_all_steps_and_caches(
    options: dict[str, Any], longest: int, graphs: list[EmulatedGraph]
) -> None:
    """A page begins, or is quantized, in the first replayed step; another cache has other pages."""
    model: Any = tiny_llama(head_dim=32)
    ids, mask = left_padded([40, longest])
    arguments = settings(4, attention_mask=mask, cache_implementation="static")
    unrecorded = compiled(model, **options) if options is INT8 else model
    plain = unrecorded.generate(ids, **arguments).sequences
    run = compiled(model, **options, mode="reduce-overhead")
    counters.clear()
    for _ in range(2):
        assert run.generate(ids, **arguments).sequences.tolist() == plain.tolist()
    (graph,) = graphs
    assert counters["kvcompile"]["recorded steps"] == 1
    # 3 tokens are decoded in a row; the very first step only compiles.
    assert graph.replays == 2 * 3 - 1
    assert graph.launches == 3 * model.config.num_hidden_layers, "append, attend and merge"
    assert "KVC506" not in said()


def test_a_step_that_reads_tables_of_another_step_is_noticed(
    graphs: list[EmulatedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: what kernels read comes from the tables alone."""
    model: Any = tiny_llama()
    arguments = settings(8, cache_implementation="static")
    ids = prompt(20)
    expected = model.generate(ids, **arguments).sequences
    run = compiled(model, mode="reduce-overhead")
    load, loads = StepTables.load, []

    def load_twice_only(self: StepTables, *given: Any) -> None:
        loads.append(given)
        if len(loads) <= 2:
            load(self, *given)

    monkeypatch.setattr(StepTables, "load", load_twice_only)
    monkeypatch.setattr(MaskWatch, "look", lambda *_: None)
    sequences = run.generate(ids, **arguments).sequences
    assert sequences[:, :23].tolist() == expected[:, :23].tolist()
    assert sequences.tolist() != expected.tolist()
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{}, INT8], ids=["exact", "int8"])
def test_a_cache_that_is_set_back_takes_the_tokens_again(
    options: dict[str, Any], graphs: list[EmulatedGraph]
) -> None:
    model: Any = tiny_llama(head_dim=32)
    tokens = prompt(59)
    chat = Chat(compiled(model, **options, mode="reduce-overhead"), model.config)
    first = chat.fill(tokens, 54)
    for layer in chat.cache.layers:
        layer.cumulative_length.sub_(3)
    again = chat.tell(tokens, 56)
    assert len(graphs) == 1
    assert graphs[0].replays == 4 + 3
    for a, b in zip(first[2:], again, strict=True):
        assert torch.equal(a, b)


def test_a_full_cache_is_refused_before_anything_is_lost(graphs: list[EmulatedGraph]) -> None:
    model: Any = tiny_llama()
    tokens = prompt(30)
    chat = Chat(compiled(model, mode="reduce-overhead"), model.config, capacity=30)
    logits = chat.fill(tokens, 25)
    with pytest.raises(CacheFullError, match="max_cache_len"):
        chat.say(tokens[:, 3:4], 30)
    for layer in chat.cache.layers:
        layer.cumulative_length.sub_(1)
    assert torch.equal(chat.say(tokens[:, 29:30], 30), logits[-1])
    assert len(graphs) == 1


def test_a_mask_that_shows_what_was_never_stored_is_told_a_step_later() -> None:
    model: Any = tiny_llama()
    tokens = prompt(26)
    chat = Chat(compiled(model, mode="reduce-overhead"), model.config)
    chat.fill(tokens[:, :24], 20)
    chat.say(tokens[:, 24:25], 40)
    with pytest.raises(CacheGapError, match="earlier step"):
        chat.say(tokens[:, 25:26], 26)
    chat.say(tokens[:, 25:26], 26)  # told once


def test_masks_of_ever_new_sizes_are_not_recorded(graphs: list[EmulatedGraph]) -> None:
    """A mask [B, T] that grows is an input of the graph, which makes the wide one of it."""
    model: Any = tiny_llama()
    tokens = prompt(30)
    run = compiled(model, mode="reduce-overhead")
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    with torch.no_grad():
        for begin, end in [(0, 20), *((t, t + 1) for t in range(20, 30))]:
            mask = torch.ones(1, end, dtype=torch.int64)
            out = run(tokens[:, begin:end], past_key_values=cache, attention_mask=mask)
        expected = model(tokens).logits[:, -1]
    assert (out.logits[:, -1] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert not graphs
    assert said().count("KVC506") == 1


def test_a_parameter_that_moves_is_recorded_anew(graphs: list[EmulatedGraph]) -> None:
    model: Any = tiny_llama()
    ids = prompt(20)
    arguments = settings(6, cache_implementation="static")
    run = compiled(model, mode="reduce-overhead")
    run.generate(ids, **arguments)
    assert len(graphs) == 1
    weight = model.lm_head.weight
    weight.data = weight.data.clone() * -1
    expected = model.generate(ids, **arguments).sequences
    assert run.generate(ids, **arguments).sequences.tolist() == expected.tolist()
    assert len(graphs) == 2


def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel(
    graphs: list[EmulatedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_llama()
    ids = prompt(20)
    arguments = settings(6, cache_implementation="static")
    expected = model.generate(ids, **arguments).sequences
    run = compiled(model, mode="reduce-overhead")
    look = launch.attend

    def look_at_q(store: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert float(q.abs().max()) > 0
        return look(store, q, *rest)

    monkeypatch.setattr(launch, "attend", look_at_q)
    assert run.generate(ids, **arguments).sequences.tolist() == expected.tolist()
    assert said().count("KVC506") == 1
    assert len(graphs) == 1
    assert not graphs[0].replays


def test_a_cache_that_grows_is_not_recorded_and_a_remark_says_so() -> None:
    model: Any = tiny_llama()
    ids = prompt(20)
    arguments = settings(4)
    expected = model.generate(ids, **arguments).sequences
    run = compiled(model, mode="reduce-overhead")
    assert run.generate(ids, **arguments).sequences.tolist() == expected.tolist()
    (remark,) = [r for r in kvcompile.notices() if r.code == "KVC506"]
    assert "static" in remark.hint
