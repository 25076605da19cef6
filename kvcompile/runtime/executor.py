"""The callable handed to Dynamo.

It binds handles to stores, runs the rewritten graph, and hands out the grown states as handles.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvcompile.codegen.rotary import rotary_table
from kvcompile.passes.ir.plan import StreamPlan
from kvcompile.passes.ir.program import Program, SizeSource, StateBinding
from kvcompile.passes.patterns.layout import writer
from kvcompile.runtime.adopted import Moves
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.as_written import INPUT, dense_input
from kvcompile.runtime.budget import Budget
from kvcompile.runtime.claim import (
    append_dense,
    claim,
    drop_cropped,
    expect_leftovers,
    filled,
    lend,
    show_from,
)
from kvcompile.runtime.counters import Counters
from kvcompile.runtime.gpu_steps import gpu_steps_of
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.joining import moved
from kvcompile.runtime.quantized_store import QuantizedStore
from kvcompile.runtime.store import PagedStore, store_kind


class Executor:
    """Runs one rewritten graph.

    Lengths of the stores move only after the graph has run: a step that fails leaves every cache
    as it was, and may be repeated. Slots of a static buffer may have been written; counters that
    the graph moves on are set back.
    """

    def __init__(
        self,
        program: Program,
        inner: Callable[..., Any],
        *,
        records: bool = False,
        budget: Budget | None = None,
    ) -> None:
        """Bind a lowered program to the compiled rest of its graph.

        Args:
            program: At stage `LOWERED`.
            inner: The compiled graph: kept inputs, then states, give the kept outputs.
            records: Whether decode steps on a GPU are recorded and replayed, where they can be.
            budget: What limits the pages of the caches that it makes.
        """
        binding = program.binding
        assert binding is not None
        self._inner = inner
        self._kept_inputs = binding.kept_inputs
        self._kept_outputs = binding.kept_outputs
        self._num_outputs = binding.num_outputs
        self._states = binding.states
        self._shards = frozenset(binding.shards)
        self._appending = tuple(i for i, s in enumerate(binding.states) if not s.only_read)
        # The plan's node would keep the whole graph alive; the binding knows the input.
        self._plans = tuple(replace(program.plans[s.site], frequencies=None) for s in self._states)
        self._kinds = tuple(
            store_kind(p.layout, p.num_kv_heads, p.dtype, s.capacity is not None, s.token_dim)
            for s, p in zip(self._states, self._plans, strict=True)
        )
        self._users = _arena_users(self._plans)
        self._budget = budget
        if budget is not None:
            per_token = sum(plan.page_bytes / plan.layout.page_size for plan in self._plans)
            budget.token_bytes = max(budget.token_bytes, per_token)
        self._dense_inputs = _handles_that_stay(program)
        expect_leftovers()
        self._counters = Counters(program, binding.kept_inputs)
        self.gpu_steps = gpu_steps_of(program, inner, records=records)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run one step."""
        if self._shards:
            # `to_local` makes a new view of a parameter; what is derived from weights goes by
            # their identity.
            args = tuple(a._local_tensor if i in self._shards else a for i, a in enumerate(args))
        counted = self._counters.copies(args)
        stores = self._bind_all(args)
        try:
            return self._step(args, stores)
        except BaseException:
            for store in self._appended(stores):
                store.abandon()
            self._counters.set_back(args, counted)
            raise
        finally:
            self._release(stores)

    def _bind_all(self, args: Sequence[Any]) -> list[PagedStore]:
        """Return a store per stream, marked as claimed, or as read, until the step is over.

        Lengths move at the end of a step only, so without the mark a second step from the same
        past, in another thread or for another stream of this graph, would write to the same slots.
        """
        shared = _Shared(self._users, args, self._budget)
        stores: list[PagedStore] = []
        with _claiming:
            if self._budget is not None and self._budget.was_exceeded:
                self._budget.was_exceeded = False
                drop_cropped(self._budget)
            try:
                for state, plan, kind in zip(self._states, self._plans, self._kinds, strict=True):
                    store = self._store(state, plan, kind, args, shared)
                    if state.only_read:
                        store.readers += 1
                    else:
                        store.claimed, store.appended = True, store.length
                    stores.append(store)
                shared.moves.make()
            except BaseException:
                self._unmark(stores)
                raise
        return stores

    def _release(self, stores: Sequence[PagedStore]) -> None:
        """Say that a step is over."""
        with _claiming:  # readers are counted
            self._unmark(stores)

    def _unmark(self, stores: Sequence[PagedStore]) -> None:
        for state, store in zip(self._states, stores, strict=False):
            if state.only_read:
                store.readers -= 1
            else:
                store.claimed = False

    def _appended(self, stores: Sequence[PagedStore]) -> list[PagedStore]:
        """Return the stores that the graph appends to."""
        return [stores[i] for i in self._appending]

    def _step(self, args: Sequence[Any], stores: list[PagedStore]) -> tuple[Any, ...]:
        """Run the graph and commit what it appended."""
        for state, store in zip(self._states, stores, strict=True):
            if state.slides is not None:
                store.slide(_size(state.slides, args))
        inputs = [args[i] for i in self._kept_inputs]
        for position, is_written in self._dense_inputs:
            handle = inputs[position]
            if isinstance(handle, KVTensor):
                inputs[position] = dense_input(handle, is_written=is_written)
        if self.gpu_steps is None:
            results = self._inner(*inputs, *[store.state for store in stores])
        else:
            results = self.gpu_steps.run(args, inputs, stores)
        outputs: list[Any] = [None] * self._num_outputs
        for position, result in zip(self._kept_outputs, results, strict=True):
            outputs[position] = result
        with _claiming:  # another thread may fork what is committed, all of it or nothing
            for store in self._appended(stores):
                store.commit(store.appended)
                if store.overflows:
                    store.settle()
        for state, store in zip(self._states, stores, strict=True):
            begin = _first_handed_on(state, store, args)
            # One handle each: an output may be a copy of another one, and is written on its own.
            for position in state.k_outputs:
                outputs[position] = KVTensor.of(store, "k", begin=begin)
            for position in state.v_outputs:
                outputs[position] = KVTensor.of(store, "v", begin=begin)
        return tuple(outputs)

    def _store(
        self,
        state: StateBinding,
        plan: StreamPlan,
        kind: tuple[object, ...],
        args: Sequence[Any],
        shared: _Shared,
    ) -> PagedStore:
        """Return the store that ends where the stream's past ends.

        Attention takes its kernels by the store: one that is only read may be of any format.
        """
        if state.k_input is None or state.v_input is None:
            return self._new_store(state, plan, args, shared)
        k, v = args[state.k_input], args[state.v_input]
        if isinstance(k, KVTensor) and isinstance(v, KVTensor):
            if state.only_read:
                if _can_be_lent(state.token_dim, k, v):
                    return lend(k, v)
            elif _is_of(kind, k.store) and (v.store is k.store or _is_of(kind, v.store)):
                store = self._within_budget(claim(k, v), (k, v), plan, shared)
                if store.capacity is not None:
                    return store
                if store.hidden and not k.tokens:
                    return store.empty_like()  # what is out of sight is no past
                _show(store, state.past_seen, k)
                return store
        store = self._new_store(state, plan, args, shared)
        is_static = state.capacity is not None
        if is_static:
            shared.moves.add((k, v), store)
        k, v = (t.read(INPUT) if isinstance(t, KVTensor) else t for t in (k, v))
        append_dense(store, k, v, filled(store, k, v) if is_static else k.shape[state.token_dim])
        return store

    def _within_budget(
        self,
        store: PagedStore,
        handles: tuple[KVTensor, KVTensor],
        plan: StreamPlan,
        shared: _Shared,
    ) -> PagedStore:
        """Return the store, or a copy that counts if it was loaded or made without a budget.

        Raises:
            CacheBudgetError: There is no room for its pages.
        """
        if self._budget is None or store.arena.budget is not None:
            return store
        counted = moved(store, shared.arenas(plan))
        if store.capacity is not None:
            shared.moves.add(handles, counted)
        return counted

    def _new_store(
        self, state: StateBinding, plan: StreamPlan, args: Sequence[Any], shared: _Shared
    ) -> PagedStore:
        """Make an empty store; the layers of one call share arenas and angles."""
        batch = _size(state.batch, args)
        capacity = None if state.capacity is None else _size(state.capacity, args)
        arenas = shared.arenas(plan)
        if plan.layout.window is None:
            store = PagedStore(
                plan.layout,
                plan.num_kv_heads,
                plan.dtype,
                plan.device,
                arenas[0],
                batch=batch,
                capacity=capacity,
                token_dim=state.token_dim,
            )
        else:
            store = QuantizedStore(
                plan.layout,
                plan.num_kv_heads,
                plan.dtype,
                plan.device,
                (arenas[0], arenas[1]),
                batch=batch,
                capacity=capacity,
                token_dim=state.token_dim,
                rotary_table=shared.angles(state, plan),
            )
        store.compute = plan.compute
        return store


