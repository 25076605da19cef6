"""GPU kernels over the records that CPU kernels read, laid out anew: both say the same.

One store of `QuantizedFakeStore` holds the tokens; its records in the other order are what the
Triton kernels read, in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.cpu.isa import detect_isa
from kvcompile.codegen.layout import relayout
from kvcompile.codegen.spec import DTypeName
from tests.support import triton_interpreter  # noqa: F401 -- repairs it before a kernel is loaded
from tests.support.fake_store import POISON
from tests.support.gpu_bound import GpuBound
from tests.support.gpu_pages import GpuCase, GpuPages, attend
from tests.support.numerics import Problem, run_attend
from tests.support.quantized_case import QuantizedCase
from tests.support.quantized_store import QuantizedFakeStore

pytestmark = pytest.mark.compiler

STARTS = (0, 13)


def moved(store: QuantizedFakeStore, pages: GpuPages) -> None:
    """Write the records of a store over those of GPU pages, which hold the same tokens."""
    assert pages.exact is not None
    for pool, into, layout in (
        (store.pages, pages.pages, store.layout),
        (store.exact, pages.exact, store.layout.exact),
    ):
        into.memory.fill_(POISON)
        for row in range(store.batch):
            for column in range(into.addresses.shape[1]):
                record = pool.memory[pool.index(row, column)]
                into[row, column][:] = relayout(record, layout, "gpu16")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("k", "v"),
    [("int4", "int4"), ("int8", "int2"), ("fp8_e5m2", "int8"), ("int3", "fp8"), ("bf16", "int4")],
)
def test_the_same_records_give_the_same_output(k: str, v: str, dtype: DTypeName) -> None:
    case = QuantizedCase(k_format=k, v_format=v, dtype=dtype, dims=(64, 80), group=3)
    tokens = case.new_tokens(len(STARTS), 230)
    store = case.quantized_store(*tokens, STARTS, residual=32)
    problem = Problem(store, case.new_queries(len(STARTS), 1), 230)
    from_cpu = run_attend(load(case.spec(detect_isa(), "attend")), problem)
    problem.check(from_cpu)
    gpu = GpuCase(k=k, v=v, dtype=dtype, dims=case.dims, group=3, page_size=64, sinks=case.sinks)
    for compute in ("fp32", "fp16") if dtype == "bf16" else ("fp32",):
        pages = GpuPages(replace(gpu, compute=compute), *tokens, STARTS)
        assert torch.equal(pages.quantized, store.quantized)
        assert int(pages.quantized.min()) > 0
        moved(store, pages)
        out = attend(pages, problem.q, splits=3)
        allowed = problem.bound(256) + GpuBound(pages, problem.q).bound()
        assert ((out.double() - from_cpu.double()).abs() <= allowed).all()
        error = (out.double() - from_cpu.double()).norm() / from_cpu.double().norm()
        assert error < (2.0**-8 if dtype == "bf16" else 2.0**-18)
