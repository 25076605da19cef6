"""What a GPU would run in a decode step: our operator, matrix products and fused kernels.

Inductor compiles for a GPU that is not there; `tests.support.fake_cuda` says how.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest

from tests.support.fake_cuda import CASES, LAYERS, inductor_modules

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton"),
    pytest.mark.parametrize("case", CASES),
]

ATTEND = "torch.ops.kvcompile.append_attend.default"
PRODUCT = "extern_kernels.mm"
ON_THE_HOST = {
    "args.clear",
    "assert_size_stride",
    "copy_if_misaligned",
    "empty_strided_cuda",
    "get_raw_stream",
    "reinterpret_tensor",
    "torch.cuda._DeviceGuard",
    "torch.cuda.set_device",
}
"""What costs the device nothing."""

MOST_KERNELS = {"static_rope": (4, 2), "dynamic_rope": (3, 3), "dynamic": (5, 2)}
"""Beside products and attention. Of a layer: two norms and the MLP's activation, its counter in a
static cache, what turns q and k outside the operator. Of a step: the last norm, angles, a mask."""


class Step:
    """The calls of one step in a module that Inductor wrote, and the sources of its kernels."""

    def __init__(self, module: str) -> None:
        tree = ast.parse(module)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        (step,) = (function for function in functions if function.name == "call")
        self.calls = [node for node in ast.walk(step) if isinstance(node, ast.Call)]
        self.names = [ast.unparse(call.func) for call in self.calls]
        self.kernels = [name.removesuffix(".run") for name in self.names if name.endswith(".run")]
        self.sources = {
            ast.literal_eval(node.args[0]): ast.literal_eval(node.args[1])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton"
        }

    def of(self, name: str) -> list[ast.Call]:
        """Return the calls of a function."""
        return [call for call, its in zip(self.calls, self.names, strict=True) if its == name]

    def takers(self, tensor: str) -> list[str]:
        """Return what a tensor, or a view of it, is given to."""
        return [
            name
            for call, name in zip(self.calls, self.names, strict=True)
            if tensor in map(memory, (*call.args, *(k.value for k in call.keywords)))
        ]


def memory(arg: ast.expr) -> str:
    """Return the tensor that an argument is, or is a view of."""
    match arg:
        case ast.Call(func=ast.Name("reinterpret_tensor"), args=[base, *_]):
            return memory(base)
    return ast.unparse(arg)


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    return {name: Step(module) for name, module in inductor_modules().items()}


@pytest.fixture
def step(case: str, steps: dict[str, Step]) -> Step:
    return steps[case]


def test_a_layer_is_one_call_on_a_state_that_stays_where_it_is(step: Step) -> None:
    states = [memory(call.args[3]) for call in step.of(ATTEND)]
    assert len(set(states)) == LAYERS
    for state in states:
        assert state.startswith("arg")
        assert step.takers(state) == ["assert_size_stride", ATTEND]


def test_nothing_waits_and_nothing_is_copied(case: str, step: Step) -> None:
    """No `item()`, no copy between devices, no operator that is not fused into a kernel."""
    launched = {f"{name}.run" for name in step.sources}
    assert set(step.names) <= launched | {ATTEND, PRODUCT} | ON_THE_HOST
    of_layer, of_step = MOST_KERNELS[case]
    assert len(step.kernels) <= LAYERS * of_layer + of_step


def test_q_k_and_v_come_straight_from_their_products(case: str, step: Step) -> None:
    """But for q and k that turn before: then those come from the kernels that turn them."""
    inside = case.endswith("_rope")
    turning = [name for name in step.kernels if "tl_math.cos(" in step.sources[name]]
    assert len(turning) == (1 if inside else 2 * LAYERS)
    products = {memory(call.keywords[0].value) for call in step.of(PRODUCT)}
    for call in step.of(ATTEND):
        assert [memory(arg) in products for arg in call.args[:3]] == [inside, inside, True]


def test_layers_share_mask_and_angles(step: Step) -> None:
    """Masks as equal views of one tensor, by which the runtime knows that it has seen them."""
    calls = step.of(ATTEND)
    assert len({ast.unparse(call.args[6]) for call in calls}) == 1
    assert len({tuple(map(memory, call.args[10:12])) for call in calls}) == 1
