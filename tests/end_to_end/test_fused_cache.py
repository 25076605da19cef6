"""Models that cache K and V in one tensor: pages behind it, and the tensor's own behaviour."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import kvcompile
from kvcompile.adoption import AdoptionError
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.reports import collect
from kvcompile.runtime.errors import CacheFileError
from kvcompile.runtime.handle import KVTensor
from tests.support.compiled import compiled
from tests.support.fused_models import FusedDecoder, Spelling, fused_decoder, go_on
from tests.support.tiny_models import VOCAB_SIZE, prompt

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

STACKED = [Spelling(dim, token_dim) for dim in range(5) for token_dim in (1, 2)]
SPELLINGS = [
    *STACKED,
    *(Spelling(0, token_dim, "select", grows_apart=True) for token_dim in (1, 2)),
    Spelling(2, 1, "select", v_first=True),
    Spelling(4, 2, grows_apart=True, v_first=True),
    Spelling(2, 1, order=(2, 0, 3, 1, 4)),
    Spelling(0, as_one=True),
    Spelling(2, 1, "select", as_one=True),
    Spelling(2, 1, order=(2, 0, 3, 1, 4), as_one=True),
    Spelling(3, 2, "chunk"),
    Spelling(3, 1, "split", v_first=True),
    Spelling(3, 2, "slice"),
    Spelling(1, 2, "chunk", grows_apart=True),
    Spelling(2, 1, "split"),
]
BOTH = [Spelling(0), Spelling(3, 1, "split", grows_apart=True)]
"""A dimension of their own before that of the rows, and one that K and V share."""


def name_of(spelling: Spelling) -> str:
    how = "apart" if spelling.grows_apart else "as-one"
    order = "-v-first" * spelling.v_first + "-permuted" * (spelling.order is not None)
    order += "-projected" * spelling.as_one
    return f"{spelling.taken_by}{spelling.dim}-tokens{spelling.token_dim}-{how}{order}"


def paged(cache: tuple[torch.Tensor, ...]) -> None:
    """Assert that nothing but pages is behind a cache."""
    assert all(isinstance(state, KVTensor) and not state.is_written for state in cache)
    assert kvcompile.memory_report(cache).materializations == {}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=name_of)
def test_the_tokens_of_the_model(spelling: Spelling) -> None:
    model, ids = fused_decoder(spelling), prompt(20, batch=2)
    expected, dense = go_on(model, ids, None, 12)
    with collect() as graphs:
        found, cache = go_on(compiled(model, strict=True), ids, None, 12)
    assert found == expected
    paged(cache)
    assert [[r.code for r in graph.remarks].count("KVC210") for graph in graphs] == [2, 2]
    assert kvcompile.memory_report(cache).stored == sum(state.nbytes for state in dense)
    for state, tensor in zip(cache, dense, strict=True):
        assert state.shape == tensor.shape
        torch.testing.assert_close(state + 0, tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "spelling", [Spelling(3, 2, "split"), Spelling(3, 1, "slice")], ids=name_of
)
def test_values_of_another_dimension(spelling: Spelling) -> None:
    model, ids = fused_decoder(spelling, value_dim=32), prompt(20, batch=2)
    expected, _ = go_on(model, ids, None, 8)
    found, cache = go_on(compiled(model, strict=True), ids, None, 8)
    assert found == expected
    paged(cache)


@pytest.fixture(params=BOTH, ids=name_of)
def case(request: pytest.FixtureRequest) -> tuple[FusedDecoder, Any, torch.Tensor]:
    model = fused_decoder(request.param)
    return model, compiled(model), prompt(20, batch=2)


Case = tuple[FusedDecoder, Any, torch.Tensor]


def test_no_step_compiles_anew(case: Case) -> None:
    _, run, ids = case
    _, cache = go_on(run, ids, None, 3)
    before = counters["stats"]["unique_graphs"]
    _, cache = go_on(run, ids[:, :1], cache, 12)
    go_on(run, prompt(20, batch=2, seed=1), None, 12)
    assert counters["stats"]["unique_graphs"] == before
    paged(cache)


def test_a_crop_and_rows_in_another_order(case: Case) -> None:
    model, run, ids = case
    how, order = model.spelling, torch.tensor([1, 0])
    ends = []
    for candidate in (model, run):
        _, cache = go_on(candidate, ids, None, 6)
        short = tuple(state.narrow(how.grown_dim, 0, 22) for state in cache)
        turned = tuple(state.index_select(how.batch_dim, order) for state in short)
        tokens, cache = go_on(candidate, ids[:, :1], turned, 6)
        last = tuple(state.narrow(how.batch_dim, 1, 1) for state in cache)
        alone, last = go_on(candidate, ids[:1, 1:2], last, 4)
        wide = tuple(state.repeat_interleave(3, dim=how.batch_dim) for state in last)
        three, wide = go_on(candidate, ids[:1, :3].T, wide, 4)
        first = tuple(state.narrow(how.batch_dim, 0, 1) for state in wide)
        joined = tuple(torch.cat(pair, how.batch_dim) for pair in zip(wide, first, strict=True))
        ends.append((tokens, alone, three, [state.shape for state in joined]))
    assert ends[0] == ends[1]
    paged(wide)
    paged(joined)


def test_a_crop_by_brackets_leaves_the_longer_handle_as_it_is(case: Case) -> None:
    model, run, ids = case
    how = model.spelling
    _, cache = go_on(run, ids, None, 6)
    whole = [state.clone() for state in cache]
    index = (slice(None),) * how.grown_dim + (slice(None, 21),)
    go_on(run, ids[:, :1], tuple(state[index] for state in cache), 4)
    again, cache = go_on(run, ids[:, :1], cache, 4)
    assert again == go_on(run, ids[:, :1], tuple(whole), 4)[0]
    paged(cache)


def test_copies_and_files(case: Case) -> None:
    _, run, ids = case
    _, cache = go_on(run, ids, None, 4)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    copies = [
        copy.deepcopy(cache),
        tuple(state.clone() for state in cache),
        pickle.loads(pickle.dumps(cache)),
        torch.load(file, weights_only=True),
    ]
    expected, cache = go_on(run, ids[:, :1], cache, 6)
    for other in copies:
        found, grown = go_on(run, ids[:, :1], other, 6)
        assert found == expected
        paged(grown)
    with pytest.raises(CacheFileError, match=r"one tensor.*torch\.save"):
        kvcompile.save_cache(cache, "unused.safetensors")


def test_int4(case: Case) -> None:
    model, _, ids = case
    run = compiled(model, kv_cache_dtype="int4", residual_length=16, page_size=16)
    _, cache = go_on(run, prompt(150, batch=2), None, 4)
    paged(cache)
    report = kvcompile.memory_report(cache)
    assert report.stored < 0.5 * sum(state.nbytes for state in cache)
    one, two = (go_on(run, ids[:, :1], copy.deepcopy(cache), 8)[0] for _ in range(2))
    loaded = pickle.loads(pickle.dumps(cache))
    assert one == two == go_on(run, ids[:, :1], loaded, 8)[0]
    order = torch.tensor([1, 0])
    turned = tuple(state.index_select(model.spelling.batch_dim, order) for state in cache)
    found, turned = go_on(run, ids[:, :1].flip(0), turned, 8)
    assert found == one[::-1]
    paged(turned)


def test_eager_code_takes_the_parts_in_pages(case: Case) -> None:
    model, run, ids = case
    how = model.spelling
    _, dense = go_on(model, ids, None, 3)
    _, cache = go_on(run, ids, None, 3)
    parts = how.part(cache[0], (16, 16))
    assert all(isinstance(part, KVTensor) for part in parts)
    paged(cache)
    for part, expected in zip(parts, how.part(dense[0], (16, 16)), strict=True):
        torch.testing.assert_close(part + 0, expected, atol=1e-5, rtol=1e-4)
    parts[1].mul_(2)  # they are views, as PyTorch's are
    how.part(dense[0], (16, 16))[1].mul_(2)
    torch.testing.assert_close(cache[0] + 0, dense[0], atol=1e-5, rtol=1e-4)


def test_eager_code_appends_to_the_whole_and_to_its_parts(case: Case) -> None:
    model, run, ids = case
    how = model.spelling
    _, dense = go_on(model, ids, None, 3)
    more = torch.randn_like(dense[0].narrow(how.grown_dim, 0, 1))
    new = dict(zip("kv", how.part(-more, (16, 16)), strict=True))
    orders = [("k", "whole", "v"), ("whole", "k", "v"), ("k", "v", "whole")]
    for tokens, order in itertools.product((22, 15), orders):
        _, cache = go_on(run, ids, None, 3)
        ends = []
        for whole in (cache[0], dense[0]):
            crop = whole.narrow(how.grown_dim, 0, tokens)
            parts = dict(zip("kv", how.part(crop, (16, 16)), strict=True))
            grown = [
                torch.cat([crop, more], how.grown_dim)
                if name == "whole"
                else torch.cat([parts[name], new[name]], how.token_dim)
                for name in order
            ]
            ends.append([*grown, *parts.values(), whole])
        paged(tuple(ends[0]))
        for found, expected in zip(*ends, strict=True):
            torch.testing.assert_close(found + 0, expected, atol=1e-5, rtol=1e-4)


def test_a_dimension_out_of_range_is_named_by_pytorch(case: Case) -> None:
    model, run, ids = case
    _, cache = go_on(run, ids, None, 1)
    parts = model.spelling.part(cache[0], (16, 16))
    for handle in (cache[0], *parts):
        for dim in (*range(-2 * handle.ndim, -handle.ndim), *range(handle.ndim, 2 * handle.ndim)):
            for ask in (
                lambda x, dim: torch.cat([x, x], dim),
                lambda x, dim: torch.cat([torch.empty(0), x], dim),
                lambda x, dim: x.index_select(dim, torch.tensor([0])),
                lambda x, dim: x.repeat_interleave(2, dim),
                lambda x, dim: x.select(dim, 0),
                lambda x, dim: x.unbind(dim),
                lambda x, dim: torch.select(x, dim, 0),
                lambda x, dim: torch.chunk(x, 2, dim),
            ):
                with pytest.raises(IndexError, match="Dimension out of range"):
                    ask(handle, dim)


def test_rows_of_two_layouts_of_one_shape_are_joined_as_tensors_are() -> None:
    ids = prompt(20, batch=2)
    caches = []
    for spelling in (Spelling(0), Spelling(1), Spelling(0, v_first=True)):
        model = fused_decoder(spelling)
        caches.append(
            (go_on(compiled(model), ids, None, 1)[1][0], go_on(model, ids, None, 1)[1][0])
        )
    for dim in (0, 1):
        found, expected = (torch.cat(tensors, dim) for tensors in zip(*caches, strict=True))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


class Widths(nn.Module):
    """One attention over the past of a model that has K and V of other widths."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result [B, H, S, 16] and the grown tensor of K and V."""
        present = torch.cat([past, torch.cat([k, v], 3)], 2)
        k, v = present.split((32, 16), 3)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), present


