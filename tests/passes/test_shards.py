"""Graphs with distributed tensors: what is left is one process's work on its own shards.

The process group is a fake one: it has two members, and only this process runs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from kvcompile.passes.base import PassOptions
from kvcompile.passes.canonicalize import Canonicalize
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.ir.verify import verify
from kvcompile.passes.shards import IS_SHARD
from tests.support.programs import calls


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def canonical(function: Callable[..., Any], x: torch.Tensor) -> Program:
    """Return the canonical program of a call; Dynamo's own graph runs instead of it."""
    found: list[Program] = []

    def backend(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(Program(gm, Stage.CAPTURED))
        Canonicalize().run(found[0], PassOptions(isa="avx512"))
        found[0].stage = Stage.CANONICAL
        verify(found[0])
        return gm.forward

    torch._dynamo.reset()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        result = torch.compile(function, backend=backend, fullgraph=True)(x)
        result.sum()  # waits for the collective behind it, which the process group insists on
    return found[0]


def test_a_sharded_block_is_a_local_one_with_one_sum_over_the_processes(mesh: DeviceMesh) -> None:
    block = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8, bias=False))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    program = canonical(block, torch.randn(2, 5, 8))
    shapes = [tuple(n.meta["val"].shape) for n in program.placeholders if n.meta[IS_SHARD]]
    assert sorted(shapes) == [(6,), (6, 8), (8, 6)]
    names = calls(program)
    assert names.count("aten.linear.default") == 2
    assert sum(name.startswith("_c10d_functional.all_reduce") for name in names) == 1


def test_rows_of_an_embedding_that_lie_elsewhere_are_masked(mesh: DeviceMesh) -> None:
    table = nn.Embedding(10, 4)
    table.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(0)]))

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        everywhere = DTensor.from_local(ids, mesh)
        rows: DTensor = table(everywhere)
        return rows.full_tensor()

    program = canonical(look_up, torch.tensor([1, 7, 9]))
    names = calls(program)
    assert "aten.embedding.default" in names
    assert any(name.startswith("_c10d_functional.all_reduce") for name in names)
    assert not any(isinstance(n.meta.get("val"), DTensor) for n in program.graph.nodes)


def test_a_sharded_output_is_refused_by_name(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)])

    def project(x: torch.Tensor) -> DTensor:
        return nn.functional.linear(DTensor.from_local(x, mesh), weight)  # type: ignore[return-value]

    with pytest.raises(Exception, match="output 0 of the graph is a DTensor"):
        canonical(project, torch.randn(5, 8))
