import pytest
import torch

import kvcompile
from kvcompile.options import CacheOptions, OptionError, parse_options
from kvcompile.passes.layer_dtypes import LayerDtypes


def test_defaults() -> None:
    assert parse_options(None) == parse_options({}) == CacheOptions()
    assert CacheOptions().kv_cache_dtype == "auto"


def test_aliases() -> None:
    assert parse_options({"block_size": 64}).page_size == 64
    with pytest.raises(OptionError, match="'page_size' is given twice, as 'page_size' too"):
        parse_options({"block_size": 64, "page_size": 64})


def test_dtypes_per_layer() -> None:
    options = CacheOptions(
        kv_cache_dtype={"default": "int4", 0: "int8"},
        v_cache_dtype="int2",
        kv_cache_dtype_skip_layers=[-1],
    )
    found = [options.dtypes().of(layer, 3) for layer in range(3)]
    assert found == [("int8", "int2"), ("int4", "int2"), ("auto", "auto")]
    assert options.dtypes().names() == {"int8", "int4", "int2"}


def test_full_names_of_formats() -> None:
    options = CacheOptions(
        kv_cache_dtype={"default": "fp8_e5m2", 0: "fp8_e4m3"}, v_cache_dtype="fp8_e4m3"
    )
    found = [options.dtypes().of(layer, 2) for layer in range(2)]
    assert found == [("fp8", "fp8"), ("fp8_e5m2", "fp8")]
    assert CacheOptions(kv_cache_dtype="fp8_e4m3").dtypes() == LayerDtypes("fp8")


def test_every_spelling_of_a_layer_counts() -> None:
    skipped = LayerDtypes({"default": "int4", 2: "int8"}, skipped=(-1,))
    assert [skipped.of(layer, 3) for layer in range(3)] == [("int4",) * 2] * 2 + [("auto",) * 2]
    apart = LayerDtypes("int4", {-1: "int8"}, {2: "int2"})
    assert [apart.of(layer, 3) for layer in (1, 2)] == [("int4", "int4"), ("int8", "int2")]
    assert LayerDtypes({5: "int8", -1: "int4"}, skipped=(-4, 2)).unknown(3) == [-4, 5]
    assert LayerDtypes({1: "int8"}).of(0, 2) == ("auto", "auto")


@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, None), (4096, 4096), ("2GiB", 2 << 30), ("512MB", 512_000_000), ("1.5 KiB", 1536)],
)
def test_spellings_of_a_memory_limit(given: int | str | None, limit: int | None) -> None:
    assert CacheOptions(kv_cache_memory_bytes=given).memory_limit() == limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_sise": 32}, "unknown option 'page_sise': did you mean 'page_size'?"),
        ({"qqqq": 32}, "unknown option 'qqqq'"),
        ({"page_size": 48}, "'page_size' cannot be 48: did you mean 32?"),
        ({"page_size": 64.0}, "'page_size' cannot be 64.0"),
        ({"kv_cache_dtype": "aut"}, "'kv_cache_dtype' cannot be 'aut': did you mean 'auto'?"),
        ({"inner_backend": "inducto"}, "did you mean 'inductor'?"),
        ({"kv_cache_dtype": "int5"}, "'kv_cache_dtype' cannot be 'int5': did you mean 'int"),
        (
            {"kv_cache_dtype": "fp8_e3m4"},
            "'kv_cache_dtype' cannot be 'fp8_e3m4': did you mean 'fp8",
        ),
        ({"k_cache_dtype": 8}, "'k_cache_dtype' cannot be 8"),
        ({"kv_cache_dtype": {0: "int9"}}, "'kv_cache_dtype[0]' cannot be 'int9': did you mean"),
        ({"kv_cache_dtype": {"first": "int8"}}, "names the layer 'first'; layers are whole"),
        ({"kv_cache_dtype_skip_layers": 3}, "a list of layers is wanted"),
        ({"kv_cache_dtype_skip_layers": ["a"]}, "cannot be 'a'; it is a whole number"),
        ({"q_group_size": 40}, "'q_group_size' cannot be 40: did you mean 32?; it is a multiple"),
        ({"q_group_size": 0}, "'q_group_size' cannot be 0: did you mean 16?"),
        ({"residual_length": -1}, "'residual_length' cannot be -1: did you mean 0?"),
        ({"num_sink_tokens": 4.0}, "'num_sink_tokens' cannot be 4.0"),
        ({"compute_dtype": "fp16"}, "'compute_dtype' cannot be 'fp16': did you mean 'fp32'?"),
        (
            {"kv_cache_dtype": {3: "int1"}, "page_size": 16},
            "'page_size' cannot be 16 with 'int1': did you mean 32?",
        ),
        ({"kv_cache_memory_bytes": 0}, "cannot be 0: did you mean 1?"),
        ({"kv_cache_memory_bytes": 2.5}, "cannot be 2.5; it is a whole number"),
        ({"kv_cache_memory_bytes": "2gib"}, "cannot be '2gib': did you mean '2GiB'?"),
        ({"kv_cache_memory_bytes": "512 mb"}, "did you mean '512MB'?"),
        ({"kv_cache_memory_bytes": "1.5G"}, "did you mean '1.5GB'?"),
        ({"kv_cache_memory_bytes": "-3 GiBB"}, "did you mean '3GiB'?"),
        ({"kv_cache_memory_bytes": "lots"}, "did you mean '2GiB'?"),
        ({"kv_cache_memory_bytes": "0B"}, "cannot be 0: did you mean 1?"),
        ({"strict": 1}, "'strict' cannot be 1"),
        ({"strict": "yes"}, "'strict' cannot be 'yes'"),
    ],
)
def test_bad_options_are_refused_with_the_nearest_valid_one(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(options)
    assert message in str(caught.value)
    with pytest.raises(OptionError):
        kvcompile.compile(torch.nn.Linear(2, 2), **options)


def test_torch_compile_refuses_them_too() -> None:
    model = torch.compile(torch.nn.Linear(2, 2), backend="kvcompile", options={"page_sise": 32})
    with pytest.raises(Exception, match="did you mean 'page_size'"), torch.no_grad():
        model(torch.ones(1, 2))
