"""Replace state update and attention by `kvcompile::` operators on page stores."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kvcompile.codegen.state import STATE_WORDS
from kvcompile.passes.base import PassOptions, missed, passed
from kvcompile.passes.canonicalize import IS_HANDLE, is_impure
from kvcompile.passes.ir.ops import APPEND, APPEND_ATTEND, ATTEND, ATTEND_DENSE
from kvcompile.passes.ir.program import Binding, Program, SizeSource, StateBinding
from kvcompile.passes.ir.result import Missed
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.patterns.counter import position_source
from kvcompile.passes.patterns.layout import (
    equal_now,
    fixed,
    is_call,
    same_size,
    the_node,
)
from kvcompile.passes.shards import IS_SHARD
from kvcompile.passes.site_operands import visible, with_one_mask
from kvcompile.passes.sizes import size_of, size_source, sum_of

if TYPE_CHECKING:
    from kvcompile.passes.ir.site import AttentionSite
    from kvcompile.passes.ir.stream import CacheStream, StateUpdate

aten = torch.ops.aten


class RewritePaged:
    """Make states inputs of fixed shape, and give attention the new tokens alone."""

    name = "rewrite-paged"
    needs = Stage.PLANNED
    gives = Stage.REWRITTEN

    def run(self, program: Program, options: PassOptions) -> None:
        """Rewrite every planned stream; fill `program.binding`."""
        captured = program.placeholders
        num_outputs = len(program.outputs)
        states: list[StateBinding] = []
        for index in range(len(program.sites)):
            site = program.sites[index]  # read anew: rewriting one site can change a later one
            if index not in program.plans:
                continue
            stream = program.streams[index]
            refusal = _rewrite(program, site, stream)
            if refusal is not None:
                program.remarks.append(missed(self.name, site, refusal))
                del program.plans[site.index]
                continue
            frequencies = program.plans[index].frequencies
            states.append(_state_binding(site, stream, captured, frequencies))
            program.remarks.append(passed(self.name, "KVC400", site, _how(stream)))
        _close(program, captured, num_outputs, tuple(states))


def _how(stream: CacheStream) -> str:
    if stream.only_read:
        return "attend; nothing is appended"
    return "append and attend" if stream.has_past else "append; attention on the new tokens"


def _rewrite(program: Program, site: AttentionSite, stream: CacheStream) -> Missed | None:
    """Rewrite one site; return why not if it cannot be."""
    knows_end = stream.k.prefix is not None if stream.has_past else _sees_only_new(stream)
    sees_all = site.mask_kind == "none" and not site.biases
    if stream.k.slides:
        if _slide_source(program.placeholders, stream) is None and stream.has_past:
            return Missed("KVC402", "no input carries how far the buffer is read", site.k)
    elif stream.is_static and sees_all and not knows_end:
        return Missed(
            "KVC401",
            "without a mask the attention sees the unwritten part of the static buffer",
            site.out,
        )
    pasts = [p for p in (stream.k.past, stream.v.past) if p is not None]
    dense = not all(past.meta[IS_HANDLE] for past in pasts)
    if dense and stream.is_static:
        return Missed(
            "KVC405",
            "the static buffers are dense: they were filled outside a compiled prefill",
            pasts[0],
            hint="call kvcompile.adopt(model) if they are buffers of a module, or adopt(cache) if "
            "they are a cache's; else let kvcompile compile the prefill too",
        )
    if (misfit := _mask_misfit(site, stream)) is not None:
        return misfit
    if size_source(program.placeholders, site.q.meta["val"].shape[0]) is None:
        return Missed("KVC404", "no input carries the batch size", site.q)
    by_position = stream.k.position is not None and stream.has_past
    if by_position and _tokens_seen(program, stream) is None:
        return Missed("KVC402", "no input carries how far the static buffer is read", site.k)
    if stream.is_static and _capacity(program.placeholders, stream) is None:
        return Missed("KVC208", "no input carries the length of the static buffer", site.k)
    past_len = _past_length(program, stream)
    if isinstance(past_len, Missed):
        return past_len
    state = _state_placeholder(program, site)
    with program.graph.inserting_before(site.out):
        out = _call(program, site, stream, state, past_len)
    if out is not None:
        out.meta = {key: val for key, val in site.out.meta.items() if key != "from_node"}
        site.out.replace_all_uses_with(out)
        program.graph.erase_node(site.out)
        program.follow(site.out, out)
    elif stream.k.kind == "fresh":
        for update in (stream.k, stream.v):
            if update.state is not update.new:
                update.state.replace_all_uses_with(update.new)
    return None


def _call(
    program: Program,
    site: AttentionSite,
    stream: CacheStream,
    state: fx.Node,
    past_len: fx.node.Argument,
) -> fx.Node | None:
    """Insert the operators of a site; return the new result, or None if the old one stays."""
    if stream.only_read:
        site = with_one_mask(program, site)
        how = (visible(site), site.mask_kind == "causal", site.scale, past_len, site.head_dim_vo)
        return program.graph.call_function(ATTEND, (site.q, state, *how), _variant(site))
    k, v = _heads_first(stream.k), _heads_first(stream.v)
    if stream.has_past:
        site = with_one_mask(program, site)
        return _append_attend(program, site, stream, (k, v, state), past_len)
    mask = visible(site)
    if (kept := stream.k.kept) is not None:
        # What a window leaves behind at once is never stored.
        k, v = _last(k, 2, kept), _last(v, 2, kept)
        if mask is not None and not same_size(mask.meta["val"].shape[3], 1):
            mask = _last(mask, 3, kept)
    # A static buffer that is only written has no past, and yet says where it is written.
    # Padding is learned from the mask: what is added beside it says nothing of it.
    program.graph.call_function(APPEND, (k, v, state, past_len, stream.k.position, mask))
    if stream.k.kind == "fresh_index_copy":
        return _attend_new(program, with_one_mask(program, site), k, v)
    return None


def _variant(site: AttentionSite) -> dict[str, fx.node.Argument]:
    """Return what the attention does beside scaling and masking, as arguments of operators."""
    given: dict[str, fx.node.Argument] = {"softcap": site.softcap, "sinks": site.sinks}
    return {name: value for name, value in given.items() if value is not None}


def _append_attend(
    program: Program,
    site: AttentionSite,
    stream: CacheStream,
    appended: tuple[fx.Node, fx.Node, fx.Node],
    past_len: fx.node.Argument,
) -> fx.Node:
    """Insert the append of K and V to a state, and the attention over its store."""
    new_len = size_of(program, stream.k.new, stream.k.token_dim)
    kv_len: fx.node.Argument
    if stream.k.position is not None:
        kv_len = _tokens_seen(program, stream)
    elif isinstance(past_len, int) and isinstance(new_len, int):
        kv_len = past_len + new_len
    else:
        kv_len = sum_of(program, past_len, new_len)
    how = (stream.k.position, visible(site), site.mask_kind == "causal", site.scale, kv_len)
    arguments = (site.q, *appended, past_len, *how)
    return program.graph.call_function(APPEND_ATTEND, arguments, _variant(site))


def _last(node: fx.Node, dim: int, count: int) -> fx.Node:
    """Return the last `count` of a dimension."""
    size = node.meta["val"].shape[dim]
    part = node.graph.call_function(aten.slice.Tensor, (node, dim, -count, sys.maxsize))
    part.meta["val"] = node.meta["val"].narrow(dim, size - count, count)
    return part


def _attend_new(program: Program, site: AttentionSite, k: fx.Node, v: fx.Node) -> fx.Node:
    """Insert attention on the new tokens alone, for a static buffer that was empty."""
    mask = visible(site)
    if mask is not None:
        new_len = size_of(program, k, 2)
        mask = program.graph.call_function(aten.slice.Tensor, (mask, 3, 0, new_len))
    if variant := _variant(site):
        how = (mask, site.mask_kind == "causal", site.scale)
        return program.graph.call_function(ATTEND_DENSE, (site.q, k, v, *how), variant)
    return program.graph.call_function(
        aten.scaled_dot_product_attention.default,
        (site.q, k, v, mask, 0.0, site.mask_kind == "causal"),
        {"scale": site.scale, "enable_gqa": site.num_q_heads != site.num_kv_heads},
    )


def _mask_misfit(site: AttentionSite, stream: CacheStream) -> Missed | None:
    """Refuse a mask whose columns are not the tokens that the attention would see."""
    seen = site.k if stream.has_past else stream.k.state
    tokens = seen.meta["val"].shape[2 if stream.has_past else stream.k.token_dim]
    masks = [] if site.mask is None else [site.mask]
    for mask in (*masks, *(bias.node for bias in site.biases)):
        columns = mask.meta["val"].shape[-1]
        if same_size(columns, 1) and (mask is not site.mask or not stream.is_static):
            continue
        if equal_now(columns, tokens):
            continue
        # A prompt in an empty buffer: keys and mask may both be cut to the new tokens.
        new_len = stream.k.new.meta["val"].shape[stream.k.token_dim]
        if stream.is_static and _sees_only_new(stream) and equal_now(columns, new_len):
            continue
        return Missed("KVC403", f"the mask has {columns} columns for {tokens} cached tokens", mask)
    return None


def _sees_only_new(stream: CacheStream) -> bool:
    """Whether the attention sees new tokens alone: they fill the buffer, or it sees a slice."""
    if stream.has_past or stream.k.slides:
        return not stream.has_past
    token_dim, prefix = stream.k.token_dim, stream.k.prefix
    new_len, capacity = (n.meta["val"].shape[token_dim] for n in (stream.k.new, stream.k.state))
    if equal_now(new_len, capacity):
        return True
    end = prefix.args[3] if prefix is not None and len(prefix.args) > 3 else None
    end = end.meta["val"] if isinstance(end, fx.Node) else end
    return isinstance(end, int | torch.SymInt) and equal_now(end, new_len)


def _tokens_seen(program: Program, stream: CacheStream) -> fx.node.Argument:
    """Return how many tokens of a static buffer the attention reads, or None if nothing tells."""
    prefix = stream.k.prefix
    if prefix is None:
        return size_of(program, the_node(stream.k.past), stream.k.token_dim)
    size = prefix.meta["val"].shape[stream.k.token_dim]
    end = prefix.args[3] if len(prefix.args) > 3 else None
    if isinstance(end, fx.Node) and same_size(end.meta["val"], size):
        return end
    return fixed(size)


def _heads_first(update: StateUpdate) -> fx.Node:
    """Return the new tokens as `[B, K, S, D]`."""
    if update.token_dim == 2:
        return update.new
    node = update.new.graph.call_function(aten.transpose.int, (update.new, 1, 2))
    node.meta["val"] = update.new.meta["val"].transpose(1, 2)
    return node


def _state_placeholder(program: Program, site: AttentionSite) -> fx.Node:
    """Add the input that carries the store's state tensor."""
    last = program.placeholders[-1]
    with program.graph.inserting_after(last):
        node = program.graph.placeholder(f"kv_state_{site.index}")
    like = site.k.meta["val"]
    assert isinstance(like, FakeTensor)
    with like.fake_mode:
        # In main memory, wherever the pages are.
        node.meta["val"] = torch.empty(STATE_WORDS, dtype=torch.int64, device="cpu")
    return node


