"""The quality of a cache's format, measured through the cache itself.

A window of text is fed in parts: a prefill, then steps of a few given tokens, each of which reads
the cache that the parts before it left. The exact cache and every format get the same parts in
turns, so that logits are compared as they come and none are kept.

Letters: N scored tokens, S tokens of a part, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from kvcompile import backend
from kvcompile.calling import accepts, cache_parameter, isolated
from kvcompile.footprint import Footprint, dense_states, footprint
from kvcompile.options import OptionError
from kvcompile.reports import CompilationReport, collect

ROWS = 32
"""Tokens whose logits are turned into float64 at once; bounds the memory of long steps."""


class Run(Protocol):
    """Feeds ids, int64 [1, S], to a model with a cache; returns logits [1, S or less, V]."""

    def __call__(self, ids: torch.Tensor, cache: Any, *, logits_to_keep: int) -> torch.Tensor:
        """Run one part; only the last `logits_to_keep` logits are needed, all of them if 0."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a window is fed, and what is scored.

    Attributes:
        window: Tokens of a window.
        skip: Tokens before the first whose prediction of the next one is scored.
        step: Tokens fed at once. With 1, each query sees the cache as a generation would. With up
            to 16, the same kernels run, and what is quantized is so by at most `step - 1` tokens
            too early. Above 16, a step is a chunk of a prefill.

    Raises:
        OptionError: They do not go together; names the nearest valid number.
    """

    window: int = 2048
    skip: int = 256
    step: int = 16

    def __post_init__(self) -> None:
        _at_least("step", self.step, 1, "")
        _at_least("skip", self.skip, self.step, f" with steps of {self.step} tokens")
        _at_least("window", self.window, self.skip + 2, f" with {self.skip} tokens skipped")

    @property
    def scored(self) -> int:
        """Tokens of a window whose prediction of the next one is scored."""
        return self.window - 1 - self.skip

    def parts(self) -> list[tuple[int, int]]:
        """Return where each part begins and ends; the first is the prefill.

        All further parts have the same length, since another one would be another compilation:
        the prefill is shorter than `skip` by what makes it so. The window's last token is only
        predicted.
        """
        prefill = self.skip - (-self.scored % self.step)
        starts = range(prefill, self.window - 1, self.step)
        return [(0, prefill), *((start, start + self.step) for start in starts)]


@dataclass
class Side:
    """One way to run a model.

    Attributes:
        label: Name in tables.
        run: Feeds one part.
        new_cache: Makes an empty cache, of a class of transformers.
        formats: Formats of K and V asked for (`int8/int4`); empty if any will do.
        shrinks: Whether the cache is meant to be smaller than the dense one.
        graphs: What the backend compiled for it so far.
    """

    label: str
    run: Run
    new_cache: Callable[[], Any]
    formats: Set[str] = frozenset()
    shrinks: bool = False
    graphs: list[CompilationReport] = field(default_factory=list)

    @property
    def formats_used(self) -> tuple[str, ...]:
        """Formats of K and V that the graphs which read a cache were compiled for."""
        sites = (site for graph in self.graphs if graph.has_past for site in graph.sites)
        return tuple(dict.fromkeys(site.format for site in sites if site.format))


@dataclass(frozen=True)
class Quality:
    """How a side predicts a text, and how far it is from the exact cache.

    Attributes:
        label: The side.
        tokens: Scored tokens.
        perplexity: exp of the mean negative log-likelihood.
        perplexity_change: Perplexity over the exact cache's, minus 1.
        perplexity_change_error: Standard error of the change, from the differences token by token.
        kl: Mean of KL(exact || side) over tokens, in nats.
        kl_99: The KL that 99 of 100 tokens do not exceed.
        top1: Share of tokens where both prefer the same next token.
        footprint: What the cache took at the end of a window.
        formats: Formats of K and V that the cache was in.
        problems: Why the figures are not those of the format asked for; empty if they are.
    """

    label: str
    tokens: int
    perplexity: float
    perplexity_change: float
    perplexity_change_error: float
    kl: float
    kl_99: float
    top1: float
    footprint: Footprint
    formats: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class TokenScores:
    """What is known of each scored token, each [N].

    Attributes:
        nll: Negative log-likelihood of the next token, float64, nats.
        exact_nll: The same of the exact cache.
        kl: KL(exact || side), float64, nats.
        agrees: Whether both prefer the same next token.
    """

    nll: torch.Tensor
    exact_nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor


def compare(exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Score logits against those of the exact cache.

    Args:
        exact: Logits of the exact cache, [N, V] of any dtype.
        logits: Logits of a side, [N, V].
        targets: The tokens that came next, int64 [N].
    """
    blocks = zip(exact.split(ROWS), logits.split(ROWS), targets.split(ROWS), strict=True)
    return _concatenated([_compare_block(*block) for block in blocks])


