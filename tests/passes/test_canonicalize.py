"""The re-trace: what it records is what running the model gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.functional import linear

from kvcompile.passes.base import PassOptions
from kvcompile.passes.canonicalize import Canonicalize
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage

WEIGHT, BIAS = torch.randn(6, 8), torch.randn(6)


class _Recorded(fx.Interpreter):
    """Runs a canonical graph and holds every value against what the trace recorded of it."""

    products = 0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.target is torch.ops.aten.linear.default:
            self.products += 1
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
