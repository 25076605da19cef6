"""The turning mean of K, in plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codegen.layout import RecordLayout, Window
from kvcompile.codegen.rotary import (
    MEAN_BYTES,
    MEANS,
    Rotary,
    rotary_table,
    separate_mean,
    turning_mean,
)
from tests.support.rotary import angles, frequencies, turning

ROTARIES = [Rotary(64), Rotary(32, interleaved=True), Rotary(6)]
PAGE, DIM = 64, 64


def split(rotary: Rotary, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is left of keys [..., P, D] and the mean that was taken out of them."""
    table = angles(rotary, k.shape[-2])
    assert table is not None
    left, packed = separate_mean(rotary, table, k)
    assert packed.dtype is torch.uint8
    assert packed.shape == (*k.shape[:-2], MEAN_BYTES)
    return left, turning_mean(rotary, table, packed, k.shape[-2:])


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_a_bias_vanishes(rotary: Rotary) -> None:
    """Mean and cosines have 12 significant bits: each is off by at most 2^-12 of itself."""
    bias = 500 * turning(rotary, PAGE, DIM, first=1000)
    left, mean = split(rotary, bias)
    assert bias.abs().max() > 499
    assert left.abs().max() <= 500 * 4 * 2.0**-12
    assert torch.allclose(mean, bias, atol=0.5)


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_what_is_left_and_the_mean_are_the_keys(rotary: Rotary) -> None:
    torch.manual_seed(0)
    k = torch.randn(3, 2, PAGE, DIM) + 30 * turning(rotary, PAGE, DIM)
    left, mean = split(rotary, k)
    assert torch.allclose(left + mean, k, rtol=0, atol=2.0**-23 * 64)
    # Subtracting the mean of turned points never makes a page longer, but for 12 significant bits.
    assert bool((left.pow(2).sum((-1, -2)) < k.pow(2).sum((-1, -2))).all())
    channels = torch.cat(rotary.channels(torch.arange(rotary.pairs)))
    touched = mean.abs().sum(-2).ne(0).sum(-1)
    assert bool((touched == 2 * rotary.means).all())
    still = torch.ones(DIM, dtype=torch.bool)
    still[channels] = False
    assert torch.equal(left[..., still], k[..., still])


def test_the_pairs_that_widen_the_range_most_are_chosen() -> None:
    """What stands still within a page can stay: the minima take it in."""
    rotary = Rotary(64)
    slow = [pair for pair in range(32) if frequencies(rotary)[pair] * PAGE < 0.2]
    fast = [pair for pair in range(32) if frequencies(rotary)[pair] * PAGE > 3]
    assert len(slow) > MEANS
    k = torch.zeros(PAGE, DIM)
    k[:, slow] = 100.0
    chosen = fast[::3][:MEANS]
    for pair in chosen:
        phase = frequencies(rotary)[pair] * torch.arange(PAGE)
        k[:, pair], k[:, pair + 32] = 20 * phase.cos(), 20 * phase.sin()
    _, mean = split(rotary, k)
    moved = mean.abs().sum(0).ne(0)
    assert bool(moved[chosen].all())


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_quantizing_is_finer_by_the_range_of_the_bias(rotary: Rotary) -> None:
    torch.manual_seed(0)
    bias = 100 * turning(rotary, PAGE, DIM)
    k, v = torch.randn(4, PAGE, DIM) + bias, torch.randn(4, PAGE, DIM)
    errors = []
    for kept in (None, rotary):
        layout = RecordLayout(
            "int4", "int4", DIM, DIM, PAGE, window=Window("fp32", 4, 64), rotary=kept
        )
        table = angles(kept, PAGE)
        back, _ = layout.unpack(layout.pack(k, v, table), table)
        errors.append(float((back - k).pow(2).mean().sqrt()))
    # 64 normal numbers have a range of about 5; a code is off by up to half a step, evenly.
    ranges = torch.stack([bias.amax(0) - bias.amin(0) + 5, torch.full((DIM,), 5.0)])
    coarse, fine = (ranges / 15 / math.sqrt(12)).pow(2).mean(-1).sqrt().tolist()
    assert errors[0] == pytest.approx(coarse, rel=0.1)
    assert errors[1] == pytest.approx(fine, rel=0.1)


def test_wrong_angles_cost_range_and_nothing_else() -> None:
    torch.manual_seed(0)
    rotary = Rotary(64)
    k = torch.randn(PAGE, DIM) + 10 * turning(rotary, PAGE, DIM)
    table = rotary_table(torch.rand(32), PAGE)
    left, packed = separate_mean(rotary, table, k)
    back = left + turning_mean(rotary, table, packed, k.shape)
    assert torch.allclose(back, k, rtol=0, atol=1e-5)


def test_extreme_keys() -> None:
    rotary = Rotary(64)
    for size in (0.0, 1e-40, 1e-20, 1e20):
        left, mean = split(rotary, torch.full((PAGE, DIM), size))
        assert torch.allclose(left + mean, torch.tensor(size), rtol=1e-5, atol=0)
    k = torch.ones(PAGE, DIM)
    k[3, 5] = math.nan
    left, mean = split(rotary, k)
    assert not mean.isnan().any(), "a NaN has no mean"
    assert left.isnan().sum() == 1


@given(dim=st.integers(-4, 40))
@settings(max_examples=30, deadline=None)
def test_dimensions(dim: int) -> None:
    if dim > 0 and dim % 2 == 0:
        assert Rotary(dim).means == min(MEANS, dim // 2)
        return
    with pytest.raises(ValueError, match="even"):
        Rotary(dim)
