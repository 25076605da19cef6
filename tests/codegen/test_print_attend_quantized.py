"""The printed attend kernels of quantized pages."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvcompile.codegen.cpu import isa as isa_module
from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.cpu.isa import ISAS, compiler_flags, has_integer_dot
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.spec import IsaName, MaskKind
from tests.support.golden import Golden
from tests.support.numerics import Case
from tests.support.quantized_case import QuantizedCase

PLAIN = QuantizedCase()


def test_printed_text(golden: Golden) -> None:
    case = QuantizedCase(k_format="int4", v_format="int3", mask="bool")
    golden(generate(case.spec("avx512", "attend")).text)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_no_template_name_and_no_long_line_is_left(isa: IsaName, name: str) -> None:
    masks: tuple[MaskKind, ...] = ("none", "causal", "bool", "additive")
    for mask, (k, v) in zip(masks, [(name, "int4"), ("int1", name)] * 2, strict=True):
        case = QuantizedCase(
            k_format=k,
            v_format=v,
            dims=(1000, 1000),
            page_size=128,
            sinks=130,
            mask=mask,
            mask_dtype="fp32" if mask == "additive" else None,
            queries="few",
            rotary=Rotary(20, interleaved=True) if FORMATS[k].is_grouped else None,
        )
        text = generate(case.spec(isa, "attend")).text
        assert "$" not in text
        assert "\n\n\n" not in text
        assert not re.search(r"[ \t]\n", text)
        # The name of the kernel alone may fill a line.
        lines = text.replace(case.spec(isa, "attend").symbol, "symbol").splitlines()
        assert max(len(line) for line in lines) <= 100
        assert text.splitlines()[0] == f"// {case.spec(isa, 'attend').symbol}"
        assert "bytes per cached token and KV head" in text


def test_exact_pages_are_read_by_the_fragments_of_exact_kernels() -> None:
    """But for the tokens of a page and the stride of queries, the text is the same."""
    text = generate(PLAIN.spec("avx512", "attend")).text
    twin = generate(Case(page_size=16).spec("avx512", "attend")).text
    for name in ("tile_scores(", "scores(", "accumulate("):
        begin = twin.index(f"static inline void {name}")
        body = twin[begin : twin.index("\n}\n", begin)]
        exact = text[text.index("namespace exact") : text.index("}  // namespace exact")]
        counted = "std::min(16, chunk.tokens - page * 16)"
        assert body.replace(counted, "chunk.filled[page]") in exact


def test_slots_between_sinks_and_ring_are_buried_only_where_there_are_any() -> None:
    for sinks, printed in ((0, False), (4, True), (16, False), (17, True)):
        text = generate(replace(PLAIN, sinks=sinks).spec("avx2", "attend")).text
        assert ("bury" in text) == printed


def test_what_cannot_be_printed_is_refused_with_a_hint() -> None:
    refused: dict[tuple[QuantizedCase, IsaName], str] = {
        (replace(PLAIN, compute="int8"), "avx2"): "compute int8 for avx2. Choose avx512, or",
        (replace(PLAIN, compute="int8", v_format="fp8"), "avx512"): "compute int8 with v in fp8.",
        (replace(PLAIN, compute="int8", k_format="bf16"), "avx512"): "compute int8 with k in bf16.",
        (replace(PLAIN, page_size=16, k_format="int1"), "avx512"): "page_size must be at least 32",
        (replace(PLAIN, q_group_size=24), "avx512"): "q_group_size must be a multiple of 16",
        (replace(PLAIN, chunk=96), "avx512"): "chunk 96. Choose a multiple of page_size 64",
    }
    for (case, isa), words in refused.items():
        with pytest.raises(UnsupportedKernelError, match=re.escape(words)):
            generate(case.spec(isa, "attend"))


def test_the_dot_product_of_bytes_is_asked_of_compiler_and_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(PLAIN, compute="int8", dims=(48, 48))
    assert compiler_flags(PLAIN.spec("avx512", "attend")) == ISAS["avx512"].flags
    assert compiler_flags(case.spec("avx512", "attend"))[-1] == "-mavx512vnni"
    flags = ISAS["avx512"].cpu_flags
    monkeypatch.setattr(isa_module, "cpu_flags", lambda: flags | {"avx512_vnni"})
    assert has_integer_dot("avx512")
    assert not has_integer_dot("avx2")
    monkeypatch.setattr(isa_module, "cpu_flags", lambda: flags)
    assert not has_integer_dot("avx512")
    with pytest.raises(UnsupportedKernelError, match="compute int8 needs avx512_vnni, which this"):
        load(case.spec("avx512", "attend"))
