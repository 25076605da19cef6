"""What one class does: generated as it is, and compiled, with each format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters

import kvcompile
from benchmarks.zoo.models import NEW_TOKENS, Entry, build, prompt
from kvcompile.passes.ir.remarks import Remark, forget_notices, notices
from kvcompile.reports import CompilationReport, collect
from kvcompile.runtime.handle import KVTensor

FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4"},
}
QUANTIZED = {"page_size": 16, "num_sink_tokens": 0, "residual_length": 0}
"""So that the few tokens of a run fill pages."""

UNTOLD = frozenset({"KVC406", "KVC410"})
"""Misses that do not keep a cache dense."""

RECURRENT = re.compile(r"conv|recurrent|ssm|rwkv|state|linear_cache")
"""Names of states that hold no K and V."""


def measure(entry: Entry, formats: list[str]) -> dict[str, Any]:
    """Return everything about one class, ready for JSON.

    Raises:
        Exception: The unmodified model cannot be built or does not generate.
    """
    model = build(entry)
    arguments = {
        **prompt(entry, model),
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
    }
    if model.config.is_encoder_decoder:
        arguments["decoder_start_token_id"] = 1
    unmodified: Any = model
    with torch.no_grad():
        expected = unmodified.generate(**arguments)
    runs: dict[str, Any] = {}
    for name in formats:
        if name == "auto" or any(state["handle"] for state in runs["auto"].get("states", ())):
            runs[name] = _run(model, arguments, expected, name)
    return {"layers": _layers(expected.past_key_values), "runs": runs}


def _run(model: Any, arguments: dict[str, Any], expected: Any, name: str) -> dict[str, Any]:
    """Generate with the compiled model, and compare."""
    torch._dynamo.reset()
    forget_notices()
    counters.clear()
    options = {"inner_backend": "eager", **FORMATS[name]} | (QUANTIZED if FORMATS[name] else {})
    compiled: Any = torch.compile(model, backend="kvcompile", options=options)
    with torch.no_grad(), collect() as graphs:
        try:
            found = compiled.generate(**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error)[:500]}", **_compiled(graphs)}
    report = kvcompile.memory_report(found.past_key_values)
    return {
        "exact": found.sequences.tolist() == expected.sequences.tolist(),
        "logits_error": _error(found.logits, expected.logits),
        "distinct": len(set(expected.sequences[0, -NEW_TOKENS:].tolist())),
        "states": [
            {"owner": owner, "name": field, "handle": isinstance(tensor, KVTensor)}
            for owner, field, tensor in _states(found.past_key_values)
        ],
        "materializations": dict(report.materializations),
        "bytes": report.stored,
        **_compiled(graphs),
    }


def _compiled(graphs: list[CompilationReport]) -> dict[str, Any]:
    """Return what the passes did over all graphs: sites, and remarks of what stays dense."""
    sites = {site.name + site.where: site for graph in graphs for site in graph.sites}
    told: dict[tuple[str, str], dict[str, Any]] = {}
    said = [r for graph in graphs for r in graph.remarks] + list(notices())
    for remark in said:
        if remark.kind != "passed" and remark.code not in UNTOLD:
            key = (remark.code, re.sub(r"\d+", "N", remark.reason))
            told.setdefault(key, _told(remark))["times"] += 1
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "sites": [
            {
                "name": site.name,
                "rewritten": site.rewritten,
                "pattern": site.pattern,
                "mask": site.mask,
                "heads": f"{site.num_q_heads}/{site.num_kv_heads}",
                "dims": f"{site.head_dim_qk}/{site.head_dim_vo}",
                "state": site.state,
            }
            for site in sites.values()
        ],
        "remarks": list(told.values()),
        "breaks": {_plain(told): n for told, n in counters["graph_break"].most_common(5)},
    }


def _plain(told: str) -> str:
    """Return the first line of what was told, files by their place among the packages."""
    return re.sub(r"/[^\s\"']*site-packages/", "", told.split("\n", 1)[0])


def _told(remark: Remark) -> dict[str, Any]:
    return {
        "code": remark.code,
        "site": remark.site,
        "where": remark.where,
        "reason": _plain(remark.reason),
        "nearest": remark.near_miss,
        "times": 0,
    }


def _error(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float | None:
    """Return the largest difference of logits, in parts of the largest logit."""
    if len(found) != len(expected):
        return None
    pairs = list(zip(found, expected, strict=True))
    most = max(float((a - b).abs().max()) for a, b in pairs)
    largest = max(float(b.abs().max()) for _, b in pairs)
    return most / largest if largest else most


def _layers(cache: object) -> list[str]:
    """Return the kinds of a cache's layers, in order; those of a cross attention at the end."""
    own = getattr(cache, "self_attention_cache", cache)
    cross = getattr(cache, "cross_attention_cache", None)
    names = [type(layer).__name__ for layer in getattr(own, "layers", ())]
    return names + ["cross" for _ in getattr(cross, "layers", ())]


def _states(value: object) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield every tensor of a cache that grows with the tokens: its owner, its name, itself."""
    seen: set[int] = set()
    stack: list[tuple[str, str, object]] = [(type(value).__name__, "", value)]
    while stack:
        owner, name, item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.dim() > 2 and not RECURRENT.search(name):
                yield owner, name, item
        elif isinstance(item, Mapping):
            stack += [(owner, name or str(key), part) for key, part in reversed(list(item.items()))]
        elif isinstance(item, (list, tuple)):
            stack += [(owner, name, part) for part in reversed(item)]
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            own = type(item).__name__
            stack += [(own, key, part) for key, part in reversed(list(vars(item).items()))]