def _past_length(program: Program, stream: CacheStream) -> fx.node.Argument | Missed:
    """Return the number of past tokens as the graph knows it: a number or a size node."""
    past, part = stream.k.past, stream.k.past_part
    if past is not None and stream.k.slides:
        if part is None:
            return int(past.meta["val"].shape[stream.k.token_dim]) - 1
        return size_of(program, part, stream.k.token_dim)
    if past is None or stream.is_static:
        return 0
    if stream.k.past_seen is not None:
        return stream.k.past_seen
    found = size_of(program, past, stream.k.token_dim)
    if found is None:
        return Missed("KVC402", "no input carries the length of the past", past)
    return found


def _state_binding(
    site: AttentionSite,
    stream: CacheStream,
    captured: list[fx.Node],
    frequencies: fx.Node | None,
) -> StateBinding:
    position = {node: i for i, node in enumerate(captured)}
    k_past, v_past, written = stream.k.past, stream.v.past, stream.k.position
    batch = size_source(captured, site.q.meta["val"].shape[0])
    assert batch is not None
    return StateBinding(
        site=site.index,
        k_input=position[k_past] if k_past is not None else None,
        v_input=position[v_past] if v_past is not None else None,
        k_outputs=stream.k.outputs,
        v_outputs=stream.v.outputs,
        token_dim=stream.k.token_dim,
        capacity=_capacity(captured, stream) if stream.is_static else None,
        batch=batch,
        frequencies=None if frequencies is None else position[frequencies],
        # A recorded step looks at all that is stored: one that may look at less is not recorded.
        position=None
        if written is None or stream.k.prefix is not None
        else position_source(captured, written),
        only_read=stream.only_read,
        kept=stream.k.kept if stream.has_past else None,
        past_seen=stream.k.past_seen,
        slides=_slide_source(captured, stream) if stream.has_past else None,
    )


