import pytest
import torch

from kvcompile.passes.ir.ops import APPEND, APPEND_ATTEND
from tests.support.attentions import Cross, Forgetful, Sdpa, Softmax, Static, TokensFirst, Window
from tests.support.programs import Pair, capture, codes, handles, past, qkv, static_handles


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


def test_a_cast_that_changes_nothing_is_the_state() -> None:
    """Dynamo gives the tensor itself two names, and the graph returns either."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        keys = k.to(torch.float32)
        return Softmax().eval().attend(q, keys, v, None), k, v

    program, _ = capture(step, *qkv(1), past(7))
    assert program.streams[0].k.kind == "cat"
    assert codes(program) == ["KVC100", "KVC200", "KVC300", "KVC400", "KVC500"]


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


@pytest.mark.parametrize("capacity", [None, 7])
def test_handles_that_are_only_read(capacity: int | None) -> None:
    program, _ = capture(Cross("expand").eval(), qkv(1)[0], handles(7, capacity))
    stream = program.streams[0]
    assert (stream.k.kind, stream.k.token_dim, stream.only_read) == ("read", 2, True)
    assert stream.k.state is stream.k.past is not stream.v.past
    assert not stream.is_static
    assert program.binding is not None
    (state,) = program.binding.states
    assert (state.only_read, state.capacity, state.k_outputs) == (True, None, ())


def test_dense_tensors_that_are_only_read_are_no_cache() -> None:
    program, _ = capture(Cross().eval(), qkv(1)[0], past(7))
    assert codes(program) == ["KVC100", "KVC202"]
    assert "dense input" in program.remarks[1].reason


def twice(q: torch.Tensor, cache: Pair) -> object:
    """Two attentions read one cache."""
    cross = Cross()
    return cross(cross(q, cache), cache)


def beside(q: torch.Tensor, cache: Pair) -> object:
    """Something else reads the keys."""
    return Cross()(q, cache), cache[0].amax()


def handed_on(q: torch.Tensor, cache: Pair) -> object:
    """A view of the keys is returned, and is not a cache of its own."""
    return Cross()(q, cache), cache[0][..., :3]


def one_tensor(q: torch.Tensor, cache: Pair) -> object:
    """Keys are values."""
    return Cross()(q, (cache[0], cache[0]))


def one_is_dense(q: torch.Tensor, cache: Pair) -> object:
    """Values are computed anew at every step."""
    return Cross()(q, (cache[0], cache[1] * 2))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (twice, ["KVC206", "KVC206"]),
        (beside, ["KVC206"]),
        (handed_on, ["KVC206"]),
        (one_tensor, ["KVC207"]),
        (one_is_dense, ["KVC209"]),
    ],
)
def test_what_is_read_elsewhere_stays_as_it_is(step: object, expected: list[str]) -> None:
    program, _ = capture(step, qkv(1, kv_heads=4)[0], handles(7, kv_heads=4))  # type: ignore[arg-type]
    assert [code for code in codes(program) if code > "KVC200"] == expected
    assert not program.plans


def test_what_is_not_returned_is_not_cached() -> None:
    program, _ = capture(Forgetful().eval(), *qkv(5))
    assert codes(program) == ["KVC100", "KVC201"]


def test_a_window_leaves_the_length_of_the_past_open() -> None:
    """Contiguity questions about the slice would guard the very length that was traced."""
    program, _ = capture(Window().eval(), *qkv(1), past(7))
    (call,) = program.graph.find_nodes(op="call_function", target=APPEND_ATTEND)
    past_len = call.args[4]
    assert not past_len.meta["val"].node.expr.is_number


@pytest.mark.parametrize("tokens", [3, 7, 30])
def test_a_window_keeps_the_last_tokens(tokens: int) -> None:
    program, _ = capture(Window().eval(), *qkv(1), past(tokens))
    assert codes(program)[:2] == ["KVC100", "KVC200"]
    is_full = tokens >= 7
    assert ("the last 8 tokens are kept" in program.remarks[1].reason) == is_full
    stream = program.streams[0]
    assert (stream.k.kept, stream.v.kept) == ((8, 8) if is_full else (None, None))
    assert stream.slides == is_full


def test_a_long_prompt_leaves_the_window_at_once() -> None:
    program, _ = capture(Window().eval(), *qkv(20))
    assert (program.streams[0].k.kind, program.streams[0].k.kept) == ("fresh", 8)
    (call,) = program.graph.find_nodes(op="call_function", target=APPEND)
    assert call.args[0].meta["val"].shape[2] == 8


def test_k_and_v_that_keep_different_windows_are_refused() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], -v], dim=2)
        return Sdpa().attend(q, k, v, None), k[:, :, -8:], v[:, :, -9:]

    program, _ = capture(step, *qkv(1), past(20))
    assert codes(program) == ["KVC100", "KVC205"]


@pytest.mark.parametrize("what", ["middle", "other reader", "strided"])
def test_a_window_of_another_form_is_refused(what: str) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], -v], dim=2)
        out = Sdpa().attend(q, k, v, None)
        if what == "middle":
            return out, k[:, :, -9:-1], v[:, :, -9:-1]
        if what == "strided":
            return out, k[:, :, -9::2], v[:, :, -9::2]
        return out, k[:, :, -8:], v[:, :, -8:], k[:, :, -8:].sum()

    program, _ = capture(step, *qkv(1), past(20))
    assert codes(program)[1] in ("KVC206", "KVC209")
    assert not program.streams


@pytest.mark.parametrize("is_stacked", [True, False])
def test_k_and_v_in_one_tensor_that_somebody_else_reads_stay_there(is_stacked: bool) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        both = torch.stack([k, v], 2) if is_stacked else torch.cat([k, v], 3)
        keys, values = both.unbind(2) if is_stacked else both.chunk(2, 3)
        return Sdpa().attend(q, keys, values, None) + both.sum(), both

    program, _ = capture(step, *qkv(5))
    assert codes(program) == ["KVC100", "KVC209"]
    assert program.fused == ()
    assert "beside it is kept" in program.remarks[1].reason


def test_a_second_reader_of_the_state_is_refused() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], v], dim=2)
        return Sdpa().attend(q, k, v, None), k, v, k.norm()

    program, _ = capture(step, *qkv(1), past(7))
    assert codes(program) == ["KVC100", "KVC206"]
    assert "norm" in program.remarks[1].reason


def test_an_attention_that_feeds_the_query_is_a_second_reader() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Pair) -> object:
        k, v = torch.cat([cache[0], -k], dim=2), torch.cat([cache[1], -v], dim=2)
        return Sdpa().attend(Sdpa().attend(q, k, v, None), k, v, None), k, v

    program, _ = capture(step, *qkv(1), past(7))
    assert [code for code in codes(program) if code > "KVC200"] == ["KVC206", "KVC206"]
