"""Give the products of a decode step a kernel that reads each weight once, in order."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.codegen.cpu.isa import ISAS
from kvcompile.codegen.spec import LinearSpec
from kvcompile.passes.canonicalize import IS_HANDLE
from kvcompile.passes.ir.ops import LINEAR
from kvcompile.passes.ir.program import KernelUse
from kvcompile.passes.ir.remarks import Remark
from kvcompile.passes.ir.stage import Stage
from kvcompile.passes.plan_formats import EXACT_FORMATS

if TYPE_CHECKING:
    from kvcompile.passes.base import PassOptions
    from kvcompile.passes.ir.program import Program

SMALLEST_WEIGHT = 1 << 16
"""Numbers; below, a call costs more than reading them in order gains."""


class RewriteLinear:
    """Replace `linear` of a few rows where the weights lie in order."""

    name = "rewrite-linear"
    needs = Stage.REWRITTEN
    gives = Stage.REWRITTEN

    def run(self, program: Program, options: PassOptions) -> None:
        """Replace targets in place, and name the kernels in `program.kernels`."""
        if not options.gemv or not program.plans:
            return
        specs: list[LinearSpec] = []
        refused: Counter[str] = Counter()
        most_rows = ISAS[options.isa].most_rows
        for node in program.graph.find_nodes(
            op="call_function", target=torch.ops.aten.linear.default
        ):
            if reason := _refusal(node, most_rows):
                refused[reason] += 1
                continue
            node.target = LINEAR
            node.args = (*node.args, *[None] * (3 - len(node.args)))
            specs.append(LinearSpec(isa=options.isa, dtype=EXACT_FORMATS[node.meta["val"].dtype]))
        program.kernels += tuple(KernelUse(None, "linear", s) for s in dict.fromkeys(specs))
        if specs or refused:
            reason = f"linears of few rows that read their weights in order: {len(specs)}"
            for why, count in refused.items():
                reason += f"; left as they are, {why}: {count}"
            program.remarks.append(Remark("passed", "KVC410", self.name, "", "", reason))


def _refusal(node: fx.Node, most_rows: int) -> str | None:
    """Return why the kernel cannot take a `linear`, or is no gain, or None.

    Rows of a symbolic number may be few in one step and many in another, as those of a chunk of a
    prompt and of guessed tokens that are verified: the operator leaves many of them to PyTorch.
    """
    operands = [n for n in node.args if isinstance(n, fx.Node)]
    if any(n.meta.get(IS_HANDLE) for n in operands):
        return "operands of a tensor subclass"  # such as quantized weights, which know better
    x, weight, *bias = (n.meta["val"] for n in operands)
    out = node.meta["val"]
    rows = x.shape[:-1]
    if all(isinstance(n, int) for n in rows) and not 0 < math.prod(rows) <= most_rows:
        return f"not 1 to {most_rows} rows"
    if any(t.dtype != out.dtype for t in (x, weight, *bias)):
        return "operands of several dtypes"
    if out.dtype not in EXACT_FORMATS:
        return f"results of {out.dtype}"
    if x.device.type != "cpu":
        return f"operands on {x.device.type}"
    # Comparing symbolic sizes would add a guard.
    sizes = [n for t in (weight, *bias) for n in (*t.shape, *t.stride())]
    if not all(isinstance(n, int) for n in sizes):
        return "weights of symbolic size"
    if any(b.shape != weight.shape[:1] for b in bias):
        return "a bias that is broadcast"
    if weight.dim() != 2 or weight.stride() != (weight.shape[1], 1):
        return "weights that do not lie in order"
    if weight.numel() < SMALLEST_WEIGHT:
        return f"weights of fewer than {SMALLEST_WEIGHT:,} numbers"
    return None
