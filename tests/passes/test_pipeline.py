import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes import pipeline
from kvcompile.passes.base import PassOptions
from kvcompile.passes.ir.printer import print_program
from kvcompile.passes.ir.program import Program
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.ir.verify import InvariantError, verify
from kvcompile.passes.layer_dtypes import LayerDtypes
from kvcompile.passes.match_attention import MatchAttention
from kvcompile.passes.pipeline import PIPELINE, PassError
from kvcompile.passes.rewrite_paged import RewritePaged
from tests.support.attentions import Sdpa, Softmax
from tests.support.programs import OPTIONS, capture, every_stage, past, qkv

MASK = torch.tensor([[[[False, True, True, True, True, True, True, True]]]])


def run_text(text: str, program: Program, inputs: list[Any]) -> tuple[Any, ...]:
    """Execute a printed program."""
    names: dict[str, Any] = {}
    exec(compile(text, "printed.py", "exec"), names)  # that is what is tested
    return tuple(names["forward"](program.module, *inputs))


@pytest.mark.parametrize("model", [Sdpa("expand"), Softmax("add"), Softmax("masked_fill")])
@pytest.mark.parametrize("cached", [0, 7])
def test_printed_programs_run(model: torch.nn.Module, cached: int) -> None:
    """The text of every stage up to the rewrite computes what the model computes."""
    args = (*qkv(1), past(cached) if cached else None, MASK if cached else None)
    expected = model.eval()(*args)
    _, inputs = capture(model, *args)
    stages = [s for s in every_stage(model, *args) if s[0].stage < Stage.REWRITTEN]
    assert list(dict.fromkeys(program.stage for program, _ in stages)) == list(Stage)[:5]
    for program, text in stages:
        out = run_text(text, program, inputs)
        for one in expected:
            assert any(one.shape == o.shape and torch.allclose(o, one, atol=1e-6) for o in out)


def test_the_retrace_leaves_out_tensor_meta_for_itself_alone() -> None:
    """Its nodes carry `val` alone; a trace after it is as make_fx made it."""
    program, _ = capture(Sdpa().eval(), *qkv(3))
    retraced = [n for n in program.graph.nodes if n.op == "call_function" and "val" in n.meta]
    assert retraced
    assert not any("tensor_meta" in n.meta for n in retraced)
    after = make_fx(torch.neg, tracing_mode="fake")(torch.ones(2))
    assert all(n.meta["tensor_meta"].shape == (2,) for n in after.graph.nodes if n.meta)


def test_a_pass_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MatchAttention, program: Program, options: PassOptions) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(MatchAttention, "run", fail)
    with pytest.raises(
        Exception, match="pass match-attention: ZeroDivisionError: by zero"
    ) as caught:
        capture(Sdpa().eval(), *qkv(3))
    assert any(isinstance(e, PassError) for e in _chain(caught.value))


class Lying:
    """A pass that does nothing and claims a stage."""

    name = "lying"
    needs = Stage.PLANNED
    gives = Stage.REWRITTEN

    def run(self, program: Program, options: PassOptions) -> None:
        pass


def test_a_pass_that_lies_about_its_stage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Lying() if isinstance(step, RewritePaged) else step for step in PIPELINE]
    monkeypatch.setattr(pipeline, "PIPELINE", steps)
    with pytest.raises(Exception, match="inputs and outputs are bound") as caught:
        capture(Sdpa().eval(), *qkv(3))
    assert any(isinstance(e, InvariantError) for e in _chain(caught.value))


def _chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def test_a_malformed_graph_is_caught() -> None:
    program, _ = capture(Sdpa().eval(), *qkv(3))
    verify(program)
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(operator.add, (x, 1))
    graph.output((y,))
    x.append(y)
    y.prepend(graph.call_function(operator.add, (y, 1)))
    with pytest.raises(InvariantError, match="malformed"):
        verify(dataclasses.replace(program, module=fx.GraphModule({}, graph)))


def test_every_pass_leaves_one_remark_per_site() -> None:
    options = dataclasses.replace(OPTIONS, fuse_rope=True)  # asked for, as on a CPU it has to be
    program, _ = capture(Softmax().eval(), *qkv(1), past(7), MASK, options=options)
    origins = [remark.origin for remark in program.remarks]
    others = ("split-fused", "rewrite-linear")  # they speak of what they find
    of_sites = [step.name for step in PIPELINE[1:] if step.name not in others]
    assert origins == of_sites
    assert all(remark.site and remark.where for remark in program.remarks)


def test_names_are_the_files() -> None:
    for step in PIPELINE:
        assert type(step).__module__.rsplit(".", 1)[1] == step.name.replace("-", "_")


def test_printing_is_deterministic() -> None:
    texts = []
    for _ in range(2):
        program, _ = capture(Sdpa("expand").eval(), *qkv(1), past(7))
        texts.append(print_program(program))
    assert texts[0] == texts[1]


def test_a_layer_that_does_not_exist_is_named() -> None:
    options = dataclasses.replace(OPTIONS, dtypes=LayerDtypes({7: "int8", "default": "auto"}))
    program, _ = capture(Sdpa().eval(), *qkv(3), options=options)
    failed = [remark for remark in program.remarks if remark.kind == "failed"]
    assert [remark.code for remark in failed] == ["KVC306"]
    assert "layer 7, but the graph has 1 attentions" in failed[0].reason
    assert "layers are -1 to 0" in failed[0].hint
