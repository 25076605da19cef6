"""Attentions that do more to scores than scale and mask them, or say that in another way.

Each is a module of a few operators that caches K and V: a prefill and steps over pages must give
what the module gives by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from tests.support.attentions import Pair, repeat
from tests.support.compiled import compiled
from tests.support.programs import qkv

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

HEADS, DIM = 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


class Scored(nn.Module):
    """Attention whose scores are a function of q [B, H, S, D], k [B, H, T, D] and a mask."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, past: Pair | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = -k, -v
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        queries, tokens = q.shape[2], k.shape[2]
        hidden = torch.arange(tokens) > (tokens - queries + torch.arange(queries))[:, None]
        mask = torch.zeros(1, 1, queries, tokens).masked_fill(hidden, torch.finfo(q.dtype).min)
        return self.attend(q, repeat(k, 2), repeat(v, 2), mask), k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(self.score(q, k, mask), dim=-1) @ v


class Sinking(Scored):
    """With a sink logit per head, as gpt-oss spells it."""

    def __init__(self, score: Score) -> None:
        super().__init__(score)
        self.sinks = nn.Parameter(torch.linspace(0, 2, HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(q, k, mask)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return torch.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1] @ v


class Joined(Scored):
    """With batch and heads in one dimension, as BLOOM multiplies."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, heads, queries, dim = q.shape
        q, k, v = (x.reshape(batch * heads, -1, dim) for x in (q, k, v))
        scores = self.score(q, k.transpose(1, 2), mask)
        weights = torch.softmax(scores.view(batch, heads, queries, -1) + mask, dim=-1)
        out = torch.bmm(weights.view(batch * heads, queries, -1), v)
        return out.view(batch, heads, queries, dim).transpose(1, 2)


class HalfJoined(Scored):
    """With batch and heads in one dimension for the scores alone, as GPT-NeoX-Japanese does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, heads, queries, dim = q.shape
        q, k = (x.reshape(batch * heads, -1, dim) for x in (q, k))
        nothing = torch.zeros(batch * heads, queries, k.shape[1])
        scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=1.0, alpha=0.3)
        return torch.softmax(scores.view(batch, heads, queries, -1) + mask, dim=-1) @ v


