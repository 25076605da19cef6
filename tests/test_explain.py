import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.options import OptionError
from kvcompile.passes.ir.remark_codes import REMARK_CODES
from tests.support.attentions import Softmax
from tests.support.compiled import compiled, settings
from tests.support.programs import past, qkv
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_transformers_model() -> None:
    model = tiny_llama(layers=2)
    found = kvcompile.explain(model, prompt(9))
    assert [graph.has_past for graph in found.graphs] == [False, True]
    assert len(found.sites) == 2
    for number, site in enumerate(found.sites):
        assert site.rewritten
        assert site.name == f"model.layers.{number}.self_attn"
        assert site.where.startswith("sdpa_attention.py:")
        assert (site.num_q_heads, site.num_kv_heads, site.head_dim_qk) == (4, 2, 16)
        assert site.format == "fp32/fp32"
        assert site.bytes_per_token == 2 * 2 * 16 * 4
        assert site.kernels[-1].startswith("attend_")
    assert found.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert not found.missed
    text = str(found)
    for expected in (
        "graph 1 (decode)",
        "2 of 2",
        "model.layers.1.self_attn",
        "512 bytes per token",
    ):
        assert expected in text


def test_a_miss_is_explained() -> None:
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    found = kvcompile.explain(Softmax("sigmoid").eval(), (*qkv(1), past(7), mask))
    (remark,) = found.missed
    assert remark.code == "KVC112"
    assert remark.where.startswith("attentions.py:")
    for part in (remark.reason, remark.hint, remark.near_miss, remark.where):
        assert part
        assert part in str(found)


def test_compiled_models_are_left_alone() -> None:
    model, ids = tiny_llama(), prompt(9)
    wrapper = compiled(model)
    with torch.no_grad():
        wrapper.generate(ids, **settings(4))
        kvcompile.explain(model, ids)
        before = counters["stats"]["unique_graphs"]
        wrapper.generate(ids, **settings(4))
    assert counters["stats"]["unique_graphs"] == before


def test_it_can_be_asked_twice() -> None:
    model, ids = tiny_llama(), {"input_ids": prompt(9), "attention_mask": torch.ones(1, 9).long()}
    assert (
        len(kvcompile.explain(model, ids).graphs) == len(kvcompile.explain(model, ids).graphs) == 2
    )


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError):
        kvcompile.explain(tiny_llama(), prompt(3), page_sise=3)


def test_every_code_in_the_sources_is_in_the_table() -> None:
    root = Path(kvcompile.__file__).parent
    folders = [root, (root / "passes").resolve(), (root / "codegen").resolve()]
    files = [p for folder in folders for p in folder.rglob("*.py") if p.name != "remark_codes.py"]
    used = {code for p in files for code in re.findall(r'"(KVC\d{3})"', p.read_text())}
    assert used == set(REMARK_CODES)
