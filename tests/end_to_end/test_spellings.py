"""Every way to say it: each must generate compiled, on pages, with the model's own tokens."""

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationMixin, PreTrainedModel, StaticCache

import kvcompile
from kvcompile.passes.ir.remarks import forget_notices
from kvcompile.runtime.handle import KVTensor
from tests.support.compiled import FAST, settings
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


OPTIONS: Any = FAST


def tokens_of(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    with torch.no_grad():
        return model.generate(ids, **settings(12, **more))


def assert_compiled(result: Any, expected: Any) -> None:
    assert torch.equal(result.sequences, expected.sequences)
    assert isinstance(result.past_key_values.layers[0].keys, KVTensor)
    assert counters["stats"]["unique_graphs"] == 2


def by_wrapper(model: PreTrainedModel) -> Any:
    return torch.compile(model, backend="kvcompile", options=OPTIONS)


def by_short_form(model: PreTrainedModel) -> Any:
    return kvcompile.compile(model, **FAST)


def in_place(model: PreTrainedModel) -> Any:
    model.compile(backend="kvcompile", options=OPTIONS)
    return model


def by_forward(model: PreTrainedModel) -> Any:
    model.forward = by_wrapper(model.forward)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("spelling", [by_wrapper, by_short_form, in_place, by_forward])
def test_generate(spelling: Any) -> None:
    model, ids = tiny_llama(), prompt(9)
    expected = tokens_of(model, ids)
    assert_compiled(tokens_of(spelling(model), ids), expected)


@pytest.fixture
def _on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compile decoding with static caches, as it does by itself on a GPU."""

    def criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        return any(isinstance(given, StaticCache) for given in model_kwargs.values())

    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", criteria)


@pytest.mark.usefixtures("_on_an_accelerator")
@pytest.mark.parametrize("spelling", [by_wrapper, by_short_form, in_place, by_forward])
def test_generate_where_transformers_would_compile_too(spelling: Any) -> None:
    model, ids = tiny_llama(), prompt(9)
    expected = tokens_of(model, ids)
    result = tokens_of(spelling(model), ids, cache_implementation="static")
    assert_compiled(result, expected)
    assert kvcompile.memory_report(result.past_key_values).materializations == {}


@pytest.mark.usefixtures("_on_an_accelerator")
def test_transformers_still_compiles_other_models() -> None:
    model, ids = tiny_llama(), prompt(9)
    expected = tokens_of(model, ids)
    config: Any = CompileConfig(backend="eager", mode=None)  # type: ignore[arg-type]
    counters.clear()
    result = tokens_of(model, ids, cache_implementation="static", compile_config=config)
    assert torch.equal(result.sequences, expected.sequences)
    assert counters["stats"]["unique_graphs"] > 0


def test_transformers_may_come_after_the_backend() -> None:
    program = (
        "import torch, kvcompile.backend\n"
        "import transformers.modeling_utils\n"
        "call = transformers.PreTrainedModel.get_compiled_call\n"
        "options = {'inner_backend': 'eager'}\n"
        "linear = torch.nn.Linear(2, 2)\n"
        "torch.compile(linear, backend='kvcompile', options=options)(torch.ones(1, 2))\n"
        "print(transformers.PreTrainedModel.get_compiled_call is call)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


def test_the_string_needs_no_import() -> None:
    program = (
        "import sys, torch\n"
        "assert 'kvcompile' not in sys.modules\n"
        "options = {'inner_backend': 'eager'}\n"
        "model = torch.compile(torch.nn.Linear(2, 2), backend='kvcompile', options=options)\n"
        "with torch.no_grad(): print(tuple(model(torch.ones(1, 2)).shape))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "(1, 2)"


def test_the_original_module_stays_uncompiled() -> None:
    model, ids = tiny_llama(), prompt(9)
    wrapper = by_wrapper(model)
    tokens_of(wrapper, ids)
    assert model._compiled_call_impl is None
    graphs = counters["stats"]["unique_graphs"]
    result = tokens_of(model, ids)
    assert not isinstance(result.past_key_values.layers[0].keys, KVTensor)
    assert counters["stats"]["unique_graphs"] == graphs


def test_an_exception_in_generate_restores_the_module() -> None:
    model = tiny_llama()
    wrapper = by_wrapper(model)
    with pytest.raises(RuntimeError, match="negative"):
        wrapper.generate(prompt(9), num_beams=-1)
    assert model._compiled_call_impl is None


def test_another_thread_is_left_alone() -> None:
    """While one thread generates compiled, the original module stays eager in another."""
    model, ids = tiny_llama(), prompt(9)
    wrapper = by_wrapper(model)
    expected = tokens_of(model, ids)
    seen: list[bool] = []

    class Meanwhile:
        """A logits processor that runs the original model in another thread."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not seen:

                def run() -> None:
                    with torch.no_grad():
                        cache = model(ids, use_cache=True).past_key_values
                    seen.append(isinstance(cache.layers[0].keys, KVTensor))

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            return scores

    result = tokens_of(wrapper, ids, logits_processor=[Meanwhile()])
    assert seen == [False]
    assert_compiled(result, expected)


def test_other_backends_are_left_alone() -> None:
    model, ids = tiny_llama(), prompt(9)
    tokens_of(by_wrapper(model), ids)
    counters.clear()
    other = torch.compile(model, backend="eager")
    result = tokens_of(other, ids)
    assert not isinstance(result.past_key_values.layers[0].keys, KVTensor)
    assert counters["stats"]["unique_graphs"] == 0


def test_a_transformers_compile_config() -> None:
    """transformers compiles decoding only, on dense static buffers: right, and said so."""
    forget_notices()
    model, ids = tiny_llama(), prompt(9)
    expected = tokens_of(model, ids, cache_implementation="static")
    config: Any = CompileConfig(backend="kvcompile", mode=None, options=OPTIONS)  # type: ignore[arg-type]
    config._compile_all_devices = True  # transformers compiles on accelerators only
    result = tokens_of(model, ids, cache_implementation="static", compile_config=config)
    assert torch.equal(result.sequences, expected.sequences)
    assert counters["stats"]["unique_graphs"] > 0
    assert any(remark.code == "KVC405" for remark in kvcompile.notices())


def test_a_mode_is_passed_on() -> None:
    model, ids = tiny_llama(layers=1), prompt(9)
    expected = tokens_of(model, ids)
    mode = "max-autotune-no-cudagraphs"
    wrapper: Any = torch.compile(model, backend="kvcompile", mode=mode)
    with torch.no_grad():
        result = wrapper.generate(ids, **settings(3))
    assert torch.equal(result.sequences, expected.sequences[:, :12])


def test_a_copied_model_is_its_own() -> None:
    model, ids = tiny_llama(), prompt(9)
    other = copy.deepcopy(model)
    wrapper = by_wrapper(model)
    expected = tokens_of(model, ids)
    assert_compiled(tokens_of(wrapper, ids), expected)
    assert not isinstance(tokens_of(other, ids).past_key_values.layers[0].keys, KVTensor)
