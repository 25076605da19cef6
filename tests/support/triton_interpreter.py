"""Triton's interpreter, repaired: bf16 numbers, and the few PTX instructions we print.

The interpreter keeps bf16 numbers as their bits, and multiplies those; it rounds to them towards
zero, and loses subnormal ones; it knows no inline assembly. It puts its own operators into the
language again at every call of a function, which takes a quarter of its time.
The environment says TRITON_INTERPRET=1 from the first import of the tests on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

Words = npt.NDArray[np.uint32]


def _widened(handle: Any) -> Any:
    """Return bf16 numbers as fp32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(numbers, tl.float32)


_convert_float = interpreter._convert_float


def _rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bf16 numbers, even ones where two are as near."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FFF, nearest).astype(np.uint16)


def _convert(data: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
    """Return the bits of numbers of one type as another, bf16 ones rounded as hardware does."""
    if source == tl.bfloat16 and target.primitive_bitwidth <= 32 and target.fp_mantissa_width > 7:
        wide = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide.view(np.uint32) if target == tl.float32 else wide.astype(np.float16)
    if target == tl.bfloat16 and source in (tl.float32, tl.float16):
        kind = np.float32 if source == tl.float32 else np.float16
        return _rounded(np.ascontiguousarray(data).view(kind).astype(np.float32))
    converted: npt.NDArray[Any] = _convert_float(data, source, target, rounding)
    return converted


_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    return _create_dot(self, _widened(a), _widened(b), d, *options)


def _halves(words: Words) -> npt.NDArray[np.float64]:
    return words.view(np.float16).reshape(-1, 2).astype(np.float64)


def _packed(halves: npt.NDArray[np.float64]) -> Words:
    # A product of two fp16 numbers and a sum with a third are exact in float64 but for what is
    # far below the last bit, so that this is the one rounding.
    return np.ascontiguousarray(halves.astype(np.float16)).view(np.uint32).reshape(-1)


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            first = a if i & 4 else ~a
            second = b if i & 2 else ~b
            result |= first & second & (c if i & 1 else ~c)
    return result


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both = np.stack([a, b], -1).view(np.uint8)
    chosen = [both[:, int(selector[0]) >> 4 * i & 7] for i in range(4)]
    return np.ascontiguousarray(np.stack(chosen, -1)).view(np.uint32).reshape(-1)


def _mul_f32(a: Words, b: Words) -> Words:
    return (a.view(np.float32) * b.view(np.float32)).view(np.uint32)


def _cvt_f16x2(high: Words, low: Words) -> Words:
    halves = np.stack([low.view(np.float32), high.view(np.float32)], -1)
    return _packed(halves.astype(np.float64))


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a.copy(),
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mul.f32": _mul_f32,
    "cvt.rn.f16x2.f32": _cvt_f16x2,
    "sub.f16x2": lambda a, b: _packed(_halves(a) - _halves(b)),
    "fma.rn.f16x2": lambda a, b, c: _packed(_halves(a) * _halves(b) + _halves(c)),
}


def run_ptx(text: str, operands: dict[str, Words]) -> dict[str, Words]:
    """Run instructions on 32-bit registers of many lanes; return all registers."""
    registers = dict(operands)
    lanes = len(next(iter(operands.values())))
    for statement in re.sub(r"[{}]", "", text).split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = [part.strip() for part in rest.split(",")]
        values = [
            registers[s] if s in registers else np.full(lanes, int(s, 0), np.uint32)
            for s in sources
        ]
        registers[target] = INSTRUCTIONS[name](*values)
    return registers


def _inline_asm(
    self: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
) -> Any:
    """Run inline assembly of packs of elements, each in as many registers as it fills."""
    shape = np.broadcast_shapes(*[value.data.shape for value in values])
    operands: dict[str, Words] = {}
    number = len(types)
    for value in values:
        lanes = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1, pack)
        for words in np.split(lanes.view(np.uint32), _registers(lanes), 1):
            operands[f"${number}"] = np.ascontiguousarray(words).reshape(-1)
            number += 1
    registers = run_ptx(text, operands)
    results = []
    for i, kind in enumerate(types):
        words = registers[f"${i}"]
        numbers = words.view(np.float16 if kind.scalar == tl.float16 else np.uint16)
        results.append(interpreter.TensorHandle(numbers.reshape(shape), kind.scalar))

    class Call:
        def get_result(self, index: int) -> Any:
            return results[index]

    return Call()


def _registers(lanes: npt.NDArray[Any]) -> int:
    return int(lanes.shape[1]) * lanes.dtype.itemsize // 4


_patch_lang = interpreter._patch_lang
_patched: set[ModuleType] = set()


def _patch_lang_once(function: Any) -> Any:
    """Put the interpreter's operators into the language, for good; return what to restore: nothing.

    Every process of the tests interprets, see `tests/conftest.py`.
    """
    modules = {m for m in function.__globals__.values() if m is tl or m is tl.core}
    if not modules <= _patched:
        _patch_lang(function)
        _patched.update(modules)
    return interpreter._LangPatchScope()


def repair() -> None:
    """Put the repairs in place."""
    interpreter._patch_lang = _patch_lang_once
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_inline_asm = _inline_asm


repair()
