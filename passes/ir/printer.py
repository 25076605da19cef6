"""A program as Python text: readable, and executable as it stands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcompile.passes.ir.program import Program

_IMPORTS = "import torch\nfrom math import inf, nan\nfrom torch import device\n"


def print_program(program: Program) -> str:
    """Return the program as a Python module that defines `forward(self, ...)`.

    `self` needs the attributes the graph module has (constants); the rest stands in the text:
    operators by their full names, shapes as annotations, the facts of each site as comments.
    """
    code = program.graph.python_code(root_module="self", verbose=True)
    lines = [
        f'"""{program.stage.name.lower()}, made by {program.made_by}"""',
        "",
        _IMPORTS,
    ]
    lines += [f"# {line}" for line in _facts(program)]
    # The same text on every machine: the file's name says enough.
    source = re.sub(r"# File: (?:\S*[/\\])?([^\s/\\]+:\d+)", r"# \1", code.src)
    return "\n".join(lines) + source


def _facts(program: Program) -> list[str]:
    """Return one line per site: what is known about it at this stage."""
    lines = []
    for site in program.sites:
        parts = [
            f"site {site.index} {site.name} {site.where}: {site.pattern}, mask {site.mask_kind},",
            f"{site.num_q_heads} query heads, {site.num_kv_heads} KV heads,",
            f"head dims {site.head_dim_qk}/{site.head_dim_vo}",
        ]
        if stream := program.streams.get(site.index):
            parts.append(f"| state {stream.k.kind} -> {stream.k.state.name}, {stream.v.state.name}")
        if plan := program.plans.get(site.index):
            parts.append(f"| {plan.layout.k_format}/{plan.layout.v_format}")
            parts.append(f"{plan.bytes_per_token:.0f} bytes per token")
        parts += [f"| {u.spec.symbol}" for u in program.kernels if u.site == site.index]
        lines.append(" ".join(parts))
    return lines
