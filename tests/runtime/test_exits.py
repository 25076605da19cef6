"""Python's ways out of a handle: the dense values, or a named error."""

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from kvcompile.runtime.errors import HandleHasNoStorageError, HandleWriteError
from kvcompile.runtime.handle import KVTensor
from tests.support.stores import Filled, filled_store


def _through_torch_save(handle: torch.Tensor) -> object:
    file = io.BytesIO()
    torch.save({"k": handle}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["k"]


WAYS_OUT: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda h: pickle.loads(pickle.dumps(h)),
    "another process": lambda h: ForkingPickler.loads(ForkingPickler.dumps(h)),
    "torch.save": _through_torch_save,
    "numpy": lambda h: torch.from_numpy(h.numpy()),
    "numpy(force)": lambda h: torch.from_numpy(h.numpy(force=True)),
    "np.asarray": lambda h: torch.from_numpy(np.asarray(h)),
    "np.array(dtype)": lambda h: torch.from_numpy(np.array(h, dtype=np.float64)).float(),
    "tolist": lambda h: torch.tensor(h.tolist()),
    "list": lambda h: torch.stack(list(h)),
    "item": lambda h: torch.tensor([x.item() for x in h.flatten()]).reshape(h.shape),
    "item of an element": lambda h: h + 0 * h[0, 0, 0, 0].item(),
    "from_dlpack": torch.utils.dlpack.from_dlpack,
    "data": lambda h: h.data,
    "detach": lambda h: h.detach(),
    "clone": lambda h: h.clone(),
    "cpu": lambda h: h.cpu(),
    "to": lambda h: h.to("cpu", torch.float32),
    "new_tensor": lambda h: h.new_tensor(h.tolist()),
    "torch.tensor": lambda h: torch.tensor(h.tolist()),
    "torch.as_tensor": torch.as_tensor,
    "Parameter": lambda h: torch.nn.Parameter(h, requires_grad=False).data,
    "as_subclass": lambda h: h.as_subclass(torch.Tensor),
    "materialize": lambda h: h.materialize(),
    "__getitem__(...)": lambda h: h[...],
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda h: h.data_ptr(),
    "const_data_ptr": lambda h: h.const_data_ptr(),
    "storage": lambda h: h.storage(),
    "share_memory_": lambda h: h.share_memory_(),
    "safetensors": lambda h: safetensors.torch.save({"k": h}),
}


@pytest.fixture
def case() -> Filled:
    return filled_store(19)


@pytest.mark.parametrize("name", WAYS_OUT)
def test_values_come_out_right(case: Filled, name: str) -> None:
    out = WAYS_OUT[name](case.k)
    assert torch.equal(torch.as_tensor(out) + 0, case.dense_k)
    written = filled_store(19)
    written.k.fill_(1.5)
    out = WAYS_OUT[name](written.k)
    assert torch.equal(torch.as_tensor(out) + 0, torch.full_like(case.dense_k, 1.5))


@pytest.mark.parametrize("name", REFUSED)
def test_addresses_are_refused_by_name(case: Filled, name: str) -> None:
    with pytest.raises(HandleHasNoStorageError, match=r"\.materialize\(\).*kvcompile\.save_cache"):
        REFUSED[name](case.k)


def test_code_in_c_that_wants_the_address_gets_pytorchs_error(case: Filled) -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch._C._to_dlpack(case.k)


def test_an_untyped_storage_gives_no_data(case: Filled) -> None:
    # Dynamo asks every tensor for it; PyTorch itself refuses to read or write through it.
    with pytest.raises(RuntimeError, match=r"invalid python storage|not allocated"):
        case.k.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match=r"invalid python storage|not allocated"):
        case.k.untyped_storage().clone()


def test_replacing_the_data_is_refused(case: Filled) -> None:
    with pytest.raises(HandleWriteError, match=r"copy_\(\)"):
        case.k.data = torch.zeros(1)


def test_numpy_is_told_that_there_is_no_memory_to_share(case: Filled) -> None:
    with pytest.raises(ValueError, match="without copying"):
        np.asarray(case.k, copy=False)


def test_what_was_written_is_saved_as_a_tensor(case: Filled, tmp_path: Path) -> None:
    torch.save({"k": case.k.mul_(2), "v": case.v}, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=True)
    assert type(loaded["k"]) is torch.Tensor
    assert torch.equal(loaded["k"], case.dense_k.mul_(2))
    assert isinstance(loaded["v"], KVTensor)
    safetensors.torch.save_file({"k": case.k.materialize()}, tmp_path / "cache.safetensors")
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "cache.safetensors")["k"], case.dense_k
    )


def test_a_written_copy_does_not_reach_back(case: Filled) -> None:
    _ = case.k.transpose(1, 2)
    array = case.k.numpy()
    array[:] = 0
    case.k.materialize().zero_()
    torch.utils.dlpack.from_dlpack(case.k).zero_()
    assert torch.equal(case.k, case.dense_k)
