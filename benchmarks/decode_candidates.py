"""The ways to decode that the end-to-end benchmark compares, and whether they do what they say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, QuantizedCache, StaticCache

from benchmarks.decoding import Decoder, new_decoder, paged_decoder
from kvcompile.calling import isolated
from kvcompile.footprint import footprint
from kvcompile.format_requests import FormatRequest

CHECKED_STEPS = 4
PREFILL_CHUNK = 1024
EAGER = "eager, DynamicCache"
STATIC = "inductor, StaticCache"
FROZEN = "inductor with freezing, StaticCache"
QUANTIZED_CACHES = (("quanto", 4), ("hqq", 4), ("hqq", 8))
"""Backend and bits of transformers' `QuantizedCache`."""

TOLERANCES = ((8, 0.15), (4, 0.7), (0, 1.2))
"""Least bits of a number in the cache, and the allowed error of a step's logits over their spread.
They are loose: they only have to tell roundings from a wrong cache, whose logits are sqrt(2)
spreads away. A bfloat16 model alone is 0.025 from its float32 self on average, and two that sum in
different orders were 0.083 apart in one of 8 steps at 8,192 tokens. Exact bounds are the tests'
business."""


class WrongResultError(RuntimeError):
    """A candidate does not compute what it should: its times would mean nothing."""


@dataclass
class Candidate:
    """One way to decode.

    Attributes:
        name: Name in tables.
        decoder: Its sequence; None if it is not installed.
        missing: Why there is no decoder.
        in_pages: Whether its cache is meant to lie in pages.
        shrinks: Whether its pages are meant to be smaller than the dense cache.
        is_lossy: Whether its cache is a library's own lossy one, whose error is shown, not judged.
        prefilled_by: What feeds the prompt, if not the decoder itself. A static cache exists before
            its model is compiled, so its prefill is the unmodified model's, as it is in `generate`.
        is_frozen: Whether Inductor treats the weights as constants.
    """

    name: str
    decoder: Decoder | None
    missing: str = ""
    in_pages: bool = False
    shrinks: bool = False
    is_lossy: bool = False
    prefilled_by: PreTrainedModel | None = None
    is_frozen: bool = False


def new_candidates(
    model: PreTrainedModel,
    context: int,
    args: argparse.Namespace,
    requests: Sequence[FormatRequest],
) -> list[Candidate]:
    """Return what is compared; the first is the baseline of the others.

    Args:
        model: The model.
        context: Tokens of the prompt.
        args: Has `steps`, `static`, `freezing` and `quantized_cache`.
        requests: Formats of kvcompile.
    """
    torch._dynamo.reset()
    found = [Candidate(EAGER, new_decoder(model, model))]
    length = context + CHECKED_STEPS + args.steps + 16
    if args.static:
        found.append(_static(model, length, STATIC))
    if args.freezing:
        found.append(_static(model, length, FROZEN))
    if args.quantized_cache:
        found += _quantized_caches(model)
    for request in requests:
        name = f"kvcompile, {request.label}"
        decoder = paged_decoder(model, name, request.options)
        shrinks = request.shrinks(model.dtype)
        found.append(Candidate(name, decoder, in_pages=True, shrinks=shrinks))
    return found


def _static(model: PreTrainedModel, length: int, name: str) -> Candidate:
    cache = StaticCache(config=model.config, max_cache_len=length)
    decoder = Decoder(torch.compile(isolated(model, name)), cache)
    return Candidate(name, decoder, prefilled_by=model, is_frozen=name == FROZEN)


def _quantized_caches(model: PreTrainedModel) -> Iterator[Candidate]:
    for backend, bits in QUANTIZED_CACHES:
        name = f"eager, QuantizedCache {backend} {bits} bits"
        try:
            cache = QuantizedCache(backend, model.config, nbits=bits)
        except ImportError:
            yield Candidate(name, None, missing=f"not installed: {backend}")
            continue
        yield Candidate(name, Decoder(model, cache), is_lossy=True)


def start(candidate: Candidate, ids: torch.Tensor) -> None:
    """Feed the prompt, and compile what runs after it; nothing if it is not installed."""
    decoder = candidate.decoder
    if decoder is None:
        return
    run = decoder.run
    decoder.run = run if candidate.prefilled_by is None else candidate.prefilled_by
    decoder.prefill(ids, chunk=PREFILL_CHUNK)
    decoder.run = run


def check(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Compare the logits of a few steps on equal tokens with the first candidate's.

    Returns:
        How far each other candidate's logits are from them at most, by their spread.

    Raises:
        WrongResultError: Logits are too far from the baseline's, or a cache that should lie in
            pages, or be smaller than the dense one, does not.
    """
    (_, baseline), *others = [(c, c.decoder) for c in candidates if c.decoder is not None]
    errors: dict[str, list[float]] = {candidate.name: [] for candidate, _ in others}
    for _ in range(CHECKED_STEPS):
        for _, decoder in others:
            decoder.token = baseline.token
        expected = baseline.step().float()
        for candidate, decoder in others:
            # Frozen weights are constants of the graph, so Dynamo too has to see the setting.
            with torch._inductor.config.patch(freezing=candidate.is_frozen):
                found = decoder.step().float()
            errors[candidate.name].append(
                float((found - expected).square().mean() / expected.var())
            )
    largest = {name: max(found) ** 0.5 for name, found in errors.items()}
    for candidate, decoder in others:
        error = largest[candidate.name]
        if not candidate.is_lossy and not error < tolerance(_bits(candidate, decoder)):
            raise WrongResultError(
                f"{candidate.name}: logits are off by {error:.3f} of their spread"
            )
    return largest


def tolerance(bits: float) -> float:
    """Return the allowed error of logits for a cache that keeps `bits` of a number."""
    return next(allowed for least, allowed in TOLERANCES if bits >= least)


def _bits(candidate: Candidate, decoder: Decoder) -> float:
    """Return the bits that a cache keeps of a number.

    Raises:
        WrongResultError: A cache that should lie in pages, or be smaller than the dense one, does
            not.
    """
    taken = footprint(decoder.cache)
    if not candidate.in_pages:
        return taken.bits_per_value
    if taken.dense_states or taken.materializations:
        made = f", made dense for {dict(taken.materializations)}" if taken.materializations else ""
        where = f"{taken.dense_states} of {taken.states} K and V tensors are not in pages"
        raise WrongResultError(f"{candidate.name}: {where}{made}")
    if candidate.shrinks and taken.stored >= taken.dense:
        message = f"{taken.stored:,} bytes are stored for {taken.dense:,} dense ones"
        raise WrongResultError(f"{candidate.name}: not compressed, {message}")
    return taken.bits_in_pages