def _show(store: PagedStore, past_seen: int | None, past: KVTensor) -> None:
    """Let column 0 be the first token that the attention of a step sees."""
    seen = past.tokens if past_seen is None else past_seen
    begin = store.origin + store.k_len - seen
    if begin != store.origin:
        show_from(store, begin)


def _first_handed_on(state: StateBinding, store: PagedStore, args: Sequence[Any]) -> int:
    """Return the first token of the states that a graph returns."""
    if state.kept is not None:
        return store.origin + max(store.k_len - state.kept, 0)
    if state.past_seen is None or state.k_input is None:
        return store.origin
    return store.origin + state.past_seen - int(args[state.k_input].shape[state.token_dim])


def _arena_users(plans: Sequence[StreamPlan]) -> Counter[tuple[int, torch.device]]:
    """Return how many streams have pages of each size on each device."""
    sizes = [(plan.page_bytes, plan.device) for plan in plans]
    exact = [(p.exact_page_bytes, p.device) for p in plans if p.layout.window is not None]
    return Counter(sizes + exact)


class _Shared:
    """What the new stores of one call share: arenas by page size, and tables of rotary angles.

    Attributes:
        moves: The handles that are to stand for new stores from now on.
    """

    def __init__(
        self,
        users: Counter[tuple[int, torch.device]],
        args: Sequence[Any],
        budget: Budget | None,
    ) -> None:
        self._users = users
        self._args = args
        self._budget = budget
        self._arenas: dict[tuple[int, torch.device], Arena] = {}
        self._angles: dict[tuple[int, int], torch.Tensor] = {}
        self.moves = Moves()

    def arenas(self, plan: StreamPlan) -> list[Arena]:
        """Return where the pages of a stream come from: quantized ones, then exact ones."""
        exact = [] if plan.layout.window is None else [plan.exact_page_bytes]
        return [self._arena(size, plan.device) for size in (plan.page_bytes, *exact)]

    def _arena(self, page_bytes: int, device: torch.device) -> Arena:
        key = page_bytes, device
        arena = self._arenas.get(key)
        if arena is None:
            make = Arena if self._budget is None else self._budget.arena
            arena = self._arenas[key] = make(page_bytes, device, stores=self._users[key])
        return arena

    def angles(self, state: StateBinding, plan: StreamPlan) -> torch.Tensor | None:
        """Return the angles that the keys of a stream turn by, if their turning mean is kept."""
        if state.frequencies is None:
            return None
        key = state.frequencies, plan.layout.page_size
        if key not in self._angles:
            self._angles[key] = rotary_table(self._args[state.frequencies], plan.layout.page_size)
        return self._angles[key]


def _is_of(kind: tuple[object, ...], store: PagedStore | None) -> bool:
    """Whether a store is of the kind that the graph was compiled for."""
    return store is not None and store.kind == kind


def _can_be_lent(token_dim: int, *handles: KVTensor) -> bool:
    """Whether stores have all that a graph reads, in the dimension that it takes for tokens.

    The rest of a static buffer that is not full reads as zeros, which are not stored.
    """
    stores = [handle.store for handle in handles]
    return all(
        store is not None
        and store.token_dim == token_dim
        and store.capacity in (None, store.length)
        for store in stores
    )


_claiming = threading.Lock()


def _size(source: SizeSource, args: Sequence[Any]) -> int:
    """Read a size off the inputs."""
    if source.number is not None:
        return source.number
    value = args[source.input]
    return int(value if source.dim is None else value.shape[source.dim])


def _handles_that_stay(program: Program) -> tuple[tuple[int, bool], ...]:
    """Return the inputs that stay dense, and whether the graph writes to them.

    They may be handles all the same, of a cache that another graph rewrote.
    """
    return tuple(
        (i, writer(node) is not None)
        for i, node in enumerate(program.placeholders)
        if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() in (4, 5)
    )
