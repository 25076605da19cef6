"""The program that passes hand on: a graph and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import fx

    from kvcompile.codegen.rotary import Rotary
    from kvcompile.codegen.spec import KernelSpec, LinearSpec
    from kvcompile.passes.ir.fused import FusedState
    from kvcompile.passes.ir.plan import StreamPlan
    from kvcompile.passes.ir.remarks import Remark
    from kvcompile.passes.ir.site import AttentionSite
    from kvcompile.passes.ir.stage import Stage
    from kvcompile.passes.ir.stream import CacheStream


@dataclass(frozen=True)
class SizeSource:
    """Where a size can be read before the rewritten graph runs.

    Attributes:
        number: The size, if it is fixed; otherwise None.
        input: Position among the captured graph's inputs.
        dim: Dimension of that input, or None if the input is the size itself.
    """

    number: int | None
    input: int = 0
    dim: int | None = None


@dataclass(frozen=True)
class PositionSource:
    """Where the position of the first new token of a static buffer can be read.

    Attributes:
        input: Position among the captured graph's inputs of a tensor that begins with it.
        counts_up: Whether the positions that follow are the next numbers in any case.
        advances: Whether the graph leaves the position behind the new tokens in that tensor.
    """

    input: int
    counts_up: bool
    advances: bool


@dataclass(frozen=True)
class StateBinding:
    """Where the state of one stream enters and leaves the rewritten graph.

    Attributes:
        site: Index of the site.
        k_input: Position of the past keys among the captured graph's inputs, or None.
        v_input: The same for the values.
        k_outputs: Positions of the keys among the captured graph's outputs.
        v_outputs: The same for the values.
        token_dim: Dimension of keys and values that grows.
        capacity: Where to read the tokens of a static buffer, or None if the state grows.
        batch: Where to read the number of sequences.
        frequencies: Position of the rotary frequencies among the captured graph's inputs, if the
            turning mean of the keys is kept.
        position: Where the first new token is written to a static buffer, if it can be read
            before the graph runs.
        only_read: Whether the graph adds nothing to the state.
        kept: How many of the last tokens the outputs are; None if all.
        past_seen: How many of the last past tokens the attention sees; None if all.
        slides: Where to read how many past tokens the attention sees of a static buffer that its
            first tokens leave; None if it is no such buffer.
    """

    site: int
    k_input: int | None
    v_input: int | None
    k_outputs: tuple[int, ...]
    v_outputs: tuple[int, ...]
    token_dim: int
    capacity: SizeSource | None
    batch: SizeSource
    frequencies: int | None = None
    position: PositionSource | None = None
    only_read: bool = False
    kept: int | None = None
    past_seen: int | None = None
    slides: SizeSource | None = None


@dataclass(frozen=True)
class Binding:
    """How the rewritten graph's inputs and outputs follow from the captured graph's.

    Attributes:
        kept_inputs: Positions of the captured inputs that remain, in order; the states of
            `states` follow them, one each.
        num_outputs: Number of outputs of the captured graph.
        kept_outputs: Positions of the captured outputs that the rewritten graph still gives.
        states: One entry per rewritten stream.
        shards: Positions of the captured inputs that are distributed tensors; the rewritten graph
            takes this process's shard of them.
    """

    kept_inputs: tuple[int, ...]
    num_outputs: int
    kept_outputs: tuple[int, ...]
    states: tuple[StateBinding, ...]
    shards: tuple[int, ...] = ()


@dataclass(frozen=True)
class KernelUse:
    """A generated kernel that one site needs, or the graph beside its sites (`site` is None)."""

    site: int | None
    role: Literal["append", "attend", "linear"]
    spec: KernelSpec | LinearSpec


@dataclass
class Program:
    """A graph, its stage, and the side tables that passes fill.

    Attributes:
        module: The graph; passes change it in place.
        stage: What holds about it.
        made_by: Name of the last pass.
        sites: Attention sites, once matched.
        fused: States of K and V in one tensor that were set apart.
        streams: Cached streams by site index, once inferred.
        plans: Storage by site index, once planned.
        binding: Inputs and outputs, once rewritten.
        ropes: How q and new K turn inside the operator, by site index, where they do.
        kernels: Kernels, complete once lowered.
        remarks: Everything that passes said, in order.
        seconds: Time of each pass, by name.
    """

    module: fx.GraphModule
    stage: Stage
    made_by: str = "capture"
    sites: tuple[AttentionSite, ...] = ()
    fused: tuple[FusedState, ...] = ()
    streams: dict[int, CacheStream] = field(default_factory=dict)
    plans: dict[int, StreamPlan] = field(default_factory=dict)
    binding: Binding | None = None
    ropes: dict[int, Rotary] = field(default_factory=dict)
    kernels: tuple[KernelUse, ...] = ()
    remarks: list[Remark] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The module's graph."""
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """Input nodes in order."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    @property
    def output_node(self) -> fx.Node:
        """The single output node."""
        return self.graph.output_node()

    @property
    def outputs(self) -> tuple[fx.node.Argument, ...]:
        """What the graph returns, in order."""
        returned = self.output_node.args[0]
        return tuple(returned) if isinstance(returned, tuple | list) else (returned,)

    def follow(self, before: fx.Node, after: fx.Node) -> None:
        """Let the sites have `after` as their operand where they had `before`."""

        def current(node: fx.Node) -> fx.Node:
            return after if node is before else node

        self.sites = tuple(
            replace(
                site,
                q=current(site.q),
                k=current(site.k),
                v=current(site.v),
                mask=None if site.mask is None else current(site.mask),
            )
            for site in self.sites
        )
