"""The small functions of a generated module: unpacking codes, and bits that are numbers.

Each has two texts: packed inline PTX for NVIDIA, whose instructions work on two 16-bit lanes at
once and which no compiler undoes, and plain Triton for other GPUs and the interpreter. Fields of a
word are put into the mantissa of an fp16 number between 1024 and 2048, from which 1024 is taken
again.
"""

from __future__ import annotations

from kvcompile.codegen.formats.float8 import FP16_BIAS, Float8Format
from kvcompile.codegen.gpu.shape import TRITON_TYPE, Part

MANTISSA = 10


def unpack_name(bits: int, *, is_raw: bool = False) -> str:
    """Return the name of the function that unpacks words of integer fields."""
    return f"unpack_{bits}{'_raw' if is_raw else ''}"


def unpack_float_name(format_: Float8Format) -> str:
    """Return the name of the function that unpacks words of floating-point numbers."""
    return f"unpack_{format_.name}"


def raw_place(bits: int, field: int) -> int:
    """Return the bit of the mantissa that begins a field: its number is 1024 + code * 2^bit."""
    in_place = MANTISSA // bits if bits < 8 else 1
    return field % in_place * bits


def unpack_text(bits: int, *, ptx: bool, dtype: str, raw: bool = False) -> str:
    """Print the function that turns int16 words into the unsigned numbers of their fields.

    Args:
        bits: Bits of a field: 1, 2, 4 or 8.
        ptx: Whether inline PTX may be used; it makes fp16 numbers.
        dtype: Name of the type of the numbers.
        raw: Whether to leave the numbers as they lie in the mantissa; see `raw_place`.
    """
    fields, triton_type = 16 // bits, TRITON_TYPE[dtype]
    head = f"@triton.jit\ndef {unpack_name(bits, is_raw=raw)}(words):\n"
    note = f"    # {fields} fields of {bits} bits, lowest first\n"
    if raw:
        note = f"    # {fields} fields of {bits} bits as 1024 + field * 2^bit, lowest first\n"
    if not ptx or dtype != "fp16":
        mask = (1 << bits) - 1
        parts = [
            f"        ({f'(words >> {i * bits})' if i else 'words'} & {mask}).to({triton_type}),"
            for i in range(fields)
        ]
        return head + note + "    return (\n" + "\n".join(parts) + "\n    )\n"
    body = _bytes_ptx(raw=raw) if bits == 8 else _fields_ptx(bits, raw=raw)
    return head + note + _asm(body, fields)


def _asm(body: list[str], outputs: int) -> str:
    lines = "\n".join(f"        {line}" for line in body)
    constraints = ",".join(["=r"] * outputs + ["r"])
    return (
        f'    return tl.inline_asm_elementwise(\n        """{{\n{lines}\n        }}""",\n'
        f'        "{constraints}",\n        [words],\n'
        f"        dtype=(tl.float16,) * {outputs},\n"
        "        is_pure=True,\n        pack=2,\n    )\n"
    )


def _twice(half: int) -> str:
    return f"0x{half << 16 | half:08X}"


def _bytes_ptx(*, raw: bool) -> list[str]:
    """Bytes behind the upper byte of 1024."""
    first, second = ("$0", "$1") if raw else ("a", "b")
    lines = [
        ".reg .b32 a, b, c, k;",
        "mov.b32 c, 0x64646464;",
        f"prmt.b32 {first}, $2, c, 0x4240;",
        f"prmt.b32 {second}, $2, c, 0x4341;",
    ]
    if not raw:
        lines += [f"mov.b32 k, {_twice(0x6400)};", "sub.f16x2 $0, a, k;", "sub.f16x2 $1, b, k;"]
    return lines


def _fields_ptx(bits: int, *, raw: bool) -> list[str]:
    """Fields where they are in the mantissa; those beyond it after one shift."""
    fields, in_place = 16 // bits, MANTISSA // bits
    shift = in_place * bits
    constants, body = [f"mov.b32 k, {_twice(0x6400)};"], []
    for i in range(fields):
        low = raw_place(bits, i)
        source = f"${fields}" if i < in_place else "t"
        mask = _twice((1 << bits) - 1 << low)
        target = f"${i}" if raw else "a"
        body.append(f"lop3.b32 {target}, {source}, {mask}, {_twice(0x6400)}, 0xEA;")
        if raw:
            continue
        if low:
            body.append(f"fma.rn.f16x2 ${i}, a, s{low}, m{low};")
        else:
            body.append(f"sub.f16x2 ${i}, a, k;")
    for low in range(bits, shift, bits) if not raw else ():
        scale, minus = FP16_BIAS - low << MANTISSA, FP16_BIAS + MANTISSA - low
        constants.append(f"mov.b32 s{low}, {_twice(scale)};")
        constants.append(f"mov.b32 m{low}, {_twice(0x8000 | minus << MANTISSA)};")
    names = ["t", "a", "k", *(line.split()[1].rstrip(",") for line in constants[1:])]
    registers = f".reg .b32 {', '.join(names)};"
    return [
        registers,
        f"shr.b32 t, ${fields}, {shift};",
        *([] if raw else constants),
        *body,
    ]


