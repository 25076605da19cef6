"""Which graphs decode as steps on a GPU, which of them can be recorded, and steps that fail."""

from typing import Any

import pytest
import torch

from kvcompile.passes.base import PassOptions
from kvcompile.runtime.gpu_steps import gpu_steps_of
from kvcompile.runtime.mask_watch import MaskWatch
from kvcompile.runtime.recordable import NotRecorded, Recording, recording_of
from kvcompile.runtime.step_tables import StepTables
from tests.support.attentions import Cross, Static
from tests.support.programs import capture, qkv, static_handles
from tests.support.stores import filled_store

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


def test_steps_that_also_read_another_cache_are_taken_and_not_recorded() -> None:
    def step(position: torch.Tensor, mask: torch.Tensor, *inputs: Any) -> object:
        q, k, v, buffers, cross = inputs
        return Cross("expand")(Static("expand")(q, k, v, buffers, position, mask), cross)

    caches = static_handles(4, 12, dim=32), static_handles(7, 7, dim=32)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    program, _ = capture(step, torch.tensor([4]), mask, *qkv(1, dim=32), *caches, options=OPTIONS)
    assert gpu_steps_of(program, program.module, records=False) is not None
    found = recording_of(program, CPU)
    assert isinstance(found, NotRecorded)
    assert "does not append to" in found.reason


def test_a_mask_is_looked_at_again_after_a_step_that_failed() -> None:
    """The second time may be the one that is recorded."""
    watch, store = MaskWatch(CPU), filled_store(4, capacity=12).store
    mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
    for looks in (1, 2):
        watch.begin()
        for _ in range(2):  # layers
            watch.look(store, mask, 4)
        assert watch._seen.tolist() == [looks, 0]


def test_tables_that_were_not_sent_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled_store(4, capacity=12).store
    tables = StepTables([store], 1)

    def fail(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(tables._addresses), "send", fail)
        with pytest.raises(MemoryError):
            tables.load([store], [(4, 5)])
    tables.load([store], [(4, 5)])
    found = tables.streams[0].addresses("pages", store.pages)
    assert found[:, :1].tolist() == [
        [store.arena.page(row[0]).data_ptr()] for row in store.pages.rows
    ]
