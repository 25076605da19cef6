"""The printed kernels of GPUs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.errors import UnsupportedKernelError
from kvcompile.codegen.formats import FORMATS
from kvcompile.codegen.gpu.attend import AttendGenerator
from kvcompile.codegen.gpu.merge import MergeGenerator
from kvcompile.codegen.registry import generate
from kvcompile.codegen.rotary import Rotary
from kvcompile.codegen.source import Unsupported
from kvcompile.codegen.spec import DTypeName, KernelSpec, MaskKind, MergeSpec, Spec
from tests.support.golden import Golden

EXACT = KernelSpec(
    op="attend",
    target="gpu",
    isa="ptx",
    dtype="bf16",
    k_format="bf16",
    v_format="bf16",
    head_dim_qk=64,
    head_dim_vo=64,
    page_size=64,
    layout="gpu16",
    q_heads_per_kv_head=4,
    mask="none",
    queries="one",
)
GROUPED = replace(
    EXACT, k_format="int4", v_format="int4", q_group_size=64, num_sink_tokens=4, compute="fp16"
)
MERGE = MergeSpec(dtype="bf16", head_dim_vo=80, q_heads_per_kv_head=3, most_splits=8)


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    """Return any attend spec of a GPU that is no contradiction."""
    names = st.sampled_from(sorted(FORMATS))
    k, v = draw(names), draw(names)
    grouped = FORMATS[k].is_grouped or FORMATS[v].is_grouped
    masks: list[MaskKind] = ["none", "causal", "bool", "additive"]
    types: list[DTypeName] = ["fp32", "bf16", "fp16"]
    mask, dims, dtypes = draw(st.sampled_from(masks)), st.integers(1, 272), st.sampled_from(types)
    rotates = FORMATS[k].is_grouped and draw(st.booleans()) and draw(st.booleans())
    return KernelSpec(
        op="attend",
        target="gpu",
        isa=draw(st.sampled_from(["ptx", "triton"])),
        dtype=draw(dtypes),
        k_format=k,
        v_format=v,
        head_dim_qk=draw(dims),
        head_dim_vo=draw(dims),
        page_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        layout="gpu16",
        q_heads_per_kv_head=draw(st.integers(1, 40)),
        mask=mask,
        mask_dtype=draw(dtypes) if mask == "additive" else None,
        queries=draw(st.sampled_from(["one", "few"])),
        q_group_size=draw(st.integers(1, 9)) * 16 if grouped else None,
        num_sink_tokens=draw(st.integers(0, 40)) if grouped else None,
        compute=draw(st.sampled_from(["fp16", "fp32", "int8"])) if grouped else None,
        softcap=draw(st.none() | st.floats(1, 100)),
        sink_dtype=draw(st.none() | dtypes),
        sliding_window=draw(st.none() | st.integers(1, 5000)),
        rotary=Rotary(2) if rotates else None,
    )


def test_printed_exact_pages(golden: Golden) -> None:
    golden(generate(replace(EXACT, mask="causal", queries="few", softcap=50.0)).text)


def test_printed_quantized_pages(golden: Golden) -> None:
    spec = replace(GROUPED, mask="additive", mask_dtype="fp32", head_dim_qk=80, head_dim_vo=96)
    golden(generate(replace(spec, page_size=128)).text)


def test_printed_raw_fields_and_two_parts_of_codes(golden: Golden) -> None:
    spec = replace(GROUPED, k_format="int2", v_format="int3", head_dim_qk=128, mask="bool")
    golden(generate(replace(spec, dtype="fp16", q_group_size=32)).text)


def test_printed_plain_triton_of_e4m3_beside_words(golden: Golden) -> None:
    spec = replace(GROUPED, isa="triton", k_format="bf16", v_format="fp8", queries="few")
    golden(generate(replace(spec, sliding_window=100, q_heads_per_kv_head=5)).text)


def test_printed_e5m2_beside_e4m3(golden: Golden) -> None:
    golden(generate(replace(GROUPED, k_format="fp8_e5m2", v_format="fp8")).text)


def test_printed_fp32_products(golden: Golden) -> None:
    golden(generate(replace(GROUPED, k_format="int8", v_format="fp8", compute="fp32")).text)


def test_printed_tiles_too_small_for_tensor_cores(golden: Golden) -> None:
    golden(generate(replace(GROUPED, head_dim_qk=32, head_dim_vo=32, page_size=16)).text)


def test_printed_merge(golden: Golden) -> None:
    golden(generate(MERGE).text)


def test_printed_merge_of_sink_logits(golden: Golden) -> None:
    golden(generate(replace(MERGE, head_dim_vo=64, sink_dtype="bf16")).text)


@given(specs())
@settings(max_examples=150, deadline=None)
def test_what_is_supported_is_printed_and_what_is_not_says_why(spec: KernelSpec) -> None:
    answer = AttendGenerator().supports(spec)
    if isinstance(answer, Unsupported):
        assert answer.reason.strip()
        assert answer.hint.strip()
        with pytest.raises(UnsupportedKernelError, match=re.escape(answer.reason)):
            generate(spec)
        return
    text = generate(spec).text
    assert text == generate(replace(spec)).text
    check_text(text, spec.symbol)


def check_text(text: str, symbol: str) -> None:
    """Assert that a module is tidy, and that all it computes is read."""
    tree = ast.parse(text)
    assert (ast.get_docstring(tree) or "").startswith(symbol)
    assert "\n\n\n\n" not in text
    assert not re.search(r"[ \t]\n", text)
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    assert symbol in functions
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert set(functions) - {symbol} <= called, "a helper that nothing calls"
    assert called <= {*functions, "range", "float"}
    for function in functions.values():
        stored = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        loaded = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        assert stored <= loaded, f"never read: {stored - loaded}"


REFUSED: dict[str, tuple[Spec, str]] = {
    "cannot multiply": (replace(GROUPED, compute="int8"), "compute int8. Choose fp16 or fp32"),
    "a model of fp32": (replace(GROUPED, dtype="fp32"), 'fp32 model. Choose compute "fp32"'),
    "an unknown size": (replace(EXACT, page_size=48), "page_size must be one of"),
    "a turning mean": (replace(GROUPED, rotary=Rotary(64)), "Leave separate_k_bias off"),
    "splits": (replace(MERGE, most_splits=512), "512 splits. At most 256 are merged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_printed_is_refused_with_a_hint(name: str) -> None:
    spec, words = REFUSED[name]
    with pytest.raises(UnsupportedKernelError, match=re.escape(words)):
        generate(spec)


def test_merges_of_all_sizes_are_tidy() -> None:
    for dim, splits in ((1, 1), (64, 256), (72, 2)):
        spec = MergeSpec(dtype="fp16", head_dim_vo=dim, q_heads_per_kv_head=1, most_splits=splits)
        assert not isinstance(MergeGenerator().supports(spec), Unsupported)
        check_text(generate(spec).text, spec.symbol)


def test_printing_needs_no_triton() -> None:
    """It is imported when a kernel is loaded, not when one is asked for or printed."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from kvcompile.codegen.registry import generate, registry\n"
        "from tests.codegen.test_print_gpu import GROUPED, MERGE\n"
        "for spec in (GROUPED, MERGE):\n"
        "    print(type(registry[spec.target, spec.op].supports(spec)).__name__)\n"
        "    print(generate(spec).text.count('@triton.jit') > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["Supported", "True"] * 2, done.stderr
