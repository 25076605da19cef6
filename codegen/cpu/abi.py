"""The C functions a kernel exports, said once: their printed signatures and how Python calls them.

Every parameter is an 8-byte word: an address, an integer, or the scale as a double. Beside the
function itself each library has `<symbol>_packed`, which takes the same words in one string of
bytes: converting twenty arguments one by one costs Python four times as much as packing them.
"""

from __future__ import annotations

import struct

from kvcompile.codegen.cpu.scalars import CTYPE
from kvcompile.codegen.cpu.text import render
from kvcompile.codegen.spec import KernelSpec, LinearSpec, Spec

Parameter = tuple[str, str]

PACKED = """
// the same, its arguments as words in a row
extern "C" int64_t ${symbol}_packed(
    const char* arguments) {
  int64_t w[$count];
  memcpy(w, arguments, sizeof w);
$double  return $symbol(
$passed);
}
"""


def _tensor(ctype: str, name: str, prefix: str, dims: str) -> list[list[Parameter]]:
    strides = [("int64_t", f"{prefix}_s{dim}") for dim in dims]
    return [[(f"{ctype}*", name), *strides]]


def parameter_lines(spec: Spec) -> list[list[Parameter]]:
    """Return the parameters of a kernel as (C type, name), in the lines they are printed in."""
    word = CTYPE[spec.dtype]
    if isinstance(spec, LinearSpec):
        return [
            [(f"const {word}*", "x_MK"), (f"const {word}*", "weight_NK")],
            [(f"const {word}*", "bias_N"), (f"{word}*", "out_MN")],
            [("int64_t", name) for name in ("rows", "in_features", "out_features", "threads")],
        ]
    assert isinstance(spec, KernelSpec)
    integers = {
        "append": ["num_kv_heads", "past_len", "new_len", "threads"],
        "gather": ["num_kv_heads", "from", "to", "threads"],
        "attend": ["num_kv_heads", "query_len", "kv_len"],
    }
    lines: list[list[Parameter]] = [[("const int64_t*", "state")]]
    if spec.op == "append":
        lines += _tensor(f"const {word}", "k_BKSD", "k", "bht")
        lines += _tensor(f"const {word}", "v_BKSD", "v", "bht")
        lines += _angles(spec)
    elif spec.op == "gather":
        lines += _tensor(word, "k_BKTD", "k", "bht")
        lines += _tensor(word, "v_BKTD", "v", "bht")
    else:
        lines += _tensor(f"const {word}", "q_BHSD", "q", "bhs")
        lines += _tensor(word, "out_BHSD", "o", "bhs")
        lines += _angles(spec)
        lines += _tensor(f"const {mask_ctype(spec)}", "mask_BHST", "m", "bhst")
        if spec.sink_dtype is not None:
            lines.append([(f"const {CTYPE[spec.sink_dtype]}*", "sinks_H")])
    lines.append([("int64_t", name) for name in integers[spec.op]])
    if spec.op == "attend":
        lines.append([("float*", "scratch"), ("int64_t", "threads"), ("double", "scale")])
    return lines


def _angles(spec: KernelSpec) -> list[list[Parameter]]:
    """Return the cosines and sines that q or new K turn by, if they do."""
    if spec.rope is None:
        return []
    word = CTYPE[spec.dtype]
    return [
        line
        for name in ("cos", "sin")
        for line in _tensor(f"const {word}", f"{name}_BSR", name, "bs")
    ]


def mask_ctype(spec: KernelSpec) -> str:
    """Return the C++ type of the mask; kernels without one take a pointer they never read."""
    return "uint8_t" if spec.mask_dtype is None else CTYPE[spec.mask_dtype]


def signature_text(spec: Spec) -> str:
    """Print the head of the kernel's function."""
    lines = [
        "    " + ", ".join(f"{ctype} {name}" for ctype, name in line)
        for line in parameter_lines(spec)
    ]
    return f'extern "C" int64_t {spec.symbol}(\n' + ",\n".join(lines) + ") {"


def packed_text(spec: Spec) -> str:
    """Print the function that takes packed arguments."""
    index = 0
    lines = []
    double = ""
    for line in parameter_lines(spec):
        words = []
        for ctype, name in line:
            if ctype == "double":
                double = f"  double {name};\n  memcpy(&{name}, w + {index}, sizeof {name});\n"
                words.append(name)
            else:
                words.append(f"w[{index}]" if ctype == "int64_t" else f"({ctype})w[{index}]")
            index += 1
        lines.append("      " + ", ".join(words))
    return render(PACKED, symbol=spec.symbol, count=index, double=double, passed=",\n".join(lines))


def packed_arguments(spec: Spec) -> struct.Struct:
    """Return what packs the arguments of a kernel of this op."""
    types = [ctype for line in parameter_lines(spec) for ctype, _ in line]
    return struct.Struct("=" + "".join("d" if ctype == "double" else "q" for ctype in types))