def _compare_block(exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    p, q = (x.double().log_softmax(-1) for x in (exact, logits))
    nll, exact_nll = (-x.gather(-1, targets[:, None])[:, 0] for x in (q, p))
    # A token that the exact side rules out, with logit -inf, adds nothing: 0 * log 0 = 0.
    terms = torch.where(p == -math.inf, 0.0, p.exp() * (p - q))
    return TokenScores(nll, exact_nll, terms.sum(-1), p.argmax(-1) == q.argmax(-1))


def _concatenated(scores: Sequence[TokenScores]) -> TokenScores:
    names = ("nll", "exact_nll", "kl", "agrees")
    return TokenScores(*(torch.cat([getattr(s, name) for s in scores]) for name in names))


def compiled_side(
    model: nn.Module,
    label: str,
    options: Mapping[str, Any],
    new_cache: Callable[[], Any],
    *,
    formats: Set[str] = frozenset(),
    shrinks: bool = False,
) -> Side:
    """Return a side that runs `torch.compile(model, backend="kvcompile", options=options)`.

    Args:
        model: A decoder of transformers; left as it is.
        label: Name in tables.
        options: See `kvcompile.options.CacheOptions`.
        new_cache: Makes an empty cache.
        formats: Formats of K and V asked for (`int8/int4`); empty if any will do.
        shrinks: Whether the cache is meant to be smaller than the dense one.

    Raises:
        OptionError: The model takes no cache.
    """
    cache_name = cache_parameter(model)
    if cache_name is None:
        raise OptionError(f"{type(model).__name__} takes no cache: there is nothing to measure")
    can_drop_logits = accepts(model, "logits_to_keep")
    compiled = torch.compile(
        isolated(model, "evaluated"), backend=backend.kvcompile, options=dict(options)
    )
    graphs: list[CompilationReport] = []

    def run(ids: torch.Tensor, cache: Any, *, logits_to_keep: int) -> torch.Tensor:
        keep = {"logits_to_keep": logits_to_keep} if can_drop_logits and logits_to_keep else {}
        with collect() as new_graphs:
            output = compiled(ids, **{cache_name: cache}, use_cache=True, **keep)
        graphs.extend(new_graphs)
        logits = output.logits
        assert isinstance(logits, torch.Tensor)
        return logits

    return Side(label, run, new_cache, formats, shrinks, graphs)


@torch.no_grad()
def evaluate(
    windows: Sequence[torch.Tensor],
    exact: Side,
    formats: Sequence[Side],
    schedule: Schedule,
    on_part: Callable[[str], None] = lambda label: None,
) -> list[Quality]:
    """Feed a text to every side and compare.

    Args:
        windows: Tokens, int64 [1, schedule.window] each.
        exact: The side that the others are compared with.
        formats: The others.
        schedule: How a window is fed.
        on_part: Called with a side's label after each part it was fed.

    Returns:
        One entry for `exact`, then one for each format.
    """
    tallies = [_Tally(side) for side in (exact, *formats)]
    for ids in windows:
        _feed(ids, tallies, schedule, on_part)
    return [tally.quality() for tally in tallies]


class _Tally:
    """What is collected about one side."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.cache: Any = None
        self.scores: list[TokenScores] = []
        self.most_dense = 0

    def run(self, ids: torch.Tensor, *, logits_to_keep: int) -> torch.Tensor:
        """Feed one part; a cache that leaves its pages even for one step is noticed."""
        logits = self.side.run(ids, self.cache, logits_to_keep=logits_to_keep)
        self.most_dense = max(self.most_dense, dense_states(self.cache))
        return logits[0]

    def quality(self) -> Quality:
        """Return the figures."""
        scores, taken = _concatenated(self.scores), footprint(self.cache)
        return _quality(self.side, scores, taken, self.most_dense)


def _feed(
    ids: torch.Tensor,
    tallies: Sequence[_Tally],
    schedule: Schedule,
    on_part: Callable[[str], None],
) -> None:
    """Feed a window to all sides, each with a new cache."""
    prefill, *steps = schedule.parts()
    for tally in tallies:
        tally.cache = tally.side.new_cache()
        tally.run(ids[:, slice(*prefill)], logits_to_keep=1)
        on_part(tally.side.label)
    for start, stop in steps:
        unscored = max(schedule.skip - start, 0)
        targets = ids[0, start + unscored + 1 : stop + 1]
        exact: torch.Tensor | None = None
        for tally in tallies:
            logits = tally.run(ids[:, start:stop], logits_to_keep=0)[unscored:]
            exact = logits if exact is None else exact
            tally.scores.append(compare(exact, logits, targets))
            on_part(tally.side.label)


def _quality(side: Side, scores: TokenScores, taken: Footprint, most_dense: int) -> Quality:
    differences = scores.nll - scores.exact_nll
    count = len(differences)
    ratio = _exp(differences.mean().item())
    deviation = differences.std().item() if count > 1 else math.nan
    return Quality(
        label=side.label,
        tokens=count,
        perplexity=_exp(scores.nll.mean().item()),
        perplexity_change=ratio - 1,
        perplexity_change_error=ratio * deviation / math.sqrt(count),
        kl=scores.kl.mean().item(),
        kl_99=scores.kl.quantile(0.99).item(),
        top1=scores.agrees.double().mean().item(),
        footprint=taken,
        formats=side.formats_used,
        problems=tuple(_problems(side, scores, taken, most_dense)),
    )


def _problems(side: Side, scores: TokenScores, taken: Footprint, most_dense: int) -> Iterator[str]:
    """Yield why the figures are not those of a cache in pages, in the format asked for."""
    if not scores.kl.isfinite().all():
        yield "NOT FINITE: some logits are not numbers"
    if most_dense:
        remarks = [r for graph in side.graphs for r in graph.remarks if r.kind != "passed"]
        why = f": {remarks[0].code} {remarks[0].reason}" if remarks else ""
        yield f"NOT IN PAGES: {most_dense} of {taken.states} K and V tensors are dense{why}"
    if side.formats and (others := [f for f in side.formats_used if f not in side.formats]):
        yield f"NOT AS ASKED: some layers are stored as {', '.join(others)}"
    if side.shrinks and taken.stored >= taken.dense:
        sizes = f"{taken.stored:,} bytes are stored for {taken.dense:,} dense ones"
        why = "" if most_dense else "; no page was filled, or every layer is exempt"
        yield f"NOT COMPRESSED: {sizes}{why}"
    for operator, count in taken.materializations.items():
        yield f"MADE DENSE: {count} x for {operator}"


def _exp(x: float) -> float:
    """Return exp of a mean that may be beyond the range of a float."""
    return math.exp(x) if x < 700 else math.inf


def _at_least(name: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise OptionError(f"option {name!r} cannot be {value}{why}: did you mean {least}?")
