import pytest
import torch

from kvcompile.passes.ir.program import SizeSource
from tests.support.attentions import Cross, Sdpa, Softmax, Static, TokensFirst
from tests.support.golden import Golden
from tests.support.programs import (
    calls,
    capture,
    codes,
    handles,
    past,
    printed,
    qkv,
    static_handles,
)

MASK = torch.ones(2, 1, 1, 12, dtype=torch.bool)


def test_prefill_appends_and_attends_as_written() -> None:
    program, _ = capture(Sdpa("expand").eval(), *qkv(5))
    names = calls(program)
    assert names.count("kvcompile.append.default") == 1
    assert "kvcompile.append_attend.default" not in names
    assert "aten.scaled_dot_product_attention.default" in names
    assert len(program.outputs) == 1
    assert program.binding is not None
    (state,) = program.binding.states
    assert (state.k_outputs, state.v_outputs, state.k_input) == ((1,), (2,), None)


def test_decode_attends_over_the_store_and_never_sees_the_past() -> None:
    program, _ = capture(Sdpa("expand").eval(), *qkv(1), past(7))
    names = calls(program)
    assert names.count("kvcompile.append_attend.default") == 1
    assert "kvcompile.append.default" not in names
    for gone in ("aten.cat.default", "aten.expand.default"):
        assert gone not in names
    assert program.binding is not None
    (state,) = program.binding.states
    assert state.k_input is not None
    assert state.k_input not in program.binding.kept_inputs
    shapes = [n.meta["val"].shape for n in program.placeholders if hasattr(n.meta["val"], "shape")]
    assert all(len(shape) < 4 or shape[2] == 1 for shape in shapes)


def test_static_decode_writes_no_buffer() -> None:
    buffers = static_handles(4, 12)
    program, _ = capture(Static("expand").eval(), *qkv(1), buffers, torch.tensor([4]), MASK)
    names = calls(program)
    assert "aten.index_copy_.default" not in names
    assert names.count("kvcompile.append_attend.default") == 1


def test_a_static_prefill_never_makes_the_dense_buffer() -> None:
    def prefill(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor,
    ) -> object:
        buffers = torch.zeros(2, 2, 12, 8), torch.zeros(2, 2, 12, 8)
        return Static("expand")(q, k, v, buffers, position, mask), *buffers

    mask = torch.ones(5, 12, dtype=torch.bool).tril()[None, None]
    program, _ = capture(prefill, *qkv(5), torch.arange(5), mask)
    names = calls(program)
    assert "aten.zeros.default" not in names
    assert "aten.index_copy_.default" not in names
    assert "kvcompile.append.default" in names
    assert program.binding is not None
    assert program.binding.states[0].capacity == SizeSource(12)


def test_a_static_prefill_that_fills_its_buffer_needs_no_mask() -> None:
    def prefill(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor
    ) -> object:
        buffers = torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8)
        return Static("expand")(q, k, v, buffers, position, None), *buffers

    program, _ = capture(prefill, *qkv(5), torch.arange(5))
    assert codes(program)[-1] == "KVC500"
    assert calls(program).count("kvcompile.append.default") == 1


def test_a_static_prefill_with_keys_and_mask_cut_to_the_prompt() -> None:
    def prefill(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor,
    ) -> object:
        buffers = tuple(torch.zeros(2, 2, 12, 8).index_copy_(2, position, x) for x in (k, v))
        keys, values = (buffer[:, :, : q.shape[2]] for buffer in buffers)
        return Sdpa().attend(q, keys, values, mask), *buffers

    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    program, _ = capture(prefill, *qkv(5), torch.arange(5), mask)
    assert codes(program)[-1] == "KVC500"
    assert calls(program).count("kvcompile.append.default") == 1


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 1, 7, dtype=torch.bool)])
def test_what_is_only_read_is_attended_to_and_nothing_is_appended(
    mask: torch.Tensor | None,
) -> None:
    program, _ = capture(Cross("expand").eval(), qkv(1)[0], handles(7), mask)
    names = [name for name in calls(program) if name.startswith(("aten", "kvcompile"))]
    assert names == ["kvcompile.attend.default"]
    (use,) = program.kernels
    assert use.role == "attend"
    assert len(program.outputs) == 1


@pytest.mark.parametrize("model", [Softmax("masked_fill"), Softmax("where"), Softmax("add")])
def test_masks_arrive_with_four_dimensions_and_true_for_visible(model: torch.nn.Module) -> None:
    mask = torch.rand(1, 8) > 0.3
    program, _ = capture(model.eval(), *qkv(1), past(7), mask)
    attend = next(n for n in program.graph.nodes if "attend" in str(n.target))
    assert attend.args[6].meta["val"].dim() == 4
    assert ("aten.logical_not.default" in calls(program)) == program.sites[0].mask_hides


@pytest.mark.parametrize(
    "case", ["prefill", "decode", "tokens_first", "static", "only_read"], ids=lambda case: str(case)
)
def test_printed(case: str, golden: Golden) -> None:
    tokens_first = tuple(x.transpose(1, 2).contiguous() for x in past(7))
    for tensor in tokens_first:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    texts = {
        "prefill": lambda: printed(Sdpa("expand").eval(), *qkv(5)),
        "decode": lambda: printed(Softmax("add").eval(), *qkv(1), past(7), MASK[..., :8]),
        "tokens_first": lambda: printed(TokensFirst("expand").eval(), *qkv(1), tokens_first),
        "static": lambda: printed(
            Static("expand").eval(), *qkv(1), static_handles(4, 12), torch.tensor([4]), MASK
        ),
        "only_read": lambda: printed(Cross("expand").eval(), qkv(1)[0], handles(12), MASK),
    }[case]()
    golden("\n".join(texts))
