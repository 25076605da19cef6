"""Python's ways out of a handle: methods that never reach the dispatcher.

Each gives the dense values, or a named error where an address was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, cast

import torch

from kvcompile.runtime.errors import HandleHasNoStorageError, HandleWriteError

if TYPE_CHECKING:
    from kvcompile.runtime.handle import KVTensor
    from kvcompile.runtime.registry import Role
    from kvcompile.runtime.store import PagedStore

# A view made in the dispatcher has the handle as its autograd base, which Dynamo cannot
# rebuild; taken from the dense tensor in Python it is a view of ordinary memory.
# fmt: off
VIEW_METHODS = (
    "as_strided", "diagonal", "flatten", "movedim", "moveaxis", "permute",
    "ravel", "reshape", "reshape_as", "squeeze", "swapaxes", "swapdims", "t",
    "transpose", "unflatten", "unfold", "unsqueeze", "view", "view_as",
)
# fmt: on


def is_handle(value: Any) -> TypeGuard[KVTensor]:
    """Whether `value` is a handle."""
    return isinstance(value, PythonExits)


class PythonExits(torch.Tensor):
    """The part of a handle that ordinary Python sees."""

    store: PagedStore | None
    role: Role

    @property
    def token_dim(self) -> int:
        """Dimension that counts tokens."""
        assert self.store is not None
        return self.store.token_dim_of(self.role)

    @property
    def batch_dim(self) -> int:
        """Dimension that counts rows."""
        assert self.store is not None
        return self.store.batch_dim_of(self.role)

    @property
    def parts_dim(self) -> int | None:
        """Dimension that tells K and V apart, if the handle is both."""
        fused = self.store.fused if self.store is not None and self.role == "kv" else None
        return None if fused is None else fused.dim

    def from_front(self, dim: int) -> int:
        """Return a dimension counted from 0 on; one that is out of range stays what it is."""
        return dim + self.ndim if -self.ndim <= dim < 0 else dim

    def read(self, operator: str) -> torch.Tensor:
        """Return the dense values for reading only."""
        raise NotImplementedError

    def snapshot(self, operator: str) -> torch.Tensor:
        """Return a new dense tensor with the values."""
        raise NotImplementedError

    def turn_dense(self, operator: str) -> torch.Tensor:
        """Return the dense tensor that is the handle's storage from now on."""
        raise NotImplementedError

    def alias(self, tokens: range | None = None) -> torch.Tensor:
        """Return a fresh handle of the same memory, or of some consecutive tokens of it."""
        raise NotImplementedError

    @property
    def is_written(self) -> bool:
        """Whether only its dense tensor is right."""
        raise NotImplementedError

    def rows(self, rows: range, tokens: range | None = None) -> torch.Tensor:
        """Return a fresh handle of some rows, and some consecutive tokens, of the same memory."""
        raise NotImplementedError

    def repeated(self, count: int) -> torch.Tensor:
        """Return a fresh handle that shows its only row `count` times."""
        raise NotImplementedError

    def only(self, role: Role) -> torch.Tensor:
        """Return K or V of a tensor of both."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Crop and slice rows on pages; take every other view from the dense tensor."""
        if self.store is None:
            return super().__getitem__(index)
        if self.store.capacity is None:
            part = _rows_and_tokens(index, self.shape, self.batch_dim, self.token_dim)
            if part is not None:
                return self.rows(*part)
        if isinstance(index, (torch.Tensor, list)) or _has_tensor(index):
            return super().__getitem__(index)
        return self.turn_dense("getitem")[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write to the dense tensor, which the handle keeps."""
        if self.store is None:
            super().__setitem__(index, value)
        else:
            self.turn_dense("setitem")[index] = value

    def narrow(self, dim: int, start: Any, length: Any) -> torch.Tensor:
        """Return rows, tokens or channels start .. start + length - 1."""
        if self.store is None:
            return super().narrow(dim, start, length)
        if self.store.capacity is None:
            first = int(start) + (self.shape[dim] if start < 0 else 0)
            fits = 0 <= first <= first + length <= self.shape[dim]
            if fits and self.from_front(dim) == self.token_dim:
                return self.alias(range(first, first + length))
            if fits and self.from_front(dim) == self.batch_dim and length:
                return self.rows(range(first, first + length))
            if fits and self.from_front(dim) == self.parts_dim:
                role = self.store.role_at(first, length)
                if role is not None:
                    return self.only(role)
        return self.turn_dense("narrow").narrow(dim, start, length)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return consecutive pieces; those of rows and of tokens stay handles."""
        if self.store is None:
            return super().split(split_size, dim)  # type: ignore[no-untyped-call, no-any-return]
        if isinstance(split_size, int):
            whole, rest = divmod(self.shape[dim], split_size)
            split_size = [split_size] * whole + [rest] * (rest > 0)
        return self._pieces(split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return `chunks` consecutive pieces; see `split`."""
        if self.store is None:
            return super().chunk(chunks, dim)
        return self.split(max(-(-self.shape[dim] // chunks), 1), dim)

    def tensor_split(self, indices_or_sections: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return consecutive pieces of nearly equal lengths, or cut at indices; see `split`."""
        if self.store is None or isinstance(indices_or_sections, torch.Tensor):
            return super().tensor_split(indices_or_sections, dim)
        # PyTorch's own division, of a tensor that takes no memory.
        like = torch.empty(self.shape, device="meta").tensor_split(indices_or_sections, dim)
        return self._pieces([piece.shape[dim] for piece in like], dim)

    def expand(self, *sizes: Any, **named: Any) -> torch.Tensor:
        """Show the only row several times, on pages; expand all else from the dense tensor."""
        if self.store is None or named:
            return super().expand(*sizes, **named)
        wanted = sizes if sizes and isinstance(sizes[0], int) else tuple(*sizes)
        shape = tuple(self.shape)
        batch = self.batch_dim
        changed = [d for d, size in enumerate(wanted) if size not in (-1, *shape[d : d + 1])]
        if len(wanted) == len(shape) and self.store.capacity is None:
            if not changed:
                return self.alias()
            if changed == [batch] and shape[batch] == 1 and wanted[batch] > 0:
                return self.repeated(wanted[batch])
        return self.turn_dense("expand").expand(*sizes)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Expand to the shape of another tensor."""
        return self.expand(other.shape)

    def repeat_interleave(
        self,
        repeats: Any,
        dim: int | None = None,
        *,
        output_size: int | torch.SymInt | None = None,
    ) -> torch.Tensor:
        """Repeat rows on pages, any other dimension on the dense tensor."""
        batch = None if self.store is None else self.batch_dim
        if batch is None or dim is None or self.from_front(dim) != batch:
            return super().repeat_interleave(repeats, dim, output_size=output_size)
        rows = torch.arange(self.shape[batch], device=self.device).repeat_interleave(repeats)
        return self.index_select(batch, rows)

    def select(self, dim: int, index: int | torch.SymInt) -> torch.Tensor:
        """Return K or V of a handle of both; take all else from the dense tensor."""
        if self.store is None:
            return super().select(dim, index)
        if self.from_front(dim) == self.parts_dim and index in (-2, -1, 0, 1):
            role = self.store.role_at(int(index) % 2)
            if role is not None:
                return self.only(role)
        return self.turn_dense("select").select(dim, index)

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return K and V of a handle of both; take all else from the dense tensor."""
        if self.store is None:
            return super().unbind(dim)
        if self.from_front(dim) == self.parts_dim and self.store.role_at(0) is not None:
            return self.select(dim, 0), self.select(dim, 1)
        return self.turn_dense("unbind").unbind(dim)

    def _pieces(self, lengths: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        return tuple(self.narrow(dim, *piece) for piece in zip(starts, lengths, strict=True))

    @property
    def data(self) -> torch.Tensor:
        """A handle of the same memory, out of autograd's sight."""
        return self.detach() if self.store is None else self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise HandleWriteError(
            "the data of a KV handle was to be replaced, but it lies in pages; write into it with "
            "copy_(), or put the new tensor itself into the cache"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the dense values as an array."""
        return self.snapshot("numpy").numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Let numpy copy the dense values; `copy=False` cannot be had."""
        if copy is False:
            raise ValueError("a KV handle cannot be seen as an array without copying its pages")
        array = self.snapshot("numpy").numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """Return the dense values as nested lists."""
        return self.read("tolist").tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Export a dense copy."""
        return self.snapshot("dlpack").__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the pages of the store; a handle that was written, as its dense tensor."""
        if self.is_written or self.store is None:
            return self.snapshot("pickle").__reduce_ex__(protocol)
        from kvcompile.runtime.pickling import reduce_handle

        return reduce_handle(cast("KVTensor", self))

    def __copy__(self) -> torch.Tensor:
        """Return a handle of the same memory."""
        return self.alias()

    def storage(self) -> NoReturn:
        """Refuse: there is no storage."""
        _refuse("storage")

    def _typed_storage(self) -> NoReturn:
        _refuse("storage")

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no address."""
        _refuse("data_ptr")

    def const_data_ptr(self) -> NoReturn:
        """Refuse: there is no address."""
        _refuse("const_data_ptr")

    def share_memory_(self) -> NoReturn:
        """Refuse: there is no storage to share."""
        _refuse("share_memory_")


def _refuse(name: str) -> NoReturn:
    raise HandleHasNoStorageError(
        f"{name}() was called on a KV handle, whose data lies in pages and not in one storage; "
        "call .materialize() first and use the dense tensor it returns. To keep a cache in a "
        "file, pages and all, use kvcompile.save_cache or torch.save"
    )


def _taken_from_dense(name: str) -> Any:
    original = getattr(torch.Tensor, name)

    def method(self: PythonExits, *args: Any, **kwargs: Any) -> Any:
        if self.store is None:
            return original(self, *args, **kwargs)
        return original(self.turn_dense(name), *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Take `{name}` of the dense tensor, which the handle keeps."
    return method


for _name in VIEW_METHODS:
    setattr(PythonExits, _name, _taken_from_dense(_name))


def _has_tensor(index: Any) -> bool:
    return isinstance(index, tuple) and any(isinstance(i, (torch.Tensor, list)) for i in index)


def _rows_and_tokens(
    index: Any, shape: torch.Size, batch_dim: int, token_dim: int
) -> tuple[range, range] | None:
    """Return which rows `index` selects, and which consecutive tokens, if it does only that.

    Args:
        index: What stands between the brackets.
        shape: Shape of the handle.
        batch_dim: Dimension that counts rows.
        token_dim: Dimension that counts tokens.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and not isinstance(item, slice) for item in items):
        return None
    if items.count(Ellipsis) == 1:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape) or Ellipsis in items:
        return None
    items += [slice(None)] * (len(shape) - len(items))
    if any(item.step is not None and item.step < 1 for item in items):
        return None  # PyTorch's own error
    parts = [range(size)[item] for item, size in zip(items, shape, strict=True)]
    whole = all(
        part == range(size)
        for dim, (part, size) in enumerate(zip(parts, shape, strict=True))
        if dim not in (batch_dim, token_dim)
    )
    tokens = parts[token_dim]
    # No token or no row at all is nothing to keep in pages, but a crop to nothing is a crop.
    if not whole or not parts[batch_dim] or tokens.step != 1:
        return None
    return parts[batch_dim], tokens
