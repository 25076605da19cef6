"""The re-trace: what it records is what running the model gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.functional import linear
from transformers import DynamicCache

from kvcompile.passes.base import PassOptions
from kvcompile.passes.canonicalize import Canonicalize, _Retrace
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage
from tests.support.compiled import compiled
from tests.support.tiny_models import prompt, tiny_gpt2, tiny_llama, tiny_qwen2

WEIGHT, BIAS = torch.randn(6, 8), torch.randn(6)


class _Recorded(fx.Interpreter):
    """Runs a canonical graph and holds every value against what the trace recorded of it."""

    products = 0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.products += n.target is torch.ops.aten.linear.default
        if isinstance(value, torch.Tensor):
            recorded = n.meta["val"]
            assert recorded.dtype is value.dtype
            assert tuple(map(int, recorded.shape)) == value.shape
            assert tuple(map(int, recorded.stride())) == value.stride()
        return value


def _products(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    """Return how many `linear` a function's canonical graph has; check what it says of them."""
    found: list[_Recorded] = []

    def backend(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        program = Program(gm, Stage.CAPTURED)
        Canonicalize().run(program, PassOptions(isa="avx512"))
        found.append(_Recorded(program.module))
        return found[0].run

    torch._dynamo.reset()
    torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
    with torch.no_grad():
        out = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(out, function(*inputs))
    return found[0].products


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_linear_is_one_node_with_its_shape_dtype_and_strides(
    shape: tuple[int, ...], bias: torch.Tensor | None
) -> None:
    assert _products(lambda x: linear(x, WEIGHT, bias), torch.randn(shape)) == 1


def test_linear_of_a_transposed_input() -> None:
    assert _products(lambda x: linear(x.transpose(1, 2), WEIGHT), torch.randn(3, 8, 5)) == 1


def test_linear_with_one_row_of_weights() -> None:
    assert _products(lambda x: linear(x, WEIGHT[0]), torch.randn(5, 8)) == 1


def test_linear_in_a_lower_precision_than_its_inputs() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _products(lambda x: linear(x, WEIGHT), torch.randn(3, 5, 8)) == 1


def test_a_function_that_enters_and_leaves_autocast_itself() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            low = linear(x, WEIGHT)
            with torch.autocast("cpu", enabled=False):
                high = linear(x, WEIGHT)
            mixed = low + linear(x, WEIGHT) + high
        return mixed + linear(x, WEIGHT)

    assert _products(step, torch.randn(3, 5, 8)) == 4
    assert not torch.is_autocast_enabled("cpu")


def test_shapes_that_change_in_place() -> None:
    """Dynamo shows of a tensor what it is in the end; the trace has it as it was at each call."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y + x
        y.unsqueeze_(0)
        z.t_()
        return linear((y.sum(0) + z.t()) * x, WEIGHT)

    def overload(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.aten.unsqueeze_.default(y, 0)
        return linear(torch.einsum("abc->bc", y), WEIGHT)

    for function in (step, overload):
        assert _products(function, torch.randn(5, 8)) == 1


def mul(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Bears the name of an operator, and is more."""
    y = torch.mul(x, factor)
    return y.t().reshape(y.shape[1], y.shape[0])


def test_a_function_with_the_name_of_an_operator() -> None:
    torch.compiler.allow_in_graph(mul)
    assert _products(lambda x: linear(mul(x, 2.0).t(), WEIGHT), torch.randn(5, 8)) == 1


def test_what_a_trace_would_lose_is_refused() -> None:
    """The results of `vmap` would be constants, and tensors without values."""
    with pytest.raises(Exception, match="vmap"):
        _products(lambda x: torch.vmap(lambda row: linear(row, WEIGHT))(x), torch.randn(5, 8))


def test_numbers_among_the_operands() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        low = torch.tensor(2.0) * x[..., : x.shape[0] // 2] - 3
        scaled = torch.add(low, x.mean(-1, keepdim=True), alpha=2) / x.shape[0]
        return torch.cat([scaled, x.sum(-1, dtype=torch.float32)[:, None] ** 2], -1)

    assert _products(step, torch.randn(6, 8)) == 0


def _listing(program: Program) -> list[str]:
    """Return every node with what the graph says of its value."""

    def value(node: fx.Node) -> str:
        if not isinstance(v := node.meta.get("val"), torch.Tensor):
            return str(v)
        sizes = (*v.shape, *v.stride(), v.storage_offset())
        numbers = [n.node.expr.expand() if isinstance(n, torch.SymInt) else n for n in sizes]
        return f"{v.dtype} {v.device} {numbers}"

    place = {node: f"%{i}" for i, node in enumerate(program.module.graph.nodes)}
    return [f"{n.target} {fx.map_arg((n.args, n.kwargs), place.get)} {value(n)}" for n in place]


@pytest.mark.parametrize(
    "model",
    [
        tiny_llama(),
        tiny_llama(attention="eager"),
        tiny_llama(dtype=torch.bfloat16),
        tiny_qwen2(),
        tiny_gpt2(),
    ],
    ids=["llama", "eager", "bf16", "qwen2", "gpt2"],
)
def test_what_dynamo_found_is_what_running_the_model_finds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of a prompt, of a chunk on a past and of a step, traced with and without shortcuts."""
    shortcuts, record, run = _Retrace.shortcuts, _Retrace.record, Canonicalize.run
    graphs: list[tuple[list[str], list[str], int]] = []

    def trace(program: Program) -> tuple[list[str], int]:
        taken = 0

        def count(self: _Retrace, *args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            out = record(self, *args, **kwargs)
            taken += out is not NotImplemented
            return out

        monkeypatch.setattr(_Retrace, "record", count)
        run(Canonicalize(), program, PassOptions(isa="avx512"))
        return _listing(program), taken

    def both(self: Canonicalize, program: Program, options: PassOptions) -> None:
        captured = program.module
        monkeypatch.setattr(_Retrace, "shortcuts", lambda self: {})
        every_call, _ = trace(program)
        program.module = captured
        monkeypatch.setattr(_Retrace, "shortcuts", shortcuts)
        found, taken = trace(program)
        graphs.append((found, every_call, taken))  # compared below: a pass that fails is left out

    monkeypatch.setattr(Canonicalize, "run", both)
    run_model, cache = compiled(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for tokens in (20, 20, 10, 1):
            run_model(prompt(tokens), past_key_values=cache)
    assert len(graphs) == 4
    for found, every_call, taken in graphs:
        assert found == every_call
        assert taken > len(found) / 3
