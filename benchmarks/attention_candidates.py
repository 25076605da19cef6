"""The ways to attend that the attention benchmark times, each checked before it is timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import baselines
from benchmarks.attention_results import CAT_SDPA, SDPA, SDPA_FP32
from benchmarks.reading import new_reader
from benchmarks.stores import Dense, PagedFormat, Setting, new_stores
from kvcompile.codegen.spec import Compute
from kvcompile.runtime import launch
from kvcompile.runtime.store import PagedStore

STREAM_BYTES = 512 << 20

OF_SUMS = 0.01
OF_FACTORS = 0.05
"""Allowed errors, relative to the root mean square of the result: of roundings after a sum, and of
roundings of what is summed up, such as a query of 8 bits. Loose: they only have to tell roundings
from a wrong cache."""

Call = Callable[[], torch.Tensor]


class WrongResultError(RuntimeError):
    """Two candidates that should agree do not: their times would mean nothing."""


@dataclass(frozen=True)
class Candidate:
    """One way to attend.

    Attributes:
        name: Name in tables.
        calls: One per layer.
        nbytes: What one call has to read.
        appends: One per layer, writing a token again; none for what does not use pages.
        bound: Name of the candidate that reads the same pages and does nothing else.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    nbytes: int
    appends: Sequence[Callable[[], None]] = ()
    bound: str | None = None


