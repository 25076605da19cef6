"""Modules that keep K and V in buffers of their own: adopted, they run on pages."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.codegen.errors import KvcompileError
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.runtime.claim import append_dense
from kvcompile.runtime.errors import CacheFullError, CacheGapError, CacheKindError
from kvcompile.runtime.handle import KVTensor
from tests.support.buffered_models import (
    BufferedDecoder,
    Layout,
    Spelling,
    assert_in_pages,
    buffered,
    decode,
)
from tests.support.compiled import FAST, compiled, count_compilations
from tests.support.tiny_models import prompt

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]

PROMPT, NEW = 9, 16
STORED = PROMPT + NEW - 1
INT4: dict[str, Any] = {"kv_cache_dtype": "int4", "residual_length": 16, "page_size": 32}


def again(model: BufferedDecoder) -> Any:
    """Compile one more instance; what Dynamo has compiled for others serves it too."""
    options: Any = FAST
    return torch.compile(model, backend="kvcompile", options=options)


def tokens_of(model: BufferedDecoder, ids: Tensor, new: int = NEW) -> Tensor:
    """Return what the unmodified model decodes; its buffers are zeros again."""
    tokens = decode(model, ids, new)
    model.reset()
    return tokens


@pytest.mark.parametrize(
    ("spelling", "layout", "batch"),
    [("index_put", "BHTD", 2), ("index_put", "BTHD", 1), ("prefix", "BHTD", 1)],
)
def test_two_generations(spelling: Spelling, layout: Layout, batch: int) -> None:
    model, ids = buffered(spelling, layout, batch=batch), prompt(PROMPT, batch=batch)
    expected = tokens_of(model, ids)
    dense = [weakref.ref(cache) for cache in model.caches()]
    adopted = kvcompile.adopt(model)
    assert adopted == tuple(f"layers.{i}.{role}_cache" for i in (0, 1) for role in "kv")
    run = compiled(model, strict=True)
    with count_compilations() as compilations:
        assert torch.equal(decode(run, ids, NEW), expected)
        assert all(ref() is None for ref in dense)
        assert_in_pages(model, STORED)
        model.reset()
        assert kvcompile.memory_report(model).stored == 0
        assert torch.equal(decode(run, ids, NEW), expected)
        assert compilations.count == 2
        # Without a reset, tokens of the past remain behind those that are written.
        assert torch.equal(decode(run, ids, 5), expected[:, :5])
        assert compilations.count == 2
    assert kvcompile.memory_report(model).materializations == {}


def test_a_prompt_in_chunks_and_two_instances() -> None:
    ids, models = prompt(PROMPT), [buffered("slice", seed=seed) for seed in (0, 1)]
    expected = [tokens_of(model, ids) for model in models]
    assert not torch.equal(*expected)
    runs = []
    for model in models:
        kvcompile.adopt(model)
        runs.append(again(model))
    for run, tokens in zip(runs, expected, strict=True):
        assert torch.equal(decode(run, ids, NEW, chunk=4), tokens)
    for model in models:
        assert_in_pages(model, STORED)


def test_quantized() -> None:
    model, ids = buffered(tokens=256), prompt(150)
    kvcompile.adopt(model)
    run = compiled(model, **INT4)
    with torch.no_grad():
        expected = model(ids, torch.arange(150), 0)  # in eager mode, on dense tensors
        torch.testing.assert_close(run(ids, torch.arange(150), 0), expected)
    decode(run, ids, NEW)
    report = kvcompile.memory_report(model)
    assert report.stored < 0.45 * model.exact_bytes(150 + NEW - 1)
    assert (report.dense, report.materializations) == (0, {})


def test_without_adopting_it_runs_as_written() -> None:
    forget_notices()
    model, ids = buffered(), prompt(PROMPT)
    expected = tokens_of(model, ids)
    assert torch.equal(decode(compiled(model), ids, NEW), expected)
    assert type(model.caches()[0]) is Tensor
    hints = [remark.hint for remark in kvcompile.notices() if remark.code == "KVC405"]
    assert hints
    assert all("kvcompile.adopt(model)" in hint for hint in hints)


def test_contents_are_taken_along_and_errors_lose_nothing() -> None:
    model, ids = buffered(positions=100), prompt(PROMPT)
    tokens = tokens_of(model, ids)
    with torch.no_grad():
        model(ids, torch.arange(PROMPT), 0)
        kvcompile.adopt(model)
        run = compiled(model)

        def step(token: int, position: int) -> int:
            at = torch.tensor([position])
            return int(run(tokens[:, token : token + 1], at, position)[0, -1].argmax())

        assert step(0, PROMPT) == tokens[0, 1]
        assert_in_pages(model, PROMPT + 1)
        with pytest.raises(CacheFullError, match="do not fit into a static cache of 64"):
            step(1, 64)
        with pytest.raises(CacheGapError, match="start at 10"):
            step(1, 30)
        assert step(1, PROMPT + 1) == tokens[0, 2]
    assert_in_pages(model, PROMPT + 2)


def test_what_modules_do_with_their_buffers() -> None:
    model, ids = buffered(), prompt(PROMPT)
    expected = tokens_of(model, ids)
    kvcompile.adopt(model)
    unused = copy.deepcopy(model)
    run = compiled(model)
    decode(run, ids, 5)
    model.to("cpu", torch.float32)
    assert_in_pages(model, PROMPT + 4)

    other = copy.deepcopy(model)
    assert torch.equal(decode(again(other), ids, NEW), expected)
    assert_in_pages(other, STORED)
    assert torch.equal(decode(again(unused), ids, NEW), expected)
    assert_in_pages(unused, STORED)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    dense = buffered()
    dense.load_state_dict(torch.load(file))
    for cache, loaded in zip(model.caches(), dense.caches(), strict=True):
        assert torch.equal(cache + 0, loaded)
        assert loaded[:, :, PROMPT + 3].any()
    other.load_state_dict(dense.state_dict())
    with torch.no_grad():
        at = torch.tensor([PROMPT + 4])
        logits = again(other)(expected[:, 4:5], at, PROMPT + 4)
    assert torch.equal(logits[:, -1].argmax(-1), expected[:, 5])
    report = kvcompile.memory_report(other)
    # No shorter than it was: behind what was loaded there are zeros.
    assert (report.stored, report.dense) == (other.exact_bytes(STORED), 0)

    half = model.half().caches()[0]
    assert type(half) is Tensor
    assert half.dtype == torch.float16


def test_fewer_rows_than_the_buffers_have() -> None:
    forget_notices()
    model, ids = buffered("prefix", "BTHD", batch=3), prompt(PROMPT, batch=2)
    expected = tokens_of(model, ids)
    kvcompile.adopt(model)
    assert torch.equal(decode(compiled(model), ids, NEW), expected)
    remarks = [remark for remark in kvcompile.notices() if remark.code == "KVC209"]
    assert remarks
    assert all("all of its rows" in remark.reason for remark in remarks)


def test_other_options_from_a_reset_on() -> None:
    model, ids = buffered(), prompt(PROMPT)
    expected = tokens_of(model, ids)
    kvcompile.adopt(model)
    assert torch.equal(decode(compiled(model), ids, NEW), expected)
    run = compiled(model, **INT4)
    with pytest.raises(CacheKindError, match="zero_"):
        decode(run, ids, NEW)
    assert_in_pages(model, STORED)
    model.reset()
    assert torch.equal(decode(run, ids, NEW), expected)  # too few tokens to fill a page
    report = kvcompile.memory_report(model)
    assert report.window == model.exact_bytes(STORED)


def test_all_layers_move_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = buffered(), prompt(PROMPT)
    expected = tokens_of(model, ids)
    kvcompile.adopt(model)
    run, calls = compiled(model), [0]

    def fails(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KvcompileError("the second layer")
        append_dense(*args)

    monkeypatch.setattr("kvcompile.runtime.executor.append_dense", fails)
    before = kvcompile.memory_report(model)
    with pytest.raises(KvcompileError, match="the second layer"):
        decode(run, ids, 1)
    after = kvcompile.memory_report(model)
    assert (after.dense, after.allocated) == (before.dense, 0)
    assert torch.equal(decode(run, ids, NEW), expected)
    assert_in_pages(model, STORED)


class PlainAttributes(nn.Module):
    """Keeps K and V as attributes that are not registered, and assigns them anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_k, self.cache_v = torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        self.cache_k, self.cache_v = self.cache_k.to(q), self.cache_v.to(q)
        end = start + k.shape[1]
        self.cache_k[:2, start:end] = k
        self.cache_v[:2, start:end] = v
        keys, values = self.cache_k[:2, :end], self.cache_v[:2, :end]
        keys, values = (
            x[:, :, :, None].expand(2, end, 2, 2, 16).reshape(2, end, 4, 16).transpose(1, 2)
            for x in (keys, values)
        )
        return (q @ keys.transpose(2, 3) / 4).softmax(-1) @ values


def test_plain_attributes() -> None:
    model, dense = PlainAttributes(), PlainAttributes()
    assert kvcompile.adopt(model) == ("cache_k", "cache_v")
    run = compiled(model, strict=True)
    with torch.no_grad(), count_compilations() as compilations:
        for start in range(8):
            q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 1, 2, 16)
            torch.testing.assert_close(run(q, k, v, start), dense(q, k, v, start))
    assert compilations.count == 2
    report = kvcompile.memory_report(model)
    assert report.stored == 2 * 2 * 8 * 2 * 16 * 4
    assert (report.dense, report.materializations) == (0, {})


def test_a_tensor_that_somebody_holds_is_not_released() -> None:
    forget_notices()
    model = buffered()
    held = model.caches()[0]
    kvcompile.adopt(model)
    decode(compiled(model), prompt(PROMPT), 1)
    assert any(remark.code == "KVC504" for remark in kvcompile.notices())
    assert not held.any()
    assert isinstance(model.caches()[0], KVTensor)
