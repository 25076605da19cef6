"""Which devices have GPU kernels, and in which order records lie there."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from kvcompile.codegen.formats import Order
from kvcompile.passes.ir.remarks import Remark, emit

NO_TRITON = "pip install triton; until then caches on GPUs stay as the model made them."


def gpu_devices() -> tuple[str, ...]:
    """Return the devices whose caches get GPU kernels; none unless the environment asks for them.

    Without a GPU they can be looked at, and run in Triton's interpreter.
    """
    if os.environ.get("KVCOMPILE_TARGET") != "gpu":
        return ()
    if find_spec("triton") is None:
        reason = "KVCOMPILE_TARGET=gpu asks for Triton, which is not installed"
        emit(Remark("missed", "KVC303", "backend", "", "", reason, NO_TRITON), once="triton")
        return ()
    return ("cuda",) if torch.cuda.is_available() else ("cpu",)


def native_order(device: torch.device) -> Order:
    """Return the order of records that the kernels of a device read."""
    return "cpu16" if device.type == "cpu" and "cpu" not in gpu_devices() else "gpu16"
