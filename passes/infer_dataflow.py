"""Follow K and V of every site back to the state they are cached in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.canonicalize import IS_HANDLE
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.ir.stream import CacheStream, StateUpdate, UpdateKind
from kvcompile.passes.patterns.layout import (
    fixed,
    is_call,
    peel,
    the_dim,
    the_node,
    value,
    writer,
)
from kvcompile.passes.patterns.nearby import kept_nearby
from kvcompile.passes.patterns.path import Path, before_path
from kvcompile.passes.patterns.token_writes import is_write, token_write
from kvcompile.passes.patterns.window import (
    Slide,
    is_handed_on,
    is_zeros,
    kept_part,
    past_in,
    positions_of,
    slide,
)

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite

aten = torch.ops.aten


class InferDataflow:
    """Find past K/V -> update -> attention -> present, for each site."""

    name = "infer-dataflow"
    needs = Stage.MATCHED
    gives = Stage.INFERRED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.streams`; the graph is left as it is."""
        taken: dict[fx.Node, AttentionSite] = {}
        for site in program.sites:
            found = _stream(program, site)
            if isinstance(found, CacheStream):
                other = next((taken[n] for n in _cached(found) if n in taken), None)
                if other is not None:
                    found = Missed("KVC207", f"the cached tensors are shared with {other.name}")
            if isinstance(found, Missed):
                program.remarks.append(missed(self.name, site, found))
                continue
            program.streams[site.index] = found
            taken |= dict.fromkeys(_cached(found), site)
            reason = f"K and V are cached ({found.k.kind}, {_layout(found.k)}{_window(found.k)})"
            program.remarks.append(passed(self.name, "KVC200", site, reason))


def _cached(stream: CacheStream) -> list[fx.Node]:
    """Return the states and pasts of a stream, which no other stream may have."""
    updates = (stream.k, stream.v)
    return [n for u in updates for n in (u.state, u.past) if n is not None]


def _layout(update: StateUpdate) -> str:
    return "[B, K, T, D]" if update.token_dim == 2 else "[B, T, K, D]"


def _window(update: StateUpdate) -> str:
    if update.kept is not None:
        return f", the last {update.kept} tokens are kept"
    return "" if update.past_seen is None else f", the last {update.past_seen} are read"


def _stream(program: Program, site: AttentionSite) -> CacheStream | Missed:
    """Infer the stream of one site."""
    k = _update(program, site.k, "keys")
    v = _update(program, site.v, "values")
    for update in (k, v):
        if isinstance(update, Missed):
            return update
    assert isinstance(k, StateUpdate)
    assert isinstance(v, StateUpdate)
    if k.state is v.state or (k.past is not None and k.past is v.past):
        return Missed("KVC207", "keys and values are one cached tensor", k.state)
    if k.kind != v.kind or k.position is not v.position:
        reason = f"keys are cached by {k.kind} and values by {v.kind}"
        return Missed("KVC205", reason, v.state)
    if k.token_dim != v.token_dim:
        return Missed("KVC205", f"keys are {_layout(k)} and values {_layout(v)}", v.state)
    if (k.kept, k.past_seen) != (v.kept, v.past_seen):
        reason = f"{k.kept} tokens of the keys and {v.kept} of the values are kept"
        return Missed("KVC205", reason, v.state)
    for update in (k, v):
        if (extra := _other_reader(program, site, update)) is not None:
            return Missed(
                "KVC206",
                f"{extra.target} reads the cached tensor besides the attention",
                extra,
                hint="if this is a sliding window or a cache of another kind, it stays dense",
            )
    if k.position is not None or k.slides:
        sizes = [fixed(u.state.meta["val"].shape[u.token_dim]) for u in (k, v)]
        # The mask fixes the length of the keys; that of the values may still be a symbol.
        if None not in sizes and sizes[0] != sizes[1]:
            return Missed("KVC208", f"static buffers of different lengths {sizes}", k.state)
    return CacheStream(site=site.index, k=k, v=v)


