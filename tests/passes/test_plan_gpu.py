"""How a GPU's pages lie, and how many tokens they have where that is left open."""

import pytest

from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.plan import StreamPlan
from kvcompile.passes.layer_dtypes import LayerDtypes
from tests.support.attentions import Sdpa
from tests.support.programs import capture, past, qkv


def plan_of(name: str, dim: int, *, page_size: int | None = None, gpu: bool = True) -> StreamPlan:
    options = PassOptions(
        isa="avx512",
        gpu_devices=("cpu",) if gpu else (),
        dtypes=LayerDtypes(name),
        page_size=page_size,
    )
    module = Sdpa("expand").eval()
    program, _ = capture(module, *qkv(1, dim=dim), past(7, dim=dim), options=options)
    return program.plans[0]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages_that_were_asked_for(page_size: int) -> None:
    layout = plan_of("int4", 32, page_size=page_size).layout
    assert (layout.order, layout.page_size) == ("gpu16", page_size)


@pytest.mark.parametrize(
    ("name", "dim", "page_size"),
    [("auto", 80, 32), ("int4", 80, 64), ("int2", 64, 64), ("int2", 80, 128), ("int3", 96, 128)],
)
def test_pages_have_tokens_for_tensor_cores(name: str, dim: int, page_size: int) -> None:
    assert plan_of(name, dim).layout.page_size == page_size
    on_a_cpu = plan_of(name, dim, gpu=False).layout
    assert (on_a_cpu.order, on_a_cpu.page_size) == ("cpu16", min(page_size, 64))