def test_a_past_of_other_widths_is_read_as_the_tensor_it_is() -> None:
    model, ids = fused_decoder(Spelling(3, 2, "split"), value_dim=32), prompt(20, batch=2)
    past = go_on(compiled(model), ids, None, 2)[1][0]
    new = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 16)
    expected = Widths()(*new, past + 0)
    for found, tensor in zip(compiled(Widths())(*new, past), expected, strict=True):
        torch.testing.assert_close(found + 0, tensor, atol=1e-5, rtol=1e-4)


def test_what_is_written_is_what_the_model_goes_on_with(case: Case) -> None:
    model, run, ids = case
    ends = []
    for candidate in (model, run):
        _, cache = go_on(candidate, ids, None, 3)
        cache[0].mul_(0.5)
        ends.append(go_on(candidate, ids[:, :1], cache, 8)[0])
    assert ends[0] == ends[1]


def test_a_dense_past_and_an_uncompiled_step(case: Case) -> None:
    model, run, ids = case
    expected, dense = go_on(model, ids, None, 3)
    found, cache = go_on(run, ids[:, :1], dense, 6)
    again, _ = go_on(model, ids[:, :1], dense, 6)
    assert found == again
    paged(cache)
    # The unmodified model appends to the handles: `cat` in eager code.
    forget_notices()
    eager, _ = go_on(model, ids[:, :1], cache, 4)
    assert eager == go_on(run, ids[:, :1], cache, 4)[0]
    assert expected