def memory_needed(setting: Setting, formats: Sequence[PagedFormat], packed: Sequence[int]) -> int:
    """Return about the bytes that a setting takes, all candidates and the stream together.

    Args:
        setting: The setting.
        formats: Formats of pages.
        packed: Bits of the caches that are decoded before SDPA.
    """
    bits = 8 * setting.torch_dtype.itemsize
    of_packed = sum(setting.dense_bytes * b // bits * 9 // 8 for b in packed)
    of_fp32 = 0 if bits == 32 else setting.dense_bytes * 32 // bits
    per_layer = (
        setting.dense_bytes + of_fp32 + sum(f.bytes_of(setting) for f in formats) + of_packed
    )
    # Beside them, once: what `cat` or decoding makes.
    return setting.layers * per_layer + 3 * setting.dense_bytes + STREAM_BYTES


def dense_candidates(layers: Sequence[Dense], *, compiled: bool) -> Iterator[Candidate]:
    """Yield what reads dense K and V of the model's dtype."""
    attentions: dict[str, baselines.Attention] = {
        SDPA: baselines.sdpa,
        CAT_SDPA: baselines.cat_sdpa,
    }
    if compiled:
        attentions["flex_attention, compiled"] = baselines.new_flex()
    nbytes = layers[0].k.nbytes + layers[0].v.nbytes
    for name, attention in attentions.items():
        calls = [functools.partial(attention, x.q, x.k, x.v) for x in layers]
        check(name, calls[0](), baselines.sdpa(layers[0].q, layers[0].k, layers[0].v), OF_SUMS)
        yield Candidate(name, calls, nbytes)


def wide_candidates(layers: Sequence[Dense]) -> Iterator[Candidate]:
    """Yield SDPA over fp32, unless the layers are fp32.

    Where a processor multiplies bf16 slowly, PyTorch has nothing faster, at twice the bytes.
    """
    if layers[0].q.dtype == torch.float32:
        return
    wide = [Dense(x.q.float(), x.k.float(), x.v.float()) for x in layers]
    calls = [functools.partial(baselines.sdpa, x.q, x.k, x.v) for x in wide]
    expected = baselines.sdpa(layers[0].q, layers[0].k, layers[0].v)
    check(SDPA_FP32, calls[0](), expected, OF_SUMS)
    yield Candidate(SDPA_FP32, calls, wide[0].k.nbytes + wide[0].v.nbytes)


def packed_candidates(layers: Sequence[Dense], bits: int, *, compiled: bool) -> Iterator[Candidate]:
    """Yield what decodes a packed cache first."""
    packed = [
        (
            x.q,
            baselines.quantize(x.k, bits, per_channel=True),
            baselines.quantize(x.v, bits, per_channel=False),
        )
        for x in layers
    ]
    ways = {f"dequantize {bits} bits + SDPA": baselines.dequantized_sdpa}
    if compiled:
        way = torch.compile(baselines.dequantized_sdpa, dynamic=False)
        ways[f"dequantize {bits} bits + SDPA, compiled"] = way
    expected = baselines.dequantized_sdpa(*packed[0])
    for name, way in ways.items():
        calls = [functools.partial(way, *each) for each in packed]
        check(name, calls[0](), expected, OF_FACTORS)
        yield Candidate(name, calls, packed[0][1].nbytes + packed[0][2].nbytes)


def paged_candidates(
    setting: Setting, paged: PagedFormat, layers: Sequence[Dense]
) -> Iterator[Candidate]:
    """Yield the ways to compute with one format of pages, and reading them."""
    stores = new_stores(setting, paged.layout, layers)
    held = stores[0].stored_bytes()
    nbytes = held.codes + held.window
    reading = f"only read {paged.label}"
    for compute in paged.computes:
        calls = [
            functools.partial(attend, store, x.q, compute)
            for store, x in zip(stores, layers, strict=True)
        ]
        appends = [
            functools.partial(append_last, store, x)
            for store, x in zip(stores, layers, strict=True)
        ]
        name = f"pages {paged.name(compute)}"
        tolerance = OF_FACTORS if compute == "int8" else OF_SUMS
        check(name, calls[0](), over_decoded(stores[0], layers[0].q), tolerance)
        yield Candidate(name, calls, nbytes, appends, reading)
    yield Candidate(reading, [new_reader(store) for store in stores], nbytes)


def attend(store: PagedStore, q: torch.Tensor, compute: Compute | None) -> torch.Tensor:
    """Attend over pages; the way to compute is chosen call by call, since stores are shared."""
    store.compute = compute
    return launch.attend(store, q, None, False, q.shape[-1] ** -0.5, store.length)


def append_last(store: PagedStore, layer: Dense) -> None:
    """Write the last token once more where it is."""
    launch.append(store, layer.k[:, :, -1:], layer.v[:, :, -1:], store.length - 1)


def over_decoded(store: PagedStore, q: torch.Tensor) -> torch.Tensor:
    """Return attention in fp32 over what the pages stand for."""
    k, v = (launch.gather(store, role, 0, store.length).float() for role in ("k", "v"))
    return baselines.sdpa(q.float(), k, v)


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare a candidate's result with what it should be.

    Raises:
        WrongResultError: They differ by more than roundings.
    """
    found, expected = found.float(), expected.float()
    error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    if not error <= tolerance:
        raise WrongResultError(f"{name}: off by {error:.2e} of the result")


def rotating(groups: Sequence[Sequence[Candidate]]) -> dict[str, Callable[[], object]]:
    """Return what to time: functions that make the next call of their candidate each time.

    Candidates of one group read the same memory. They are kept apart in the rotation, so that none
    finds in the processor's caches what another one has just read.
    """
    steps: dict[str, Callable[[], object]] = {}
    for group in groups:
        count = sum(2 if candidate.appends else 1 for candidate in group)
        place = itertools.count()
        for candidate in group:
            kinds = {candidate.name: candidate.calls, append_name(candidate): candidate.appends}
            for name, calls in kinds.items():
                if calls:
                    steps[name] = _rotate(calls, next(place) * len(calls) // count)
    return steps


def append_name(candidate: Candidate) -> str:
    """Return the name under which a candidate's append is timed."""
    return f"append before {candidate.name}"


def _rotate(calls: Sequence[Callable[[], object]], first: int) -> Callable[[], object]:
    cycle = itertools.cycle([*calls[first:], *calls[:first]])
    return lambda: next(cycle)()
