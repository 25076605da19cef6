import pytest
import torch

import kvcompile
from kvcompile.options import CacheOptions, OptionError, parse_options


def test_defaults() -> None:
    assert parse_options(None) == parse_options({}) == CacheOptions()
    assert CacheOptions().kv_cache_dtype == "auto"


def test_aliases() -> None:
    assert parse_options({"block_size": 64}).page_size == 64
    with pytest.raises(OptionError, match="'page_size' is given twice, as 'page_size' too"):
        parse_options({"block_size": 64, "page_size": 64})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_sise": 32}, "unknown option 'page_sise': did you mean 'page_size'?"),
        ({"qqqq": 32}, "unknown option 'qqqq'"),
        ({"page_size": 48}, "'page_size' cannot be 48: did you mean 32?"),
        ({"page_size": 64.0}, "'page_size' cannot be 64.0"),
        ({"kv_cache_dtype": "aut"}, "'kv_cache_dtype' cannot be 'aut': did you mean 'auto'?"),
        ({"inner_backend": "inducto"}, "did you mean 'inductor'?"),
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
