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
    add_means,
    rotary_table,
    separate_mean,
)
from tests.support.rotary import angles, frequencies, gains, mean_sizes, turning

ROTARIES = [Rotary(64), Rotary(32, interleaved=True), Rotary(6)]
PAGE, DIM = 64, 64


def split(
    rotary: Rotary, k: torch.Tensor, *, has_minimum: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is left of keys [..., P, D] and the mean that was taken out of them."""
    table = angles(rotary, k.shape[-2])
    assert table is not None
    left, packed = separate_mean(rotary, table, k, has_minimum=has_minimum)
    assert packed.dtype is torch.uint8
    assert packed.shape == (*k.shape[:-2], MEAN_BYTES)
    return left, add_means(rotary, table, packed, torch.zeros(k.shape))


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
    touched = mean.abs().sum(-2).ne(0)
    assert bool((touched.sum(-1) <= 2 * rotary.means).all())
    assert torch.equal(left[..., rotary.dim :], k[..., rotary.dim :])
    assert not touched[..., rotary.dim :].any()


def turn_pairs(k: torch.Tensor, sizes: dict[int, float], pace: float = 1.0) -> torch.Tensor:
    """Return keys [P, 64] with a bias of these sizes in some pairs of `Rotary(64)`."""
    k, speeds = k.clone(), pace * frequencies(Rotary(64))
    for pair, size in sizes.items():
        phase = speeds[pair] * torch.arange(len(k))
        k[:, pair] += size * phase.cos()
        k[:, pair + 32] += size * phase.sin()
    return k


def test_the_pairs_that_gain_most_are_chosen() -> None:
    rotary = Rotary(64)
    torch.manual_seed(0)
    k = turn_pairs(torch.randn(PAGE, DIM), {pair: 10.0 + pair for pair in range(MEANS + 4)})
    k[:, 31] += 20  # turns by less than 1/100 in a page
    most = gains(rotary, frequencies(rotary), k).sort(descending=True)
    # Means of up to 30, in 12 significant bits as the cosines are, move what is left by 1/60: its
    # range of about 5 by 1/30, the squares of both channels by less than 1, in either pair.
    assert most.values[MEANS - 1] - most.values[MEANS] > 2, "no tie at the end"
    _, mean = split(rotary, k)
    touched = mean.abs().sum(0).ne(0)
    chosen = set(touched[:32].nonzero().flatten().tolist())
    assert chosen == set(most.indices[:MEANS].tolist())
    assert 31 not in chosen
    assert torch.equal(touched[:32], touched[32:])


def test_a_bias_that_hardly_turns_is_left_to_a_minimum_unless_it_is_huge() -> None:
    """A minimum takes it in, but for its rounding: 1/128 of the bias, beside a range of about 5."""
    rotary = Rotary(64)
    torch.manual_seed(0)
    for size, with_minimum in ((20, False), (400, True)):
        k = turn_pairs(torch.randn(PAGE, DIM), {31: size})
        for has_minimum, kept in ((True, with_minimum), (False, True)):
            left, mean = split(rotary, k, has_minimum=has_minimum)
            assert (mean[:, 31].abs().min() > 0.9 * size) == kept
            assert (left[:, 31].abs().max() < 5) == kept


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_keys_without_a_bias_keep_hardly_any_mean(page_size: int) -> None:
    rotary = Rotary(64)
    torch.manual_seed(page_size)
    k = torch.randn(500, page_size, DIM)
    for has_minimum in (True, False):
        _, mean = split(rotary, k, has_minimum=has_minimum)
        assert mean[:, 0].ne(0).double().mean() < 0.01


def test_a_mean_of_the_first_pair_counts_beside_empty_places() -> None:
    """Empty places look like means of length 0 of pair 0."""
    rotary = Rotary(64)
    layout = RecordLayout(
        "int4", "int4", DIM, DIM, PAGE, window=Window("fp32", 4, 64), rotary=rotary
    )
    torch.manual_seed(0)
    k = turn_pairs(torch.randn(PAGE, DIM), {0: 50.0})
    sizes = mean_sizes(layout, layout.pack(k, k, angles(rotary, PAGE)))
    assert sizes[:, [0, 32]].min() > 45
    assert not sizes[:, 1:32].any()


def test_the_keys_of_the_caller_stay_as_they_are() -> None:
    """Also those that lie channel by channel, as the means are added."""
    rotary = Rotary(64)
    k = turning(rotary, PAGE, DIM).T.contiguous().T * 30
    before = k.clone()
    left, _ = split(rotary, k)
    assert torch.equal(k, before)
    assert not torch.equal(left, k)


def test_what_does_not_turn_as_it_should_is_left_alone() -> None:
    """Channels that stand still, or turn at another speed, are no coarser for the means."""
    rotary = Rotary(64)
    torch.manual_seed(0)
    noise = torch.randn(PAGE, DIM)
    table = angles(rotary, PAGE)
    assert table is not None
    still = noise + 100 * torch.randn(DIM)
    slower = turn_pairs(noise, dict.fromkeys(range(0, 32, 8), 100.0), pace=1 / 8)
    for k in (still, slower):
        for name in ("int4", "fp8"):
            errors = []
            for kept in (None, rotary):
                layout = RecordLayout(
                    name, "int8", DIM, DIM, PAGE, window=Window("fp32", 4, 64), rotary=kept
                )
                back, _ = layout.unpack(layout.pack(k, noise, table), table)
                errors.append(float((back - k).pow(2).mean().sqrt()))
            assert errors[1] <= 1.05 * errors[0]


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


def test_wrong_angles_are_undone_all_the_same() -> None:
    torch.manual_seed(0)
    rotary = Rotary(64)
    k = torch.randn(PAGE, DIM) + 10 * turning(rotary, PAGE, DIM)
    table = rotary_table(torch.rand(32), PAGE)
    left, packed = separate_mean(rotary, table, k, has_minimum=True)
    assert torch.allclose(add_means(rotary, table, packed, left), k, rtol=0, atol=1e-5)


def test_extreme_keys() -> None:
    rotary = Rotary(64)
    for size in (0.0, 1e-40, 1e-20, 1e20, 3e38):
        left, mean = split(rotary, torch.full((PAGE, DIM), size))
        assert torch.allclose(left + mean, torch.tensor(size), rtol=1e-5, atol=0)
    for odd in (math.nan, math.inf):
        k = torch.ones(PAGE, DIM)
        k[3, 5] = odd
        left, mean = split(rotary, k)
        assert mean.isfinite().all()
        assert left.isfinite().sum() == left.numel() - 1
    zeros = torch.full((PAGE, DIM), -0.0)
    assert bool(torch.signbit(split(rotary, zeros)[0]).all()), "a channel without a mean is kept"


@given(dim=st.integers(-4, 40))
@settings(max_examples=30, deadline=None)
def test_dimensions(dim: int) -> None:
    if dim > 0 and dim % 2 == 0:
        assert Rotary(dim).means == min(MEANS, dim // 2)
        return
    with pytest.raises(ValueError, match="even"):
        Rotary(dim)
