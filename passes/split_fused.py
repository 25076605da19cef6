"""Set K and V apart where a model caches them in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kvcompile.passes.base import PassOptions, passed
from kvcompile.passes.canonicalize import IS_HANDLE, is_impure
from kvcompile.passes.ir.fused import FusedLayout, FusedState
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.patterns.layout import is_call, peel, the_dim, the_node
from kvcompile.passes.patterns.parts import Part, joined_pair, part_of, parts_of, readers
from kvcompile.passes.patterns.path import Path, before_path
from kvcompile.passes.shards import IS_SHARD

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program
    from kvcompile.passes.ir.site import AttentionSite

aten = torch.ops.aten

Readers = list[tuple[fx.Node, Part]]
Pair = tuple[fx.Node, fx.Node]


class SplitFused:
    """Give a graph K and V as inputs and outputs of their own instead of one tensor of both.

    The passes behind it know of no fused states. The runtime hands the graph the two parts of what
    it is called with, and joins what it returns.
    """

    name = "split-fused"
    needs = Stage.MATCHED
    gives = Stage.MATCHED

    def run(self, program: Program, options: PassOptions) -> None:
        """Fill `program.fused`; leave alone what is not fused, or not understood."""
        for index in range(len(program.sites)):
            site = program.sites[index]  # read anew: splitting one state can change a later site
            if _split_what_is_taken_apart(program, site) or _split_what_is_joined(program, site):
                layout = program.fused[-1].layout
                how = "a dimension of their own" if layout.is_stacked else "one that they share"
                reason = f"K and V are one cached tensor, along dimension {layout.dim}, {how}"
                program.remarks.append(passed(self.name, "KVC210", site, reason))
        if program.fused:
            program.graph.eliminate_dead_code(is_impure)
            program.module.recompile()


def _split_what_is_taken_apart(program: Program, site: AttentionSite) -> bool:
    """Split a state of which K and V are taken: `k, v = torch.cat([past, new], dim).unbind(0)`."""
    k_end, v_end = (_chain(operand)[-1] for operand in (site.k, site.v))
    pair = _parts_of_output(program, k_end.node, v_end.node)
    if pair is None:
        return False
    k, v = pair
    if k.order[k_end.token_dim] == k.dim:  # the tokens of K, and then those of V
        return False
    state, layout, sizes = k.base, k.layout(is_k=True), (k.size, v.size)
    read = _readers(state, k)
    if read is None or state.op == "placeholder":
        return False
    past, new, time = None, state, 0
    grown = _grown_from(state)
    if grown is not None and grown[2] != layout.dim:  # there it would be a join of K and V
        past, new, time = grown
        if past.meta["val"].dim() == 1:  # an empty tensor of one dimension stands for no past
            past = None
        elif not _only_grows(past := peel(past), state):
            return False
    pasts = _past_parts(program, past, layout, sizes)
    with program.graph.inserting_before(state.next):
        apart = _in_parts(new, layout, sizes)
        if pasts is not None:
            grown_parts = [
                program.graph.call_function(aten.cat.default, ([old, part], layout.inner(time)))
                for old, part in zip(pasts, apart, strict=True)
            ]
            apart = grown_parts[0], grown_parts[1]
    for node, is_k, size in zip(apart, (True, False), sizes, strict=True):
        if node.meta.get("val") is None:
            node.meta["val"] = _empty(layout.part(state.meta["val"], is_k, size))
    _replace(program, read, layout, apart)
    _return(program, state, layout, apart, past, sizes)
    return True


def _parts_of_output(program: Program, k: fx.Node, v: fx.Node) -> tuple[Part, Part] | None:
    """Return K and V as the two parts of one tensor that the graph returns, or None."""
    for k_part in parts_of(k):
        for v_part in parts_of(v):
            if k_part.goes_with(v_part) and _positions(program, k_part.base):
                return k_part, v_part
    return None


def _split_what_is_joined(program: Program, site: AttentionSite) -> bool:
    """Split a state that K and V are joined to: `torch.stack([k, v])`."""
    chains = [{path.node: path for path in _chain(operand)} for operand in (site.k, site.v)]
    for out in program.outputs:
        pair = joined_pair(peel(out)) if isinstance(out, fx.Node) else None
        if pair is None:
            continue
        first, second = peel(pair[0]), peel(pair[1])
        for k_first, k, v in ((True, first, second), (False, second, first)):
            if k is not v and k in chains[0] and v in chains[1]:
                if not pair[3] and pair[2] == chains[0][k].token_dim:
                    return False  # the tokens of K, and then those of V
                layout = FusedLayout(pair[2], pair[3], k_first)
                return _split_joined(program, peel(the_node(out)), layout, (k, v))
    return False


def _split_joined(program: Program, state: fx.Node, layout: FusedLayout, both: Pair) -> bool:
    """Split the state that is joined from a K and a V, which grow from one past or from none."""
    k_size, v_size = (1 if layout.is_stacked else int(_shape(n)[layout.dim]) for n in both)
    grown = [_grown_from(node) for node in both]
    old = [part_of(g[0]) for g in grown if g is not None]
    past: fx.Node | None = None
    read: Readers | None = []
    if old:
        k, v = old[0], old[-1]
        if k is None or v is None or not k.goes_with(v) or k.layout(is_k=True) != layout:
            return False
        past, read = k.base, _readers(k.base, k)
        if past.op != "placeholder" or read is None or not all(_is_natural(p) for _, p in read):
            return False
    pasts = _past_parts(program, past, layout, (k_size, v_size))
    if pasts is not None and read is not None:
        _replace(program, read, layout, pasts)
    _return(program, state, layout, both, past, (k_size, v_size))
    return True


def _chain(node: fx.Node) -> list[Path]:
    """Return a node and what it is another form of, step by step."""
    path: Path | None = Path(node, swapped=False)
    paths = []
    while path is not None:
        paths.append(path)
        path = before_path(path)
    return paths


def _shape(node: fx.Node) -> Sequence[int | torch.SymInt]:
    shape: Sequence[int | torch.SymInt] = node.meta["val"].shape
    return shape


def _positions(program: Program, node: fx.Node) -> tuple[int, ...]:
    """Return where among the outputs a node is."""
    return tuple(
        i for i, o in enumerate(program.outputs) if isinstance(o, fx.Node) and peel(o) is node
    )


def _readers(node: fx.Node, like: Part) -> Readers | None:
    """Return who takes one of the parts of a node, or None if somebody takes something else."""
    found: Readers = []
    for reader, part in readers(node, like):
        if part is None:
            return None
        found.append((reader, part))
    return found


def _is_natural(part: Part) -> bool:
    return list(part.order) == sorted(part.order)


def _grown_from(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Return past, new tokens and dimension of `cat([past, new], dim)`, or None."""
    parts = node.args[0] if is_call(node, aten.cat.default) else None
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return None
    return the_node(parts[0]), the_node(parts[1]), the_dim(node, 1)


