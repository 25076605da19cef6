"""Budgets: what the figures of a kernel's machine code may reach.

They lie in one JSON file, by version of Triton, kernel and target. `make golden` rewrites those of
the installed version, to be read as a diff.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from kvcompile.codegen.gpu.machine_code import MachineCode

SLACK = 1.02
"""Of the instructions per number: a change of a few instructions is not worth a look."""


def ceilings(facts: MachineCode) -> dict[str, float]:
    """Return the figures of machine code that should not grow, as a budget holds them."""
    found: dict[str, float] = {
        "registers": facts.registers,
        "spills": facts.spills,
        "shared_bytes": facts.shared_bytes,
    }
    if (loop := facts.loop) is not None:
        found |= {
            "instructions_per_element": math.ceil(loop.per_element * SLACK * 100) / 100,
            "plain_loads": loop.plain_loads,
            "wide_copies": loop.wide_copies,
            "narrow_copies": loop.narrow_copies,
            "conversions": loop.conversions,
            "barriers": loop.barriers,
        }
    return found


def figures(facts: MachineCode) -> dict[str, float]:
    """Return what was found, by the names of the budget."""
    found = ceilings(facts)
    if facts.loop is not None:
        found["instructions_per_element"] = facts.loop.per_element
    return found


class Budgets:
    """Compares the figures of a kernel with its budgets, or rewrites these."""

    def __init__(self, path: Path, *, update: bool) -> None:
        self.path = path
        self.update = update

    def __call__(self, version: str, kernel: str, facts: dict[str, MachineCode]) -> None:
        """Assert that no figure is above its budget.

        Args:
            version: Triton's.
            kernel: Name of the kernel.
            facts: Its machine code, by target.

        Raises:
            AssertionError: A figure is above its budget, or has none.
        """
        budgets = json.loads(self.path.read_text()) if self.path.exists() else {}
        if self.update:
            budgets.setdefault(version, {})[kernel] = {
                target: ceilings(found) for target, found in facts.items()
            }
            self.path.write_text(json.dumps(budgets, indent=2, sort_keys=True) + "\n")
            return
        over = []
        for target, found in facts.items():
            budget = budgets.get(version, {}).get(kernel, {}).get(target, {})
            for fact, value in figures(found).items():
                if fact not in budget:
                    over.append(f"{kernel}, {target}: no budget of {fact}: run make golden")
                elif value > budget[fact]:
                    over.append(f"{kernel}, {target}: {fact} {value:g}, budget {budget[fact]:g}")
        assert not over, "\n".join([f"Triton {version}:", *over])
