"""Two compilations for a whole `generate`, prefill and decode, and never again."""

from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.passes.ir.remarks import forget_notices
from tests.support.compiled import (
    FAST,
    assert_paged,
    compiled,
    count_compilations,
    exact_bytes,
    settings,
)
from tests.support.tiny_models import greedy, prompt, tiny_llama, tiny_nanogpt

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_two_for_a_long_generation(cache: str) -> None:
    model = compiled(tiny_llama())
    with count_compilations() as compilations:
        model.generate(prompt(20), **settings(260, cache_implementation=cache))
        assert compilations.count == 2


def test_none_for_another_prompt_length() -> None:
    """The second length may teach Dynamo that the prompt is dynamic; the third changes nothing."""
    model = compiled(tiny_llama())
    for length in (20, 31):
        model.generate(prompt(length), **settings(8))
    with count_compilations() as compilations:
        for length in (12, 40, 77):
            model.generate(prompt(length), **settings(8))
        assert compilations.count == 0


def test_two_for_a_tuple_cache() -> None:
    model = compiled(tiny_nanogpt())
    with count_compilations() as compilations:
        greedy(model, prompt(20), 40)
        assert compilations.count == 2


def test_none_when_two_models_take_turns() -> None:
    """The graphs of one instance are not guarded away by another with equal shapes."""
    first, second = compiled(tiny_llama(seed=1)), compiled(tiny_llama(seed=2))
    for model in (first, second):
        model.generate(prompt(20), **settings(8))
    with count_compilations() as compilations:
        for model in (first, second, first):
            model.generate(prompt(20), **settings(8))
        assert compilations.count == 0


def test_grad_mode_does_not_undo_it() -> None:
    """`generate` runs under no_grad; a call outside it must not break the next generation."""
    plain, ids = tiny_llama(), prompt(20)
    expected = plain.generate(ids, **settings(8)).sequences
    model = compiled(plain)
    model.generate(ids, **settings(8))
    model(ids).logits.sum().backward()
    assert model.generate(ids, **settings(8)).sequences.tolist() == expected.tolist()


def test_every_other_one_is_explained_by_a_remark() -> None:
    forget_notices()
    model = tiny_llama()
    wrapper = compiled(model)
    with torch.no_grad(), count_compilations() as compilations:
        wrapper.generate(prompt(9), **settings(4))
        assert (compilations.count, len(kvcompile.notices())) == (2, 0)
        wrapper.generate(prompt(12), **settings(4))
        wrapper.generate(prompt(9, batch=3), **settings(4))
        wrapper.generate(prompt(1), **settings(4))
    remarks = kvcompile.notices()
    assert compilations.count == 2 + len(remarks)
    assert {remark.code for remark in remarks} == {"KVC003"}
    assert "actual 12" in remarks[0].reason
    assert "prefill" in remarks[0].reason


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_batches_and_lengths_of_all_sizes_stay_in_pages(dynamic: bool | None, cache: str) -> None:
    """`dynamic=True` makes every size and every float an input; sizes come and go otherwise."""
    forget_notices()
    model = tiny_llama()
    options: Any = FAST
    wrapper: Any = torch.compile(model, backend="kvcompile", dynamic=dynamic, options=options)
    more = {"cache_implementation": "static"} if cache == "static" else {}
    with torch.no_grad(), count_compilations() as compilations:
        for batch, length in ((3, 9), (4, 9), (2, 12), (5, 31)):
            ids = prompt(length, batch=batch)
            mask = torch.ones_like(ids)
            mask[0, :2] = 0
            arguments = settings(5, attention_mask=mask, **more)
            result = wrapper.generate(ids, **arguments)
            expected: Any = model
            assert torch.equal(result.sequences, expected.generate(ids, **arguments).sequences)
            assert_paged(result.past_key_values, exact_bytes(model, batch * (length + 4) - 2))
    assert not [remark for remark in kvcompile.notices() if remark.kind != "note"]
    assert compilations.count <= (2 if dynamic else 6)
