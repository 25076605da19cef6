"""Handles as tensors: native operators stay in pages, all others are right on dense values."""

import copy
import gc

import pytest
import torch

from kvcompile.passes.ir import remarks
from kvcompile.runtime.claim import claim
from kvcompile.runtime.errors import HandleWriteError
from kvcompile.runtime.handle import KVTensor
from tests.support.stores import PAGE, Filled, filled_store, new_tokens, push

LENGTH = 2 * PAGE + 5


@pytest.fixture
def case() -> Filled:
    return filled_store(LENGTH)


def assert_is(handle: object, dense: torch.Tensor) -> KVTensor:
    """Check that a result stayed a handle and has the values of `dense`."""
    assert isinstance(handle, KVTensor)
    assert handle.shape == dense.shape
    assert torch.equal(handle.materialize(), dense)
    return handle


def test_it_looks_like_the_dense_tensor(case: Filled) -> None:
    for handle, dense in ((case.k, case.dense_k), (case.v, case.dense_v)):
        assert isinstance(handle, torch.Tensor)
        assert handle.shape == dense.shape
        assert handle.stride() == dense.stride()
        assert (handle.dtype, handle.device, handle.ndim) == (dense.dtype, dense.device, 4)
        assert handle.is_contiguous()
        assert not handle.requires_grad
        assert handle.grad_fn is None
        assert handle.numel() == dense.numel()


def test_repr_reads_nothing(case: Filled) -> None:
    text = f"{case.k!r} {case.k} {[case.v]}"
    assert "shape=(2, 2, 37, 8)" in text
    assert "torch.float32" in text
    assert "page" in text
    assert not case.store.materializations


