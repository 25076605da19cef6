from collections.abc import Callable

import pytest
import torch

from tests.support.attentions import Sdpa, Softmax
from tests.support.programs import capture, codes, past, qkv

REWRITTEN = ["KVC100", "KVC200", "KVC300", "KVC400", "KVC500"]

VISIBLE = torch.tensor([[[[True] * 8], [[True] * 8]]]).view(2, 1, 1, 8).clone()
VISIBLE[0, :, :, :3] = False


@pytest.mark.parametrize("repeating", ["gqa", "expand", "interleave"])
@pytest.mark.parametrize("masked", [True, False])
def test_sdpa_spellings(repeating: str, masked: bool) -> None:
    model = Sdpa(repeating).eval()
    program, _ = capture(model, *qkv(1), past(7), VISIBLE if masked else None)
    assert codes(program) == REWRITTEN
    (site,) = program.sites
    assert (site.pattern, site.mask_kind) == ("sdpa", "bool" if masked else "none")
    assert (site.num_q_heads, site.num_kv_heads, site.head_dim_qk) == (4, 2, 8)
    assert site.scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize("scaling", ["mul", "div", "query"])
@pytest.mark.parametrize(
    ("masking", "kind", "hides"),
    [
        ("add", "additive", False),
        ("masked_fill", "bool", True),
        ("where", "bool", False),
    ],
)
def test_softmax_spellings(scaling: str, masking: str, kind: str, hides: bool) -> None:
    model = Softmax(masking, scaling).eval()
    program, _ = capture(model, *qkv(1), past(7), VISIBLE)
    assert codes(program) == REWRITTEN
    (site,) = program.sites
    assert (site.pattern, site.mask_kind, site.mask_hides) == ("softmax", kind, hides)
    assert site.num_kv_heads == 2
    assert site.scale == pytest.approx(1.0 if scaling == "query" else 8**-0.5)


def test_softmax_without_a_mask() -> None:
    program, _ = capture(Softmax().eval(), *qkv(1), past(7))
    assert codes(program) == REWRITTEN
    assert program.sites[0].mask_kind == "none"


def test_another_softmax_is_refused_with_the_line_and_the_nearest_pattern() -> None:
    program, _ = capture(Softmax("sigmoid").eval(), *qkv(1), past(7), VISIBLE)
    (remark,) = program.remarks
    assert (remark.kind, remark.code) == ("missed", "KVC112")
    assert remark.where.startswith("attentions.py:")
    assert remark.near_miss == "softmax attention, 2 of 4 parts"
    assert remark.hint


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def of_scores(change: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """Return an attention that changes its scores on their way to the softmax."""
    return lambda q, k, v: torch.softmax(change(q @ k.transpose(2, 3)), -1) @ v


def with_column(x: torch.Tensor) -> torch.Tensor:
    """Put a column behind scores that differs between query tokens."""
    return torch.cat([x, x[..., :1] * 2], -1)


REFUSED: dict[str, tuple[str, Attend]] = {
    "a scale per key": ("KVC104", of_scores(lambda x: x * torch.rand(x.shape[-1]))),
    "a scale of zero": ("KVC104", of_scores(lambda x: x * 0.0)),
    "a number is added": ("KVC114", of_scores(lambda x: x + 1.0)),
    "a bias below the cap": ("KVC114", of_scores(lambda x: torch.tanh(x + torch.rand(3)))),
    "a mask below the cap": (
        "KVC115",
        of_scores(lambda x: torch.tanh(x.masked_fill(x > 9, -torch.inf))),
    ),
    "a cap that is a tensor": ("KVC116", of_scores(lambda x: torch.tanh(x) * torch.rand(4, 1, 1))),
    "two caps": ("KVC116", of_scores(lambda x: torch.tanh(torch.tanh(x)))),
    "sinks of tokens": (
        "KVC117",
        lambda q, k, v: torch.softmax(with_column(q @ k.transpose(2, 3)), -1)[..., :-1] @ v,
    ),
    "a column that stays": (
        "KVC117",
        lambda q, k, v: torch.softmax(with_column(q @ k.mT), -1) @ torch.cat([v, v[:, :, :1]], 2),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scores_that_no_kernel_computes_are_refused(name: str) -> None:
    code, attend = REFUSED[name]
    program, _ = capture(attend, *qkv(3, kv_heads=4))
    assert codes(program) == [code]


def test_active_dropout_is_refused() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    program, _ = capture(attend, *qkv(3, heads=2))
    assert codes(program) == ["KVC102"]


def test_other_softmaxes_are_no_attention() -> None:
    program, _ = capture(lambda x: torch.softmax(x, -1), torch.randn(2, 3))
    assert codes(program) == ["KVC101"]


def test_a_softmax_over_experts_is_refused_with_a_reason() -> None:
    program, _ = capture(lambda x: torch.softmax(x, -1) + 1, torch.randn(2, 3, 4, 5))
    assert codes(program) == ["KVC111"]


def test_masks_of_a_positive_fill_are_refused() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(2, 3)).masked_fill(q.sum() > 0, -3.0)
        return torch.softmax(scores, -1) @ v

    program, _ = capture(attend, *qkv(3, heads=2))
    assert codes(program) == ["KVC115"]


@pytest.mark.parametrize("how", ["expand", "interleave"])
def test_heads_may_be_repeated_before_they_come_first(how: str) -> None:
    def repeated(x: torch.Tensor) -> torch.Tensor:
        if how == "interleave":
            return x.repeat_interleave(2, dim=2)
        b, t, k, d = x.shape
        return x[:, :, :, None, :].expand(b, t, k, 2, d).reshape(b, t, 2 * k, d)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (repeated(x.transpose(1, 2) * 2).transpose(1, 2) for x in (k, v))
        return Sdpa().attend(q, k, v, None)

    inputs = qkv(5)
    program, args = capture(step, *inputs)
    assert (program.sites[0].num_q_heads, program.sites[0].num_kv_heads) == (4, 2)
    assert torch.equal(program.module(*args)[0], step(*inputs))
