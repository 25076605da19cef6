"""What Inductor makes of rewritten decode graphs on an NVIDIA GPU; no GPU is needed.

A model is captured and rewritten on the CPU. Then all tensors of its graph but the states become
fakes on `cuda`, and Inductor writes the module that it would load: the calls of a step, and the
sources of its Triton kernels. That takes a process of its own, `python -m tests.support.fake_cuda`,
since tests import Triton as an interpreter. What is used of Inductor is private to torch 2.13.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map

import kvcompile
from kvcompile.passes.ir.ops import APPEND_ATTEND
from tests.support.tiny_models import prompt, tiny_llama

LAYERS = 2
CASES = {
    "static_rope": ("static", True),
    "dynamic_rope": ("dynamic", True),
    "dynamic": ("dynamic", False),
}
"""Kinds of cache, and whether q and k turn in the operator."""
CUDA = torch.device("cuda", 0)
H200 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
)


def inductor_modules() -> dict[str, str]:
    """Return the modules that Inductor writes for `CASES`.

    Raises:
        RuntimeError: The process that makes them failed; its words.
    """
    command = [sys.executable, "-m", "tests.support.fake_cuda"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))


def decode_graph(cache: str, fuse_rope: bool) -> tuple[fx.GraphModule, list[Any]]:
    """Return what the backend gives Inductor for a decode step of two rows, one left-padded."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def inner(gm: fx.GraphModule, inputs: list[Any], *_: Any, **__: Any) -> Callable[..., Any]:
        if gm.graph.find_nodes(op="call_function", target=APPEND_ATTEND):
            found.append((gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    run = kvcompile.compile(tiny_llama(dtype=torch.bfloat16, layers=LAYERS), fuse_rope=fuse_rope)
    ids = prompt(5, batch=2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with mock.patch("kvcompile.backend._inner", inner):
        run.generate(ids, attention_mask=mask, max_new_tokens=3, cache_implementation=cache)
    (graph,) = found
    return graph


class _Written(BaseException):
    """A module is written, and is not to be loaded; not an error, which Inductor would wrap."""


def cuda_module(gm: fx.GraphModule, inputs: list[Any]) -> str:
    """Return the module that Inductor writes for a graph if all but its states is on a GPU."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    stays = [n.name.startswith("kv_state") for n in gm.graph.find_nodes(op="placeholder")]

    def on_cuda(aten: fx.GraphModule, cpu: list[Any], **how: Any) -> Any:
        for node in aten.graph.nodes:
            node.args, node.kwargs = tree_map(_moved, (node.args, dict(node.kwargs)))
        mode = next(x.fake_mode for x in cpu if isinstance(x, FakeTensor))
        with mode:
            moved = [x if its else _moved(x) for x, its in zip(cpu, stays, strict=True)]
        FakeTensorProp(aten, mode).propagate_dont_convert_inputs(*moved)
        return compile_fx_inner(aten, moved, **how)

    with (
        mock.patch.object(GraphLowering, "save_output_code", side_effect=_Written) as save,
        config.patch(fx_graph_cache=False, compile_threads=1),
        torch.no_grad(),
        suppress(_Written),
    ):
        compile_fx(gm, inputs, inner_compile=on_cuda)
    return str(save.call_args.args[0])


def _moved(x: Any) -> Any:
    """Return a tensor as a fake on the GPU, a device as the GPU, and anything else as it is."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
    return CUDA if isinstance(x, torch.device) else x


def pretend_gpu() -> None:
    """Let Inductor and Triton find a GPU, for good."""
    import triton
    from torch._dynamo import device_interface
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget

    properties = staticmethod(lambda _=None: H200)
    facts = {
        "Worker": SimpleNamespace(get_device_properties=properties),
        "get_device_properties": properties,
        "get_compute_capability": staticmethod(lambda *_: 90),
        "is_available": staticmethod(lambda: True),
        "is_bf16_supported": staticmethod(lambda **_: True),
    }
    device_interface.init_device_reg()
    interface = type("Interface", (device_interface.CudaInterface,), facts)
    device_interface.register_interface_for_device("cuda", interface)
    device_interface.register_interface_for_device("cuda:0", interface)
    mock.patch("torch.cuda.get_device_properties", properties).start()
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    has_triton.cache_clear()


if __name__ == "__main__":
    found = {name: decode_graph(*case) for name, case in CASES.items()}
    pretend_gpu()
    sys.stdout.write(json.dumps({name: cuda_module(*graph) for name, graph in found.items()}))