class TestNative:
    """Operators on block tables."""

    @pytest.mark.parametrize("end", [0, 1, PAGE, LENGTH - 1, LENGTH, LENGTH + 9, -1, -LENGTH])
    def test_crop(self, case: Filled, end: int) -> None:
        expected = case.dense_k[:, :, :end]
        assert assert_is(case.k[..., :end, :], expected).store is case.store
        assert_is(case.k[:, :, :end], expected)
        assert_is(case.k[:, :, 0:end, :], expected)
        assert not case.k[:, :, :end]._is_view()

    @pytest.mark.parametrize("part", [(-LENGTH, None), (-5, None), (3, 20), (1, -1), (30, 30)])
    def test_consecutive_tokens(self, case: Filled, part: tuple[int, int | None]) -> None:
        expected = case.dense_k[:, :, slice(*part)]
        assert assert_is(case.k[:, :, slice(*part)], expected).store is case.store
        again = assert_is(case.k[:, :, 1:][..., 2:, :][:, :, :4], case.dense_k[:, :, 3:7])
        assert again.begin == 3

    def test_a_part_is_a_view(self, case: Filled) -> None:
        part, rest = case.k[:, :, 5:9], case.k[1:, :, 4:]
        part[0, 0, 1, 0] = 7.0
        assert float(case.k[0, 0, 6, 0]) == 7.0
        case.k[1, 1, 8, 2] = 9.0
        assert float(part[1, 1, 3, 2]) == float(rest[0, 1, 4, 2]) == 9.0
        assert torch.equal(part + 0, case.k.materialize()[:, :, 5:9])

    def test_narrow_split_chunk(self, case: Filled) -> None:
        assert_is(case.k.narrow(2, 0, 9), case.dense_k[:, :, :9])
        assert_is(torch.narrow(case.k, -2, 0, 9), case.dense_k[:, :, :9])
        for pieces, expected in (
            (case.k.split(20, dim=2), torch.split(case.dense_k, 20, dim=2)),
            (
                torch.split(case.k, [7, LENGTH - 7], dim=2),
                torch.split(case.dense_k, [7, 30], dim=2),
            ),
            (case.k.chunk(4, dim=-2), case.dense_k.chunk(4, dim=-2)),
        ):
            assert_is(pieces[0], expected[0])
            assert len(pieces) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(pieces, expected, strict=True))
        assert torch.equal(case.k.narrow(2, 3, 4), case.dense_k.narrow(2, 3, 4))
        assert torch.equal(case.k.chunk(2, dim=1)[1], case.dense_k.chunk(2, dim=1)[1])

    @pytest.mark.parametrize(
        "select",
        [
            lambda h: h.index_select(0, torch.tensor([1, 1, 0])),
            lambda h: h[torch.tensor([1, 1, 0])],
            lambda h: h[torch.tensor([1, 1, 0]), ...],
            lambda h: h[[1, -1, 0]],
            lambda h: h[torch.tensor([False, True])],
            lambda h: h.repeat_interleave(3, dim=0),
            lambda h: h.repeat_interleave(torch.tensor([1, 2]), dim=0),
        ],
    )
    def test_rows_are_selected_without_copying_pages(self, case: Filled, select: object) -> None:
        assert callable(select)
        used = case.store.arena.used_pages
        k, v = select(case.k), select(case.v)
        assert case.store.arena.used_pages == used
        assert not case.store.materializations
        # Both roles end in one store, which can be appended to.
        store = claim(assert_is(k, select(case.dense_k)), assert_is(v, select(case.dense_v)))
        assert k.store is v.store is store

    def test_rows_out_of_range_are_pytorchs_own_error(self, case: Filled) -> None:
        with pytest.raises(IndexError):
            case.k[torch.tensor([0, 2])]

    def test_detach_alias_copy(self, case: Filled) -> None:
        for handle in (
            case.k.detach(),
            torch.ops.aten.alias(case.k),
            copy.copy(case.k),
            case.k.data,
        ):
            assert assert_is(handle, case.dense_k).store is case.store

    def test_clone_is_another_memory(self, case: Filled) -> None:
        clone = case.k.clone()
        assert_is(clone, case.dense_k)
        case.k.fill_(3.0)
        assert torch.equal(clone, case.dense_k)

    def test_to(self, case: Filled) -> None:
        assert case.k.to(torch.float32) is case.k
        assert case.k.cpu() is case.k
        assert case.k.contiguous() is case.k
        assert_is(case.k.to("cpu", copy=True), case.dense_k)
        half = case.k.to(torch.bfloat16)
        assert type(half) is torch.Tensor
        assert torch.equal(half, case.dense_k.bfloat16())

    def test_deepcopy_forks_once_per_store(self, case: Filled) -> None:
        (k, v), again = copy.deepcopy([(case.k, case.v), (case.k,)])
        assert again[0] is k
        assert k.store is v.store is not case.store
        push(claim(k, v), *new_tokens(2, 3))
        assert_is(case.k, case.dense_k)
        assert_is(k, case.dense_k)

    def test_joining_rows(self, case: Filled) -> None:
        more = case.k[torch.tensor([1])], case.v[torch.tensor([1])]
        index = torch.tensor([0, 1, 1])
        k = assert_is(torch.cat([case.k, more[0]]), case.dense_k[index])
        v = assert_is(torch.cat([case.v, more[1]], dim=0), case.dense_v[index])
        assert k.store is v.store

    def test_eager_append_stays_in_pages_with_one_remark(self, case: Filled) -> None:
        remarks.forget_notices()
        k, v, dense_k, dense_v = case.k, case.v, case.dense_k, case.dense_v
        for _ in range(PAGE):
            new_k, new_v = new_tokens(2, 1)
            k, v = torch.cat((k, new_k), dim=-2), torch.cat([v, new_v], dim=2)  # type: ignore[assignment]
            dense_k, dense_v = torch.cat([dense_k, new_k], 2), torch.cat([dense_v, new_v], 2)
        assert_is(k, dense_k)
        assert_is(v, dense_v)
        assert k.store is v.store is case.store
        assert_is(case.k, case.dense_k)
        assert [notice.code for notice in remarks.notices()] == ["KVC502"]


