"""`explain(model, inputs)`: what would be rewritten, what would not, and why."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from kvcompile import backend
from kvcompile.calling import cache_parameter, isolated
from kvcompile.options import parse_options
from kvcompile.reports import CompilationReport, SiteReport, collect

if TYPE_CHECKING:
    from kvcompile.passes.ir.remarks import Remark


@dataclass(frozen=True)
class Explanation:
    """What the passes did with every graph of a model.

    Attributes:
        graphs: One report per compiled graph, in the order they were compiled.
    """

    graphs: tuple[CompilationReport, ...]

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """Sites of the last graph that holds any: the decode step, if there was one."""
        return next((g.sites for g in reversed(self.graphs) if g.sites), ())

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Everything the passes said, over all graphs."""
        return tuple(r for g in self.graphs for r in g.remarks)

    @property
    def missed(self) -> tuple[Remark, ...]:
        """What was not rewritten, with the reasons."""
        return tuple(r for r in self.remarks if r.kind != "passed")

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token of one sequence takes in all rewritten layers."""
        return sum(s.bytes_per_token for s in self.sites)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150, color_system=None)
        for number, graph in enumerate(self.graphs):
            console.print(_table(number, graph))
            for remark in graph.remarks:
                if remark.kind != "passed":
                    console.print(str(remark), markup=False, highlight=False)
        if self.bytes_per_token:
            console.print(f"{self.bytes_per_token:,.0f} bytes per token in all layers")
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


def _table(number: int, graph: CompilationReport) -> Table:
    kind = "decode" if graph.has_past else "prefill"
    rewritten = sum(s.rewritten for s in graph.sites)
    title = (
        f"graph {number} ({kind}): {rewritten} of {len(graph.sites)} attentions rewritten, "
        f"passes {graph.seconds * 1e3:.0f} ms"
    )
    beside = [str(r) for r in graph.remarks if r.code == "KVC410"]
    table = Table(
        title=title,
        title_justify="left",
        caption="\n".join(beside) or None,
        caption_justify="left",
    )
    for column in ("site", "source", "attention", "heads", "state", "format", "B/token", "kernel"):
        table.add_column(column, overflow="fold")
    for site in graph.sites:
        heads = f"{site.num_q_heads}/{site.num_kv_heads} x {site.head_dim_qk}"
        table.add_row(
            site.name,
            site.where,
            f"{site.pattern}, {site.mask}",
            heads,
            site.state or "-",
            site.format or "dense",
            f"{site.bytes_per_token:.0f}" if site.rewritten else "-",
            site.kernels[-1] if site.kernels else site.reason,
        )
    return table


def explain(model: nn.Module, inputs: Any, **options: Any) -> Explanation:
    """Run the passes on a model's graphs and return what they did.

    The model is run once on `inputs`, and once more on one token if its output carries a cache
    (`past_key_values`), so that both the prefill and the decode graph are seen. Nothing is lowered:
    the inner backend is `eager`.

    Args:
        model: A decoder.
        inputs: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        **options: See `kvcompile.options.CacheOptions`.

    Raises:
        OptionError: An option is unknown or has a bad value.
    """
    parse_options(options)
    options = {**options, "inner_backend": "eager"}
    call = isolated(model, "explained")
    compiled = torch.compile(call, backend=backend.kvcompile, options=options)
    with torch.no_grad(), collect() as graphs:
        output = _call(compiled, inputs)
        follow = _next_step(model, inputs, output)
        if follow is not None:
            compiled(**follow)
    return Explanation(tuple(graphs))


def _call(function: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple) else function(inputs)


def _next_step(model: nn.Module, inputs: Any, output: Any) -> dict[str, Any] | None:
    """Return keyword arguments of a decode step, for models that speak transformers' protocol."""
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        return None
    name = cache_parameter(model)
    given = inputs if isinstance(inputs, Mapping) else {}
    ids = given.get("input_ids", inputs if isinstance(inputs, torch.Tensor) else None)
    if isinstance(inputs, tuple) and inputs and isinstance(inputs[0], torch.Tensor):
        ids = inputs[0]
    if ids is None or name is None:
        return None
    step: dict[str, Any] = {"input_ids": ids[:, -1:], name: cache}
    if isinstance(mask := given.get("attention_mask"), torch.Tensor):
        step["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return step
