"""Counters of a graph are remembered on their device, without waiting for it."""

import pytest
import torch
from torch import fx

from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage
from kvcompile.runtime.counters import Counters

aten = torch.ops.aten


def counters_of(device: str) -> Counters:
    """Return those of a graph that counts in two of its inputs, kept as number 0 and 3."""
    graph = fx.Graph()
    counter, read, vector, other = (graph.placeholder(name) for name in "abcd")
    for node, shape in ((counter, ()), (read, ()), (vector, (3,)), (other, (1,))):
        node.meta["val"] = torch.zeros(shape, dtype=torch.int64, device=device)
    graph.call_function(aten.add_.Tensor, (graph.call_function(aten.alias.default, (counter,)), 1))
    graph.call_function(aten.add_.Tensor, (vector, read))
    graph.call_function(aten.add_.Tensor, (other, 1))
    graph.output((read,))
    program = Program(fx.GraphModule(torch.nn.Module(), graph), Stage.LOWERED)
    return Counters(program, [0, 1, 2, 3])


def test_what_a_failed_step_has_counted_is_set_back() -> None:
    found = counters_of("cpu")
    args = [torch.tensor(5), torch.tensor(6), torch.tensor([7, 8, 9]), torch.tensor([10])]
    copies = found.copies(args)
    for arg in args:
        arg.add_(1)
    found.set_back(args, copies)
    assert [arg.tolist() for arg in args] == [5, 7, [8, 9, 10], [10]]


def test_a_device_is_not_asked_for_its_numbers() -> None:
    """On `meta` there are none: whoever asks gets an error."""
    found = counters_of("meta")
    args = [torch.zeros(s, dtype=torch.int64, device="meta") for s in ((), (), (3,), (1,))]
    with pytest.raises(RuntimeError):
        args[0].item()
    copies = found.copies(args)
    assert [copy.shape for copy in copies] == [(1,), (1, 1)]
    found.set_back(args, copies)
