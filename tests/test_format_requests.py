from typing import Any

import pytest
import torch

from kvcompile.format_requests import parse_formats
from kvcompile.options import OptionError

COMMON = {"inner_backend": "eager"}


def options_of(*lists: str) -> dict[str, dict[str, Any]]:
    return {r.label: dict(r.options) for r in parse_formats(lists, {})}


def test_names_of_dtypes() -> None:
    assert options_of("auto, int8", "int4") == {
        "auto": {"kv_cache_dtype": "auto"},
        "int8": {"kv_cache_dtype": "int8"},
        "int4": {"kv_cache_dtype": "int4"},
    }


@pytest.mark.parametrize("name", ["kint8-vint4", "k8v4", "k8-v4", "kint8v4"])
def test_k_and_v_apart(name: str) -> None:
    assert options_of(name) == {name: {"k_cache_dtype": "int8", "v_cache_dtype": "int4"}}


def test_k_and_v_of_other_kinds() -> None:
    assert options_of("kbf16-vfp8,kfp8_e5m2v4,kauto-vint2") == {
        "kbf16-vfp8": {"k_cache_dtype": "bf16", "v_cache_dtype": "fp8"},
        "kfp8_e5m2v4": {"k_cache_dtype": "fp8_e5m2", "v_cache_dtype": "int4"},
        "kauto-vint2": {"k_cache_dtype": "auto", "v_cache_dtype": "int2"},
    }


def test_options_belong_to_the_format_before_them() -> None:
    assert options_of("int4:residual_length=32,num_sink_tokens=0,k8v4:page_size=128,int3") == {
        "int4:residual_length=32,num_sink_tokens=0": {
            "kv_cache_dtype": "int4",
            "residual_length": 32,
            "num_sink_tokens": 0,
        },
        "k8v4:page_size=128": {
            "k_cache_dtype": "int8",
            "v_cache_dtype": "int4",
            "page_size": 128,
        },
        "int3": {"kv_cache_dtype": "int3"},
    }


def test_values_of_all_kinds() -> None:
    token = "int4:kv_cache_dtype_skip_layers=[0,-1],strict=true,compute_dtype=fp32"
    (found,) = options_of(token).values()
    assert found == {
        "kv_cache_dtype": "int4",
        "kv_cache_dtype_skip_layers": [0, -1],
        "strict": True,
        "compute_dtype": "fp32",
    }


def test_common_options_can_be_overridden() -> None:
    (plain, own) = parse_formats(["int8,int4:inner_backend=inductor"], COMMON)
    assert plain.options["inner_backend"] == "eager"
    assert own.options["inner_backend"] == "inductor"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "format 'int5': option 'kv_cache_dtype' cannot be 'int5': did you mean 'int"),
        ("k8v5", "format 'k8v5': option 'v_cache_dtype' cannot be 'int5': did you mean 'int"),
        ("int4:residual_lenght=3", "unknown option 'residual_lenght': did you mean 'residual_leng"),
        ("int4:page_size=48", "option 'page_size' cannot be 48: did you mean"),
        ("int4:residual_length", "'residual_length' is no option: write 'name=value'"),
        ("int4:strict=true,strict=false", "option 'strict' is given twice"),
        ("int4:kv_cache_dtype=int8", "option 'kv_cache_dtype' is given twice"),
        ("int4,page_size=32", "did you mean 'int4:page_size=32'?"),
        ("page_size=32", "did you mean 'auto:page_size=32'?"),
        ("int4,int4", "format 'int4' is given twice"),
        (" , ", "no format is given"),
    ],
)
def test_bad_formats_are_refused_with_what_would_do(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_formats([text], COMMON)
    assert message in str(caught.value)


def test_all_bad_formats_are_named_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        parse_formats(["int5,int8", "int4:page_size=7"], COMMON)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["format 'int5'", "format 'int4"]


@pytest.mark.parametrize(
    ("token", "dtype", "expected"),
    [
        ("auto", torch.float32, False),
        ("bf16", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("int8", torch.bfloat16, True),
        ("fp8", torch.float16, True),
        ("fp8_e5m2", torch.bfloat16, True),
        ("kauto-vint4", torch.bfloat16, True),
        ("kauto-vbf16", torch.bfloat16, False),
    ],
)
def test_what_is_meant_to_shrink(token: str, dtype: torch.dtype, expected: bool) -> None:
    (request,) = parse_formats([token], {})
    assert request.shrinks(dtype) is expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("auto", {"bf16/bf16"}),
        ("k8v4", {"int8/int4"}),
        ("kauto-v4", {"bf16/int4"}),
        ("kfp8_e4m3-vfp8_e5m2", {"fp8/fp8_e5m2"}),
        ("int4:kv_cache_dtype_skip_layers=[0,-1]", {"int4/int4", "bf16/bf16"}),
    ],
)
def test_what_layers_may_be_stored_as(token: str, expected: set[str]) -> None:
    (request,) = parse_formats([token], {})
    assert request.formats(torch.bfloat16) == expected
