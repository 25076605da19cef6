"""The printed linear kernels."""

from __future__ import annotations

import pytest

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.registry import generate
from kvcompile.codegen.spec import DTypeName, IsaName, LinearSpec
from tests.support.golden import Golden

DTYPES: list[DTypeName] = ["fp32", "bf16", "fp16"]


def test_printed_text(golden: Golden) -> None:
    golden(generate(LinearSpec(isa="avx512", dtype="bf16")).text)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_template_name_and_no_long_line_is_left(isa: IsaName, dtype: DTypeName) -> None:
    text = generate(LinearSpec(isa=isa, dtype=dtype)).text
    assert "$" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