def _update(program: Program, operand: fx.Node, what: str) -> StateUpdate | Missed:
    """Find the state behind one operand of the attention."""
    outputs = program.outputs
    path = Path(operand, swapped=False)
    fresh: StateUpdate | None = None
    while True:
        node = path.node
        if (found := _cat(path)) or (found := _index_copy(path)):
            kind, new, past, position = found
            token_dim = 1 if path.swapped else 2
            positions = positions_of(outputs, node)
            if past is None and kind == "cat":
                kind = "fresh"
            kept = past_seen = None
            if kind in ("fresh", "cat") and not positions:
                kept, positions = kept_part(outputs, node, token_dim)
            if path.suffix is not None:
                past_seen = past_in(path.suffix, new, token_dim) if kind == "cat" else None
                if past_seen is None:
                    return _cut_unclearly(what, path.suffix)
            if kind in ("fresh", "cat", "fresh_index_copy") and not positions:
                return _not_cached(program, what, node)
            return StateUpdate(
                kind,
                node,
                new,
                past,
                position,
                token_dim,
                positions,
                prefix=path.prefix,
                kept=kept,
                past_seen=past_seen,
            )
        if (moved := slide(path)) is not None:
            return _slide(outputs, moved, path.token_dim)
        if fresh is None:
            fresh = _fresh(outputs, path)
        if is_write(peel(node)):
            return Missed(
                "KVC209",
                f"the {what} are written into a buffer that is neither an input nor made of zeros, "
                "or not token by token in all rows",
                node,
            )
        before = before_path(path)
        if before is None:
            break
        path = before
    if fresh is not None:
        return fresh
    if (written := _written_elsewise(path.node)) is not None:
        return Missed(
            "KVC209",
            f"the {what} are read from a buffer that is written otherwise than token by token in "
            "all of its rows",
            written,
            hint="buffers of K and of V, made for the very batch that is run, whole tokens written "
            "one behind the other, can lie in pages",
        )
    if path.node.op == "placeholder":
        return _only_read(path, what)
    return _not_cached(program, what, path.node)


def _slide(outputs: tuple[object, ...], moved: Slide, token_dim: int) -> StateUpdate:
    return StateUpdate(
        moved.kind,
        moved.copied,
        moved.new,
        moved.buffer if moved.kind == "slide" else None,
        None,
        token_dim,
        positions_of(outputs, moved.copied),
        kept=fixed(moved.copied.meta["val"].shape[token_dim]),
        past_part=moved.past_part,
    )


def _fresh(outputs: tuple[object, ...], path: Path) -> StateUpdate | None:
    """Return new tokens that the graph returns, or the last ones of them."""
    node, kept, positions = path.node, None, positions_of(outputs, path.node)
    if not positions:
        kept, positions = kept_part(outputs, node, path.token_dim)
    if not positions:
        return None
    return StateUpdate("fresh", node, node, None, None, path.token_dim, positions, kept=kept)


def _cut_unclearly(what: str, suffix: fx.Node) -> Missed:
    return Missed(
        "KVC211",
        f"the attention reads the last tokens of the {what}, which are not a fixed number of past "
        "ones and the new ones",
        suffix,
    )


def _written_elsewise(node: fx.Node) -> fx.Node | None:
    """Return what writes to a view of the input that a node is a view of, or None."""
    views = (aten.slice.Tensor, aten.narrow.default, aten.transpose.int, aten.select.int)
    while is_call(node, *views):
        node = the_node(node.args[0])
    return writer(node) if node.op == "placeholder" else None


def _only_read(path: Path, what: str) -> StateUpdate | Missed:
    """Return an input that the graph adds nothing to, if it is in pages already."""
    node = path.node
    if not node.meta.get(IS_HANDLE):
        return Missed(
            "KVC202",
            f"the {what} are a dense input that the graph only reads",
            node,
            hint="if they are a cache, let kvcompile compile the step that fills it, too",
        )
    return StateUpdate("read", node, node, node, None, 1 if path.swapped else 2, ())


def _not_cached(program: Program, what: str, node: fx.Node) -> Missed:
    """Tell keys that nobody keeps from keys that are kept in a way that is not recognised."""
    kept = kept_nearby(program.outputs, node)
    if kept is not None:
        return Missed(
            "KVC209",
            f"the {what} come from {node.target}, which is not followed further, and {kept.name} "
            "beside it is kept",
            node,
            hint="sliding windows and other forms of a cache stay dense; one tensor of K and V may "
            "be read by nobody else",
        )
    return Missed(
        "KVC201",
        f"the {what} are not kept: the graph does not return them",
        node,
        hint="pass use_cache=True, and call the model as a whole so that its cache is in the graph",
    )


_Found = tuple[UpdateKind, fx.Node, fx.Node | None, fx.Node | None]


