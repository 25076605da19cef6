"""Decoders without transformers, modules without attention, and what `strict` refuses."""

import pytest
import torch
from torch import nn

import kvcompile
from tests.support.compiled import assert_paged, compiled
from tests.support.tiny_models import CacheLayout, greedy, prompt, tiny_nanogpt

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

LAYOUTS = pytest.mark.parametrize("cache_layout", ["BHTD", "BTHD"])


@LAYOUTS
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [2, 32, 45])
def test_tuple_cache(cache_layout: CacheLayout, batch: int, length: int) -> None:
    model = tiny_nanogpt(cache_layout=cache_layout)
    ids = prompt(length, batch=batch)
    expected, dense = greedy(model, ids, 40)
    tokens, cache = greedy(compiled(model), ids, 40)
    assert tokens.tolist() == expected.tolist()
    assert_paged(cache, sum(t.nbytes for layer in dense for t in layer))


@LAYOUTS
def test_a_returned_cache_is_the_tensor_it_stands_for(cache_layout: CacheLayout) -> None:
    model = tiny_nanogpt(cache_layout=cache_layout)
    _, dense = greedy(model, prompt(20), 20)
    _, cache = greedy(compiled(model), prompt(20), 20)
    for layer, dense_layer in zip(cache, dense, strict=True):
        for handle, tensor in zip(layer, dense_layer, strict=True):
            assert handle.shape == tensor.shape
            assert handle.dtype == tensor.dtype
            torch.testing.assert_close(handle + 0, tensor, atol=1e-5, rtol=1e-4)


def test_a_model_without_attention_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
        assert torch.equal(compiled(model, strict=True)(x), model(x))


class GatedAttention(nn.Module):
    """Weighs its probabilities once more, by a gate: not the attention that any pattern means."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(
        self, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        gate = k.norm(dim=-1).sigmoid()[:, :, None]
        return ((q @ k.transpose(-1, -2)).softmax(-1) * gate) @ v, k, v


@pytest.fixture
def gated_case() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    past = torch.randn(1, 2, 40, 16)
    return GatedAttention().eval(), (torch.randn(1, 2, 1, 16), past, past)


def test_an_unmatched_attention_stays_right(
    gated_case: tuple[nn.Module, tuple[torch.Tensor, ...]],
) -> None:
    model, inputs = gated_case
    with torch.no_grad():
        for found, expected in zip(compiled(model)(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(found, expected)


def test_an_unmatched_attention_is_explained(
    gated_case: tuple[nn.Module, tuple[torch.Tensor, ...]],
) -> None:
    explanation = kvcompile.explain(*gated_case)
    missed = [r for r in explanation.remarks if r.kind == "missed"]
    assert missed
    assert all(r.code.startswith("KVC") and r.reason for r in missed)
    assert missed[0].code in str(explanation)


def test_strict_refuses_an_unmatched_attention(
    gated_case: tuple[nn.Module, tuple[torch.Tensor, ...]],
) -> None:
    model, inputs = gated_case
    with torch.no_grad(), pytest.raises(Exception, match="KVC"):
        compiled(model, strict=True)(*inputs)


def test_strict_accepts_a_matched_model() -> None:
    greedy(compiled(tiny_nanogpt(), strict=True), prompt(20), 8)
