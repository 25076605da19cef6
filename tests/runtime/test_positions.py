"""Positions that the host knows are not read, and are never wrong."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcompile.passes.ir.program import PositionSource
from kvcompile.passes.patterns.counter import position_source
from kvcompile.runtime.positions import FirstPositions

aten = torch.ops.aten
ADVANCING = PositionSource(input=0, counts_up=True, advances=True)


def test_a_counter_that_the_graph_moves_on_is_read_once() -> None:
    counter = torch.tensor(5)
    positions = FirstPositions([ADVANCING, ADVANCING])
    for step in range(4):
        found = positions.of([counter], 1, [5 + step] * 2)
        assert found == [5 + step] * 2
        counter.add_(1)
        positions.advanced([counter], 1, found)
    assert positions.reads == 1


@pytest.mark.parametrize("how", ["written", "replaced", "appended to by others", "inference"])
def test_a_counter_that_others_move_is_read_again(how: str) -> None:
    counter = torch.tensor(5)
    positions = FirstPositions([ADVANCING])
    if how == "inference":
        with torch.inference_mode():
            counter = torch.tensor(5)
    found = positions.of([counter], 1, [5])
    with torch.inference_mode(how == "inference"):
        counter.add_(1)
    positions.advanced([counter], 1, found)
    expected, length = 6, 6
    if how == "written":
        counter.sub_(3)
        expected = 3
    elif how == "replaced":
        counter = torch.tensor(2)
        expected = 2
    elif how == "appended to by others":
        # As compiled code writes: the version of the tensor does not tell.
        counter.data.add_(20)
        expected = length = 26
    assert positions.of([counter], 1, [length]) == [expected]
    assert positions.reads == 2


def test_a_counter_that_the_graph_leaves_alone_is_read_at_every_step() -> None:
    positions = FirstPositions([PositionSource(0, counts_up=True, advances=False)])
    for first in (3, 4, 9):
        given = [torch.tensor([first])]
        found = positions.of(given, 1, [first])
        assert found == [first]
        positions.advanced(given, 1, found)
    assert positions.reads == 3


def test_positions_with_gaps_are_left_to_who_refuses_them() -> None:
    vector = PositionSource(0, counts_up=False, advances=False)
    positions = FirstPositions([vector, None])
    assert positions.of([torch.tensor([4, 5, 6])], 3, [4, 4]) == [4, None]
    assert positions.of([torch.tensor([4, 6, 7])], 3, [4, 4]) == [None, None]
    # One number that the graph gives to all new tokens.
    assert positions.of([torch.tensor([4])], 3, [4, 4]) == [None, None]


def graph_of(spelling: str, *, write: str = "after", new_len: int = 2) -> PositionSource | None:
    """Return what is found in a graph that computes positions from a counter, input 1."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        with mode:
            values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
            node.meta["val"] = target(*values)  # type: ignore[operator]
        return node

    other, counter = graph.placeholder("other"), graph.placeholder("counter")
    with mode:
        other.meta["val"] = torch.empty(3)
        shape = (new_len,) if spelling in ("given", "a vector + arange") else ()
        counter.meta["val"] = torch.empty(shape, dtype=torch.int64)
    arange = graph.call_function(aten.arange.default, (new_len,))
    backwards = graph.call_function(aten.arange.start_step, (new_len, 0, -1))
    with mode:
        arange.meta["val"] = torch.arange(new_len)
        backwards.meta["val"] = torch.arange(new_len, 0, -1)
    view = call(aten.alias.default, counter) if write == "before and after" else None
    if write.startswith("before"):
        call(aten.add_.Tensor, counter, new_len)
    if spelling == "given":
        position = counter
        if write == "between":
            call(aten.add_.Tensor, counter, new_len)
        call(aten.index_select.default, other, 0, position)
    elif spelling in ("arange + counter", "a vector + arange"):
        position = call(aten.add.Tensor, arange, counter)
    elif spelling == "a view of counter + arange":
        row = call(aten.unsqueeze.default, counter, 0)
        position = call(aten.view.default, call(aten.add.Tensor, row, arange), [-1])
    elif spelling == "backwards":
        position = call(aten.add.Tensor, backwards, counter)
    else:
        assert spelling == "twice the counter"
        position = call(aten.add.Tensor, arange, call(aten.mul.Tensor, counter, 2))
    if write == "after":
        call(aten.add_.Tensor, counter, new_len)
    elif write == "by another number":
        call(aten.add_.Tensor, counter, new_len + 1)
    elif write == "twice":
        call(aten.add_.Tensor, counter, new_len)
        call(aten.add_.Tensor, counter, 0)
    elif view is not None:
        call(aten.add_.Tensor, view, new_len)
    graph.output((other,))
    return position_source([other, counter], position)


@pytest.mark.parametrize("spelling", ["arange + counter", "a view of counter + arange"])
def test_counters_are_found(spelling: str) -> None:
    assert graph_of(spelling) == PositionSource(1, counts_up=True, advances=True)


@pytest.mark.parametrize("write", ["none", "by another number", "twice"])
def test_only_a_counter_that_moves_on_by_the_new_tokens_is_known(write: str) -> None:
    found = graph_of("arange + counter", write=write)
    assert found == PositionSource(1, counts_up=True, advances=False)


def test_positions_that_are_given() -> None:
    assert graph_of("given", write="none") == PositionSource(1, counts_up=False, advances=False)
    assert graph_of("given", write="none", new_len=1) == PositionSource(
        1, counts_up=True, advances=False
    )


@pytest.mark.parametrize("spelling", ["backwards", "twice the counter", "a vector + arange"])
def test_other_arithmetic_is_left_to_the_graph(spelling: str) -> None:
    assert graph_of(spelling) is None


@pytest.mark.parametrize("write", ["before", "before and after"])
def test_a_counter_that_is_written_first_is_left_to_the_graph(write: str) -> None:
    assert graph_of("arange + counter", write=write) is None


def test_a_counter_that_is_the_position_is_written_after_all_that_uses_it() -> None:
    """One that counts up before the tokens are written is read too early by the host."""
    assert graph_of("given", write="between", new_len=1) is None
    found = graph_of("given", write="after", new_len=1)
    assert found == PositionSource(1, counts_up=True, advances=True)


def test_a_step_that_fails_leaves_nothing_known() -> None:
    """It may have moved the counter on before it failed, with kernels that leave no trace."""
    counter = torch.tensor(5)
    positions = FirstPositions([ADVANCING])
    found = positions.of([counter], 1, [5])
    counter.data.add_(1)
    positions.advanced([counter], 1, found)
    assert positions.of([counter], 1, [6]) == [6]
    counter.data.add_(1)
    assert positions.of([counter], 1, [6]) == [7]
    assert positions.reads == 2
