"""linear kernels against the product in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvcompile.codegen.cpu.compile import load
from kvcompile.codegen.cpu.isa import ISAS, available_isas
from kvcompile.codegen.spec import DTypeName, IsaName, LinearSpec

pytestmark = pytest.mark.compiler

DTYPES: dict[DTypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SIZES = [(1, 1), (7, 3), (33, 31), (5, 64), (64, 129), (192, 576), (301, 1000)]
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of rounding to a dtype: 24, 8 and 11 binary digits."""


@pytest.fixture(params=itertools.product(available_isas(), DTYPES), ids="-".join)
def spec(request: pytest.FixtureRequest) -> LinearSpec:
    isa: IsaName
    dtype: DTypeName
    isa, dtype = request.param
    return LinearSpec(isa=isa, dtype=dtype)


def fenced(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers with NaN before and behind them in memory."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 128,), torch.nan, dtype=dtype)
    inner = buffer[64 : 64 + size].view(shape)
    inner.copy_(torch.randn(shape))
    return inner


def product(
    spec: LinearSpec,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    threads: int = 1,
) -> torch.Tensor:
    size = x.shape[0] * weight.shape[0]
    buffer = torch.full((size + 128,), torch.nan, dtype=x.dtype)
    out = buffer[64 : 64 + size].view(x.shape[0], weight.shape[0])
    address = 0 if bias is None else bias.data_ptr()
    sizes = (x.shape[0], weight.shape[1], weight.shape[0], threads)
    kernel = load(spec)
    assert kernel.call(x.data_ptr(), weight.data_ptr(), address, out.data_ptr(), *sizes) == 0
    assert buffer[:64].isnan().all()
    assert buffer[64 + size :].isnan().all()
    return out


def most_rows(spec: LinearSpec) -> int:
    return ISAS[spec.isa].most_rows


def test_within_the_bound_of_its_sums(spec: LinearSpec) -> None:
    """A sum of n products in 16 or more chains, each multiplied and added with a rounding.

    A chain of n / 16 products, at most 31 single ones behind it, and 8 additions of the chains
    err by at most as many roundings of twice 2^-24 (a multiplication and an addition), relative
    to the sum of magnitudes (Higham, Accuracy and Stability, 3.1).
    """
    numbers = range(1, most_rows(spec) + 1)
    for rows, (outputs, inputs), with_bias in itertools.product(numbers, SIZES, (False, True)):
        x = fenced((rows, inputs), DTYPES[spec.dtype])
        weight = fenced((outputs, inputs), DTYPES[spec.dtype])
        bias = fenced((outputs,), DTYPES[spec.dtype]) if with_bias else None
        exact = x.double() @ weight.double().T
        magnitude = x.double().abs() @ weight.double().abs().T
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        roundings = inputs / 16 + 31 + 8 + 1
        summed = 2 * 2.0**-24 * roundings * magnitude
        allowed = summed + ROUNDING[spec.dtype] * (exact.abs() + summed)
        allowed += 2.0**-25 if spec.dtype == "fp16" else 0  # half a step of its subnormal numbers
        error = (product(spec, x, weight, bias).double() - exact).abs()
        assert (error <= allowed).all()


def test_a_row_has_one_result_alone_in_a_batch_and_on_two_threads(spec: LinearSpec) -> None:
    x = fenced((most_rows(spec), 583), DTYPES[spec.dtype])
    weight = fenced((301, 583), DTYPES[spec.dtype])
    together = product(spec, x, weight, None)
    assert torch.equal(product(spec, x, weight, None, threads=2), together)
    for row in range(most_rows(spec)):
        alone = product(spec, x[row : row + 1], weight, None)
        assert torch.equal(alone[0], together[row])


def test_more_rows_than_it_takes_are_refused(spec: LinearSpec) -> None:
    too_many = most_rows(spec) + 1
    kernel, x = load(spec), torch.zeros(too_many, 64, dtype=DTYPES[spec.dtype])
    for rows in (0, too_many):
        assert kernel.call(*[x.data_ptr()] * 4, rows, 64, 1, 1) == 1
