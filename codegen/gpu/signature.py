"""The Triton types of the parameters of attend, told by their names."""

from __future__ import annotations

from kvcompile.codegen.gpu.fragments import parameters
from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.spec import KernelSpec


def parameter_types(spec: KernelSpec) -> dict[str, str]:
    """Return the Triton type of each parameter, in order: "*bf16" is a pointer, "i32" a number.

    Args:
        spec: A spec of attend that the printer prints.
    """
    mask = "i8" if spec.mask == "bool" else spec.mask_dtype
    others = {
        "q_BHSD": f"*{spec.dtype}",
        "cos_BSR": f"*{spec.dtype}",
        "sin_BSR": f"*{spec.dtype}",
        "page_BN": "*i64",
        "starts_B": "*i32",
        "kv_len": "*i64",
        "quantized_B": "*i32",
        "ring_from_B": "*i32",
        "exact_BN": "*i64",
        "mask_BHST": f"*{mask}",
        "out_RND": "*fp32",
        "lse_RN": "*fp32",
        "scale_log2": "fp32",
    }
    text = "".join(parameters(GpuShape(spec)))
    names = [name.strip() for name in text.split(",") if name.strip()]
    return {name: others.get(name, "i32") for name in names}


def multiples_of_16(types: dict[str, str]) -> list[str]:
    """Return the parameters that are multiples of 16: bytes of an address, or numbers of a row.

    Rows of a query have at least 16 numbers, so Triton finds the same of its strides at a launch.
    """
    return [
        name for name, type_ in types.items() if type_.startswith("*") or name.startswith("q_s")
    ]
