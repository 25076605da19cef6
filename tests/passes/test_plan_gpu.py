"""What a GPU has no kernels for is left to the model, and a remark says so."""

from dataclasses import replace

import pytest

from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.program import Program
from kvcompile.passes.layer_dtypes import LayerDtypes
from tests.support.attentions import Sdpa
from tests.support.programs import capture, codes, past, qkv

OPTIONS = PassOptions(isa="avx512", gpu_devices=("cpu",), dtypes=LayerDtypes("int4"))


def program_of(options: PassOptions) -> Program:
    program, _ = capture(Sdpa("expand").eval(), *qkv(1, dim=32), past(7, dim=32), options=options)
    return program


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_pages_lie_as_gpus_read_them(page_size: int) -> None:
    plan = program_of(replace(OPTIONS, page_size=page_size)).plans[0]
    assert plan.layout.order == "gpu16"
    assert plan.layout.page_size == page_size


def test_pages_too_small_for_a_tile_are_refused_with_the_nearest_size() -> None:
    program = program_of(replace(OPTIONS, page_size=16))
    assert program.plans == {}
    assert "KVC307" in codes(program)
    (remark,) = [r for r in program.remarks if r.code == "KVC307"]
    assert "int4 K of 32" in remark.reason
    assert remark.hint == "Choose a page_size of at least 32."
    on_a_cpu = program_of(replace(OPTIONS, page_size=16, gpu_devices=()))
    assert on_a_cpu.plans[0].layout.page_size == 16