def test_an_operator_that_needs_a_dense_tensor_is_counted(case: Case) -> None:
    _, run, ids = case
    _, cache = go_on(run, ids, None, 3)
    forget_notices()
    assert cache[0].abs().max() > 0
    assert dict(kvcompile.memory_report(cache).materializations) == {"aten.abs": 1}
    assert [remark.code for remark in kvcompile.notices()] == ["KVC507"]


def test_with_inductor() -> None:
    model, ids = fused_decoder(BOTH[0]), prompt(20, batch=2)
    expected, _ = go_on(model, ids, None, 8)
    run = torch.compile(model, backend="kvcompile")
    found, cache = go_on(run, ids, None, 8)
    assert found == expected
    paged(cache)


class Normed(FusedDecoder):
    """Reads the cached tensor besides its attention."""

    def forward(self, ids: torch.Tensor, past: Any = None) -> Any:
        """Return logits that depend on the whole cache, and the cache."""
        logits, cache = super().forward(ids, past)
        return logits + sum(state.square().mean() for state in cache), cache


class Turned(FusedDecoder):
    """Returns what it caches once more, permuted."""

    def forward(self, ids: torch.Tensor, past: Any = None) -> Any:
        """Return logits, and the cache twice."""
        logits, cache = super().forward(ids, past)
        return logits, (*cache, *(state.transpose(0, 1) for state in cache))


