"""The operator behind `linear` of a few rows: see `codegen.cpu.linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from kvcompile.codegen.cpu.isa import ISAS, detect_isa
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.spec import LinearSpec
from kvcompile.runtime import launch
from kvcompile.runtime.cpu_launch import check

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_linears: dict[torch.dtype, Linear] = {}
launch.LAUNCHERS.append(_linears)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + bias, of x's dtype, contiguous.

    Args:
        x: [..., K]; more rows than the kernel takes are left to PyTorch.
        weight: [N, K].
        bias: [N] or None.
    """
    if not weight.is_contiguous():
        return F.linear(x, weight, bias).contiguous()
    launcher = _linears.get(x.dtype)
    if launcher is None:
        launcher = _linears[x.dtype] = _launcher(x.dtype)
    return launcher(x, weight, bias)


def _launcher(dtype: torch.dtype) -> Linear:
    """Return what multiplies this dtype: the kernel, or PyTorch where it cannot be had."""
    try:
        spec = LinearSpec(isa=detect_isa(), dtype=launch.DTYPE_NAMES[dtype])
    except UnsupportedKernelError as error:
        launch.remark(str(error))
        return F.linear
    kernel = launch.load_or_remark(spec)
    if kernel is None:
        return F.linear
    pack, enter, threads = kernel.pack, kernel.enter, torch.get_num_threads
    most_rows = ISAS[spec.isa].most_rows

    def launcher(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs, inputs = weight.shape
        if x.shape[-1] != inputs or weight.dtype != x.dtype:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} times {weight.dtype} {(outputs, inputs)}")
        rows = x.numel() // max(inputs, 1)
        if not 0 < rows <= most_rows:
            return F.linear(x, weight, bias).contiguous()
        x = x.contiguous()
        address = 0
        if bias is not None:
            if bias.shape != (outputs,) or bias.dtype != x.dtype:
                raise ValueError(f"a bias {bias.dtype} {tuple(bias.shape)} for {outputs} outputs")
            bias = bias.contiguous()
            address = bias.data_ptr()
        out = x.new_empty((*x.shape[:-1], outputs))
        words = pack(
            x.data_ptr(),
            weight.data_ptr(),
            address,
            out.data_ptr(),
            rows,
            inputs,
            outputs,
            threads(),
        )
        check(enter(words), kernel)
        return out

    return launcher
