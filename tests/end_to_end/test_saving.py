"""Caches that are saved, loaded and gone on with, and caches that are offloaded between layers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvcompile
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.report import handles_in
from tests.support.compiled import compiled, settings
from tests.support.tiny_models import prompt, tiny_llama, tiny_qwen2

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

STEPS = 12
"""So many that pages are quantized after loading too."""

IN_ANOTHER_PROCESS = """
import sys
import torch
from transformers import DynamicCache
import kvcompile
from tests.end_to_end.test_saving import go_on
from tests.support.compiled import compiled
from tests.support.tiny_models import tiny_qwen2

pairs = kvcompile.load_cache(sys.argv[1])
again = torch.load(sys.argv[2], weights_only=True)
run = compiled(tiny_qwen2(k_bias=40.0), kv_cache_dtype="int4")
torch.save([go_on(run, DynamicCache(p)) for p in (pairs, again)], sys.argv[3])
"""


def go_on(run: Any, cache: Any) -> torch.Tensor:
    """Return the logits of greedy steps after a prompt of 190 tokens."""
    token, found = prompt(1), []
    with torch.no_grad():
        for _ in range(STEPS):
            found.append(run(token, past_key_values=cache).logits)
            token = found[-1].argmax(-1)
    assert not kvcompile.memory_report(cache).materializations
    return torch.cat(found, 1)


def test_an_int4_cache_goes_on_with_identical_logits(tmp_path: Path) -> None:
    model = tiny_qwen2(k_bias=40.0)
    run = compiled(model, kv_cache_dtype="int4")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        run(prompt(190), past_key_values=cache)
    stores = [handle.store for handle in handles_in(cache)]
    assert all(isinstance(s, QuantizedStore) and s.rotary_table is not None for s in stores)
    files = [tmp_path / name for name in ("cache.safetensors", "cache.pt", "logits.pt")]
    kvcompile.save_cache(cache, files[0])
    torch.save([pair[:2] for pair in cache], files[1])
    unpickled = pickle.loads(pickle.dumps(cache))
    angles = {id(handle.store.rotary_table) for handle in handles_in(unpickled) if handle.store}
    assert len(angles) == 1
    subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, *map(str, files)],
        check=True,
        cwd=Path(__file__).parents[2],
    )
    expected = go_on(run, cache)
    for found in torch.load(files[2]):
        assert torch.equal(found, expected)


def test_a_static_cache_goes_on(tmp_path: Path) -> None:
    model = tiny_llama()
    run = compiled(model)
    cache: Any = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        run(prompt(190), past_key_values=cache)
    kvcompile.save_cache(cache, tmp_path / "cache")
    again: Any = StaticCache(config=model.config, max_cache_len=256)
    pairs: Any = kvcompile.load_cache(tmp_path / "cache")
    for layer, (k, v) in zip(again.layers, pairs, strict=True):
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v
        layer.cumulative_length.fill_(k.length)
    assert torch.equal(go_on(run, again), go_on(run, cache))


def test_offloading_where_there_is_nowhere_to_offload_to() -> None:
    """transformers' streams want an accelerator: the error is that of the unmodified model."""
    model = tiny_llama()
    ids = prompt(40)
    for run in (model, compiled(model)):
        arguments = settings(3, attention_mask=torch.ones_like(ids))
        with pytest.raises(Exception, match="Torch not compiled with CUDA enabled"):
            run.generate(ids, cache_implementation="offloaded", **arguments)