AS_WRITTEN = {
    "read": (Normed, BOTH[0]),
    "returned": (Turned, BOTH[0]),
    "tokens-of-k-then-of-v": (FusedDecoder, Spelling(2, 2, "chunk", grows_apart=True)),
    "tokens-of-k-then-of-v-first": (FusedDecoder, Spelling(1, 1, "chunk", grows_apart=True)),
}


@pytest.mark.parametrize(("kind", "spelling"), AS_WRITTEN.values(), ids=AS_WRITTEN)
def test_another_form_or_reader_leaves_the_tensor_as_written(
    kind: type[FusedDecoder], spelling: Spelling
) -> None:
    torch.manual_seed(0)
    model, ids = kind(spelling, 16).eval().requires_grad_(False), prompt(20, batch=2)
    expected, _ = go_on(model, ids, None, 6)
    forget_notices()
    found, cache = go_on(compiled(model), ids, None, 6)
    assert found == expected
    assert not any(isinstance(state, KVTensor) for state in cache)
    assert "KVC209" in {remark.code for remark in kvcompile.notices()}


class Buffered(nn.Module):
    """One attention over a registered buffer of K and V, written at positions."""

    kv: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv", torch.zeros(2, 2, 4, 64, 16))
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, VOCAB_SIZE)
        self.tokens = nn.Embedding(VOCAB_SIZE, 64)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocabulary]."""
        q, k, v = (
            part.unflatten(-1, (4, 16)).transpose(1, 2)
            for part in self.qkv(self.tokens(ids)).chunk(3, -1)
        )
        self.kv[0].index_copy_(2, places, k)
        self.kv[1].index_copy_(2, places, v)
        mask = torch.arange(64) <= places[:, None]
        y = F.scaled_dot_product_attention(q, self.kv[0], self.kv[1], attn_mask=mask)
        return self.head(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_static_buffer_of_both_stays_as_written() -> None:
    torch.manual_seed(0)
    model = Buffered().eval().requires_grad_(False)
    forget_notices()
    ends = []
    for run in (model, compiled(model)):
        model.kv.zero_()
        step, places, found = prompt(20, batch=2), torch.arange(20), []
        with torch.no_grad():
            for _ in range(8):
                step = run(step, places)[:, -1:].argmax(-1).contiguous()
                places = places[-1:] + 1
                found.append(step)
        ends.append(torch.cat(found, 1).tolist())
    assert ends[0] == ends[1]
    assert [remark.code for remark in kvcompile.notices()] == ["KVC209"]
    with pytest.raises(AdoptionError, match="5 dimensions"):
        kvcompile.adopt(model)