def gemma2(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.4
    return torch.tanh(scores / 1.5) * 1.5 + mask


def grok(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """A factor inside that is not the inverse of the one outside."""
    return mask + 1.5 * torch.tanh(q @ k.transpose(2, 3) * 0.2)


def scale_of_heads(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q @ k.transpose(2, 3) * (1 + SLOPES) + mask


def divided_by_a_tensor(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.matmul(q, k.mT) / torch.sqrt(torch.tensor(float(DIM))) + mask


def scaled_keys(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    root = math.sqrt(math.sqrt(DIM))
    return (q / root) @ (k / root).transpose(-1, -2) + mask


def in_place(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3)
    scores /= math.sqrt(DIM)
    scores += mask
    return scores


def falcon(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The bias is scaled too, and the mask is not."""
    logits = q @ k.transpose(2, 3) + SLOPES * torch.arange(k.shape[2])
    logits *= 0.3
    return logits + mask


def mpt(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.3 + SLOPES * torch.arange(1 - k.shape[2], 1)
    return scores.masked_fill(mask < 0, torch.finfo(q.dtype).min)


def t5(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2]) + k.shape[2]
    scores += torch.sin(distance * SLOPES).unsqueeze(0)
    return torch.where(mask < 0, -1e9, scores)


def gpt_neo(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Two masks, one of them boolean; what is hidden becomes a tensor."""
    lowest = torch.tensor(torch.finfo(q.dtype).min)
    seen = torch.ones(64, 64, dtype=torch.bool).tril()[k.shape[2] - q.shape[2] : k.shape[2]]
    return torch.where(seen[:, : k.shape[2]], q @ k.transpose(-1, -2), lowest) + mask


def bloom(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    alibi = (SLOPES * torch.arange(k.shape[2])).repeat(2, 1, 1)
    return alibi.baddbmm(batch1=q, batch2=k, beta=0.5, alpha=0.3)


SPELLINGS: dict[str, Scored] = {
    score.__name__: Scored(score)
    for score in (
        gemma2,
        grok,
        scale_of_heads,
        divided_by_a_tensor,
        scaled_keys,
        in_place,
        falcon,
        mpt,
        t5,
        gpt_neo,
    )
} | {
    "bloom": Joined(bloom),
    "half joined": HalfJoined(bloom),
    "sinks": Sinking(in_place),
    "capped sinks": Sinking(gemma2),
}


WITH_A_CHUNK = ("gemma2", "bloom", "capped sinks")


@pytest.mark.parametrize("name", SPELLINGS)
def test_prefill_steps_and_a_chunk_over_pages(name: str) -> None:
    """The chunk has more queries than kernels take: it attends to a dense copy."""
    torch.manual_seed(0)
    model = SPELLINGS[name]
    run = compiled(model)
    past: tuple[Pair, ...] = ()
    pages: tuple[Pair, ...] = ()
    with torch.no_grad():
        for size in (40, 1, 1, 20)[: 4 if name in WITH_A_CHUNK else 3]:
            new = qkv(size)
            expected, *kept = model(*new, *past)
            out, *stored = run(*new, *pages)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
            past, pages = ((kept[0], kept[1]),), ((stored[0], stored[1]),)
    report = kvcompile.memory_report(pages)
    assert report.materializations == {}
    assert report.stored == 4 * sum(x.numel() for x in past[0])


@pytest.mark.parametrize("name", ["gemma2", "bloom", "sinks"])
def test_quantized_pages(name: str) -> None:
    """As close to what the module gives as int8 can be."""
    torch.manual_seed(0)
    model = SPELLINGS[name]
    run = compiled(model, kv_cache_dtype="int8", page_size=16, q_group_size=16, residual_length=16)
    with torch.no_grad():
        new, step = qkv(100), qkv(1)
        _, *past = model(*new)
        _, *pages = run(*new)
        expected, *_ = model(*step, past)
        out, *pages = run(*step, pages)
    torch.testing.assert_close(out, expected, atol=0.03, rtol=0.0)
    report = kvcompile.memory_report(pages)
    assert report.materializations == {}
    assert report.layers[0].bytes.codes > 0


def test_sink_logits_are_read_at_run_time() -> None:
    """They are weights: what is compiled serves the module after they have changed, too."""
    model = Sinking(in_place)
    run = compiled(model)
    with torch.no_grad():
        new, step = qkv(40), qkv(1)
        _, *past = model(*new)
        _, *pages = run(*new)
        outs = []
        for size in (0.0, 3.0):
            model.sinks.fill_(size)
            expected, *_ = model(*step, past)
            outs.append(run(*step, pages)[0])
            torch.testing.assert_close(outs[-1], expected, atol=2e-6, rtol=2e-6)
    assert not torch.allclose(outs[0], outs[1], rtol=0.1)


def wide_bias(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q @ k.transpose(2, 3) * 0.3 + SLOPES * torch.arange(k.shape[2]) + mask


def test_padding_is_hidden_beside_a_bias_of_a_wider_dtype() -> None:
    """The lowest number of fp16 is a visible one of fp32: rows would see what is not stored."""

    class Padded(Scored):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.arange(k.shape[2]) < torch.tensor([0, 7])[:, None]
            mask = mask.to(q.dtype)
            mask = mask.masked_fill(hidden[:, None, None], torch.finfo(q.dtype).min)
            return torch.softmax(self.score(q, k, mask), dim=-1).to(v.dtype) @ v

    model = Padded(wide_bias)
    run = compiled(model)
    with torch.no_grad():
        new, step = ([x.half() for x in qkv(size)] for size in (20, 1))
        _, *past = model(*new)
        _, *pages = run(*new)
        expected, *_ = model(*step, past)
        out, *pages = run(*step, pages)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert kvcompile.memory_report(pages).stored == 2 * 2 * 2 * DIM * (21 + 14)


def test_a_sharp_cap_matters() -> None:
    """The cap of these tests bites: without it the module gives something else."""
    new = qkv(40)
    with torch.no_grad():
        capped = Scored(gemma2)(*new)[0]
        plain = Scored(lambda q, k, mask: q @ k.transpose(2, 3) * 0.4 + mask)(*new)[0]
    assert (capped - plain).abs().max() > 1e-2
