"""Buffers of a module that tokens are written into, in every spelling: the same static state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.programs import Pair, calls, capture, codes, qkv, static_handles

TOKENS = 12
Write = Callable[[Tensor, Tensor, Tensor, int], object]


def put(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, pos] = new


def scatter(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache.scatter_(2, pos.view(1, 1, -1, 1).expand_as(new), new)


def assign(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, start : start + new.shape[2]] = new


def assign_rows(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[: new.shape[0], :, start : start + new.shape[2]] = new


def assign_from_behind(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, start - TOKENS : start - TOKENS + new.shape[2]] = new


def narrow(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache.narrow(2, start, new.shape[2]).copy_(new)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def step(write: Write, *, start: int = 4) -> Callable[..., Tensor]:
    """Return a step that writes and then attends to the whole buffers."""

    def run(q: Tensor, k: Tensor, v: Tensor, buffers: Pair, pos: Tensor, mask: Tensor) -> Tensor:
        write(buffers[0], k, pos, start)
        write(buffers[1], v, pos, start)
        return attend(q, buffers[0], buffers[1], mask)

    return run


def inputs(tokens: int, buffers: Pair | None = None) -> tuple[object, ...]:
    pos, mask = torch.arange(4, 4 + tokens), torch.ones(1, 1, tokens, TOKENS, dtype=torch.bool)
    mask[..., 4 + tokens :] = False
    return *qkv(tokens), buffers or static_handles(4, TOKENS), pos, mask


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("write", [put, scatter, assign, assign_rows, assign_from_behind, narrow])
def test_every_spelling_is_a_static_state(write: Write, tokens: int) -> None:
    program, _ = capture(step(write), *inputs(tokens))
    stream = program.streams[0]
    assert (stream.k.kind, stream.k.token_dim, stream.k.prefix) == ("index_copy", 2, None)
    assert stream.k.position is stream.v.position is not None
    assert calls(program)[-1] == "kvcompile.append_attend.default"
    assert not any("index" in n or "copy" in n or "scatter" in n for n in calls(program))


def test_positions_may_be_int32() -> None:
    *others, pos, mask = inputs(3)
    assert isinstance(pos, Tensor)
    program, _ = capture(step(put), *others, pos.to(torch.int32), mask)
    assert program.streams[0].k.kind == "index_copy"


def test_positions_of_a_range_are_counted() -> None:
    program, _ = capture(step(assign), *inputs(3))
    names = calls(program)
    assert names.count("aten.arange.default") == 1  # for K and V
    assert (names.count("aten.add.Tensor"), names.count("aten.slice.Tensor")) == (1, 0)


def test_tokens_before_heads() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, buffers: Pair, pos: Tensor, mask: Tensor) -> Tensor:
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, pos] = new.transpose(1, 2)
        return attend(q, buffers[0].transpose(1, 2), buffers[1].transpose(1, 2), mask)

    dense = torch.zeros(2, TOKENS, 2, 8), torch.zeros(2, TOKENS, 2, 8)
    program, _ = capture(run, *inputs(3, dense))
    assert (program.streams[0].k.kind, program.streams[0].k.token_dim) == ("index_copy", 1)


@pytest.mark.parametrize("masked", [False, True])
def test_whoever_knows_the_end_reads_no_more(masked: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, buffers: Pair, pos: Tensor, mask: Tensor) -> Tensor:
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, 4:7] = new
        seen = buffers[0][:, :, :7], buffers[1][:, :, :7]
        return attend(q, *seen, mask[..., :7] if masked else None)

    program, _ = capture(run, *inputs(3))
    attends = next(n for n in program.graph.nodes if "attend" in str(n.target))
    assert attends.args[9] == 7
    assert program.binding is not None
    assert program.binding.states[0].position is None


def test_a_mask_must_fit_what_is_read() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, buffers: Pair, pos: Tensor, mask: Tensor) -> Tensor:
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, 4:5] = new
        return attend(q, buffers[0][:, :, :5], buffers[1][:, :, :5], mask[..., :1])

    program, _ = capture(run, *inputs(1))
    assert codes(program)[-1] == "KVC403"


def test_dense_buffers_are_recognised_and_their_owner_is_told() -> None:
    dense = torch.zeros(2, 2, TOKENS, 8), torch.zeros(2, 2, TOKENS, 8)
    program, _ = capture(step(assign), *inputs(1, dense))
    assert codes(program)[-1] == "KVC405"
    assert "kvcompile.adopt(model)" in program.remarks[-1].hint


def twice(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, 4:5] = new
    cache[:, :, 5:6] = -new


def steps_of_two(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, 0:4:2] = new


def one_for_all(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, pos] = new[:, :, :1]


def per_row(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[torch.arange(2), :, pos[0].expand(2)] = new[:, :, 0]


def one_row(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:1, :, start : start + new.shape[2]] = new[:1]


def channels(cache: Tensor, new: Tensor, pos: Tensor, start: int) -> None:
    cache[:, :, 4:5, :4] = new[..., :4]


@pytest.mark.parametrize(
    ("write", "tokens"),
    [(twice, 1), (steps_of_two, 2), (one_for_all, 3), (per_row, 1), (one_row, 1), (channels, 1)],
)
def test_other_writes_stay_as_they_are(write: Write, tokens: int) -> None:
    program, _ = capture(step(write), *inputs(tokens))
    assert codes(program)[-1] == "KVC209"
    assert not program.plans


@pytest.mark.parametrize("write", [put, assign])
@pytest.mark.parametrize("copies", [False, True])
def test_a_buffer_under_another_name(write: Write, copies: bool) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, buffers: Pair, pos: Tensor, mask: Tensor) -> Tensor:
        keys = buffers[0].to(k, copy=copies)
        values = buffers[1].to(v, copy=copies)
        write(keys, k, pos, 4)
        write(values, v, pos, 4)
        return attend(q, keys, values, mask)

    program, _ = capture(run, *inputs(1))
    assert bool(program.plans) is not copies
