"""The invariant of each stage, checked between passes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvcompile.codegen.errors import KvcompileError
from kvcompile.passes.ir.ops import APPEND, APPEND_ATTEND, ATTEND
from kvcompile.passes.ir.stage import Stage

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program


class InvariantError(KvcompileError):
    """A program is not what its stage promises; names the pass, the node and the invariant."""


def verify(program: Program) -> None:
    """Check the program against its stage.

    Raises:
        InvariantError: An invariant of this stage or an earlier one does not hold.
    """
    try:
        program.graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        raise InvariantError(f"after {program.made_by}: the graph is malformed: {error}") from error
    stage = program.stage
    if stage >= Stage.CANONICAL:
        _canonical(program)
    if Stage.MATCHED <= stage < Stage.REWRITTEN:
        _matched(program)
    if Stage.INFERRED <= stage < Stage.REWRITTEN:
        _inferred(program)
    if stage >= Stage.PLANNED:
        _planned(program)
    if stage >= Stage.REWRITTEN:
        _rewritten(program)
    if stage >= Stage.LOWERED:
        _lowered(program)


def _require(holds: bool, program: Program, node: fx.Node | None, invariant: str) -> None:
    if not holds:
        at = f" at {node.format_node() or node.name}" if node is not None else ""
        raise InvariantError(f"after {program.made_by}{at}: {invariant}")


def _canonical(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op == "placeholder":
            val = node.meta.get("val")
            _require("val" in node.meta, program, node, "every input has a value")
            handle = isinstance(val, torch.Tensor) and is_traceable_wrapper_subclass(val)
            _require(not handle, program, node, "no input is a handle")
        elif node.op == "call_function":
            _require(_is_canonical(node), program, node, "operators are called by overload")
        else:
            known = node.op in ("get_attr", "output", "call_module")
            _require(known, program, node, "only functions, inputs, constants and one output")


def _is_canonical(node: fx.Node) -> bool:
    """Whether a call is of an overload or higher-order operator, or arithmetic on sizes."""
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return True
    if node.target is operator.getitem:  # one of several results
        return True
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _matched(program: Program) -> None:
    alive = set(program.graph.nodes)
    for site in program.sites:
        for node in (site.out, site.k, site.v, *site.beside):
            _require(node in alive, program, node, "a site's nodes are alive")


def _inferred(program: Program) -> None:
    alive = set(program.graph.nodes)
    outputs = program.outputs
    for stream in program.streams.values():
        for update in (stream.k, stream.v):
            _require(update.state in alive, program, update.state, "a state is alive")
            for i in update.outputs:
                val = outputs[i].meta.get("val") if isinstance(outputs[i], fx.Node) else None  # type: ignore[union-attr]
                same = isinstance(val, torch.Tensor) and val.dim() == 4
                _require(same, program, update.state, f"output {i} is the state")


def _planned(program: Program) -> None:
    for index in program.plans:
        _require(index in program.streams, program, None, "a plan has a stream")


def _rewritten(program: Program) -> None:
    binding = program.binding
    _require(binding is not None, program, None, "inputs and outputs are bound")
    assert binding is not None
    inputs = len(binding.kept_inputs) + len(binding.states)
    _require(inputs == len(program.placeholders), program, None, "the binding covers the inputs")
    covers = len(binding.kept_outputs) == len(program.outputs)
    _require(covers, program, None, "the binding covers the outputs")
    used = {True: _states(program, ATTEND), False: _states(program, APPEND, APPEND_ATTEND)}
    for only_read, what in ((False, "appended to"), (True, "read")):
        nodes, expected = used[only_read], [s for s in binding.states if s.only_read is only_read]
        once = len(set(nodes)) == len(nodes) == len(expected)
        _require(once, program, None, f"every store that is {what} is {what} exactly once")


_STATE_ARGUMENT = {ATTEND: 1, APPEND: 2, APPEND_ATTEND: 3}


def _states(program: Program, *targets: object) -> list[fx.node.Argument]:
    """Return the states that calls of these operators are given, in order."""
    calls = [n for n in program.graph.nodes if n.target in targets]
    return [n.args[_STATE_ARGUMENT[n.target]] for n in calls]


def _lowered(program: Program) -> None:
    served = {use.site for use in program.kernels if use.site is not None}
    _require(served == set(program.plans), program, None, "every planned site has a kernel")
    for node in program.graph.nodes:
        clean = "example_value" not in node.meta and "from_node" not in node.meta
        _require(clean, program, node, "metadata holds no other graph's nodes")