def _only_grows(past: fx.Node, state: fx.Node) -> bool:
    """Whether an input is read by its update alone, but for its sizes."""
    if past.op != "placeholder":
        return False
    stack = list(past.users)
    while stack:
        user = stack.pop()
        if user is state or is_call(user, aten.sym_size.int):
            continue
        if peel(user) is not past:
            return False
        stack.extend(user.users)
    return True


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape that is nobody's view."""
    assert isinstance(like, FakeTensor)
    with like.fake_mode:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _past_parts(
    program: Program, past: fx.Node | None, layout: FusedLayout, sizes: tuple[int, int]
) -> Pair | None:
    """Add K and V of the past to the inputs; whoever asks for a size of the past asks them."""
    if past is None:
        return None
    parts: list[fx.Node] = []
    for is_k, size in zip((True, False), sizes, strict=True):
        with program.graph.inserting_after(program.placeholders[-1]):
            node = program.graph.placeholder(f"{past.name}_{'k' if is_k else 'v'}")
        node.meta["val"] = _empty(layout.part(past.meta["val"], is_k, size))
        node.meta[IS_HANDLE], node.meta[IS_SHARD] = past.meta[IS_HANDLE], False
        parts.append(node)
    for user in list(past.users):
        if is_call(user, aten.sym_size.int) and (dim := the_dim(user, 1)) != layout.dim:
            user.args = (parts[0], layout.inner(dim))
    return parts[0], parts[1]


def _in_parts(new: fx.Node, layout: FusedLayout, sizes: tuple[int, int]) -> Pair:
    """Return K and V of new tokens, from before they were joined if that can be seen."""
    pair = joined_pair(new)
    if pair is not None and pair[2:] == (layout.dim, layout.is_stacked):
        return (pair[0], pair[1]) if layout.k_first else (pair[1], pair[0])
    parts: list[fx.Node] = []
    for is_k, size in zip((True, False), sizes, strict=True):
        comes_first = is_k == layout.k_first
        if layout.is_stacked:
            place = 0 if comes_first else 1
            part = new.graph.call_function(aten.select.int, (new, layout.dim, place))
        else:
            start = 0 if comes_first else sum(sizes) - size
            part = new.graph.call_function(aten.narrow.default, (new, layout.dim, start, size))
        part.meta["val"] = layout.part(new.meta["val"], is_k, size)
        parts.append(part)
    return parts[0], parts[1]


def _replace(program: Program, read: Readers, layout: FusedLayout, both: Pair) -> None:
    """Let whoever took a part read K or V itself."""
    for node, part in read:
        new = both[0] if part.comes_first is layout.k_first else both[1]
        if not _is_natural(part):
            with program.graph.inserting_before(node):
                moved = program.graph.call_function(aten.permute.default, (new, part.permutation()))
            moved.meta["val"] = node.meta["val"]
            new = moved
        node.replace_all_uses_with(new)
        program.follow(node, new)


def _return(
    program: Program,
    state: fx.Node,
    layout: FusedLayout,
    both: Pair,
    past: fx.Node | None,
    sizes: tuple[int, int],
) -> None:
    """Return K and V instead of the state, and note how the runtime gets from one to the other."""
    positions, end = _positions(program, state), len(program.outputs)
    outputs = [None if i in positions else out for i, out in enumerate(program.outputs)]
    program.output_node.args = ((*outputs, *both),)
    program.fused += (
        FusedState(
            layout=layout,
            input=None if past is None else program.placeholders.index(past),
            outputs=positions,
            k_output=end,
            v_output=end + 1,
            k_size=sizes[0],
            v_size=sizes[1],
        ),
    )
