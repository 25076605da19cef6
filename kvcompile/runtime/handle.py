"""Handles: tensors that look like the dense K or V of a layer and keep their data in a store.

A handle of a store that grows is a value: some consecutive tokens, whatever the store does
later. A handle of a static store is a buffer: it shows what the store holds now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from kvcompile.runtime.dense import DenseCell, RowsCell
from kvcompile.runtime.errors import HandleWriteError, StaleHandleError
from kvcompile.runtime.exits import PythonExits
from kvcompile.runtime.notices import tell_turned_dense
from kvcompile.runtime.ops import materialize
from kvcompile.runtime.registry import Role, anchor_for, find, read_anchor
from kvcompile.runtime.store import PagedStore

if TYPE_CHECKING:
    from torch._ops import OpOverload


class KVTensor(PythonExits):
    """The dense K or V of one layer, or both in one tensor, without storage of its own.

    Attributes:
        store: Where the data is; None under fake tensors.
        role: "k", "v", or "kv" for a tensor of both.
        begin: Its first token, counted from the first one that the store ever held.
        anchor: int64[1], all that a compiler sees of the handle.
        cell: Shared with the handles that alias this one; None as long as there is none.
    """

    store: PagedStore | None
    role: Role
    begin: int
    anchor: torch.Tensor
    cell: DenseCell | None = None
    _dynamo_weak_dynamic_indices: set[int]
    _has_dynamo_dim_marking: bool

    # Python-level overrides are methods; everything else arrives in __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, store: PagedStore, role: Role, length: int | None = None, begin: int | None = None
    ) -> KVTensor:
        """Return a handle of tokens of a store, by default of all that it shows of a role.

        For a static store the handle is the whole buffer, whatever the tokens are.

        Args:
            store: The store.
            role: K, V or both.
            length: Tokens from `begin` on.
            begin: The first token, counted from the first one ever stored; by default the one in
                column 0.
        """
        if torch.is_inference_mode_enabled():
            # An inference tensor cannot be detached there, nor used in a later graph.
            with torch.inference_mode(mode=False):
                return cls.of(store, role, length, begin)
        if store.capacity is not None:
            begin = 0
        elif begin is None:
            begin = store.origin
        if length is None:
            length = store.role_length(role) + store.origin - begin
        shape = store.shape(role, length)
        handle: KVTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=store.dtype, device=store.device
        )
        # C++ code that reads the address gets an error instead of a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(handle)
        handle.store, handle.role, handle.begin = store, role, begin
        handle.anchor = anchor_for(store.key, role, begin) if begin else store.anchors[role]
        if store.capacity is None:
            # What torch._dynamo.maybe_mark_dynamic(handle, token_dim) sets, without its walk over
            # the inner tensors: sixty handles are made per decoding step.
            handle._dynamo_weak_dynamic_indices = {store.token_dim_of(role)}
            handle._has_dynamo_dim_marking = True
        store.note(handle)
        return handle

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, torch.device]]:
        """Show a compiler the anchor, and a context that never changes."""
        return ["anchor"], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: tuple[torch.dtype, torch.device],
        size: Sequence[Any],
        stride: Sequence[Any],
    ) -> KVTensor:
        """Rebuild a handle around an anchor, which is fake while a compiler traces."""
        anchor = inner["anchor"]
        if type(anchor) is torch.Tensor and not torch._is_functional_tensor(anchor):
            return _from_anchor(anchor, size)
        handle: KVTensor = torch.Tensor._make_wrapper_subclass(
            KVTensor, size, strides=stride, dtype=context[0], device=context[1]
        )
        handle.store, handle.role, handle.begin, handle.anchor = None, "k", 0, anchor
        return handle

    def _stable_hash_for_caching(self) -> str:
        """Return all that a compiled artifact may depend on; sizes may be symbolic."""
        return f"KVTensor {[str(size) for size in self.shape]} {self.dtype} {self.device}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer an operator on pages where that is possible, else on the dense tensor."""
        from kvcompile.runtime.handle_ops import dispatch

        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the handle without reading its data."""
        shape = f"shape={tuple(self.shape)}, dtype={self.dtype}"
        if self.store is None:
            return f"KVTensor({shape}, traced)"
        state = "written" if self.is_written else "paged"
        return f"KVTensor({shape}, {self.role.upper()} {state} in {self.store!r})"

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Fork the store, once for all its handles in the object that is copied."""
        if self.store is None:
            raise StaleHandleError(
                "a KV handle of a compiler's trace was deep-copied; it has no data to copy"
            )
        if id(self) in memo:
            return cast("torch.Tensor", memo[id(self)])
        if self.is_written:
            copy = self._copy_of_written()
        else:
            key = ("forked KV store", self.store.key)
            if key not in memo:
                memo[key] = self.store.fork()
            copy = KVTensor.of(memo[key], self.role, self.length, self.begin)
        memo[id(self)] = copy
        return copy

    def _copy_of_written(self) -> torch.Tensor:
        """Return a dense copy; of a static buffer, one that goes back into pages like it."""
        from kvcompile.runtime.adopted import adopted

        dense = self.materialize()
        return dense if self.store is None or self.store.capacity is None else adopted(dense)

    @property
    def tokens(self) -> int:
        """Extent of the dimension that counts tokens; the capacity of a static store."""
        return self.shape[self.token_dim]

    @property
    def length(self) -> int:
        """Tokens the handle stands for; of a static store, tokens stored now."""
        assert self.store is not None
        return self.tokens if self.store.capacity is None else self.store.role_length(self.role)

    @property
    def first(self) -> int:
        """The column of the store that its first token is in; below 0 if it is out of sight."""
        assert self.store is not None
        return self.begin - self.store.origin

    @property
    def end(self) -> int:
        """The column of the store behind its last token."""
        return self.length + self.first

    @property
    def is_written(self) -> bool:
        """Whether it was written without the store's knowledge: only its dense tensor is right."""
        cell = self.present_cell()
        return cell is not None and cell.is_written

    def materialize(self) -> torch.Tensor:
        """Return a new dense tensor with the handle's values."""
        return self.snapshot("materialize")

    def snapshot(self, operator: str) -> torch.Tensor:
        """Return a new dense tensor with the handle's values, counted under `operator`."""
        dense = self.read(operator)
        return dense.clone() if self._present_dense() is not None else dense

    def read(self, operator: str) -> torch.Tensor:
        """Return the values for reading only; may be the tensor that the handle turned into."""
        if self.store is None:
            return materialize(self.anchor, self.shape, self.dtype, self.device)
        dense = self._present_dense()
        if dense is None:
            return self.store.materialize(self.role, self.tokens, operator, self.begin)
        self.store.materializations.add(operator)
        return dense

    def turn_dense(self, operator: str) -> torch.Tensor:
        """Return the tensor that is the handle's storage from now on; writes to it persist."""
        if self.store is None:
            return self.read(operator)
        cell = self.shared_cell()
        if cell.dense is None:
            cell.turn_dense(operator)
            tell_turned_dense(operator)
        present = self._present_dense()
        assert present is not None
        return present

    def expose(self, operator: str, *, is_write: bool) -> torch.Tensor:
        """Return the handle's storage to an operator below autograd that writes or aliases it.

        Raises:
            HandleWriteError: It writes in a graph of another compiler, where it would reach only
                a copy. Dynamo's own trace may write: that graph is not yet anybody's.
        """
        if self.store is None:
            if is_write and isinstance(self.anchor, FunctionalTensor):
                raise HandleWriteError(
                    f"{operator} writes to a KV handle inside a graph of another compiler, where "
                    "the write would be lost; write to handle.materialize() instead, or compile "
                    'with backend="kvcompile"'
                )
            return self.read(operator)
        dense = self.turn_dense(operator)
        if is_write:
            self.shared_cell().mark_written()
        else:
            self.shared_cell().watch(self)
        return dense

    def shared_cell(self) -> DenseCell:
        """Return the cell of the memory this handle stands for, made now if need be."""
        assert self.store is not None
        cell = self.present_cell()
        if cell is None:
            cell = DenseCell(self.store, self.role)
            if self.store.capacity is not None:
                self.store.cells[self.role] = cell
        if self.store.capacity is None and self.cell is None:
            self._show(cell)
        return cell

    def _show(self, cell: DenseCell) -> None:
        """Be a handle of the memory of a cell."""
        self.cell = cell
        self.anchor = anchor_for(cell.key, self.role, self.begin) if self.begin else cell.anchor

    def alias(self, tokens: range | None = None) -> KVTensor:
        """Return a fresh handle of the same memory, or of some consecutive tokens of it."""
        assert self.store is not None
        cell = None if self.store.capacity is not None else self.shared_cell()
        part = range(self.tokens) if tokens is None else tokens
        handle = KVTensor.of(self.store, self.role, len(part), self.begin + part.start)
        if cell is not None:
            handle._show(cell)
        return handle

    def rows(self, rows: range, tokens: range | None = None) -> KVTensor:
        """Return a fresh handle of some rows, and some consecutive tokens, of the same memory.

        It shares pages until somebody writes to the rows or to the whole; see `RowsCell`.
        """
        if rows == range(self.shape[0]):
            return self.alias(tokens)
        batch = self.batch_dim
        chosen = (*[slice(None)] * batch, slice(rows.start, rows.stop, rows.step))
        return self._part(list(rows), lambda whole: whole[chosen], tokens)

    def repeated(self, count: int) -> KVTensor:
        """Return a fresh handle that shows its only row `count` times."""
        sizes = [count if dim == self.batch_dim else -1 for dim in range(self.ndim)]
        return self._part([0] * count, lambda whole: whole.expand(sizes))

    def only(self, role: Role) -> KVTensor:
        """Return K or V of a tensor of both, as a handle that is a view of it."""
        store = self.store
        assert store is not None
        handle = KVTensor.of(store, role, self.length, self.begin)
        at = 0 if role == "k" else 1
        handle._show(RowsCell(store, role, self, lambda whole: store.parts_of(whole)[at]))
        return handle

    def _part(
        self,
        rows: list[int],
        view: Callable[[torch.Tensor], torch.Tensor],
        tokens: range | None = None,
    ) -> KVTensor:
        store = self.store
        assert store is not None
        assert store.capacity is None
        chosen = store.derive(
            ("slice", *rows), self.role, self.end, lambda: store.select_rows(rows)
        )
        base = self if tokens is None else self.alias(tokens)
        handle = KVTensor.of(chosen, self.role, base.length, base.begin)
        handle._show(RowsCell(chosen, self.role, base, view))
        return handle

    def rebind(self, store: PagedStore, role: Role | None = None) -> None:
        """Let a static handle stand for the buffer of another store, or for its other role."""
        self.role = role or self.role
        self.store, self.anchor = store, store.anchors[self.role]
        store.note(self)

    def present_cell(self) -> DenseCell | None:
        """Return the cell of the memory this handle stands for, if there is one."""
        if self.store is None or self.store.capacity is None:
            return self.cell
        return self.store.cells.get(self.role)

    def _present_dense(self) -> torch.Tensor | None:
        cell = self.present_cell()
        if cell is None or cell.dense is None:
            return None
        return cell.part(self.begin, self.tokens)


def _from_anchor(anchor: torch.Tensor, size: Sequence[int]) -> KVTensor:
    key, role, begin = read_anchor(int(anchor.item()))
    source = find(key)
    store = source.store if isinstance(source, DenseCell) else source
    assert isinstance(store, PagedStore)
    handle = KVTensor.of(store, role, size[store.token_dim_of(role)], begin)
    if isinstance(source, DenseCell) and store.capacity is None:
        handle.cell, handle.anchor = source, anchor
    return handle
