"""The script for a GPU, as far as it runs without one: interpreted, small, without times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("triton")

from benchmarks import gpu_correctness, gpu_model, gpu_speed
from benchmarks.gpu_correctness import Case
from kvcompile.runtime import launch
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        Case(k="int4", v="int4", dims=(64, 64), tokens=120),
        Case(k="bf16", v="int2", dims=(64, 64), tokens=120, queries=6, has_mask=True),
        Case(k="fp16", v="fp16", dims=(64, 64), dtype=torch.float16, tokens=70),
    ],
    ids=str,
)
def test_a_case_is_right_and_a_wrong_kernel_is_not(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(case)
    found = gpu_correctness.check(case, CPU)
    assert gpu_correctness.is_right(case, found)
    right = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *args: right(*args) * 1.02)
    assert not gpu_correctness.is_right(case, gpu_correctness.check(case, CPU))


def test_cases_differ() -> None:
    names = [str(case) for case in gpu_correctness.cases()]
    assert len(set(names)) == len(names) > 30


def test_every_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 2.0

    monkeypatch.setattr(gpu_speed, "replayed", once)
    monkeypatch.setattr(gpu_speed, "COLD_BYTES", 1)
    for name, value in (("HEADS", 2), ("DIM", 64), ("LATENT", 64), ("ROTATING", 32)):
        monkeypatch.setattr(gpu_speed, name, value)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    speeds = gpu_speed.attention_speeds(70, 1, CPU)
    names = [speed.name for speed in speeds]
    assert names[:2] == ["SDPA", "flex_attention"]
    assert {"pages bf16", "pages int8", "pages int4", "pages int2"} <= set(names)
    for speed in (*speeds, gpu_speed.latent_speed(70, 2, CPU)):
        assert speed.gigabytes_per_second == speed.bytes / 2000


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_TARGET", "gpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_model, "STEPS", 2)
    monkeypatch.setattr(gpu_model, "WARM_UP", 1)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    monkeypatch.setattr(gpu_model, "LlamaConfig", lambda **given: LlamaConfig(**(given | sizes)))
    compiled = torch.compile

    def without_inductor(model: Any, **options: Any) -> Any:
        if "backend" not in options:
            return model
        options["options"]["inner_backend"] = "eager"
        return compiled(model, **options)

    monkeypatch.setattr(torch, "compile", without_inductor)
    static, *paged = gpu_model.compare(1, 40, 1, CPU)
    assert static.kv_bytes == 2 * 2 * 43 * 32 * 2
    assert [found.recordings for found in paged] == [1, 1, 1, 0]
    assert static.error == 0
    for found in paged:
        assert 0 < found.error < 0.1
        assert found.milliseconds > 0
        assert found.compilations == 2
        assert found.kv_bytes > 0
