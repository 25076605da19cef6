"""What a record amounts to: rewritten, or not and why."""

from __future__ import annotations

import re
from typing import Literal

from benchmarks.zoo.results import Record

Verdict = Literal["rewritten", "partly", "dense", "no K and V", "wrong", "does not run"]

TOLERANCE = 1e-3
"""Largest difference of logits, in parts of the largest one, between two orders of one sum."""

NOT_CAUSES = frozenset({"KVC003", "KVC501", "KVC507"})
"""Remarks about a cache that is in pages, or about compilations."""


WEAK = frozenset({"KVC101", "KVC201"})
"""No attention, or one that caches nothing: a cause only where no other was told."""


def verdict(record: Record) -> Verdict:
    """Return what became of a class under the exact format."""
    if "runs" not in record:
        return "does not run"
    run = record["runs"]["auto"]
    if "error" in run or not run["exact"] or run["logits_error"] is None:
        return "wrong"
    if run["logits_error"] > TOLERANCE:
        return "wrong"
    states = [state["handle"] for state in run["states"]]
    if not states:
        return "no K and V"
    if all(states) and not run["materializations"]:
        return "rewritten"
    return "partly" if any(states) else "dense"


def causes(record: Record) -> list[tuple[str, str]]:
    """Return code and reason of each thing that kept a cache from being rewritten, once each.

    The numbers of layers, nodes and dimensions are left out, so that equal causes are equal.
    """
    kind = verdict(record)
    if kind in ("rewritten", "no K and V"):
        return []
    if kind == "does not run":
        text = record.get("crashed") or record["failed"]
        return [("", general(text))]
    run = record["runs"]["auto"]
    found = [
        (remark["code"], general(remark["reason"]))
        for remark in run["remarks"]
        if remark["code"] not in NOT_CAUSES
    ]
    if "error" in run:
        found.insert(0, ("error", general(run["error"])))
    elif kind == "wrong":
        found.insert(0, ("tokens", "the tokens or logits differ from those of the model"))
    if any(code not in WEAK for code, _ in found):
        found = [cause for cause in found if cause[0] not in WEAK]
    found += [
        ("KVC507", f"{name} needed a dense tensor") for name in run.get("materializations", {})
    ]
    found += [("break", f"the graph breaks: {general(text)}") for text in run["breaks"]]
    return list(dict.fromkeys(found)) or [("", "no remark says why")]


def general(text: str) -> str:
    """Return a text without what is particular to one layer or model."""
    text = " ".join(text.split())[:160]
    text = re.sub(r"\b(l_|arg|add|cat|view|getitem|to|clone)\w*_\w*", "…", text)
    text = re.sub(r"\[[\d, ]+\]|\([\ds, +*]+\)", "[…]", text)
    return re.sub(r"\d+(?!\w)", "N", text)
