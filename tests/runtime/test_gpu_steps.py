"""Which graphs decode as steps on a GPU, and which of them can be recorded."""

from typing import Any

import pytest
import torch

from kvcompile.passes.base import PassOptions
from kvcompile.runtime.gpu_steps import gpu_steps_of
from kvcompile.runtime.recordable import NotRecorded, Recording, recording_of
from tests.support.attentions import Static
from tests.support.programs import capture, qkv, static_handles

OPTIONS = PassOptions(isa="avx512", gpu_devices=("cpu",))
CPU = torch.device("cpu")


@pytest.mark.parametrize("queries", [3, 1])
def test_steps_whose_queries_are_not_the_new_tokens_are_not_taken(queries: int) -> None:
    """The host prepares pages for as many tokens as are appended, not for those that look."""
    q, k, v = qkv(3, dim=32)
    mask = torch.ones(2, 1, queries, 12, dtype=torch.bool)
    inputs = q[:, :, -queries:], k, v, static_handles(4, 12, dim=32), torch.arange(4, 7), mask
    program, _ = capture(Static("expand").eval(), *inputs, options=OPTIONS)
    steps = gpu_steps_of(program, program.module, records=True)
    assert (steps is not None) == (queries == 3)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_graph_that_writes_to_memory_it_reads_as_another_input_is_not_recorded(
    is_shared: bool,
) -> None:
    """Of each input there is a buffer: what is written to one would not be seen in the other."""
    position = torch.tensor([4])
    written = position.view(1, 1) if is_shared else torch.tensor([[4]])

    def step(position: torch.Tensor, written: torch.Tensor, *inputs: Any) -> torch.Tensor:
        q, k, v, buffers, mask = inputs
        out: torch.Tensor = Static("expand")(q, k, v, buffers, position, mask)
        written.add_(1)
        return out + position

    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    inputs = position, written, *qkv(1, dim=32), static_handles(4, 12, dim=32), mask
    program, _ = capture(step, *inputs, options=OPTIONS)
    found = recording_of(program, CPU)
    assert isinstance(found, NotRecorded if is_shared else Recording)
