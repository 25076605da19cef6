import pytest
import torch

from tests.support.attentions import Forgetful, Sdpa, Softmax, Static, TokensFirst, Window
from tests.support.programs import Pair, capture, codes, past, qkv, static_handles


@pytest.mark.parametrize("model", [Sdpa(), Sdpa("expand"), Softmax()])
def test_new_tokens_that_are_returned_are_a_fresh_state(model: torch.nn.Module) -> None:
    program, _ = capture(model.eval(), *qkv(5))
    stream = program.streams[0]
    assert (stream.k.kind, stream.v.kind, stream.k.token_dim) == ("fresh", "fresh", 2)
    assert not stream.has_past
    assert stream.k.outputs == (1,)
    assert stream.v.outputs == (2,)


def test_a_concatenation_is_a_growing_state() -> None:
    program, _ = capture(Sdpa("expand").eval(), *qkv(1), past(7))
    stream = program.streams[0]
    assert (stream.k.kind, stream.k.token_dim, stream.is_static) == ("cat", 2, False)
    assert stream.has_past


def test_tokens_before_heads() -> None:
    program, _ = capture(TokensFirst("expand").eval(), *qkv(5))
    assert (program.streams[0].k.kind, program.streams[0].k.token_dim) == ("fresh", 1)
    pair = tuple(x.transpose(1, 2).contiguous() for x in past(7))
    for tensor in pair:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    program, _ = capture(TokensFirst("expand").eval(), *qkv(1), pair)
    assert (program.streams[0].k.kind, program.streams[0].k.token_dim) == ("cat", 1)


def test_an_empty_past_is_no_past() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        k = torch.cat([torch.tensor([]), k], dim=-2)
        v = torch.cat([torch.tensor([]), v], dim=-2)
        return Sdpa().attend(q, k, v, None), k, v

    program, _ = capture(step, *qkv(5))
    assert program.streams[0].k.kind == "fresh"


def test_a_static_buffer() -> None:
    buffers = static_handles(4, 12)
    mask = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    mask[..., :5] = True
    program, _ = capture(Static().eval(), *qkv(1), buffers, torch.tensor([4]), mask)
    stream = program.streams[0]
    assert (stream.k.kind, stream.is_static) == ("index_copy", True)
    assert stream.k.position is stream.v.position is not None
    assert program.binding is not None
    assert program.binding.states[0].k_outputs == ()


def test_dense_static_buffers_stay_dense_and_say_why() -> None:
    buffers = torch.zeros(2, 2, 12, 8), torch.zeros(2, 2, 12, 8)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    program, _ = capture(Static().eval(), *qkv(1), buffers, torch.tensor([4]), mask)
    assert codes(program)[-1] == "KVC405"
    assert not program.plans


def test_what_is_not_returned_is_not_cached() -> None:
    program, _ = capture(Forgetful().eval(), *qkv(5))
    assert codes(program) == ["KVC100", "KVC201"]


def test_a_window_leaves_the_length_of_the_past_open() -> None:
    """Contiguity questions about the slice would guard the very length that was traced."""
    program, _ = capture(Window().eval(), *qkv(1), past(7))
    cats = [n.meta["val"] for n in program.graph.nodes if n.target == torch.ops.aten.cat.default]
    assert cats
    assert all(isinstance(cat.shape[2], torch.SymInt) for cat in cats)
    assert not any(cat.shape[2].node.expr.is_number for cat in cats)


def test_a_window_is_another_reader_of_the_state() -> None:
    program, _ = capture(Window().eval(), *qkv(1), past(7))
    assert codes(program)[1] == "KVC209"
    assert "slice_1 beside it is kept" in program.remarks[1].reason
    assert program.remarks[1].where.startswith("attentions.py:")
    assert not program.streams


def test_a_second_reader_of_the_state_is_refused() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], v], dim=2)
        return Sdpa().attend(q, k, v, None), k, v, k.norm()

    program, _ = capture(step, *qkv(1), past(7))
    assert codes(program) == ["KVC100", "KVC206"]
    assert "norm" in program.remarks[1].reason
