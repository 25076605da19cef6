"""The machine code of generated GPU kernels, compiled ahead of time: no GPU is needed.

Each kernel is compiled in a process of its own, since Triton is an interpreter in this one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.codegen.gpu.latent import shape_of
from kvcompile.codegen.gpu.machine_code import (
    SHARED_BYTES,
    TARGETS,
    MachineCode,
    code_bytes,
    inspect,
)
from kvcompile.codegen.gpu.schedule import Schedule
from kvcompile.codegen.spec import KernelSpec
from tests.support.budgets import Budgets
from tests.support.gpu_kernels import KERNELS, machine_code

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")

EVERYWHERE = ("bf16", "int8", "int4")
"""Kernels that are compiled for every target; the others only for sm_90."""

MOST_PER_ELEMENT = {
    "bf16": 2.9,
    "int8": 3.2,
    "fp8_e5m2": 2.5,
    "int4": 2.9,
    "int2": 2.9,
    "gemma2_int4": 3.3,
    "latent_bf16": 4.0,
}
"""Instructions of a lane for a number of K or V, or of a latent, on sm_90."""


@pytest.fixture
def budgets(request: pytest.FixtureRequest) -> Budgets:
    path = Path(__file__).with_name("gpu_budgets.json")
    return Budgets(path, update=request.config.getoption("--update-golden"))


@pytest.mark.golden
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name: str, budgets: Budgets) -> None:
    targets = TARGETS if name in EVERYWHERE else ("sm_90",)
    version, found = machine_code(name, targets)
    check(name, found["sm_90"])
    for target, facts in found.items():
        assert facts.shared_bytes <= SHARED_BYTES[target], target
        assert facts.spills == 0, target
    budgets(version, name, found)


def check(name: str, facts: MachineCode) -> None:
    """Assert what holds for every kernel on sm_90, with any version of Triton."""
    loop = facts.loop
    assert loop is not None
    assert facts.resident
    assert loop.conversions == 0
    # The address of the next page, and scales of which a lane has less than a copy brings.
    assert loop.plain_loads == 1 + loads_of_single_scales(KERNELS[name])
    # What comes in smaller copies is scales: 128 bits at a time bring at least all the rest.
    assert loop.wide_bytes >= code_bytes(shape_of(KERNELS[name]))
    if name in MOST_PER_ELEMENT:
        assert loop.per_element <= MOST_PER_ELEMENT[name]


def loads_of_single_scales(spec: KernelSpec) -> int:
    """Return how often an iteration loads scales without minima, which two warps share.

    Each lane has one of 16 bits, and copies to shared memory bring 32 at least.
    """
    shape = shape_of(spec)
    loads = {"k": len(shape.k.pieces), "v": shape.v.groups * shape.tiles}
    return sum(loads[part.role] for part in (shape.k, shape.v) if part.is_float)


def test_an_interpreted_kernel_has_no_machine_code() -> None:
    with pytest.raises(KernelCompilationError, match="TRITON_INTERPRET"):
        inspect(KERNELS["bf16"], "sm_90", Schedule(4, 3))
