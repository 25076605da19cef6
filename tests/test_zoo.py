"""The builder makes models of many kinds, and docs/models.md is what the results render to."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.zoo.models import build, entries, prompt
from benchmarks.zoo.render import render
from benchmarks.zoo.results import DOCUMENT, RESULTS, read
from benchmarks.zoo.verdict import causes, general, verdict

BY_NAME = {entry.name: entry for entry in entries()}


def test_the_document_is_what_the_results_render_to() -> None:
    assert DOCUMENT.read_text() == render(read(RESULTS).values(), BY_NAME)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",  # the rule alone
        "Gemma3nForCausalLM",  # layers that share K and V
        "JambaForCausalLM",  # recurrent layers
        "DeepseekV3ForCausalLM",  # latents
        "BartForConditionalGeneration",  # an encoder
        "LlavaForConditionalGeneration",  # an image
    ],
)
def test_the_builder_makes_small_models_that_run(name: str) -> None:
    model: Any = build(BY_NAME[name])
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    out = model.generate(**prompt(BY_NAME[name], model), max_new_tokens=2, do_sample=False)
    assert out.dim() == 2


def test_results_are_of_classes_that_there_are() -> None:
    assert set(read(RESULTS)) <= set(BY_NAME)


def test_no_class_stays_dense_without_a_reason() -> None:
    for record in read(RESULTS).values():
        if verdict(record) in ("partly", "dense"):
            assert ("", "no remark says why") not in causes(record), record["name"]


def test_equal_causes_of_two_layers_are_one() -> None:
    assert general("slice_3 of 17 tokens") == general("slice_4 of 18 tokens")
