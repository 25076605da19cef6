"""The printed text: pure, readable, and what the golden file says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.registry import generate, registry
from kvcompile.codegen.spec import IsaName, MaskKind, Op
from tests.support.golden import Golden
from tests.support.numerics import Case

GOLDEN: dict[str, tuple[Case, Op, IsaName]] = {
    "append": (Case(dims=(12, 64)), "append", "portable"),
    "gather": (Case(dtype="fp32", store="fp16"), "gather", "avx2"),
    "decode": (Case(mask="bool"), "attend", "avx512"),
    "verify": (
        Case(dtype="fp32", dims=(24, 24), mask="causal", queries="few", group=2, page_size=16),
        "attend",
        "avx512",
    ),
    "portable": (
        Case(dtype="fp16", mask="additive", mask_dtype="fp32", group=9),
        "attend",
        "portable",
    ),
    "variants": (Case(softcap=30.0, sink_dtype="fp32", dims=(32, 32)), "attend", "avx2"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_printed_text(name: str, golden: Golden) -> None:
    case, op, isa = GOLDEN[name]
    golden(generate(case.spec(isa, op)).text)


def test_another_process_prints_the_same_text() -> None:
    case, op, isa = GOLDEN["verify"]
    spec = case.spec(isa, op)
    program = (
        "from kvcompile.codegen.spec import KernelSpec\n"
        "from kvcompile.codegen.registry import generate\n"
        f"print(end=generate({spec!r}).text)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert other.stdout == generate(spec).text


@pytest.mark.parametrize("op", ["append", "attend", "gather"])
@pytest.mark.parametrize("isa", ISAS)
def test_no_template_name_and_no_long_line_is_left(op: Op, isa: IsaName) -> None:
    masks: tuple[MaskKind, ...] = ("none", "causal", "bool", "additive")
    for mask in masks:
        case = Case(
            mask=mask,
            mask_dtype="fp32" if mask == "additive" else None,
            dims=(20, 24),
            queries="few",
            softcap=50.0 if mask == "none" else None,
            sink_dtype="bf16" if mask == "causal" else None,
        )
        text = generate(case.spec(isa, op)).text
        assert "$" not in text
        assert "\n\n\n" not in text
        assert not re.search(r"[ \t]\n", text)
        assert max(len(line) for line in text.splitlines()) <= 100
        assert text.splitlines()[0] == f"// {case.spec(isa, op).symbol}"
        assert "bytes per cached token and KV head" in text


def test_fragments_come_in_the_order_of_the_mathematics() -> None:
    text = generate(Case(mask="bool").spec("avx2", "attend")).text
    order = ["load_query", "scores", "mask", "online_softmax"]
    order += ["accumulate", "store_partial", "merge_splits"]
    places = [text.index(f"// {name}: ") for name in order]
    assert places == sorted(places)


def test_what_cannot_be_printed_is_refused_with_a_hint() -> None:
    refused = {
        Case(group=300): "300 query heads per KV head. 1 to 256",
        Case(chunk=100): "chunk 100. Choose a multiple of page_size 32",
        Case(mask="additive", mask_dtype="fp16"): "a fp16 mask with bf16 queries. Convert",
        Case(page_size=48): "page_size 48. Choose one of",
        Case(dims=(2000, 64)): "head_dim_qk 2000. 1 to 1024",
        Case(store="int5"): "unknown cache format 'int5'; known: fp32, bf16, fp16",  # type: ignore[arg-type]
    }
    for case, words in refused.items():
        with pytest.raises(UnsupportedKernelError, match=re.escape(words)):
            generate(case.spec("portable", "attend"))


def test_the_registry_is_complete() -> None:
    both = ("append", "attend", "gather")
    assert set(registry) == {
        *(("cpu", op) for op in (*both, "linear")),
        *(("gpu", op) for op in (*both, "attend_latent", "merge_splits")),
    }
