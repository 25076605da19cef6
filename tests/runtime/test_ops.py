"""kvcompile::append, append_attend and materialize: alone, and in graphs lowered by Inductor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from kvcompile.codegen.spec import MOST_QUERIES
from kvcompile.runtime.errors import CacheGapError, PaddingRevivedError, StaleHandleError
from kvcompile.runtime.store import PagedStore
from tests.support.stores import DIM_QK, DIM_VO, HEADS, PAGE, empty_store, filled_store, new_tokens

ops = torch.ops.kvcompile
SCALE = DIM_QK**-0.5


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)


def queries(batch: int, tokens: int) -> torch.Tensor:
    return torch.randn(batch, 3 * HEADS, tokens, DIM_QK)


def causal_mask(past: int, new: int, padding: list[int]) -> torch.Tensor:
    """Return bool[B, 1, S, T]: query s sees tokens padding[b] .. past + s."""
    column = torch.arange(past + new)
    visible = column <= past + torch.arange(new)[:, None]
    return torch.stack([visible & (column >= pad) for pad in padding])[:, None]


def additive(mask: torch.Tensor, dead: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, dead)


@pytest.mark.parametrize("new", [1, 3, MOST_QUERIES, MOST_QUERIES + 1, 40])
@pytest.mark.parametrize("past", [0, 1, PAGE - 1, PAGE, 70])
def test_append_and_attend(past: int, new: int) -> None:
    case = filled_store(past)
    k, v = new_tokens(2, new)
    q, mask = queries(2, new), causal_mask(past, new, [0, 0])
    state = case.store.state
    out = ops.append_attend(q, k, v, state, past, None, mask, False, SCALE, past + new)
    dense_k, dense_v = torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2)
    torch.testing.assert_close(out, attention(q, dense_k, dense_v, mask))
    assert out.transpose(1, 2).is_contiguous()
    assert case.store.length == past  # only commit moves it


@pytest.mark.parametrize("new", [1, 20])
def test_no_mask_and_strided_inputs(new: int) -> None:
    case = filled_store(30)
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in new_tokens(2, new))
    q = queries(2, new).transpose(2, 3).contiguous().transpose(2, 3)
    state = case.store.state
    out = ops.append_attend(q, k, v, state, 30, None, None, False, SCALE, 30 + new)
    dense_k, dense_v = torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2)
    torch.testing.assert_close(out, attention(q, dense_k, dense_v))


@pytest.mark.parametrize(
    ("tokens", "new"), [(1, 5), (20, 1), (2, 0), (0, 3), (3, MOST_QUERIES + 4)]
)
def test_queries_need_not_be_those_of_the_new_tokens(tokens: int, new: int) -> None:
    case = filled_store(30)
    k, v = new_tokens(2, new)
    q = queries(2, tokens)
    state = case.store.state
    out = ops.append_attend(q, k, v, state, 30, None, None, False, SCALE, 30 + new)
    dense_k, dense_v = torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2)
    torch.testing.assert_close(out, attention(q, dense_k, dense_v))
    assert out.transpose(1, 2).is_contiguous()


def test_attention_over_nothing_is_zero() -> None:
    store = empty_store()
    nothing = (queries(2, 3), *new_tokens(2, 0), store.state)
    out = ops.append_attend(*nothing, 0, None, None, False, SCALE, 0)
    assert torch.equal(out, torch.zeros(2, 3 * HEADS, 3, DIM_VO))
    assert out.transpose(1, 2).is_contiguous()


def test_a_store_that_begins_anew_forgets_what_a_failed_step_learned() -> None:
    store = empty_store()
    k, v = new_tokens(2, 6)
    with pytest.raises(ValueError, match="do not fit"):
        ops.append(k[:, :1], v, store.state, 0, None, causal_mask(0, 6, [0, 4]))
    out = ops.append_attend(queries(2, 6), k, v, store.state, 0, None, None, False, SCALE, 6)
    store.commit(6)
    assert out.isfinite().all()
    assert store.start_list() == [0, 0]
    assert torch.equal(store.materialize("k"), k)


@pytest.mark.parametrize("dead", [None, float("-inf"), torch.finfo(torch.float32).min, -3e38])
def test_left_padding_is_learned_and_owns_no_page(dead: float | None) -> None:
    padding = [0, PAGE + 3, 2 * PAGE]
    store = empty_store(batch=3)
    prompt = 2 * PAGE + 1
    k, v = new_tokens(3, prompt)
    mask = causal_mask(0, prompt, padding)
    given = mask if dead is None else additive(mask, dead)
    ops.append(k, v, store.state, 0, None, given)
    store.commit(prompt)
    assert store.start_list() == padding
    assert len(store.holdings()[0].filled) == 3 + 1 + 1
    for row, pad in enumerate(padding):
        k[row, :, :pad] = 0
        v[row, :, :pad] = 0
    assert torch.equal(store.materialize("k"), k)
    for new in (1, 2, MOST_QUERIES + 4):
        past = store.length
        new_k, new_v = new_tokens(3, new)
        k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        mask = causal_mask(past, new, padding)
        given = mask if dead is None else additive(mask, dead)
        q = queries(3, new)
        new_kv, length = (new_k, new_v), past + new
        out = ops.append_attend(q, *new_kv, store.state, past, None, given, False, SCALE, length)
        store.commit(past + new)
        torch.testing.assert_close(out, attention(q, k, v, mask))


@torch.inference_mode()
def test_masks_of_inference_mode() -> None:
    test_left_padding_is_learned_and_owns_no_page(None)


def test_padding_that_comes_back_to_life_is_an_error() -> None:
    store = empty_store()
    mask = causal_mask(0, 6, [0, 4])
    ops.append(*new_tokens(2, 6), store.state, 0, None, mask)
    store.commit(6)
    tokens = (queries(2, 1), *new_tokens(2, 1), store.state)
    good = causal_mask(6, 1, [0, 4])
    bad = causal_mask(6, 1, [0, 3])
    ops.append_attend(*tokens, 6, None, good, False, SCALE, 7)
    for mask_now in (bad, additive(bad, float("-inf")), None):
        with pytest.raises(PaddingRevivedError, match=r"\[0, 4\] left-padding"):
            ops.append_attend(*tokens, 6, None, mask_now, False, SCALE, 7)


def test_a_second_prompt_learns_its_own_padding() -> None:
    store = empty_store(capacity=40)
    for padding in ([0, 4], [2, 0], [0, 0]):
        mask = F.pad(causal_mask(0, 6, padding), (0, 34))
        ops.append(*new_tokens(2, 6), store.state, 0, torch.arange(6), mask)
        store.commit(6)
        assert store.start_list() == padding


def test_a_static_cache_is_written_like_a_dense_buffer() -> None:
    case = filled_store(PAGE, capacity=50)
    for position in (PAGE, PAGE + 1, PAGE - 5):
        k, v = new_tokens(2, 2)
        q, where = queries(2, 2), torch.arange(position, position + 2)
        case.dense_k[:, :, position : position + 2] = k
        case.dense_v[:, :, position : position + 2] = v
        mask = F.pad(causal_mask(position, 2, [0, 0]), (0, 50 - position - 2))
        state = case.store.state
        out = ops.append_attend(q, k, v, state, 0, where, mask, False, SCALE, 50)
        case.store.commit(position + 2)
        torch.testing.assert_close(out, attention(q, case.dense_k, case.dense_v, mask))
        assert torch.equal(case.k, case.dense_k)


def test_a_static_cache_is_read_as_far_as_is_asked_for() -> None:
    store = empty_store(capacity=40)
    k, v = new_tokens(2, 30)
    ops.append(k, v, store.state, 0, torch.arange(30), None)
    store.commit(30)
    (k[:, :, 9:10], v[:, :, 9:10]), q = new_tokens(2, 1), queries(2, 1)
    new = k[:, :, 9:10], v[:, :, 9:10]
    position = torch.tensor([9])
    out = ops.append_attend(q, *new, store.state, 0, position, None, False, SCALE, 10)
    torch.testing.assert_close(out, attention(q, k[:, :, :10], v[:, :, :10]))


def test_a_static_gap_is_an_error() -> None:
    case = filled_store(PAGE, capacity=50)
    state = case.store.state
    with pytest.raises(CacheGapError, match="position 20"):
        ops.append(*new_tokens(2, 1), state, 0, torch.tensor([20]), None)
    with pytest.raises(CacheGapError, match="consecutive"):
        ops.append(*new_tokens(2, 2), state, 0, torch.tensor([16, 18]), None)
    tokens, where = (queries(2, 1), *new_tokens(2, 1), state), torch.tensor([PAGE])
    everything = torch.ones(2, 1, 1, 50, dtype=torch.bool)
    for mask in (everything, additive(everything, 0.0), None):
        with pytest.raises(CacheGapError, match=r"50 columns .* the 17"):
            ops.append_attend(*tokens, 0, where, mask, False, SCALE, 50)


def test_a_state_that_outlived_its_store_is_a_named_error() -> None:
    new, state = new_tokens(2, 1), filled_store(3).store.state
    with pytest.raises(StaleHandleError, match="no longer exists"):
        ops.append(*new, state, 3, None, None)
    with pytest.raises(StaleHandleError, match="no longer exists"):
        ops.append_attend(queries(2, 1), *new, state, 3, None, None, False, SCALE, 4)


def test_a_clone_of_the_state_is_as_good() -> None:
    case = filled_store(PAGE)
    clone = case.store.state.clone()
    k, v = new_tokens(2, 30 * PAGE)  # the block table moves; the clone still has its old address
    ops.append(k, v, clone, PAGE, None, None)
    case.store.commit(31 * PAGE)
    q, new_k, new_v = queries(2, 1), *new_tokens(2, 1)
    past = 31 * PAGE
    out = ops.append_attend(q, new_k, new_v, clone, past, None, None, False, SCALE, past + 1)
    k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
    dense_k, dense_v = torch.cat([case.dense_k, k], 2), torch.cat([case.dense_v, v], 2)
    torch.testing.assert_close(out, attention(q, dense_k, dense_v))


def test_materialize_reads_what_an_anchor_names() -> None:
    case = filled_store(20)
    for role, dense in (("k", case.dense_k), ("v", case.dense_v)):
        anchor = case.store.anchors["k" if role == "k" else "v"]
        out = ops.materialize(
            anchor, [2, HEADS, 11, dense.shape[3]], torch.float32, torch.device("cpu")
        )
        assert torch.equal(out, dense[:, :, :11])


def graph(
    x: torch.Tensor, state: torch.Tensor, past: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """One layer's worth of work around the operator."""
    batch, tokens = x.shape[:2]
    k = (x * 2).view(batch, tokens, HEADS, DIM_QK).transpose(1, 2)
    v = (x + 1).view(batch, tokens, HEADS, DIM_QK).transpose(1, 2)[..., :DIM_VO]
    q = x.view(batch, tokens, HEADS, DIM_QK).transpose(1, 2).sin()
    new, length = (q, k, v), past + tokens
    out: torch.Tensor = ops.append_attend(*new, state, past, None, mask, False, SCALE, length)
    return out.transpose(1, 2).reshape(batch, tokens, -1) * 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_inside_compiled_graphs(backend: str) -> None:
    compiled = torch.compile(graph, backend=backend, fullgraph=True, dynamic=True)
    plain, fast = empty_store(), empty_store()
    past = 0
    for tokens in (5, 1, 1, PAGE, 1, 1):
        x = torch.randn(2, tokens, HEADS * DIM_QK)
        mask = causal_mask(past, tokens, [0, 2])
        expected = graph(x, plain.state, past, mask)
        torch.testing.assert_close(compiled(x, fast.state, past, mask), expected)
        past += tokens
        plain.commit(past)
        fast.commit(past)
    assert torch.equal(plain.materialize("k"), fast.materialize("k"))
    assert torch.equal(plain.materialize("v"), fast.materialize("v"))


def big_store(tokens: int) -> PagedStore:
    store = empty_store(batch=2, page_size=64)
    store.append(*new_tokens(2, tokens), 0)
    store.commit(tokens)
    return store


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_a_compiled_step_copies_no_cache() -> None:
    store = big_store(4096)
    compiled = torch.compile(graph, backend="inductor", fullgraph=True)
    x = torch.randn(2, 1, HEADS * DIM_QK)
    store.reserve(4096, 8)
    for _ in range(2):
        compiled(x, store.state, 4096, None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        compiled(x, store.state, 4096, None)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in trace.key_averages())
    assert store.stored_bytes().codes > 1_000_000
    assert allocated < 50_000