class TestDense:
    """Everything else."""

    @pytest.mark.parametrize(
        "operator",
        [
            lambda h: h + 1,
            lambda h: h.transpose(2, 3),
            lambda h: torch.transpose(h, 2, 3),
            lambda h: h.mT,
            lambda h: h @ h.mT,
            lambda h: h[:, :, None].expand(2, 2, 3, LENGTH, -1).reshape(2, 6, LENGTH, -1),
            lambda h: h[1],
            lambda h: h[:, 1:],
            lambda h: h[:, :, ::2],
            lambda h: h[:, :, torch.tensor([3, 1])],
            lambda h: h[h > 0],
            lambda h: h.flip(2),
            lambda h: h.roll(-1, dims=-2),
            lambda h: torch.cat([h, h], dim=2),
            lambda h: torch.cat([h[:, :, 1:], h[:, :, :1]], dim=2),
            lambda h: torch.stack([h, h]),
            lambda h: h.sum(),
            lambda h: h.unbind(0)[1],
            lambda h: next(iter(h)),
            lambda h: h.double(),
            lambda h: h.permute(0, 2, 1, 3).contiguous(),
            lambda h: torch.nn.functional.pad(h, (0, 0, 1, 0)),
            lambda h: torch.where(h > 0, h, 0.0),
            lambda h: torch.einsum("bhtd,bhsd->bhts", h, h),
        ],
    )
    def test_any_other_operator_is_right_and_counted(self, case: Filled, operator: object) -> None:
        assert callable(operator)
        torch.testing.assert_close(operator(case.k), operator(case.dense_k), rtol=0, atol=0)
        assert case.store.materializations.total() > 0

    def test_attention_on_handles(self, case: Filled) -> None:
        q = torch.randn(2, 4, 3, 8)
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, case.k, case.v, enable_gqa=True)
        torch.testing.assert_close(out, attention(q, case.dense_k, case.dense_v, enable_gqa=True))

    def test_counts_name_the_operator(self, case: Filled) -> None:
        _ = case.k * 2
        _ = case.v.flip(2) * 3
        assert case.store.materializations == {"aten.mul": 1, "aten.flip": 1}

    def test_each_operator_is_told_once(self, case: Filled) -> None:
        remarks.forget_notices()
        for _ in range(3):
            _ = case.k * 2 + case.v.flip(2).sum()
        case.k.materialize()
        case.k.tolist()
        case.k.numpy()
        told = [(remark.code, remark.reason.split()[0]) for remark in remarks.notices()]
        assert told == [("KVC507", "aten.mul"), ("KVC507", "aten.flip")]
        assert "memory_report" in remarks.notices()[0].reason

    def test_an_append_that_needs_gradients_is_dense(self, case: Filled) -> None:
        new = torch.randn(2, 2, 1, 8, requires_grad=True)
        out = torch.cat([case.k, new], dim=2)
        assert type(out) is torch.Tensor
        (gradient,) = torch.autograd.grad(out.sum(), new)
        assert torch.equal(gradient, torch.ones_like(new))


class TestWrites:
    """A write turns the handle dense once; later reads, views and claims see it."""

    @pytest.mark.parametrize("inference", [False, True])
    @pytest.mark.parametrize(
        "write",
        [
            lambda h: h.fill_(2.0),
            lambda h: h.zero_(),
            lambda h: h.mul_(3),
            lambda h: h.copy_(torch.full_like(h, 5.0)),
            lambda h: h.index_copy_(2, torch.tensor([4]), torch.ones(2, 2, 1, 8)),
            lambda h: h.__setitem__((slice(None), slice(None), 3), 7.0),
            lambda h: h[:, :, 2:5].fill_(9.0),
            lambda h: h[:, :, :5].fill_(9.0),
            lambda h: h.narrow(2, 0, 4).zero_(),
            lambda h: h.transpose(1, 2)[:, 3].fill_(1.0),
            lambda h: torch.transpose(h, 1, 2)[:, 3].fill_(1.0),
            lambda h: h.detach().fill_(4.0),
            lambda h: h.view(-1)[5:9].zero_(),
            lambda h: torch.add(h, 1, out=h),
            lambda h: torch._foreach_add_([h], 2.0),
        ],
    )
    def test_writes_persist(self, case: Filled, write: object, inference: bool) -> None:
        assert callable(write)
        with torch.inference_mode(inference):
            write(case.k)
        write(case.dense_k)
        assert isinstance(case.k, KVTensor)
        assert torch.equal(case.k.materialize(), case.dense_k)
        assert torch.equal(case.k + 0, case.dense_k)
        assert case.k.is_written
        store = claim(case.k, case.v)
        assert store is not case.store
        assert torch.equal(store.materialize("k"), case.dense_k)
        assert torch.equal(store.materialize("v"), case.dense_v)
        assert torch.equal(KVTensor.of(store, "k"), case.dense_k)

    def test_an_in_place_operator_returns_the_handle(self, case: Filled) -> None:
        assert case.k.fill_(1.0) is case.k

    def test_a_view_that_is_only_read_changes_nothing(self, case: Filled) -> None:
        view = case.k.transpose(1, 2)
        assert torch.equal(view, case.dense_k.transpose(1, 2))
        assert not case.k.is_written
        assert claim(case.k, case.v) is case.store

    def test_handles_that_alias_see_each_others_writes(self, case: Filled) -> None:
        crop, alias = case.k[:, :, :10], case.k.detach()
        crop.fill_(1.0)
        alias[:, :, 20] = 2.0
        case.dense_k[:, :, :10] = 1.0
        case.dense_k[:, :, 20] = 2.0
        assert torch.equal(case.k, case.dense_k)
        assert torch.equal(alias, case.dense_k)
        assert torch.equal(crop, case.dense_k[:, :, :10])

    @pytest.mark.parametrize("name", ["unsqueeze_", "squeeze_", "t_", "resize_", "set_"])
    def test_shape_changes_in_place_are_a_named_error(self, case: Filled, name: str) -> None:
        arguments = {"unsqueeze_": (0,), "resize_": (1, 2), "set_": (torch.ones(2),)}
        with pytest.raises((HandleWriteError, RuntimeError), match=r"in place|storage|t\(\)"):
            getattr(case.k, name)(*arguments.get(name, ()))


