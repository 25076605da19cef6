"""Reading NVIDIA's machine code as `cuobjdump -sass` prints it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,6})\*/\s+(?:@!?U?P[T0-9]+\s+)?"
    r"(?P<name>[A-Z][A-Z0-9_.]*)\s*(?P<operands>.*?);",
    re.MULTILINE,
)
_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: Its byte in the function.
        name: With all its suffixes, as "LDG.E.64".
        operands: As printed.
    """

    address: int
    name: str
    operands: str

    @property
    def base(self) -> str:
        """The name without suffixes."""
        return self.name.split(".", maxsplit=1)[0]


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a disassembly, without those that only fill space."""
    found = [
        Instruction(int(match["address"], 16), match["name"], match["operands"])
        for match in _INSTRUCTION.finditer(text)
    ]
    return [instruction for instruction in found if instruction.base != "NOP"]


def count(instructions: Sequence[Instruction], *bases: str) -> int:
    """Return how many of the instructions have one of these names, suffixes aside."""
    return sum(instruction.base in bases for instruction in instructions)


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the innermost loop that copies to shared memory while it works (LDGSTS).

    A loop is what lies between a branch backwards and where it leads. A branch from code that was
    moved to the end looks the same, but what it encloses is longer than the loop within.
    """
    loops = []
    for branch in instructions:
        target = _TARGET.search(branch.operands) if branch.base == "BRA" else None
        if target is None or int(target[1], 16) >= branch.address:
            continue
        first, last = int(target[1], 16), branch.address
        body = [i for i in instructions if first <= i.address <= last]
        if count(body, "LDGSTS"):
            loops.append(body)
    return min(loops, key=len, default=[])


def histogram(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Return how often each name occurs, suffixes included, the most frequent first."""
    return dict(Counter(instruction.name for instruction in instructions).most_common())
