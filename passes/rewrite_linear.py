"""Give the products of a decode step a kernel that reads each weight once, in order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import fx

from kvcompile.codegen.spec import MOST_ROWS, LinearSpec
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
        for node in program.graph.find_nodes(
            op="call_function", target=torch.ops.aten.linear.default
        ):
            if not _has_few_rows(node):
                continue
            node.target = LINEAR
            node.args = (*node.args, *[None] * (3 - len(node.args)))
            specs.append(LinearSpec(isa=options.isa, dtype=EXACT_FORMATS[node.meta["val"].dtype]))
        if not specs:
            return
        program.kernels += tuple(KernelUse(None, "linear", s) for s in dict.fromkeys(specs))
        reason = f"linears of few rows that read their weights in order: {len(specs)}"
        program.remarks.append(Remark("passed", "KVC410", self.name, "", "", reason))


def _has_few_rows(node: fx.Node) -> bool:
    """Whether a `linear` is one that the kernel takes; more rows than expected run as before."""
    operands = [n for n in node.args if isinstance(n, fx.Node)]
    if any(n.meta.get(IS_HANDLE) for n in operands):
        return False  # a tensor subclass, such as quantized weights, knows better
    x, weight, *bias = (n.meta["val"] for n in operands)
    out = node.meta["val"]
    if any(b.shape != weight.shape[:1] for b in bias):
        return False
    same = all(t.dtype == out.dtype for t in (x, weight, *bias))
    if not same or out.dtype not in EXACT_FORMATS or weight.dim() != 2 or x.device.type != "cpu":
        return False
    if not all(isinstance(size, int) for size in (*weight.shape, *weight.stride())):
        return False
    in_order = weight.stride() == (weight.shape[1], 1)
    return in_order and weight.numel() >= SMALLEST_WEIGHT and 0 < _rows(x) <= MOST_ROWS


def _rows(x: torch.Tensor) -> int:
    """Return the rows of this graph's example, without a guard on their number."""
    return math.prod(map(_example_of, x.shape[:-1]))


def _example_of(size: object) -> int:
    example = size.node.hint if isinstance(size, torch.SymInt) else size
    return example if isinstance(example, int) else MOST_ROWS + 1