class TestStatic:
    """A static handle is a buffer."""

    def test_it_shows_what_the_store_holds(self) -> None:
        case = filled_store(5, capacity=40)
        assert torch.equal(case.k, case.dense_k)
        k, v = new_tokens(2, 2)
        push(claim(case.k, case.v), k, v)
        case.dense_k[:, :, 5:7] = k
        assert torch.equal(case.k, case.dense_k)

    def test_zero_is_a_reset(self) -> None:
        case = filled_store(PAGE + 2, capacity=40)
        assert case.k.zero_() is case.k
        case.v.zero_()
        assert case.store.arena.used_pages == 0
        assert claim(case.k, case.v).length == 0
        assert torch.equal(case.k, torch.zeros_like(case.dense_k))
        assert torch.equal(case.v, torch.zeros_like(case.dense_v))

    @pytest.mark.parametrize("role", ["k", "v"])
    def test_eager_writes_reach_every_handle_and_the_next_claim(self, role: str) -> None:
        case = filled_store(5, capacity=40)
        handle, dense = (case.k, case.dense_k) if role == "k" else (case.v, case.dense_v)
        twin = handle.detach()
        new = torch.randn_like(dense[:, :, :1])
        assert handle.index_copy_(2, torch.tensor([5]), new) is handle
        dense[:, :, 5:6] = new
        assert torch.equal(twin, dense)
        view = twin[:, :, :9]
        view[:, :, 2] = 1.0
        dense[:, :, 2] = 1.0
        assert torch.equal(handle, dense)
        store = claim(case.k, case.v)
        assert store is case.store
        assert store.length == 6
        assert torch.equal(case.k, case.dense_k)
        assert torch.equal(case.v, case.dense_v)
        assert not case.k.is_written

    def test_a_written_buffer_dies_with_its_handles(self) -> None:
        case = filled_store(5, capacity=40)
        case.k.fill_(1.0)
        case.v.transpose(1, 2)
        arena = case.store.arena
        gc.disable()
        try:
            del case
            assert arena.used_pages == 0
        finally:
            gc.enable()

    def test_clones_are_separate_buffers(self) -> None:
        case = filled_store(5, capacity=40)
        first, second, v = case.k.clone(), case.k.clone(), case.v.clone()
        first.zero_()
        assert torch.equal(second, case.dense_k)
        assert torch.equal(v, case.dense_v)
        assert torch.equal(case.k, case.dense_k)

    def test_deepcopy_and_rows(self) -> None:
        case = filled_store(5, capacity=40)
        k, v = copy.deepcopy((case.k, case.v))
        rows = torch.tensor([1, 0])
        swapped = case.k[rows], case.v[rows]
        push(claim(k, v), *new_tokens(2, 4))
        assert torch.equal(case.k, case.dense_k)
        assert torch.equal(swapped[0], case.dense_k[rows])
        assert torch.equal(swapped[1], case.dense_v[rows])
        assert claim(swapped[0], swapped[1]).length == 5