def unit_factor(part: Part) -> str:
    """Print the factor that turns unpacked numbers into those that codes stand for."""
    return f" * {2.0**part.unit_bits}" if part.unit_bits else ""


def unpack_float_text(format_: Float8Format, *, ptx: bool, dtype: str) -> str:
    """Print the function that turns int16 words into two floating-point numbers.

    The bits of the one type, shifted, are those of fp16, whose exponents begin lower: numbers are
    divided by 2^fp16_exponent. With as many bits of exponent as fp16 has the sign moves as far as
    all else, and a number is one byte that is moved.
    """
    unit, shift = 1 << format_.fp16_exponent, MANTISSA - format_.mantissa_bits
    divided = f" / {unit}" if unit > 1 else ""
    head = (
        f"@triton.jit\ndef {unpack_float_name(format_)}(words):\n"
        f"    # two {format_.type_name} numbers{divided}, lowest first\n"
    )
    if shift == 8:
        body = ["prmt.b32 $0, $2, 0, 0x2404;", f"and.b32 $1, $2, {_twice(0xFF00)};"]
        low, high = "words << 8", "words & -256"
    else:
        mask = 0x7F << shift
        body = [
            ".reg .b32 a, b;",
            "shl.b32 a, $2, 8;",
            "and.b32 a, a, 0x80008000;",
            f"shl.b32 b, $2, {shift};",
            f"lop3.b32 $0, b, {_twice(mask)}, a, 0xEA;",
            "and.b32 a, $2, 0x80008000;",
            f"shr.b32 b, $2, {8 - shift};",
            f"lop3.b32 $1, b, {_twice(mask)}, a, 0xEA;",
        ]
        low = f"((words << {shift}) & 0x{mask:04X}) | ((words << 8) & -32768)"
        high = f"((words >> {8 - shift}) & 0x{mask:04X}) | (words & -32768)"
    if ptx and dtype == "fp16":
        return head + _asm(body, 2)
    cast = "" if dtype == "fp16" else f".to({TRITON_TYPE[dtype]})"
    return (
        head + f"    low = {low}\n    high = {high}\n"
        f"    return (low.to(tl.float16, bitcast=True){cast}, "
        f"high.to(tl.float16, bitcast=True){cast})\n"
    )


UPPER = """@triton.jit
def upper(words):
    # the bf16 number in the upper half of each word
    return (words & -65536).to(tl.float32, bitcast=True)
"""

LOWER = """@triton.jit
def lower(words):
    # the bf16 number in the lower half of each word
    return (words << 16).to(tl.float32, bitcast=True)
"""

POWER = """@triton.jit
def power(exponent):
    # 2^(exponent - 127), for exponents from 1 to 254
    return (exponent << 23).to(tl.float32, bitcast=True)
"""

SCALES_PTX = '''@triton.jit
def half_scales(words, over_unit):
    # the bf16 numbers in the upper halves, divided by a unit, as fp16
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 a, $1, 0xFFFF0000;
        and.b32 b, $2, 0xFFFF0000;
        mul.f32 a, a, $3;
        mul.f32 b, b, $4;
        cvt.rn.f16x2.f32 $0, b, a;
        }""",
        "=r,r,r,r,r",
        [words, over_unit],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
'''

SCALES = """@triton.jit
def half_scales(words, over_unit):
    # the bf16 numbers in the upper halves, divided by a unit, as fp16
    return (upper(words) * over_unit).to(tl.float16)
"""

MINIMA_PTX = """@triton.jit
def minima(words):
    # the bf16 numbers in the lower halves
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;",
        "=r,r,r",
        [words],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
"""

MINIMA = """@triton.jit
def minima(words):
    # the bf16 numbers in the lower halves
    return lower(words).to(tl.bfloat16)
"""
