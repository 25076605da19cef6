"""The small functions of GPU kernels: inline PTX and plain Triton agree, on every word there is."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvcompile.codegen.gpu.helpers import (
    LOWER,
    MINIMA,
    MINIMA_PTX,
    POWER,
    SCALES,
    SCALES_PTX,
    UPPER,
    raw_place,
    unpack_float_text,
    unpack_text,
)
from kvcompile.codegen.gpu.quantize import NEAREST, nearest_float_text
from tests.support import triton_interpreter
from tests.support.float8 import FLOAT8, hard_numbers
from tests.support.triton_interpreter import run_ptx

HEAD = "import triton\nimport triton.language as tl\n\n\n"
WORDS = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
KINDS = {"fp16": torch.float16, "fp32": torch.float32}


def load(path: Path, text: str) -> Any:
    """Return the function `run` of a module."""
    path.write_text(HEAD + text)
    name = path.stem
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module.run


def unpacked(path: Path, text: str, fields: int, kind: torch.dtype) -> torch.Tensor:
    """Return the fields of all words, [fields, 65536]."""
    match = re.search(r"def (\w+)\(", text)
    assert match is not None
    names = ", ".join(f"a{i}" for i in range(fields))
    stores = "\n".join(f"    tl.store(out_FN + {i} * 65536 + n, a{i})" for i in range(fields))
    body = (
        f"    n = tl.arange(0, 65536)\n    {names} = {match[1]}(tl.load(words_N + n))\n{stores}\n"
    )
    run = load(path, f"{text}\n\n@triton.jit\ndef run(words_N, out_FN):\n{body}")
    out = torch.full((fields, len(WORDS)), torch.nan, dtype=kind)
    run[(1,)](WORDS, out)
    return out


def fields_of(bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 16, bits)[:, None]
    return (WORDS.int() & 0xFFFF) >> shifts & (1 << bits) - 1


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_fields_of_every_word(bits: int, dtype: str, tmp_path: Path) -> None:
    expected = fields_of(bits).to(KINDS[dtype])
    for ptx in (False, True):
        text = unpack_text(bits, ptx=ptx, dtype=dtype)
        assert ("inline_asm" in text) == (ptx and dtype == "fp16")
        name = f"unpack_{bits}_{dtype}_{ptx}.py"
        assert torch.equal(unpacked(tmp_path / name, text, 16 // bits, KINDS[dtype]), expected)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_raw_fields_of_every_word(bits: int, tmp_path: Path) -> None:
    """They are 1024 and the code where it is in the mantissa; fp16 holds each of them."""
    places = torch.tensor([raw_place(bits, i) for i in range(16 // bits)])[:, None]
    assert int(places.max()) + bits <= 10
    expected = (1024 + (fields_of(bits) << places)).half()
    text = unpack_text(bits, ptx=True, dtype="fp16", raw=True)
    found = unpacked(tmp_path / f"raw_{bits}.py", text, 16 // bits, torch.float16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FLOAT8)
def test_floating_point_numbers_of_every_word(name: str, tmp_path: Path) -> None:
    """e4m3 divided by 256, e5m2 as it is."""
    bytes_ = fields_of(8).to(torch.uint8)
    expected = bytes_.view(FLOAT8[name].word).float() / {"fp8": 256, "fp8_e5m2": 1}[name]
    numbers = ~expected.isnan()
    for dtype, kind in KINDS.items():
        plain, ptx = (
            unpacked(
                tmp_path / f"{name}_{dtype}_{ptx}.py",
                unpack_float_text(FLOAT8[name], ptx=ptx, dtype=dtype),
                2,
                kind,
            )
            for ptx in (False, True)
        )
        bits = torch.int16 if dtype == "fp16" else torch.int32
        assert torch.equal(plain.view(bits), ptx.view(bits)), "signs of zeros, too"
        assert torch.equal(plain[numbers].float(), expected[numbers])
        assert torch.equal(plain.signbit(), bytes_ >> 7 != 0)


@pytest.mark.parametrize("name", FLOAT8)
def test_numbers_are_rounded_to_8_bits_as_torch_does(name: str, tmp_path: Path) -> None:
    format_ = FLOAT8[name]
    numbers = hard_numbers(format_)
    size = 1 << (len(numbers) - 1).bit_length()
    run = (
        "@triton.jit\ndef run(x_N, words_N):\n"
        f"    n = tl.arange(0, {size})\n    inside = n < {len(numbers)}\n"
        "    x = tl.load(x_N + n, mask=inside, other=0.0)\n"
        f"    tl.store(words_N + n, {format_.type_name}(x), mask=inside)\n"
    )
    text = "\n\n".join((NEAREST, nearest_float_text(format_), run))
    words = torch.full((len(numbers),), -1, dtype=torch.int32)
    load(tmp_path / f"nearest_{name}.py", text)[(1,)](numbers, words)
    assert torch.equal(words, numbers.to(format_.word).view(torch.uint8).int())


@pytest.mark.parametrize("exponent", [1, 100, 127, 140, 238])
def test_scales_and_minima_of_every_word(exponent: int, tmp_path: Path) -> None:
    """Scales meet a unit of 2^(127 - exponent), rounded once; minima stay as they are."""
    words = WORDS.int() << 16 | torch.flip(WORDS, [0]).int() & 0xFFFF
    body = (
        "    n = tl.arange(0, 65536)\n    words = tl.load(words_N + n)\n"
        f"    unit = power(tl.full((), {exponent}, tl.int32))\n"
        "    tl.store(scales_N + n, half_scales(words, unit))\n"
        "    tl.store(minima_N + n, minima(words))\n"
    )
    run = f"@triton.jit\ndef run(words_N, scales_N, minima_N):\n{body}"
    upper = (words & ~0xFFFF).view(torch.float32)
    expected = (upper * 2.0 ** (exponent - 127)).half()
    lower = (words & 0xFFFF).to(torch.int16)
    for name, parts in (
        ("plain", (UPPER, LOWER, SCALES, MINIMA)),
        ("ptx", (SCALES_PTX, MINIMA_PTX)),
    ):
        text = "\n\n".join((*parts, POWER, run))
        scales = torch.zeros(len(words), dtype=torch.float16)
        minima = torch.zeros(len(words), dtype=torch.bfloat16)
        load(tmp_path / f"{name}_{exponent}.py", text)[(1,)](words, scales, minima)
        assert torch.equal(scales.nan_to_num(), expected.nan_to_num())
        assert torch.equal(scales.isnan(), expected.isnan())
        number = ~minima.isnan()
        assert torch.equal(minima.view(torch.int16)[number], lower[number])
        assert torch.equal(minima.isnan(), lower.view(torch.bfloat16).isnan())


def test_the_interpreter_rounds_to_bf16_as_torch_does() -> None:
    numbers = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([numbers, torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.4e38, torch.inf])])
    rounded = triton_interpreter._rounded(numbers.numpy())
    expected = numbers.bfloat16()
    finite = ~expected.isnan().numpy()
    assert np.array_equal(rounded[finite], expected.view(torch.uint16).numpy()[finite])
    assert torch.from_numpy(rounded[~finite]).view(torch.bfloat16).isnan().all()


def test_the_interpreter_knows_what_its_instructions_do() -> None:
    a = np.array([0x12345678], np.uint32)
    result = run_ptx(
        "{ .reg .b32 b, c; mov.b32 c, 0x64646464; prmt.b32 b, $1, c, 0x4240;"
        " lop3.b32 $0, b, 0x00FF00FF, 0xFF000000, 0xEA; }",
        {"$1": a},
    )
    assert int(result["b"][0]) == 0x64346478
    assert int(result["$0"][0]) == (0x64346478 & 0x00FF00FF) | 0xFF000000