def _cat(path: Path) -> _Found | None:
    """Match `cat([past, new], token_dim)`; an empty past is no past."""
    node = path.node
    if not is_call(node, aten.cat.default):
        return None
    parts = node.args[0]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return None
    if node.meta["val"].dim() != 4 or the_dim(node, 1) != (1 if path.swapped else 2):
        return None
    past, new = the_node(parts[0]), the_node(parts[1])
    past_value = value(past)
    if past_value is None or past_value.dtype != new.meta["val"].dtype:
        return None
    if past_value.dim() == 1:
        return ("cat", new, None, None)
    past = peel(past)
    return ("cat", new, past, None) if past.op == "placeholder" else None


def _index_copy(path: Path) -> _Found | None:
    """Match tokens written into a buffer at positions."""
    write = token_write(path.node)
    if write is None or write.dim != (1 if path.swapped else 2):
        return None
    buffer = write.buffer
    if buffer.op == "placeholder":
        return ("index_copy", write.new, buffer, write.position)
    if is_zeros(peel(buffer)):
        return ("fresh_index_copy", write.new, None, write.position)
    return None


def _other_reader(program: Program, site: AttentionSite, update: StateUpdate) -> fx.Node | None:
    """Return a node outside the attention that reads the state, or None.

    What the rewrite makes unreachable may read it (repeating heads, transposing scores): those
    nodes are the ones from which only the attention's result can be reached.
    """
    for node in (update.state, update.new, update.past):
        if node is not None and (found := writer(node, update.state)) is not None:
            return found
    if update.kind == "slide":
        return _other_reader_of_slide(site, update)
    if update.past is not None and update.kind != "read":
        for user in update.past.users:
            if user is not update.state and not _is_size_or_step(user, update):
                return user
    if update.kind in ("fresh", "fresh_slide"):
        return None
    # A grown state is handed on; one that is only read is nobody else's.
    allowed = {site.out} if update.kind == "read" else {site.out, program.output_node}
    seen: set[fx.Node] = set()
    stack = [update.state]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen or user in allowed or _is_size(user, update):
                continue
            if node is update.state and is_handed_on(
                user, update.state, update.token_dim, program.output_node
            ):
                continue
            seen.add(user)
            # A cast that changes nothing is the state, and may be what the graph returns as such.
            if peel(user) is not update.state and not _feeds_only(user, site):
                return user
            stack.append(user)
    return None


def _other_reader_of_slide(site: AttentionSite, update: StateUpdate) -> fx.Node | None:
    """Return a node that reads a buffer that slides, but for sliding it on and attending to it."""
    readers = [u for node in (update.past, update.state) if node is not None for u in node.users]
    return next(
        (
            user
            for user in readers
            if user is not update.state
            and not is_call(user, aten.sym_size.int)
            and user.op != "output"
            and not _reaches(user, site, depth=_STEPS, end=update.state)
        ),
        None,
    )


def _is_size(user: fx.Node, update: StateUpdate) -> bool:
    """Whether a reader of a state that is only read takes its size, which other inputs carry."""
    is_its = update.kind == "read" and user.args[:1] == (update.state,)
    return is_its and is_call(user, aten.sym_size.int)


def _is_size_or_step(user: fx.Node, update: StateUpdate) -> bool:
    """Whether a reader of the past takes its length, or only leads to the update."""
    if is_call(user, aten.sym_size.int) or not user.users:
        return True
    is_step = peel(user) is update.past
    return is_step and all(u is update.state or _is_size_or_step(u, update) for u in user.users)


def _feeds_only(node: fx.Node, site: AttentionSite) -> bool:
    """Whether a reader of the state is part of the attention: a size, or a layout step."""
    val = node.meta.get("val")
    if isinstance(val, int | torch.SymInt):
        return not node.users
    if not isinstance(val, torch.Tensor | tuple | list):  # several results, as `max` has
        return False
    return bool(node.users) and _reaches(node, site, depth=_STEPS)


_STEPS = 24
"""Most operators from a cached tensor to the result: those of sink logits are 16."""


def _reaches(node: fx.Node, site: AttentionSite, depth: int, end: fx.Node | None = None) -> bool:
    """Whether every path from a node ends in the attention's result, or at `end`, in a few steps.

    Not by way of what stays, such as its query and mask, and with it whatever it is made of.
    """
    if node is site.out or node is end:
        return True
    if depth == 0 or not node.users or node in site.beside:
        return False
    return all(_reaches(user, site, depth - 1, end) for user in node.users)
