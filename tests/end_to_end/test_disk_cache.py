"""A second process starts from the disk caches: Inductor's, AOTAutograd's and the kernels'."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
from tests.support.tiny_models import greedy, prompt, tiny_nanogpt
model = torch.compile(tiny_nanogpt(layers=1), backend="kvcompile")
tokens, _ = greedy(model, prompt(9), 4)
print(json.dumps({"tokens": tokens.tolist(), **counters["inductor"], **counters["aot_autograd"]}))
"""


def run(folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "KVCOMPILE_CACHE_DIR": str(folder / "kernels"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.compiler
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first["fxgraph_cache_miss"] == 2
    kernels = {p: p.stat().st_mtime_ns for p in (tmp_path / "kernels").rglob("*.so")}
    assert kernels
    second = run(tmp_path)
    assert second["tokens"] == first["tokens"]
    assert second["fxgraph_cache_hit"] == second["autograd_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in second
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "kernels").rglob("*.so")} == kernels
