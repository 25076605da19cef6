"""Quality measured through a cache: the arithmetic, what is fed, and what the cache really was."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM

from kvcompile.evaluation import Quality, Schedule, Side, compare, compiled_side, evaluate
from kvcompile.format_requests import parse_formats
from kvcompile.options import OptionError
from tests.support.compiled import FAST, count_compilations, exact_bytes
from tests.support.tiny_models import prompt, tiny_llama

WINDOW = 80
SHORT = Schedule(window=WINDOW, skip=20, step=16)


def plain_side(label: str, model: LlamaForCausalLM, **more: Any) -> Side:
    """Return the unmodified model, its cache dense."""

    def run(ids: torch.Tensor, cache: Any, *, logits_to_keep: int) -> torch.Tensor:
        logits = model(ids, cache=cache, logits_to_keep=logits_to_keep).logits
        assert isinstance(logits, torch.Tensor)
        return logits

    return Side(label, run, lambda: DynamicCache(config=model.config), **more)


def damaged_side(model: LlamaForCausalLM, damage: float) -> Side:
    """Return the unmodified model whose new values shrink in the cache after each part."""
    intact = plain_side(f"damaged by {damage}", model)

    def run(ids: torch.Tensor, cache: Any, *, logits_to_keep: int) -> torch.Tensor:
        logits = intact.run(ids, cache, logits_to_keep=logits_to_keep)
        for layer in cache.layers:
            layer.values[:, :, -ids.shape[1] :] *= 1 - damage
        return logits

    return Side(intact.label, run, intact.new_cache)


def paged_side(label: str, model: LlamaForCausalLM, **more: Any) -> Side:
    return compiled_side(model, label, FAST, lambda: DynamicCache(config=model.config), **more)


def texts(count: int = 2) -> list[torch.Tensor]:
    return [prompt(WINDOW, seed=seed) for seed in range(count)]


# What is fed


@given(st.integers(1, 40), st.integers(0, 50), st.integers(2, 200))
def test_parts_cover_a_window_and_all_steps_are_alike(step: int, more: int, scored: int) -> None:
    schedule = Schedule(window=step + more + scored, skip=step + more, step=step)
    prefill, *steps = schedule.parts()
    edges = [prefill, *steps]
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == schedule.window - 1
    assert {stop - start for start, stop in steps} == {step}
    assert schedule.skip - step < prefill[1] <= schedule.skip
    assert schedule.scored == scored - 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"step": 0}, "option 'step' cannot be 0: did you mean 1?"),
        ({"skip": 15}, "option 'skip' cannot be 15 with steps of 16 tokens: did you mean 16?"),
        ({"window": 257}, "option 'window' cannot be 257 with 256 tokens skipped: did you mean"),
    ],
)
def test_schedules_that_make_no_sense(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Schedule(**numbers)
    assert message in str(caught.value)


# The arithmetic


def test_scores_of_tokens() -> None:
    exact, logits = torch.randn(70, 9), torch.randn(70, 9)
    exact[3, 2] = -math.inf  # a token that is ruled out adds nothing to the KL
    targets = torch.randint(3, 9, (70,))
    scores = compare(exact, logits, targets)
    for n in range(70):
        p, q = ([math.exp(x) for x in row[n].tolist()] for row in (exact, logits))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        assert scores.kl[n].item() == pytest.approx(kl, abs=1e-6)
        assert scores.nll[n].item() == pytest.approx(-math.log(q[targets[n]]), abs=1e-6)
        assert scores.exact_nll[n].item() == pytest.approx(-math.log(p[targets[n]]), abs=1e-6)
        assert scores.agrees[n].item() == (p.index(max(p)) == q.index(max(q)))


@pytest.mark.parametrize(("skip", "step"), [(1, 1), (20, 1), (20, 16), (40, 30), (79 - 8, 7)])
def test_figures_are_those_of_one_forward_pass(skip: int, step: int) -> None:
    """Two models, float64: feeding them in parts must not change what a whole pass gives."""
    a, b = (tiny_llama(seed=seed, dtype=torch.float64) for seed in (0, 1))
    schedule = Schedule(window=WINDOW, skip=skip, step=step)
    exact, other = evaluate(texts(), plain_side("a", a), [plain_side("b", b)], schedule)

    with torch.no_grad():
        p, q = (torch.cat([m(ids).logits[0, skip:-1] for ids in texts()]) for m in (a, b))
    targets = torch.cat([ids[0, skip + 1 :] for ids in texts()])
    p_nll, q_nll = (F.cross_entropy(x, targets, reduction="none") for x in (p, q))
    kl = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    ratio = (q_nll.mean() - p_nll.mean()).exp().item()
    spread = statistics.stdev((q_nll - p_nll).tolist()) / math.sqrt(len(targets))

    assert other.tokens == exact.tokens == len(targets) == 2 * (WINDOW - 1 - skip)
    assert exact.perplexity == pytest.approx(p_nll.mean().exp().item(), rel=1e-6)
    assert other.perplexity == pytest.approx(q_nll.mean().exp().item(), rel=1e-6)
    assert other.perplexity_change == pytest.approx(ratio - 1, rel=1e-6)
    assert other.perplexity_change_error == pytest.approx(ratio * spread, rel=1e-6)
    assert other.kl == pytest.approx(kl.mean().item(), rel=1e-6)
    assert other.kl_99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-6)
    assert other.top1 == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert (exact.perplexity_change, exact.kl, exact.top1) == (0, 0, 1)


def test_damage_to_the_cache_is_seen() -> None:
    """Every scored prediction reads what the parts before it left in the cache."""
    model = tiny_llama()
    sides = [damaged_side(model, damage) for damage in (0, 0.001, 0.01, 0.1)]
    _, none, *damaged = evaluate(texts(), plain_side("exact", model), sides, SHORT)
    assert (none.kl, none.perplexity_change, none.top1) == (0, 0, 1)
    kls = [quality.kl for quality in damaged]
    assert 0 < kls[0] < kls[1] < kls[2]
    assert damaged[-1].top1 < 1


def test_a_prediction_without_numbers_is_a_problem() -> None:
    model = tiny_llama()
    side = damaged_side(model, math.nan)
    _, found = evaluate(texts(1), plain_side("exact", model), [side], SHORT)
    assert "NOT FINITE: some logits are not numbers" in found.problems
    assert math.isnan(found.kl)


# What the cache was


@pytest.mark.compiler
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("step", [1, 16, 20])
def test_exact_pages_give_the_unmodified_models_predictions(step: int) -> None:
    """Both compute in fp32 and differ in the order of sums: KL is of the order of 1e-7 squared."""
    model = tiny_llama()
    schedule = Schedule(window=WINDOW, skip=20, step=step)
    with count_compilations() as compilations:
        plain, paged = evaluate(
            texts(), plain_side("plain", model), [paged_side("paged", model)], schedule
        )
        assert compilations.count == 2
    assert paged.kl < 1e-9
    assert paged.top1 == 1
    assert paged.formats == ("fp32/fp32",)
    assert paged.problems == ()
    taken = paged.footprint
    assert taken.stored == taken.dense == exact_bytes(model, WINDOW - 1)
    assert taken.allocated >= taken.stored
    assert (taken.tokens, taken.dense_states) == (WINDOW - 1, 0)
    assert taken.bits_per_value == taken.bits_in_pages == 32
    assert plain.footprint.dense == plain.footprint.stored == taken.dense


@pytest.mark.usefixtures("fresh_dynamo")
def test_quantized_pages_are_measured() -> None:
    """A page of 64 tokens and 64 channels: two bf16 numbers per 64 codes are half a bit each."""
    model = tiny_llama(head_dim=64, layers=1)
    new_cache = paged_side("", model).new_cache
    sides = [
        compiled_side(
            model,
            request.label,
            request.options,
            new_cache,
            formats=request.formats(model.dtype),
            shrinks=request.shrinks(model.dtype),
        )
        for request in parse_formats(["int8,k8v4,int4"], FAST)
    ]
    schedule = Schedule(window=300, skip=150, step=50)
    _, *found = evaluate([prompt(300)], paged_side("exact", model), sides, schedule)
    assert [quality.problems for quality in found] == [(), (), ()]
    assert [quality.formats for quality in found] == [
        ("int8/int8",),
        ("int8/int4",),
        ("int4/int4",),
    ]
    assert [quality.footprint.bits_in_pages for quality in found] == [8.5, 6.5, 4.5]
    kls = [quality.kl for quality in found]
    assert 0 < kls[0] < kls[1] < kls[2]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_as_large_as_the_dense_one_is_not_compressed() -> None:
    model = tiny_llama()
    side = paged_side("exact pages, called int8", model, shrinks=True)
    _, found = evaluate(texts(1), paged_side("exact", model), [side], SHORT)
    (problem,) = found.problems
    size = f"{exact_bytes(model, WINDOW - 1):,}"
    assert problem.startswith(f"NOT COMPRESSED: {size} bytes are stored for {size} dense ones")


@pytest.mark.usefixtures("fresh_dynamo")
def test_another_format_than_the_one_asked_for() -> None:
    model = tiny_llama()
    side = paged_side("exact pages, called int8", model, formats={"int8/int8"})
    assert measured(side, model).problems == ("NOT AS ASKED: some layers are stored as fp32/fp32",)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_that_leaves_its_pages_for_one_step() -> None:
    model = tiny_llama()
    paged = paged_side("paged", model)

    def run(ids: torch.Tensor, cache: Any, *, logits_to_keep: int) -> torch.Tensor:
        logits = paged.run(ids, cache, logits_to_keep=logits_to_keep)
        if cache.get_seq_length() == 31:
            cache.layers[1].keys = cache.layers[1].keys.materialize()
            cache.layers[1].values = cache.layers[1].values.materialize()
        return logits

    found = measured(Side("for a while", run, paged.new_cache), model)
    assert found.footprint.dense_states == 0
    assert "NOT IN PAGES: 2 of 4 K and V tensors are dense" in found.problems


def test_a_dense_cache_is_not_in_pages() -> None:
    model = tiny_llama()
    side = plain_side("not compiled", model, shrinks=True)
    assert [p.split(":")[0] for p in measured(side, model).problems] == [
        "NOT IN PAGES",
        "NOT COMPRESSED",
    ]


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_attention_that_is_not_matched_is_named() -> None:
    AttentionInterface.register("squashed", squashed_attention)
    model = tiny_llama(attention="squashed")
    found = measured(paged_side("squashed", model), model)
    (problem,) = found.problems
    assert problem.startswith("NOT IN PAGES: 4 of 4 K and V tensors are dense: KVC112 ")
    assert found.kl < 1e-9


def measured(side: Side, model: LlamaForCausalLM) -> Quality:
    return evaluate(texts(1), plain_side("exact", model), [side], SHORT)[1]


def squashed_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend with scores bounded by a sine, which no model does."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.sin(q @ k.transpose(2, 3))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None