def _slide_source(inputs: list[fx.Node], stream: CacheStream) -> SizeSource | None:
    """Return where to read how many past tokens are seen of a buffer that slides, or None."""
    past, part, dim = stream.k.past, stream.k.past_part, stream.k.token_dim
    if past is None or not stream.k.slides:
        return None
    if part is None:
        return SizeSource(int(past.meta["val"].shape[dim]) - 1)
    return size_source(inputs, part.meta["val"].shape[dim])


def _capacity(inputs: list[fx.Node], stream: CacheStream) -> SizeSource | None:
    """Return where the length of a static buffer can be read."""
    return size_source(inputs, stream.k.state.meta["val"].shape[stream.k.token_dim])


def _close(
    program: Program, captured: list[fx.Node], num_outputs: int, states: tuple[StateBinding, ...]
) -> None:
    """Drop the states from inputs and outputs, and what only they kept alive."""
    gone_outputs = {i for s in states for i in (*s.k_outputs, *s.v_outputs)}
    kept_outputs = tuple(i for i in range(num_outputs) if i not in gone_outputs)
    outputs = program.outputs
    output = program.output_node
    output.args = (tuple(outputs[i] for i in kept_outputs),)
    for site in program.sites:
        if site.index in program.plans:
            _erase_update(program, program.streams[site.index])
    program.graph.eliminate_dead_code(is_impure)
    gone_inputs = {i for s in states for i in (s.k_input, s.v_input) if i is not None}
    gone_inputs |= {i for i, node in enumerate(captured) if node.meta["val"] is None}  # meshes
    gone_inputs |= {f.input for f in program.fused if f.input is not None}
    for i in sorted(gone_inputs):
        _release_sizes(program, captured[i])
        program.graph.erase_node(captured[i])
    kept_inputs = tuple(i for i in range(len(captured)) if i not in gone_inputs)
    shards = tuple(i for i, node in enumerate(captured) if node.meta[IS_SHARD])
    program.binding = Binding(kept_inputs, num_outputs, kept_outputs, states, shards)
    program.module.recompile()


def _release_sizes(program: Program, past: fx.Node) -> None:
    """Let size nodes of a past read the input that carries the same size."""
    for user in list(past.users):
        if is_call(user, torch.ops.aten.sym_size.int):
            dim = user.args[1]
            assert isinstance(dim, int)
            size = size_of(program, past, dim)
            user.replace_all_uses_with(size)  # type: ignore[arg-type]
            program.graph.erase_node(user)


def _erase_update(program: Program, stream: CacheStream) -> None:
    """Erase update and old attention: their in-place operators would be kept for their effect."""
    for update in (stream.k, stream.v):
        if update.state is not update.new and update.state in program.graph.nodes:
            source = update.state.args[1] if update.slides else None
            _erase_readers(program.graph, update.state)
            if is_call(source, aten.index_put_.default):
                program.graph.erase_node(the_node(source))  # into what was rolled


def _erase_readers(graph: fx.Graph, node: fx.Node) -> None:
    while node.users:  # two ways may lead to one reader
        _erase_readers(graph, next(iter(node.users)))
    graph.erase_node(node)
