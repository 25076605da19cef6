"""What `kvcompile.adopt` takes, and what it refuses before anything is changed."""

from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile.adoption import AdoptionError
from kvcompile.runtime.handle import KVTensor


class Holder(nn.Module):
    """Buffers of all kinds."""

    k_cache: torch.Tensor
    mask: torch.Tensor
    both: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.randn(2, 3, 5, 8))
        self.register_buffer("mask", torch.ones(1, 1, 5, 5, dtype=torch.bool))
        self.register_buffer("angles", torch.ones(5, 8))
        self.register_buffer("nothing", None)
        self.both = torch.zeros(2, 2, 3, 5, 8)
        self.part = self.both[0]


def test_buffers_of_four_dimensions_and_their_values() -> None:
    module = Holder()
    compiled: Any = torch.compile(module, backend="kvcompile")
    dense = module.k_cache
    values = dense.clone()
    assert kvcompile.adopt(compiled) == ("k_cache",)
    handle = module.k_cache
    assert isinstance(handle, KVTensor)
    assert dict(module.named_buffers())["k_cache"] is handle
    assert torch.equal(handle + 0, values)
    handle[:, :, 2] = 7.0  # no graph is known yet: the tensor it stands for is written
    assert torch.equal(dense[:, :, 2], torch.full((2, 3, 8), 7.0))
    assert kvcompile.memory_report(module).dense == dense.nbytes + 8
    assert kvcompile.adopt(module) == ("k_cache",)
    assert module.k_cache is handle


def test_modules_that_share_a_buffer_go_on_sharing_it() -> None:
    first, second = Holder(), Holder()
    second.k_cache = first.k_cache
    names = kvcompile.adopt(nn.ModuleList([first, second]), ["*.k_cache"])
    assert names == ("0.k_cache", "1.k_cache")
    assert isinstance(first.k_cache, KVTensor)
    assert first.k_cache is second.k_cache


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("k_cach", "'k_cach' names no buffer of Holder; it has: k_cache"),
        ("mask", "mask is torch.bool"),
        ("angles", "angles has 2 dimensions, not 4"),
        ("part", "part is a view of other memory"),
    ],
)
def test_a_name_that_cannot_be_adopted(name: str, reason: str) -> None:
    module = Holder()
    with pytest.raises(AdoptionError, match=reason):
        kvcompile.adopt(module, ["k_cache", name])
    assert type(module.k_cache) is torch.Tensor


def test_nothing_to_adopt() -> None:
    with pytest.raises(AdoptionError, match="Linear has nothing to adopt: it has no buffers"):
        kvcompile.adopt(nn.Linear(2, 2))
    norm = nn.BatchNorm1d(2)
    with pytest.raises(AdoptionError, match="running_mean has 1 dimensions, not 4"):
        kvcompile.adopt(norm)


def test_buffers_made_under_inference_mode() -> None:
    with torch.inference_mode():
        module = Holder()
    values = module.k_cache.clone()
    kvcompile.adopt(module, ["k_cache"])
    assert torch.equal(module.k_cache + 0, values)


def test_what_holds_no_buffers_is_refused() -> None:
    with pytest.raises(AdoptionError, match="a tuple was to be adopted; give a module, or a cache"):
        kvcompile.adopt((torch.zeros(1, 1, 1, 1),))
