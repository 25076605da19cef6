"""The GPU kernels whose machine code is checked, and its figures in a fresh process.

The process is fresh because tests import Triton as an interpreter:

    python -m tests.support.gpu_kernels int4 sm_90 gfx942
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcompile.codegen.artifacts import cache_directory
from kvcompile.codegen.gpu.machine_code import NVIDIA_TARGETS, Loop, MachineCode, inspect
from kvcompile.codegen.gpu.schedule import choose_schedule
from kvcompile.codegen.spec import KernelSpec
from tests.support.gpu_pages import GpuCase

ROOT = Path(__file__).resolve().parents[2]

_BASE = GpuCase(k="int4", dims=(128, 128), group=8, page_size=64)
_GEMMA2 = replace(_BASE, dims=(256, 256), group=2, softcap=50.0, sliding_window=4096)
_CASES = {
    "bf16": replace(_BASE, k="bf16"),
    "int8": replace(_BASE, k="int8"),
    "fp8_e5m2": replace(_BASE, k="fp8_e5m2"),
    "int4": _BASE,
    "int2": replace(_BASE, k="int2"),
    "int8_k_int4_v": replace(_BASE, k="int8", v="int4"),
    "int4_d64": replace(_BASE, dims=(64, 64)),
    "int4_p32": replace(_BASE, page_size=32),
    "int4_p128": replace(_BASE, page_size=128),
    "int4_q16": replace(_BASE, queries="few", mask="causal"),
    "gemma2_int4": _GEMMA2,
    "gemma2_bf16": replace(_GEMMA2, k="bf16"),
    "latent_bf16": replace(_BASE, k="bf16", dims=(512, 64), group=16, kv_heads=1, latent=True),
}
KERNELS: dict[str, KernelSpec] = {name: case.spec for name, case in _CASES.items()}


def for_target(spec: KernelSpec, target: str) -> KernelSpec:
    """Return the spec as it is printed for a target: no PTX where it means nothing."""
    return spec if target in NVIDIA_TARGETS else replace(spec, isa="triton")


def machine_code(name: str, targets: Sequence[str]) -> tuple[str, dict[str, MachineCode]]:
    """Compile one of `KERNELS` in a fresh process, or find it in the cache.

    Args:
        name: Which.
        targets: What for.

    Returns:
        Triton's version, and the figures of each target.

    Raises:
        RuntimeError: The process failed; its words.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_directory() / "triton")
    command = [sys.executable, "-m", "tests.support.gpu_kernels", name, *targets]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} for {', '.join(targets)}: {done.stderr}")
    said = json.loads(done.stdout)
    return said["triton"], {target: _from_json(facts) for target, facts in said["facts"].items()}


def _from_json(facts: dict[str, Any]) -> MachineCode:
    loop = facts.pop("loop")
    return MachineCode(**facts, loop=None if loop is None else Loop(**loop))


def _main(name: str, targets: Sequence[str]) -> None:
    import triton

    facts = {}
    for target in targets:
        spec = for_target(KERNELS[name], target)
        facts[target] = dataclasses.asdict(inspect(spec, target, choose_schedule(spec)))
    sys.stdout.write(json.dumps({"triton": triton.__version__, "facts": facts}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
